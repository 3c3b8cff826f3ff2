//! Layers and data that several programs use.

use std::collections::HashMap;

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

/// Tensors of 32 bits in memory.
pub(crate) const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// Indices in memory.
pub(crate) const INDEX: (Kind, Device) = (Kind::Int64, Device::Cpu);

/// `count` rows of `data`, drawn at random: a new tensor, as a data loader makes it.
pub(crate) fn draw(data: &Tensor, count: i64) -> Tensor {
    data.index_select(0, &Tensor::randint(data.size()[0], [count], INDEX))
}

/// Freezes or unfreezes the weights whose names contain one of `parts`; running statistics stay as they are.
pub(crate) fn set_trainable(variables: &HashMap<String, Tensor>, parts: &[&str], is_trained: bool) {
    let is_meant = |name: &str| parts.iter().any(|part| name.contains(part)) && !name.contains("running");
    let found = variables.iter().filter(|(name, _)| is_meant(name));
    found.for_each(|(_, variable)| drop(variable.set_requires_grad(is_trained)));
}

/// A linear layer with a bias.
pub(crate) fn linear(vs: nn::Path<'_>, inputs: i64, outputs: i64) -> nn::Linear {
    nn::linear(vs, inputs, outputs, nn::LinearConfig::default())
}

/// A layer norm over the last dimension.
pub(crate) fn norm(vs: nn::Path<'_>, width: i64) -> nn::LayerNorm {
    nn::layer_norm(vs, vec![width], nn::LayerNormConfig::default())
}

/// A stack of linear layers of these widths, with GELU between them.
pub(crate) fn perceptron(vs: &nn::Path<'_>, widths: &[i64]) -> nn::Sequential {
    let last = widths.len().saturating_sub(2);
    widths.windows(2).enumerate().fold(nn::seq(), |stack, (index, pair)| {
        let stack = stack.add(linear(vs / index, pair[0], pair[1]));
        if index < last { stack.add_fn(|x| x.gelu("none")) } else { stack }
    })
}

/// A pre-norm transformer block with fused attention.
#[derive(Debug)]
pub(crate) struct Block {
    norms: [nn::LayerNorm; 2],
    qkv: nn::Linear,
    projection: nn::Linear,
    up: nn::Linear,
    down: nn::Linear,
    heads: i64,
    is_causal: bool,
    dropout: f64,
}

impl Block {
    /// A block of `width`, with heads of 32.
    pub(crate) fn new(vs: &nn::Path<'_>, width: i64, is_causal: bool, dropout: f64) -> Block {
        Block {
            norms: [norm(vs / "norm1", width), norm(vs / "norm2", width)],
            qkv: linear(vs / "qkv", width, 3 * width),
            projection: linear(vs / "projection", width, width),
            up: linear(vs / "up", width, 4 * width),
            down: linear(vs / "down", 4 * width, width),
            heads: width / 32,
            is_causal,
            dropout,
        }
    }

    fn attention(&self, x: &Tensor) -> Tensor {
        let (batch, length, width) = x.size3().unwrap_or_default();
        let qkv = self.qkv.forward(x).view([batch, length, 3, self.heads, width / self.heads]);
        let parts: Vec<Tensor> = qkv.unbind(2).iter().map(|part| part.transpose(1, 2)).collect();
        let y = Tensor::scaled_dot_product_attention(
            &parts[0],
            &parts[1],
            &parts[2],
            None::<&Tensor>,
            self.dropout,
            self.is_causal,
            None,
            false,
        );
        self.projection.forward(&y.transpose(1, 2).reshape([batch, length, width]))
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Tensor {
        let x = x + self.attention(&self.norms[0].forward(x)).dropout(self.dropout, true);
        let y = self.up.forward(&self.norms[1].forward(&x)).gelu("tanh");
        &x + self.down.forward(&y).dropout(self.dropout, true)
    }
}

/// A small language model of transformer blocks.
#[derive(Debug)]
pub(crate) struct Gpt {
    tokens: nn::Embedding,
    positions: nn::Embedding,
    pub(crate) blocks: Vec<Block>,
    norm: nn::LayerNorm,
    head: nn::Linear,
}

/// Tokens that the language models know.
pub(crate) const VOCABULARY: i64 = 512;
/// The longest sequence of the language models.
const CONTEXT: i64 = 512;

impl Gpt {
    /// A model of this width and number of blocks.
    pub(crate) fn new(vs: &nn::Path<'_>, width: i64, blocks: i64, dropout: f64) -> Gpt {
        Gpt {
            tokens: nn::embedding(vs / "tokens", VOCABULARY, width, nn::EmbeddingConfig::default()),
            positions: nn::embedding(vs / "positions", CONTEXT, width, nn::EmbeddingConfig::default()),
            blocks: (0..blocks).map(|index| Block::new(&(vs / index), width, true, dropout)).collect(),
            norm: norm(vs / "norm", width),
            head: linear(vs / "head", width, VOCABULARY),
        }
    }

    /// What goes into the first block.
    pub(crate) fn embed(&self, tokens: &Tensor) -> Tensor {
        let positions = Tensor::arange(tokens.size()[1], INDEX);
        self.tokens.forward(tokens) + self.positions.forward(&positions)
    }

    /// What comes out of the last block, normed.
    pub(crate) fn hidden(&self, tokens: &Tensor) -> Tensor {
        self.norm.forward(&self.blocks.iter().fold(self.embed(tokens), |x, block| block.forward(&x)))
    }

    /// The logits of hidden states.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Tensor {
        self.head.forward(hidden)
    }

    /// The loss of sequences that are one token longer than what is predicted.
    pub(crate) fn loss(&self, sequences: &Tensor) -> Tensor {
        let (inputs, targets) = shifted(sequences);
        self.logits(&self.hidden(&inputs))
            .view([-1, VOCABULARY])
            .cross_entropy_for_logits(&targets.reshape(-1))
    }
}

/// Tokens drawn at random, `[count, length + 1]`.
pub(crate) fn sequences(count: i64, length: i64) -> Tensor {
    Tensor::randint(VOCABULARY, [count, length + 1], INDEX)
}

/// What a language model gets of sequences, and what it is to predict.
pub(crate) fn shifted(sequences: &Tensor) -> (Tensor, Tensor) {
    let length = sequences.size()[1] - 1;
    (sequences.narrow(1, 0, length), sequences.narrow(1, 1, length))
}
