//! A transformer whose matrices are frozen, with small ones beside them that are trained.

use tch::nn::{Init, Path};
use tch::{Kind, Tensor};

use crate::Result;
use crate::programs::Shape;

const RANK: i64 = 16;
const SCALE: f64 = 2.0;
const VOCABULARY: i64 = 32_000;
const HEAD: i64 = 128;

/// The whole model.
pub(crate) struct Adapted {
    tokens: Tensor,
    blocks: Vec<Block>,
    head: Tensor,
}

struct Block {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// A frozen matrix, and two small ones whose product is added to it.
struct Linear {
    frozen: Tensor,
    narrow: Tensor,
    wide: Tensor,
}

impl Adapted {
    pub(crate) fn new(vs: &Path<'_>, shape: &Shape) -> Adapted {
        let (width, mlp) = (shape.hidden, shape.mlp());
        let block = |index| {
            let vs = vs / "block" / index;
            let linear = |name: &str, inputs, outputs| Linear::new(&(&vs / name), inputs, outputs);
            Block {
                query: linear("query", width, width),
                key: linear("key", width, width),
                value: linear("value", width, width),
                output: linear("output", width, width),
                gate: linear("gate", width, mlp),
                up: linear("up", width, mlp),
                down: linear("down", mlp, width),
            }
        };
        Adapted {
            tokens: frozen(vs, "tokens", &[VOCABULARY, width]),
            blocks: (0..shape.layers).map(block).collect(),
            head: frozen(vs, "head", &[VOCABULARY, width]),
        }
    }

    pub(crate) fn loss(&self, inputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let x = Tensor::f_embedding(&self.tokens, inputs, -1, false, false)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        let logits = norm(&x)?.f_linear(&self.head, None::<&Tensor>)?.f_to_kind(Kind::Float)?;
        let logits = logits.f_view([-1, VOCABULARY])?;
        let logs = logits.f_log_softmax(-1, Kind::Float)?;
        Ok(logs.f_nll_loss(&targets.f_reshape([-1])?, None::<&Tensor>, tch::Reduction::Mean, -100)?)
    }
}

impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = norm(x)?;
        let [batch, length, width] = x.size()[..] else { return Err("a batch of sequences is meant".into()) };
        let heads = |of: Tensor| of.f_view([batch, length, width / HEAD, HEAD])?.f_transpose(1, 2);
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|linear| linear.forward(&y));
        let (query, key, value) = (heads(query?)?, heads(key?)?, heads(value?)?);
        let y = Tensor::f_scaled_dot_product_attention(
            &query,
            &key,
            &value,
            None::<&Tensor>,
            0.0,
            true,
            None,
            false,
        )?;
        let x = x + self.output.forward(&y.f_transpose(1, 2)?.f_reshape([batch, length, width])?)?;
        let y = norm(&x)?;
        let y = self.gate.forward(&y)?.f_silu()? * self.up.forward(&y)?;
        Ok(x + self.down.forward(&y)?)
    }
}

impl Linear {
    fn new(vs: &Path<'_>, inputs: i64, outputs: i64) -> Linear {
        let small = |name: &str, size: &[i64], deviation| {
            vs.var(name, size, Init::Randn { mean: 0.0, stdev: deviation })
        };
        Linear {
            frozen: frozen(vs, "frozen", &[outputs, inputs]),
            narrow: small("narrow", &[RANK, inputs], 0.02),
            wide: small("wide", &[outputs, RANK], 0.0),
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let added = x.f_linear(&self.narrow, None::<&Tensor>)?.f_linear(&self.wide, None::<&Tensor>)?;
        Ok(x.f_linear(&self.frozen, None::<&Tensor>)? + added * SCALE)
    }
}

fn frozen(vs: &Path<'_>, name: &str, size: &[i64]) -> Tensor {
    vs.randn(name, size, 0.0, 0.02).set_requires_grad(false)
}

/// A root-mean-square norm in 32 bits, without a weight.
fn norm(x: &Tensor) -> Result<Tensor> {
    let wide = x.f_to_kind(Kind::Float)?;
    let scale = (wide.f_square()?.f_mean_dim(-1, true, Kind::Float)? + 1e-5).f_rsqrt()?;
    Ok((wide * scale).f_to_kind(x.kind())?)
}
