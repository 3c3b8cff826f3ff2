//! GPT-2: a decoder-only transformer with layer norms before attention and MLP.

mod config;

use std::num::NonZero;

use ssdtrain::{remat, resolve_math_kernels, scope, segment};
use tch::{Device, Kind, TchError, Tensor, nn};

pub use self::config::GptConfig;
use crate::error::{Error, Result};
use crate::layers::{INIT_STD, LayerNorm, Linear, dropout, linear, normal};
use crate::loss::{ChunkedHead, cross_entropy};
use crate::recompute::Recompute;

/// A GPT-2 with its parameters in a [`nn::VarStore`].
///
/// Runs under the scopes `embed`, `block.N.attn`, `block.N.mlp` and `head`, which reports use to name its parts.
#[derive(Debug)]
pub struct Gpt {
    config: GptConfig,
    tokens: Tensor,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    /// Shares its storage with `tokens` if the weights are tied.
    head: Tensor,
    loss_chunk: Option<NonZero<u32>>,
    grads_in_place: bool,
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
    /// [`Error::Argument`] if `config` is invalid, [`Error::Torch`] if there is not enough memory for the parameters.
    pub fn new(vs: &nn::Path<'_>, config: GptConfig) -> Result<Gpt> {
        config.validate()?;
        resolve_math_kernels()?;
        let tokens = normal(&vs.sub("wte"), config.vocab, config.hidden, INIT_STD)?;
        let positions = normal(&vs.sub("wpe"), config.context, config.hidden, INIT_STD)?;
        let blocks = (0..config.layers)
            .map(|index| Block::new(&vs.sub("block").sub(index), index, &config))
            .collect::<Result<_, _>>()?;
        let norm = LayerNorm::new(&vs.sub("norm"), config.hidden, config.bias)?;
        let head = if config.tied {
            tokens.shallow_clone()
        } else {
            normal(&vs.sub("head"), config.vocab, config.hidden, INIT_STD)?
        };
        Ok(Gpt {
            config,
            tokens,
            positions,
            blocks,
            norm,
            head,
            loss_chunk: None,
            grads_in_place: false,
            recompute: Recompute::None,
        })
    }

    /// If given, computes losses for this many tokens at a time, so that the logits of all tokens (`vocab` numbers
    /// each) never exist at once. See [`Gpt::training_loss`] for what changes; without a chunk size nothing does.
    #[must_use]
    pub fn with_loss_chunk(self, tokens: Option<NonZero<u32>>) -> Gpt {
        Gpt { loss_chunk: tokens, ..self }
    }

