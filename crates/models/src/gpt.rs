//! GPT-2: a decoder-only transformer with layer norms before attention and MLP.

mod config;

use std::num::NonZero;

use ssdtrain::{remat, resolve_math_kernels, scope};
use tch::{Device, TchError, Tensor, nn};

pub use self::config::GptConfig;
use crate::blocks::{self, Block, Names, through};
use crate::error::Result;
use crate::head::Head;
use crate::language_model::LanguageModel;
use crate::layers::{INIT_STD, LayerNorm, Linear, Norm, dropout, normal};
use crate::loss::Loss;
use crate::recompute::Recompute;

/// A GPT-2 with its parameters in a [`nn::VarStore`].
///
/// Runs under the scopes `embed`, `block.N.attn`, `block.N.mlp` and `head`, which reports use to name its parts.
#[derive(Debug)]
pub struct Gpt {
    config: GptConfig,
    tokens: Tensor,
    positions: Tensor,
    blocks: Vec<GptBlock>,
    /// Its weight shares its storage with `tokens` if the weights are tied.
    head: Head<LayerNorm>,
    recompute: Recompute,
}

impl Gpt {
    /// Creates a freshly initialised model under `vs`, initialised like GPT-2: weights are normally distributed with
    /// a standard deviation of 0.02, projections back to the residual stream are smaller by √(2 · layers), biases are
    /// zero. Draws from libtorch's generator.
    ///
    /// The model has the device and kind of `vs`. For a 16-bit model, call [`nn::VarStore::set_kind`] while the store
    /// is empty; then no parameter ever exists in 32 bits.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if `config` is invalid, [`Error::Torch`](crate::Error::Torch) if
    /// there is not enough memory for the parameters.
    pub fn new(vs: &nn::Path<'_>, config: GptConfig) -> Result<Gpt> {
        config.validate()?;
        resolve_math_kernels()?;
        let tokens = normal(&vs.sub("wte"), config.vocab, config.hidden, INIT_STD)?;
        let positions = normal(&vs.sub("wpe"), config.context, config.hidden, INIT_STD)?;
        let blocks = (0..config.layers)
            .map(|index| GptBlock::new(&vs.sub("block").sub(index), index, &config))
            .collect::<Result<_, _>>()?;
        let norm = LayerNorm::new(&vs.sub("norm"), config.hidden, config.bias)?;
        let head = if config.tied {
            tokens.shallow_clone()
        } else {
            normal(&vs.sub("head"), config.vocab, config.hidden, INIT_STD)?
        };
        let head = Head::new(norm, head);
        Ok(Gpt { config, tokens, positions, blocks, head, recompute: Recompute::None })
    }

    /// If given, computes losses for this many tokens at a time, so that the logits of all tokens (`vocab` numbers
    /// each) never exist at once. See [`LanguageModel::training_loss`] for what changes; without a chunk size nothing
    /// does.
    #[must_use]
    pub fn with_loss_chunk(mut self, tokens: Option<NonZero<u32>>) -> Gpt {
        self.head.method = tokens.map_or(Loss::Whole, Loss::Chunked);
        self
    }

    /// If given, computes losses by [`linear_cross_entropy`](crate::linear_cross_entropy), for this many tokens at a
    /// time. Unlike [`Gpt::with_loss_chunk`], which this takes the place of, it has no conditions; it holds a second
    /// gradient of the head's weight from forward to backward.
    #[must_use]
    pub fn with_fused_loss(mut self, tokens: Option<NonZero<u32>>) -> Gpt {
        self.head.method = tokens.map_or(Loss::Whole, Loss::Fused);
        self
    }

    /// If `in_place`, makes backward add to the gradients of matrices in place, so that a second gradient as large as
    /// the matrix never exists beside the first. Otherwise nothing changes.
    #[must_use]
    pub fn with_grads_in_place(mut self, in_place: bool) -> Gpt {
        self.head.grads_in_place = in_place;
        for GptBlock { attention, mlp, .. } in &mut self.blocks {
            for layer in [&mut attention.qkv, &mut attention.proj, &mut mlp.up, &mut mlp.down] {
                layer.grads_in_place = in_place;
            }
        }
        self
    }

