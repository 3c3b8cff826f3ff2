//! What a step of one of this project's models really saves.

use ssdtrain::{Offload, TensorCache};
use ssdtrain_models::{Gpt, LanguageModel, Llama, ModelConfig};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

/// Bytes that a step of `batch` full sequences saves on the CPU: each storage once, and no parameters.
pub(super) fn measured_bytes(config: &ModelConfig, kind: Kind, batch: i64) -> u64 {
    let mut vs = VarStore::new(Device::Cpu);
    vs.set_kind(kind);
    let (model, vocab): (Box<dyn LanguageModel>, _) = match config.clone() {
        ModelConfig::Gpt(config) => (Box::new(Gpt::new(&vs.root(), config.clone()).unwrap()), config.vocab),
        ModelConfig::Llama(config) => {
            (Box::new(Llama::new(&vs.root(), config.clone()).unwrap()), config.vocab)
        }
    };
    let place = tempfile::tempdir().unwrap();
    let builder = TensorCache::builder().policy(Offload::default()).spill_to(place.path());
    let cache = builder.parameters(&vs).min_bytes(0).build().unwrap();
    let tokens = || Tensor::randint(vocab, [batch, config.context()], (Kind::Int64, Device::Cpu));
    let (inputs, targets) = (tokens(), tokens());
    let step = cache.step();
    let loss = model.loss(&inputs, &targets, true).unwrap();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    report.saved.bytes - report.deduplicated.bytes - report.kept.parameters.bytes
}