    /// If `in_place`, makes backward add to the gradients of matrices in place, so that a second gradient as large as
    /// the matrix never exists beside the first. Otherwise nothing changes.
    #[must_use]
    pub fn with_grads_in_place(mut self, in_place: bool) -> Gpt {
        self.grads_in_place = in_place;
        for Block { attention, mlp, .. } in &mut self.blocks {
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
        self.norm.recomputed = cheap;
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

    /// Where the parameters are.
    pub fn device(&self) -> Device {
        self.tokens.device()
    }

    /// Logits `[batch, block, vocab]` of the token after each of `inputs` (`[batch, block]`, 64-bit token ids).
    /// Dropout is on if `train`.
    ///
    /// # Errors
    /// [`Error::Argument`] if `inputs` has another shape or is longer than the context, [`Error::Torch`] if an
    /// id is not below `vocab` or memory runs out.
    pub fn forward(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        let hidden = self.hidden(inputs, train)?;
        let _scope = scope("head");
        self.logits(&hidden)
    }

    /// Mean cross-entropy, in nats per token, of `targets` (`[batch, block]`) after `inputs`: a scalar of at least 32
    /// bits. Dropout is on if `train`.
    ///
    /// The chunks of [`Gpt::with_loss_chunk`] are used if no gradients are being recorded. If they are, this is the
    /// ordinary loss with all its logits; [`Gpt::training_loss`] is the one that uses chunks.
    ///
    /// # Errors
    /// As [`Gpt::forward`].
    pub fn loss(&self, inputs: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        let hidden = self.hidden(inputs, train)?;
        let _scope = scope("head");
        let (x, targets) = self.head_inputs(&hidden, targets)?;
        Ok(match self.chunked_head() {
            Some(head) if !x.requires_grad() => head.cross_entropy(&x, &targets)?,
            _ => cross_entropy(&linear(&x, &self.head, None, self.grads_in_place)?, &targets)?,
        })
    }

    /// The loss to train on: [`Gpt::loss`] with dropout, divided by `parts`, the number of micro-batches whose
    /// gradients are summed.
    ///
    /// With [`Gpt::with_loss_chunk`], the gradients of the head are computed together with its loss. Then:
    /// - gradients must be cleared before this call, not between it and `backward`;
    /// - the head's part is in its weight's gradient as soon as this returns;
    /// - `backward` must run on the result, as it is, exactly once: it carries the rest of the gradient into the
    ///   rest of the model.
    ///
    /// # Errors
    /// As [`Gpt::forward`].
    pub fn training_loss(&self, inputs: &Tensor, targets: &Tensor, parts: NonZero<usize>) -> Result<Tensor> {
        match self.chunked_head() {
            None => Ok(self.loss(inputs, targets, true)?.f_div_scalar(parts.get() as f64)?),
            Some(head) => {
                let hidden = self.hidden(inputs, true)?;
                let _scope = scope("head");
                let (x, targets) = self.head_inputs(&hidden, targets)?;
                if x.requires_grad() {
                    return Ok(head.training_loss(&x, &targets, parts)?);
                }
                Ok(head.cross_entropy(&x, &targets)?.f_div_scalar(parts.get() as f64)?)
            }
        }
    }

    /// Logits `[vocab]` of the token after the last of `inputs` (`[1, block]`), without dropout.
    pub(crate) fn next_logits(&self, inputs: &Tensor) -> Result<Tensor> {
        let hidden = self.hidden(inputs, false)?;
        let last = hidden.f_narrow(1, -1, 1)?;
        Ok(self.logits(&last)?.f_view([self.config.vocab])?)
    }

    /// The residual stream after the last block.
    fn hidden(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = self.embed(inputs, train)?;
        for block in &self.blocks {
            x = if self.recompute == Recompute::Layer {
                let held = block.shallow_clone();
                segment(&block.name, &x, move |x| held.forward(x, train))?
            } else {
                block.forward(&x, train)?
            };
        }
        Ok(x)
    }

    fn embed(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        let _scope = scope("embed");
        let block = match inputs.size()[..] {
            [_, block] if (1..=self.config.context).contains(&block) && inputs.kind() == Kind::Int64 => block,
            _ => {
                let (kind, size, context) = (inputs.kind(), inputs.size(), self.config.context);
                return Err(Error::argument(format!(
                    "inputs are {kind:?} {size:?}; the model takes Int64 [batch, 1 to {context}]"
                )));
            }
        };
        let tokens = Tensor::f_embedding(&self.tokens, inputs, -1, false, false)?;
        let x = tokens.f_add(&self.positions.f_narrow(0, 0, block)?)?;
        Ok(dropout(x, self.config.dropout, train)?)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.norm.forward(hidden)?.f_linear(&self.head, None::<&Tensor>)?)
    }

    /// The input of the head, `[tokens, hidden]`, and the targets, `[tokens]`.
    fn head_inputs(&self, hidden: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
        let x = self.norm.forward(hidden)?.f_view([-1, self.config.hidden])?;
        Ok((x, targets.f_reshape([-1])?))
    }

    fn chunked_head(&self) -> Option<ChunkedHead<'_>> {
        self.loss_chunk.map(|chunk| ChunkedHead { weight: &self.head, chunk })
    }
}

#[derive(Debug)]
struct Block {
    name: String,
    attention_scope: String,
    attention_norm: LayerNorm,
    attention: Attention,
    mlp_scope: String,
    mlp_norm: LayerNorm,
    mlp: Mlp,
    dropout: f64,
}

impl Block {
    fn new(vs: &nn::Path<'_>, index: i64, config: &GptConfig) -> Result<Block, TchError> {
        Ok(Block {
            name: format!("block.{index}"),
            attention_scope: format!("block.{index}.attn"),
            attention_norm: LayerNorm::new(&vs.sub("attn_norm"), config.hidden, config.bias)?,
            attention: Attention::new(&vs.sub("attn"), config)?,
            mlp_scope: format!("block.{index}.mlp"),
            mlp_norm: LayerNorm::new(&vs.sub("mlp_norm"), config.hidden, config.bias)?,
            mlp: Mlp::new(&vs.sub("mlp"), config)?,
            dropout: config.dropout,
        })
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor, TchError> {
        let x = {
            let _scope = scope(&self.attention_scope);
            let y = self.attention.forward(&self.attention_norm.forward(x)?, train)?;
            x.f_add(&dropout(y, self.dropout, train)?)?
        };
        let _scope = scope(&self.mlp_scope);
        let y = self.mlp.forward(&self.mlp_norm.forward(&x)?)?;
        x.f_add(&dropout(y, self.dropout, train)?)
    }

    /// The same block, with shared parameters.
    fn shallow_clone(&self) -> Block {
        Block {
            name: self.name.clone(),
            attention_scope: self.attention_scope.clone(),
            attention_norm: self.attention_norm.shallow_clone(),
            attention: Attention {
                qkv: self.attention.qkv.shallow_clone(),
                proj: self.attention.proj.shallow_clone(),
                ..self.attention
            },
            mlp_scope: self.mlp_scope.clone(),
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
            assert_eq!(model.head.data_ptr() == model.tokens.data_ptr(), tied);
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
