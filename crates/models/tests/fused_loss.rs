//! The loss in chunks that leaves gradients to backward, against the loss of all logits.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::num::NonZero;

use ssdtrain_libtorch as torch;
use ssdtrain_models::{Result, linear_cross_entropy};
use tch::{Device, Kind, Tensor, no_grad};

const CHUNKS: [u32; 4] = [1, 5, 12, 1000];

/// Input `[2, 6, 7]`, weight `[11, 7]` and targets `[2, 6]`, the same ones each time.
fn leaves(kind: Kind) -> (Tensor, Tensor, Tensor) {
    tch::manual_seed(11);
    let leaf = |shape: &[i64]| {
        Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind).set_requires_grad(true)
    };
    (leaf(&[2, 6, 7]), leaf(&[11, 7]), Tensor::randint(11, [2, 6], (Kind::Int64, Device::Cpu)))
}

type Loss<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor;

fn whole(x: &Tensor, weight: &Tensor, targets: &Tensor) -> Tensor {
    let logits = x.reshape([-1, 7]).linear(weight, None::<Tensor>);
    logits.log_softmax(-1, x.kind()).nll_loss(&targets.reshape([-1]))
}

fn fused(chunk: u32) -> impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor {
    move |x, weight, targets| linear_cross_entropy(x, weight, targets, NonZero::new(chunk).unwrap()).unwrap()
}

/// Asserts that what `run` makes of a loss (values and gradients) is the same for all sizes of chunks as for the whole.
fn agrees(run: impl Fn(Loss<'_>) -> Vec<Tensor>) {
    let expected = run(&whole);
    for chunk in CHUNKS {
        for (index, (found, expected)) in run(&fused(chunk)).iter().zip(&expected).enumerate() {
            assert!(found.allclose(expected, 1e-10, 1e-12, false), "{index}, chunks of {chunk}");
        }
    }
}

#[test]
fn loss_and_gradients_are_those_of_all_logits() {
    agrees(|loss| {
        let (x, weight, targets) = leaves(Kind::Double);
        let value = loss(&x, &weight, &targets);
        value.backward();
        vec![value, x.grad(), weight.grad()]
    });
}

#[test]
fn targets_of_minus_100_do_not_count() {
    agrees(|loss| {
        let (x, weight, targets) = leaves(Kind::Double);
        let _ignored = targets.narrow(1, 2, 3).fill_(-100);
        let value = loss(&x, &weight, &targets);
        value.backward();
        vec![value, x.grad(), weight.grad()]
    });
    let (x, weight, targets) = leaves(Kind::Double);
    let value = fused(5)(&x, &weight, &targets.full_like(-100));
    value.backward();
    assert!(value.double_value(&[]).is_nan(), "the mean of nothing");
    assert_eq!(
        [x.grad(), weight.grad()].map(|gradient| gradient.count_nonzero(None).int64_value(&[])),
        [0, 0]
    );
}

#[test]
fn gradients_scale_with_the_loss() {
    agrees(|loss| {
        let (x, weight, targets) = leaves(Kind::Double);
        ((loss(&x, &weight, &targets) * 1024.0).square() / 3.0).backward();
        vec![x.grad(), weight.grad()]
    });
}

#[test]
fn gradients_of_micro_batches_add_up() {
    agrees(|loss| {
        let (x, weight, targets) = leaves(Kind::Double);
        for part in 0..2 {
            (loss(&x.narrow(0, part, 1), &weight, &targets.narrow(0, part, 1)) / 2.0).backward();
        }
        vec![x.grad(), weight.grad()]
    });
    agrees(|loss| {
        let (x, weight, targets) = leaves(Kind::Double);
        (loss(&x, &weight, &targets) + loss(&x.sin(), &weight, &targets)).backward();
        vec![x.grad(), weight.grad()]
    });
}

#[test]
fn a_weight_may_be_used_elsewhere_too() {
    agrees(|loss| {
        let (x, weight, targets) = leaves(Kind::Double);
        let embedded = Tensor::embedding(&weight, &targets, -1, false, false);
        loss(&(&x * embedded), &weight, &targets).backward();
        vec![x.grad(), weight.grad()]
    });
}

#[test]
fn gradients_may_be_cleared_between_forward_and_backward() {
    agrees(|loss| {
        let (mut x, mut weight, targets) = leaves(Kind::Double);
        loss(&x, &weight, &targets).backward();
        let value = loss(&x, &weight, &targets);
        x.zero_grad();
        weight.zero_grad();
        value.backward();
        vec![x.grad(), weight.grad()]
    });
}

#[test]
fn a_graph_that_is_kept_gives_its_gradients_again() {
    agrees(|loss| {
        let (x, weight, targets) = leaves(Kind::Double);
        let value = loss(&x, &weight, &targets);
        let gradients = |keep| Tensor::run_backward(&[&value * 2.0], &[&x, &weight], keep, false);
        let mut all = gradients(true);
        all.extend(gradients(false));
        all
    });
    let (x, weight, targets) = leaves(Kind::Double);
    let value = fused(5)(&x, &weight, &targets);
    value.backward();
    let again = value.f_backward().unwrap_err().to_string();
    assert!(again.contains("a second time"), "{again}");
}

#[test]
fn what_is_frozen_gets_no_gradient() {
    for frozen in 0..2 {
        agrees(|loss| {
            let (x, weight, targets) = leaves(Kind::Double);
            let other = if frozen == 0 { (&x, &weight) } else { (&weight, &x) };
            let _frozen = other.0.set_requires_grad(false);
            loss(&x, &weight, &targets).backward();
            assert!(!other.0.grad().defined());
            vec![other.1.grad()]
        });
    }
}

#[test]
fn nothing_is_recorded_without_gradients() {
    let (x, weight, targets) = leaves(Kind::Double);
    let value = no_grad(|| fused(5)(&x, &weight, &targets));
    assert!(!value.requires_grad());
    assert!(value.allclose(&whole(&x, &weight, &targets), 1e-12, 1e-12, false));
}

#[test]
fn a_first_gradient_of_the_weight_is_handed_over_without_a_copy() {
    torch::install_cpu_allocator();
    let tensor = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let (x, weight) = (tensor(&[4, 256]), tensor(&[8192, 256]));
    let targets = Tensor::randint(8192, [4], (Kind::Int64, Device::Cpu));
    let value = fused(2)(&x, &weight, &targets);
    assert!(!weight.grad().defined());
    torch::reset_peak(Device::Cpu);
    let before = torch::memory(Device::Cpu).allocated;
    assert!(before > 2 * 8192 * 256 * 4, "the weight and its gradient");
    value.backward();
    assert!(weight.grad().defined());
    let most = torch::memory(Device::Cpu).peak - before;
    assert!(most < 8192 * 256, "{most} bytes");
}

#[test]
fn sums_in_16_bits_are_as_good_as_the_whole() {
    for (kind, tolerance) in [(Kind::BFloat16, 0.02), (Kind::Half, 0.003)] {
        let run = |loss: Loss<'_>, kind| {
            let (x, weight, targets) = leaves(kind);
            loss(&x, &weight, &targets).backward();
            assert_eq!((x.grad().kind(), weight.grad().kind()), (kind, kind));
            [x.grad(), weight.grad()].map(|gradient| gradient.to_kind(Kind::Double))
        };
        let exact = run(&whole, Kind::Double);
        for chunk in CHUNKS {
            for (found, exact) in run(&fused(chunk), kind).iter().zip(&exact) {
                let off = ((found - exact).norm() / exact.norm()).double_value(&[]);
                assert!(off < tolerance, "{kind:?}, chunks of {chunk}: off by {off}");
            }
        }
    }
}

