//! Llama: a decoder-only transformer with root-mean-square norms, rotary embedding, grouped queries and SwiGLU.
//!
//! All of it is plain tensor operations, with nothing marked for recomputation.

mod config;

use std::num::NonZero;

use ssdtrain::{resolve_math_kernels, scope};
use tch::{Device, TchError, Tensor, nn};

pub use self::config::LlamaConfig;
use crate::blocks::{self, Block, Names, through};
use crate::error::{Error, Result};
use crate::head::Head;
use crate::language_model::LanguageModel;
use crate::layers::{INIT_STD, Linear, Norm, RmsNorm, at_least_float, normal};
use crate::loss::Loss;
use crate::recompute::Recompute;

/// A Llama with its parameters in a [`nn::VarStore`].
///
/// Runs under the scopes `embed`, `block.N.attn`, `block.N.mlp` and `head`, which reports use to name its parts. It
/// has no dropout, no biases, and a head with weights of its own.
#[derive(Debug)]
pub struct Llama {
    config: LlamaConfig,
    tokens: Tensor,
    blocks: Vec<LlamaBlock>,
    head: Head<RmsNorm>,
    recompute: Recompute,
}

impl Llama {
    /// Creates a freshly initialised model under `vs`: weights are normally distributed with a standard deviation of
    /// 0.02, projections back to the residual stream are smaller by √(2 · layers). Draws from libtorch's generator.
    ///
    /// The model has the device and kind of `vs`; its loss is computed in at least 32 bits. For a 16-bit model, call [`nn::VarStore::set_kind`] while the store
    /// is empty; then no parameter ever exists in 32 bits.
    ///
    /// # Errors
    /// [`Error::Argument`] if `config` is invalid, [`Error::Torch`] if there is not enough memory for the parameters.
    pub fn new(vs: &nn::Path<'_>, config: LlamaConfig) -> Result<Llama> {
        config.validate()?;
        resolve_math_kernels()?;
        let tokens = normal(&vs.sub("tokens"), config.vocab, config.hidden, INIT_STD)?;
        let rotary = Rotary::new(&vs.sub("rotary"), &config)?;
        let blocks = (0..config.layers)
            .map(|index| LlamaBlock::new(&vs.sub("block").sub(index), index, &config, &rotary))
            .collect::<Result<_, _>>()?;
        let norm = RmsNorm::new(&vs.sub("norm"), config.hidden)?;
        let head = normal(&vs.sub("head"), config.vocab, config.hidden, INIT_STD)?;
        let head = Head { is_loss_wide: true, ..Head::new(norm, head) };
        Ok(Llama { config, tokens, blocks, head, recompute: Recompute::None })
    }

    /// As [`Gpt::with_loss_chunk`](crate::Gpt::with_loss_chunk).
    #[must_use]
    pub fn with_loss_chunk(mut self, tokens: Option<NonZero<u32>>) -> Llama {
        self.head.method = tokens.map_or(Loss::Whole, Loss::Chunked);
        self
    }

    /// If given, computes losses by [`linear_cross_entropy`](crate::linear_cross_entropy), for this many tokens at a
    /// time. Unlike [`Llama::with_loss_chunk`], which this takes the place of, it has no conditions; it holds a second
    /// gradient of the head's weight from forward to backward.
    #[must_use]
    pub fn with_fused_loss(mut self, tokens: Option<NonZero<u32>>) -> Llama {
        self.head.method = tokens.map_or(Loss::Whole, Loss::Fused);
        self
    }

    /// As [`Gpt::with_grads_in_place`](crate::Gpt::with_grads_in_place).
    #[must_use]
    pub fn with_grads_in_place(mut self, in_place: bool) -> Llama {
        self.head.grads_in_place = in_place;
        for LlamaBlock { attention, mlp, .. } in &mut self.blocks {
            let Attention { query, key, value, output, .. } = attention;
            for layer in [query, key, value, output, &mut mlp.gate, &mut mlp.up, &mut mlp.down] {
                layer.grads_in_place = in_place;
            }
        }
        self
    }

