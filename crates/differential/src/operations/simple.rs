//! Operations of one tensor, or of two of the same shape.

use tch::{Kind, TchError, Tensor};

use super::Action::{Change, ChangeBy, Map, Other, Zip};
use super::{Action, Operation};

type Made = Result<Tensor, TchError>;

const fn operation(name: &'static str, action: Action) -> Operation {
    Operation { name, action }
}

/// Functions of one tensor that return a new tensor or a view.
pub(super) const MAPS: &[Operation] = &[
    operation("sin", Map(Tensor::f_sin)),
    operation("cos", Map(Tensor::f_cos)),
    operation("tanh", Map(Tensor::f_tanh)),
    operation("atan", Map(Tensor::f_atan)),
    operation("erf", Map(Tensor::f_erf)),
    operation("sigmoid", Map(Tensor::f_sigmoid)),
    operation("relu", Map(Tensor::f_relu)),
    operation("silu", Map(Tensor::f_silu)),
    operation("mish", Map(Tensor::f_mish)),
    operation("selu", Map(Tensor::f_selu)),
    operation("elu", Map(Tensor::f_elu)),
    operation("celu", Map(Tensor::f_celu)),
    operation("leaky_relu", Map(Tensor::f_leaky_relu)),
    operation("hardswish", Map(Tensor::f_hardswish)),
    operation("hardtanh", Map(Tensor::f_hardtanh)),
    operation("log_sigmoid", Map(Tensor::f_log_sigmoid)),
    operation("softplus", Map(Tensor::f_softplus)),
    operation("abs", Map(Tensor::f_abs)),
    operation("neg", Map(Tensor::f_neg)),
    operation("square", Map(Tensor::f_square)),
    operation("exp", Map(|x| x.f_tanh()?.f_exp())),
    operation("sqrt", Map(|x| x.f_square()?.f_add_scalar(1.0)?.f_sqrt())),
    operation("rsqrt", Map(|x| x.f_square()?.f_add_scalar(1.0)?.f_rsqrt())),
    operation("reciprocal", Map(|x| x.f_abs()?.f_add_scalar(1.0)?.f_reciprocal())),
    operation("log", Map(|x| x.f_abs()?.f_add_scalar(0.5)?.f_log())),
    operation("pow", Map(|x| x.f_pow_tensor_scalar(3.0))),
    operation("gelu", Map(|x| x.f_gelu("none"))),
    operation("gelu_tanh", Map(|x| x.f_gelu("tanh"))),
    operation("softmax", Map(|x| x.f_softmax(-1, None::<Kind>))),
    operation("log_softmax", Map(|x| x.f_log_softmax(-1, None::<Kind>))),
    operation("scaled", Map(|x| x.f_mul_scalar(1.5))),
    operation("shifted", Map(|x| x.f_add_scalar(1.0))),
    operation("clamp", Map(|x| x.f_clamp(-0.5, 0.75))),
    operation("cumsum", Map(|x| x.f_cumsum(-1, None::<Kind>))),
    operation("cummax", Map(|x| Ok(x.f_cummax(-1)?.0))),
    operation("logcumsumexp", Map(|x| x.f_logcumsumexp(-1))),
    operation("logsumexp", Map(|x| x.f_logsumexp([-1_i64].as_slice(), true))),
    operation("sum_last", Map(|x| x.f_sum_dim_intlist([-1_i64].as_slice(), true, None::<Kind>))),
    operation("mean_last", Map(|x| x.f_mean_dim([-1_i64].as_slice(), true, None::<Kind>))),
    operation("amax", Map(|x| x.f_amax([-1_i64].as_slice(), true))),
    operation("max_dim", Map(|x| Ok(x.f_max_dim(0, true)?.0))),
    operation("std", Map(|x| x.f_std_dim([-1_i64].as_slice(), true, true))),
    operation("norm", Map(|x| x.f_shift_and_norm())),
    operation("prod", Map(|x| x.f_tanh()?.f_prod_dim_int(-1, true, None::<Kind>))),
    // libtorch 2.11's median reads out of bounds where a stride is zero.
    operation("median", Map(|x| Ok(x.f_contiguous()?.f_median_dim(-1, true)?.0))),
    operation("sort", Map(|x| Ok(x.f_sort(-1, false)?.0))),
    operation("sum_all", Map(|x| x.f_sum(None::<Kind>))),
    operation("mean_all", Map(|x| x.f_mean(None::<Kind>))),
    operation("flip", Map(|x| x.f_flip([0_i64]))),
    operation("roll", Map(|x| x.f_roll([1_i64], [0_i64]))),
    operation("tril", Map(|x| x.f_tril(0))),
    operation("copy", Map(|x| Ok(x.copy()))),
    operation("contiguous", Map(Tensor::f_contiguous)),
    operation("bf16", Map(|x| x.f_to_kind(Kind::BFloat16))),
    operation("f16", Map(|x| x.f_to_kind(Kind::Half))),
    operation("f32", Map(|x| x.f_to_kind(Kind::Float))),
    operation("f64", Map(|x| x.f_to_kind(Kind::Double))),
    operation("detach", Map(Tensor::f_detach)),
    operation("data", Map(Tensor::f_data)),
    operation("gradient", Map(gradient)),
    operation("dropout", Map(|x| x.f_dropout(0.4, true))),
    operation("alpha_dropout", Map(|x| x.f_alpha_dropout(0.4, true))),
    operation("feature_dropout", Map(|x| x.f_feature_dropout(0.4, true))),
    operation("noisy", Map(|x| x.f_add(&x.f_rand_like()?))),
    operation("bernoulli", Map(|x| x.f_mul(&x.f_detach()?.f_sigmoid()?.f_bernoulli()?))),
];