    /// In a step of a cache, makes backward recompute parts of the model instead of having them kept. Blocks are then
    /// segments named `block.N`, and their scopes lie within these.
    #[must_use]
    pub fn with_recompute(mut self, recompute: Recompute) -> Gpt {
        self.recompute = recompute;
        let cheap = recompute == Recompute::Cheap;
        self.head.norm.recomputed = cheap;
        for block in &mut self.blocks {
            block.attention_norm.recomputed = cheap;
            block.mlp_norm.recomputed = cheap;
            block.mlp.recomputed = cheap;
        }
        self
    }

    /// The shape of the model.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// The residual stream after the last block.
    fn hidden(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        through(&self.blocks, self.embed(inputs, train)?, train, self.recompute)
    }

    fn embed(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        let _scope = scope("embed");
        let block = blocks::length(inputs, self.config.context)?;
        let tokens = Tensor::f_embedding(&self.tokens, inputs, -1, false, false)?;
        let x = tokens.f_add(&self.positions.f_narrow(0, 0, block)?)?;
        Ok(dropout(x, self.config.dropout, train)?)
    }
}

impl LanguageModel for Gpt {
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
struct GptBlock {
    names: Names,
    attention_norm: LayerNorm,
    attention: Attention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
    dropout: f64,
}

impl GptBlock {
    fn new(vs: &nn::Path<'_>, index: i64, config: &GptConfig) -> Result<GptBlock, TchError> {
        Ok(GptBlock {
            names: Names::of(index),
            attention_norm: LayerNorm::new(&vs.sub("attn_norm"), config.hidden, config.bias)?,
            attention: Attention::new(&vs.sub("attn"), config)?,
            mlp_norm: LayerNorm::new(&vs.sub("mlp_norm"), config.hidden, config.bias)?,
            mlp: Mlp::new(&vs.sub("mlp"), config)?,
            dropout: config.dropout,
        })
    }
}

impl Block for GptBlock {
    fn names(&self) -> &Names {
        &self.names
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor, TchError> {
        let x = {
            let _scope = scope(&self.names.attention);
            let y = self.attention.forward(&self.attention_norm.forward(x)?, train)?;
            x.f_add(&dropout(y, self.dropout, train)?)?
        };
        let _scope = scope(&self.names.mlp);
        let y = self.mlp.forward(&self.mlp_norm.forward(&x)?)?;
        x.f_add(&dropout(y, self.dropout, train)?)
    }

    fn shallow_clone(&self) -> GptBlock {
        GptBlock {
            names: self.names.clone(),
            attention_norm: self.attention_norm.shallow_clone(),
            attention: Attention {
                qkv: self.attention.qkv.shallow_clone(),
                proj: self.attention.proj.shallow_clone(),
                ..self.attention
            },
            mlp_norm: self.mlp_norm.shallow_clone(),
            mlp: Mlp { up: self.mlp.up.shallow_clone(), down: self.mlp.down.shallow_clone(), ..self.mlp },
            dropout: self.dropout,
        }
    }
}

/// Causal self-attention.
#[derive(Debug)]
struct Attention {
    qkv: Linear,
    proj: Linear,
    heads: i64,
    dropout: f64,
}

impl Attention {
    fn new(vs: &nn::Path<'_>, config: &GptConfig) -> Result<Attention, TchError> {
        let hidden = config.hidden;
        Ok(Attention {
            qkv: Linear::new(&vs.sub("qkv"), hidden, 3 * hidden, INIT_STD, config.bias)?,
            proj: Linear::new(&vs.sub("proj"), hidden, hidden, residual_std(config), config.bias)?,
            heads: config.heads,
            dropout: config.dropout,
        })
    }