#[test]
fn a_wider_weight_gets_a_gradient_of_its_own_kind() {
    let (x, weight, targets) = leaves(Kind::Float);
    let narrow = x.to_kind(Kind::BFloat16);
    let value = fused(5)(&narrow, &weight, &targets);
    value.backward();
    assert_eq!((value.kind(), weight.grad().kind()), (Kind::Float, Kind::Float));
}

#[test]
fn second_derivatives_are_refused() {
    let (x, weight, targets) = leaves(Kind::Double);
    let value = fused(5)(&x, &weight, &targets);
    let error = Tensor::f_run_backward(&[&value], &[&x], true, true).unwrap_err().to_string();
    assert!(error.contains("differentiated twice"), "{error}");
}

#[test]
fn shapes_and_kinds_that_do_not_match_are_named() -> Result<()> {
    let (x, weight, targets) = leaves(Kind::Double);
    let chunk = NonZero::new(5).unwrap();
    let refused = |x: &Tensor, weight: &Tensor, targets: &Tensor| {
        linear_cross_entropy(x, weight, targets, chunk).unwrap_err().to_string()
    };
    assert!(refused(&x, &weight.tr(), &targets).contains("weight [7, 11]"));
    assert!(refused(&x, &weight, &targets.narrow(1, 0, 5)).contains("targets Int64 [2, 5]"));
    assert!(refused(&x, &weight, &targets.to_kind(Kind::Int)).contains("Int [2, 6]"));
    assert!(refused(&x.narrow(0, 0, 0), &weight, &targets.narrow(0, 0, 0)).contains("x is Double [0, 6, 7]"));
    // A weight converted to these would lose its fractions.
    assert!(refused(&x.to_kind(Kind::Int64), &weight, &targets).contains("x is Int64"));
    let outside = refused(&x, &weight, &(targets + 11));
    assert!(outside.starts_with("libtorch: "), "{outside}");
    Ok(())
}