/// Changes in place.
pub(super) const CHANGES: &[Operation] = &[
    operation("sigmoid_", Change(Tensor::f_sigmoid_)),
    operation("tanh_", Change(Tensor::f_tanh_)),
    operation("relu_", Change(Tensor::f_relu_)),
    operation("sin_", Change(Tensor::f_sin_)),
    operation("cos_", Change(Tensor::f_cos_)),
    operation("neg_", Change(Tensor::f_neg_)),
    operation("abs_", Change(Tensor::f_abs_)),
    operation("silu_", Change(Tensor::f_silu_)),
    operation("mish_", Change(Tensor::f_mish_)),
    operation("elu_", Change(Tensor::f_elu_)),
    operation("selu_", Change(Tensor::f_selu_)),
    operation("celu_", Change(Tensor::f_celu_)),
    operation("leaky_relu_", Change(Tensor::f_leaky_relu_)),
    operation("hardswish_", Change(Tensor::f_hardswish_)),
    operation("hardtanh_", Change(Tensor::f_hardtanh_)),
    operation("erf_", Change(Tensor::f_erf_)),
    operation("gelu_", Change(|x| x.f_gelu_("tanh"))),
    operation("scale_", Change(|x| x.f_mul_scalar_(0.5))),
    operation("shift_", Change(|x| x.f_add_scalar_(0.25))),
    operation("fill_", Change(|x| x.f_fill_(0.375))),
    operation("zero_", Change(Tensor::f_zero_)),
    operation("clamp_", Change(|x| x.f_clamp_(-0.5, 0.5))),
    operation("triu_", Change(|x| x.f_triu_(0))),
    operation("cumsum_", Change(|x| x.f_cumsum_(-1, None::<Kind>))),
    operation("dropout_", Change(|x| x.f_dropout_(0.4, true))),
    operation("uniform_", Change(|x| x.f_uniform_(-1.0, 1.0))),
    operation("normal_", Change(|x| x.f_normal_(0.0, 1.0))),
    operation("bernoulli_", Change(|x| x.f_bernoulli_float_(0.5))),
    operation("detach_", Change(Tensor::f_detach_)),
    operation("transpose_", Change(|x| x.f_transpose_(0, -1))),
    operation("unsqueeze_", Change(|x| x.f_unsqueeze_(0))),
    operation("squeeze_", Change(Tensor::f_squeeze_)),
];

/// Functions of any number of tensors.
pub(super) const SUMS: &[Operation] =
    &[operation("total", Other { draw: |_| None, run: |inputs, _| Ok(vec![total(inputs)?]) })];

/// The sum of everything in `inputs`, as one number.
pub(crate) fn total(inputs: &[Tensor]) -> Made {
    let mut total: Option<Tensor> = None;
    for input in inputs {
        let input = input.f_to_kind(Kind::Double)?;
        let sum = if input.dim() == 0 { input } else { input.f_sum(None::<Kind>)? };
        total = Some(match total {
            Some(total) => total.f_add(&sum)?,
            None => sum,
        });
    }
    total.ok_or_else(|| TchError::Torch("a sum of nothing".to_owned()))
}