    /// Query, key and value stay views of one tensor, and the output needs no copy either: the fused kernel accepts
    /// strides, and writes `[batch, block, heads, width]` behind a transposed view. Backward of `unbind` writes the
    /// three gradients side by side, whereas three `select`s would each create the whole gradient and add it up.
    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor, TchError> {
        let (batch, block, hidden) = x.size3()?;
        let qkv = self.qkv.forward(x)?.f_view([batch, block, 3, self.heads, hidden / self.heads])?;
        let parts = qkv.f_unbind(2)?;
        let part = |index: usize| parts[index].f_transpose(1, 2);
        let rate = if train { self.dropout } else { 0.0 };
        let (query, key, value) = (part(0)?, part(1)?, part(2)?);
        let y = Tensor::f_scaled_dot_product_attention(
            &query,
            &key,
            &value,
            None::<&Tensor>,
            rate,
            true,
            None,
            false,
        )?;
        self.proj.forward(&y.f_transpose(1, 2)?.f_reshape([batch, block, hidden])?)
    }
}

#[derive(Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
    /// Whether backward recomputes what lies between the two layers.
    recomputed: bool,
}

impl Mlp {
    fn new(vs: &nn::Path<'_>, config: &GptConfig) -> Result<Mlp, TchError> {
        let hidden = config.hidden;
        Ok(Mlp {
            up: Linear::new(&vs.sub("up"), hidden, 4 * hidden, INIT_STD, config.bias)?,
            down: Linear::new(&vs.sub("down"), 4 * hidden, hidden, residual_std(config), config.bias)?,
            recomputed: false,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let x = self.up.forward(x)?;
        let y = if self.recomputed {
            remat(&[&x], |inputs| inputs[0].f_gelu("tanh"))?
        } else {
            x.f_gelu("tanh")?
        };
        drop(x);
        self.down.forward(&y)
    }
}

/// Keeps the residual stream's variance from growing with depth: every block adds to it twice.
fn residual_std(config: &GptConfig) -> f64 {
    INIT_STD / (2.0 * config.layers as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> GptConfig {
        GptConfig {
            vocab: 11,
            context: 8,
            layers: 2,
            heads: 2,
            hidden: 12,
            dropout: 0.0,
            tied: true,
            bias: true,
        }
    }

    #[test]
    fn the_parameter_count_is_that_of_the_variables() -> Result<()> {
        for (tied, bias) in [(false, false), (false, true), (true, false), (true, true)] {
            let vs = nn::VarStore::new(Device::Cpu);
            let config = GptConfig { tied, bias, ..tiny() };
            let expected = config.parameters();
            let _model = Gpt::new(&vs.root(), config)?;
            let counted: usize = vs.trainable_variables().iter().map(Tensor::numel).sum();
            assert_eq!(counted as i64, expected, "tied {tied}, bias {bias}");
        }
        let gpt2 = GptConfig::preset("gpt2-small")?;
        assert_eq!(gpt2.parameters(), 124_439_808);
        assert_eq!(gpt2.flops_per_token(1_024), 854_438_400);
        Ok(())
    }

    #[test]
    fn tied_weights_are_one_tensor_and_untied_ones_are_two() -> Result<()> {
        for tied in [true, false] {
            let vs = nn::VarStore::new(Device::Cpu);
            let model = Gpt::new(&vs.root(), GptConfig { tied, ..tiny() })?;
            assert_eq!(model.head.weight.data_ptr() == model.tokens.data_ptr(), tied);
        }
        Ok(())
    }

    #[test]
    fn no_position_sees_what_comes_after_it() -> Result<()> {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), tiny())?;
        let logits = |ids: &[i64]| model.forward(&Tensor::from_slice(ids).unsqueeze(0), false);
        let (left, right) = (logits(&[1, 2, 3, 4, 5])?, logits(&[1, 2, 3, 9, 0])?);
        assert_eq!(left.narrow(1, 0, 3), right.narrow(1, 0, 3));
        assert_ne!(left.narrow(1, 3, 1), right.narrow(1, 3, 1));
        Ok(())
    }

    #[test]
    fn the_next_token_has_the_logits_of_the_last_position() -> Result<()> {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), tiny())?;
        vs.double();
        let inputs = Tensor::from_slice(&[3_i64, 1, 4, 1, 5]).unsqueeze(0);
        let expected = model.forward(&inputs, false)?.select(1, -1).squeeze();
        assert!(model.next_logits(&inputs)?.allclose(&expected, 1e-9, 1e-12, false));
        Ok(())
    }
}