    /// In a step of a cache, makes backward recompute blocks instead of having parts of them kept. Blocks are then
    /// segments named `block.N`, and their scopes lie within these.
    ///
    /// # Errors
    /// [`Error::Argument`] for [`Recompute::Cheap`]: a Llama marks none of its operations.
    pub fn with_recompute(mut self, recompute: Recompute) -> Result<Llama> {
        if recompute == Recompute::Cheap {
            return Err(Error::argument(
                "a Llama marks no operation as cheap to recompute; give it none or layer",
            ));
        }
        self.recompute = recompute;
        Ok(self)
    }

    /// The shape of the model.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The residual stream after the last block.
    fn hidden(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        let x = {
            let _scope = scope("embed");
            blocks::length(inputs, self.config.context)?;
            Tensor::f_embedding(&self.tokens, inputs, -1, false, false)?
        };
        through(&self.blocks, x, train, self.recompute)
    }
}

impl LanguageModel for Llama {
    fn context(&self) -> i64 {
        self.config.context
    }

    fn device(&self) -> Device {
        self.tokens.device()
    }

    fn forward(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        self.head.logits(&self.hidden(inputs, train)?)
    }

    fn next_logits(&self, inputs: &Tensor) -> Result<Tensor> {
        self.head.last_logits(&self.hidden(inputs, false)?)
    }

    fn loss(&self, inputs: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.head.loss(&self.hidden(inputs, train)?, targets)
    }

    fn training_loss(&self, inputs: &Tensor, targets: &Tensor, parts: NonZero<usize>) -> Result<Tensor> {
        self.head.training_loss(&self.hidden(inputs, true)?, targets, parts)
    }
}

#[derive(Debug)]
struct LlamaBlock {
    names: Names,
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

impl LlamaBlock {
    fn new(
        vs: &nn::Path<'_>,
        index: i64,
        config: &LlamaConfig,
        rotary: &Rotary,
    ) -> Result<LlamaBlock, TchError> {
        Ok(LlamaBlock {
            names: Names::of(index),
            attention_norm: RmsNorm::new(&vs.sub("attn_norm"), config.hidden)?,
            attention: Attention::new(&vs.sub("attn"), config, rotary)?,
            mlp_norm: RmsNorm::new(&vs.sub("mlp_norm"), config.hidden)?,
            mlp: Mlp::new(&vs.sub("mlp"), config)?,
        })
    }
}

impl Block for LlamaBlock {
    fn names(&self) -> &Names {
        &self.names
    }

    fn forward(&self, x: &Tensor, _train: bool) -> Result<Tensor, TchError> {
        let x = {
            let _scope = scope(&self.names.attention);
            x.f_add(&self.attention.forward(&self.attention_norm.forward(x)?)?)?
        };
        let _scope = scope(&self.names.mlp);
        x.f_add(&self.mlp.forward(&self.mlp_norm.forward(&x)?)?)
    }

    fn shallow_clone(&self) -> LlamaBlock {
        let Attention { query, key, value, output, rotary, .. } = &self.attention;
        let Mlp { gate, up, down } = &self.mlp;
        LlamaBlock {
            names: self.names.clone(),
            attention_norm: self.attention_norm.shallow_clone(),
            attention: Attention {
                query: query.shallow_clone(),
                key: key.shallow_clone(),
                value: value.shallow_clone(),
                output: output.shallow_clone(),
                rotary: rotary.shallow_clone(),
                ..self.attention
            },
            mlp_norm: self.mlp_norm.shallow_clone(),
            mlp: Mlp { gate: gate.shallow_clone(), up: up.shallow_clone(), down: down.shallow_clone() },
        }
    }
}

/// Causal self-attention, in which several heads of queries share one of keys and values.
#[derive(Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    rotary: Rotary,
    heads: i64,
    kv_heads: i64,
}