/// Functions of two tensors.
pub(super) const ZIPS: &[Operation] = &[
    operation("add", Zip(Tensor::f_add)),
    operation("sub", Zip(Tensor::f_sub)),
    operation("mul", Zip(Tensor::f_mul)),
    operation("div", Zip(|x, y| x.f_div(&y.f_abs()?.f_add_scalar(1.0)?))),
    operation("maximum", Zip(Tensor::f_maximum)),
    operation("minimum", Zip(Tensor::f_minimum)),
    operation("atan2", Zip(|x, y| x.f_atan2(&y.f_square()?.f_add_scalar(1.0)?))),
    operation("hypot", Zip(|x, y| x.f_shifted()?.f_hypot(y))),
    operation("matmul", Zip(|x, y| x.f_matmul(y)?.f_mul_scalar(0.25))),
    operation("linear", Zip(|x, y| x.f_linear(y, None::<&Tensor>)?.f_mul_scalar(0.25))),
    operation("bmm", Zip(|x, y| x.f_bmm(y)?.f_mul_scalar(0.25))),
    operation("where", Zip(|x, y| x.f_where_self(&x.f_gt(0.0)?, y))),
    operation("masked_fill", Zip(|x, y| x.f_masked_fill(&y.f_gt(0.0)?, 0.5))),
    operation("masked_scatter", Zip(|x, y| x.f_masked_scatter(&y.f_gt(0.0)?, &y.f_contiguous()?))),
    operation("lerp", Zip(|x, y| x.f_lerp(y, 0.3))),
    operation("addcmul", Zip(|x, y| x.f_addcmul(x, y))),
    operation("addcdiv", Zip(|x, y| x.f_addcdiv(y, &x.f_square()?.f_add_scalar(1.0)?))),
    operation("mse_loss", Zip(|x, y| x.f_mse_loss(y, tch::Reduction::Mean))),
    operation("smooth_l1_loss", Zip(|x, y| x.f_smooth_l1_loss(y, tch::Reduction::None, 1.0))),
    operation("cat", Zip(|x, y| Tensor::f_cat(&[x, y], 0))),
    operation("stack", Zip(|x, y| Tensor::f_stack(&[x, y], 0))),
    operation("addmm", Zip(|x, y| x.f_addmm(x, y)?.f_mul_scalar(0.25))),
    operation(
        "einsum",
        Zip(|x, y| Tensor::f_einsum("ij,kj->ik", &[x, y], None::<&[i64]>)?.f_mul_scalar(0.25)),
    ),
    operation("scaled_dot_product_attention", Zip(attention)),
    operation("cosine_similarity", Zip(|x, y| Tensor::f_cosine_similarity(x, y, -1, 1e-6))),
    operation("cdist", Zip(|x, y| Tensor::f_cdist(x, y, 2.0, None::<i64>))),
    operation("prelu", Zip(|x, y| x.f_prelu(&y.f_flatten(0, -1)?.f_narrow(0, 0, 1)?))),
    operation("glu", Zip(|x, y| Tensor::f_cat(&[x, y], -1)?.f_glu(-1))),
];

/// Changes of the first of two tensors.
pub(super) const CHANGES_BY: &[Operation] = &[
    operation("add_", ChangeBy(Tensor::f_add_)),
    operation("sub_", ChangeBy(Tensor::f_sub_)),
    operation("mul_", ChangeBy(|x, y| x.f_mul_(&y.f_tanh()?))),
    operation("copy_", ChangeBy(|x, y| x.f_copy_(y).map(|()| x.shallow_clone()))),
    operation("masked_fill_", ChangeBy(|x, y| x.f_masked_fill_(&y.f_gt(0.0)?, 0.5))),
    operation("lerp_", ChangeBy(|x, y| x.f_lerp_(y, 0.3))),
    operation("addcmul_", ChangeBy(|x, y| x.f_addcmul_(y, y))),
    operation("addmm_", ChangeBy(|x, y| x.f_addmm_(y, y))),
    operation("add_out", ChangeBy(|x, y| y.f_add_out(x, y))),
    operation("tanh_out", ChangeBy(|x, y| y.f_tanh_out(x))),
    operation("matmul_out", ChangeBy(|x, y| y.f_matmul_out(x, y))),
];

fn gradient(x: &Tensor) -> Made {
    let none = || TchError::Torch("there is no gradient".to_owned());
    let gradient = if x.is_leaf() { x.f_grad()? } else { return Err(none()) };
    if gradient.defined() { Ok(gradient) } else { Err(none()) }
}

/// libtorch's flash attention divides by zero for empty tensors, which ends the process.
fn attention(x: &Tensor, y: &Tensor) -> Made {
    if x.numel() == 0 || y.numel() == 0 {
        return Err(TchError::Torch("attention over nothing".to_owned()));
    }
    Tensor::f_scaled_dot_product_attention(x, y, &x.f_sin()?, None::<&Tensor>, 0.0, true, None, false)
}

/// Preparations that several of the operations above need.
trait Before {
    fn f_shifted(&self) -> Made;
    fn f_shift_and_norm(&self) -> Made;
}

impl Before for Tensor {
    /// Moves values away from zero, where some gradients are not finite.
    fn f_shifted(&self) -> Made {
        self.f_abs()?.f_add_scalar(0.5)
    }

    fn f_shift_and_norm(&self) -> Made {
        self.f_shifted()?.f_norm_scalaropt_dim(2.0, [-1_i64], true)
    }
}
