//! A run to save and to restore.

use std::path::Path;

use ssdtrain_models::{
    AdamW, AdamWConfig, Checkpoint, Corpus, Gpt, GptConfig, LanguageModel, Optimizer, RandomBatches, Result,
    TokenSet, Tokenizer, TrainState, seed_step,
};
use tch::{Device, Kind, Tensor, nn};

const SEED: u64 = 5;

pub(crate) fn tiny() -> GptConfig {
    GptConfig {
        vocab: 256,
        context: 8,
        layers: 2,
        heads: 2,
        hidden: 16,
        dropout: 0.1,
        tied: false,
        bias: true,
    }
}

/// A small model in training.
pub(crate) struct Run {
    pub(crate) vs: nn::VarStore,
    pub(crate) model: Gpt,
    pub(crate) optimizer: AdamW,
    batches: RandomBatches,
}

impl Run {
    pub(crate) fn new(config: GptConfig, kind: Kind) -> Result<Run> {
        let corpus = Corpus::from_text("text", "all work and no play makes a dull text. ".repeat(10));
        let tokens = TokenSet::encode(&corpus, &Tokenizer::Bytes)?;
        let mut vs = nn::VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), config)?;
        vs.set_kind(kind);
        let optimizer = AdamW::new(&vs, AdamWConfig::default())?;
        Ok(Run { model, optimizer, batches: tokens.random_batches(4, 8, SEED, Device::Cpu)?, vs })
    }

    pub(crate) fn train(&mut self, steps: u64) -> Result<()> {
        for _ in 0..steps {
            seed_step(SEED, self.optimizer.steps());
            let batch = self.batches.draw()?;
            self.optimizer.zero_grad();
            self.model.loss(&batch.inputs, &batch.targets, true)?.f_backward()?;
            self.optimizer.clip_grad_norm(1.0)?;
            self.optimizer.step(1e-2)?;
        }
        Ok(())
    }

    pub(crate) fn save(&self, path: &Path) -> Result<TrainState> {
        let notes = [("tokenizer".to_owned(), Tokenizer::Bytes.to_string())].into();
        let state =
            TrainState { step: self.optimizer.steps(), seed: SEED, position: self.batches.position(), notes };
        Checkpoint::save(path, self.model.config(), &self.vs, &self.optimizer, &state)?;
        Ok(state)
    }

    pub(crate) fn restore(&mut self, path: &Path) -> Result<()> {
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.restore(self.model.config(), &self.vs, Some(&mut self.optimizer))?;
        self.batches.seek(checkpoint.state().position);
        Ok(())
    }

    /// The bits of every parameter, in the order of names.
    pub(crate) fn bits(&self) -> Vec<(String, Vec<u8>)> {
        let bits = |tensor: &Tensor| {
            let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
            tensor.copy_data_u8(&mut bytes, tensor.numel());
            bytes
        };
        let mut all: Vec<_> = self.vs.variables().iter().map(|(name, v)| (name.clone(), bits(v))).collect();
        all.sort();
        all
    }
}