impl Attention {
    fn new(vs: &nn::Path<'_>, config: &LlamaConfig, rotary: &Rotary) -> Result<Attention, TchError> {
        let &LlamaConfig { hidden, heads, kv_heads, .. } = config;
        let linear = |name, outputs, std| Linear::new(&vs.sub(name), hidden, outputs, std, false);
        let shared = kv_heads * config.head_width();
        Ok(Attention {
            query: linear("q", hidden, INIT_STD)?,
            key: linear("k", shared, INIT_STD)?,
            value: linear("v", shared, INIT_STD)?,
            output: linear("o", hidden, residual_std(config))?,
            rotary: rotary.shallow_clone(),
            heads,
            kv_heads,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let (batch, block, hidden) = x.size3()?;
        let split =
            |x: Tensor, heads| x.f_view([batch, block, heads, hidden / self.heads])?.f_transpose(1, 2);
        let query = split(self.query.forward(x)?, self.heads)?;
        let key = split(self.key.forward(x)?, self.kv_heads)?;
        let value = split(self.value.forward(x)?, self.kv_heads)?;
        let [cos, sin] = self.rotary.upto(block)?;
        let y = Tensor::f_scaled_dot_product_attention(
            &rotate(&query, &cos, &sin)?,
            &rotate(&key, &cos, &sin)?,
            &value,
            None::<&Tensor>,
            0.0,
            true,
            None,
            true,
        )?;
        self.output.forward(&y.f_transpose(1, 2)?.f_reshape([batch, block, hidden])?)
    }
}

/// Turns pairs of numbers of `x` (`[batch, heads, block, width]`), one from each half of a head, by the angles of
/// their positions.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor, TchError> {
    let halves = x.f_chunk(2, -1)?;
    let turned = Tensor::f_cat(&[halves[1].f_neg()?, halves[0].shallow_clone()], -1)?;
    x.f_mul(cos)?.f_add(&turned.f_mul(sin)?)
}

/// Cosines and sines of the angles at each position of the context, `[context, width]`, once for each half of a head.
#[derive(Debug)]
struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Computed in at least 32 bits and then stored in the kind of `vs`, where they change with it.
    fn new(vs: &nn::Path<'_>, config: &LlamaConfig) -> Result<Rotary, TchError> {
        let width = config.head_width();
        let wide = (at_least_float(vs.kind()), vs.device());
        let exponents = Tensor::f_arange_start_step(0, width, 2, wide)?.f_div_scalar(width as f64)?;
        let wavelengths = Tensor::f_pow_scalar(config.rotary_base, &exponents)?;
        let positions = Tensor::f_arange(config.context, wide)?.f_unsqueeze(1)?;
        let angles = positions.f_div(&wavelengths)?;
        let table = |name, half: Tensor| {
            let both = Tensor::f_cat(&[&half, &half], -1)?.f_to_kind(vs.kind())?;
            Ok::<_, TchError>(vs.add(name, both, false))
        };
        Ok(Rotary { cos: table("cos", angles.f_cos()?)?, sin: table("sin", angles.f_sin()?)? })
    }

    /// The cosines and the sines of the first `block` positions.
    fn upto(&self, block: i64) -> Result<[Tensor; 2], TchError> {
        Ok([self.cos.f_narrow(0, 0, block)?, self.sin.f_narrow(0, 0, block)?])
    }

    fn shallow_clone(&self) -> Rotary {
        Rotary { cos: self.cos.shallow_clone(), sin: self.sin.shallow_clone() }
    }
}

/// SwiGLU: one projection is gated by another.
#[derive(Debug)]
struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn new(vs: &nn::Path<'_>, config: &LlamaConfig) -> Result<Mlp, TchError> {
        let &LlamaConfig { hidden, mlp, .. } = config;
        Ok(Mlp {
            gate: Linear::new(&vs.sub("gate"), hidden, mlp, INIT_STD, false)?,
            up: Linear::new(&vs.sub("up"), hidden, mlp, INIT_STD, false)?,
            down: Linear::new(&vs.sub("down"), mlp, hidden, residual_std(config), false)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        self.down.forward(&self.gate.forward(x)?.f_silu()?.f_mul(&self.up.forward(x)?)?)
    }
}

/// Keeps the residual stream's variance from growing with depth: every block adds to it twice.
fn residual_std(config: &LlamaConfig) -> f64 {
    INIT_STD / (2.0 * config.layers as f64).sqrt()
}
