//! What `Auto` does when the disk becomes faster in the middle of training: steps of a small GPT are planned
//! for a disk limited to 150 MB/s, then the limit is removed. Each line is a step: its duration, its activation peak,
//! and the peak that its plan predicted.
//!
//! `cargo run --release -p ssdtrain-models --example faster_disk [DIRECTORY]`

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;

use bytesize::ByteSize;
use ssdtrain::plan::Goal;
use ssdtrain::store::{Backend, Pool, Store, StoreConfig, Throttled, Uring};
use ssdtrain::{Auto, TensorCache};
use ssdtrain_models::{Gpt, GptConfig, LanguageModel, Recompute};
use tch::{Device, Kind, Tensor, nn};

const TOKENS: i64 = 256;
const LIMIT: NonZero<u64> = NonZero::new(150_000_000).unwrap();
/// Number of steps with the limit, and without it.
const STEPS: [usize; 2] = [20, 12];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory: PathBuf = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let vs = nn::VarStore::new(Device::Cpu);
    let config = GptConfig { context: TOKENS, ..GptConfig::preset("mini")? };
    let vocab = config.vocab;
    let model = Gpt::new(&vs.root(), config)?.with_recompute(Recompute::Cheap).with_grads_in_place(true);

    let disk: Arc<dyn Backend> = match Uring::new(16) {
        Ok(uring) => Arc::new(uring),
        Err(_) => Arc::new(Pool::new(8)?),
    };
    let disk = Arc::new(Throttled::new(disk, LIMIT)?);
    let files = StoreConfig { directories: vec![directory.clone()], ..StoreConfig::default() };
    let store = Store::open_with(files, Arc::clone(&disk) as _)?;
    // The directory tells the plan that there is a disk; the store is the one above.
    let builder = TensorCache::builder().spill_to(directory).policy(Auto::new(Goal::overhead(0.02)));
    let builder = builder.parameters(&vs);
    let cache = TensorCache::with_store(builder, store)?;

    let tokens = Tensor::randint(vocab, [8, TOKENS + 1], (Kind::Int64, Device::Cpu));
    for (steps, limit) in STEPS.into_iter().zip([Some(LIMIT), None]) {
        disk.set_limit(limit);
        println!(
            "{}",
            limit.map_or_else(
                || "no limit".to_owned(),
                |limit| format!("at most {}/s", ByteSize(limit.get()))
            )
        );
        for _ in 0..steps {
            let step = cache.step();
            vs.variables().values_mut().for_each(Tensor::zero_grad);
            let loss = model.loss(&tokens.narrow(1, 0, TOKENS), &tokens.narrow(1, 1, TOKENS), true)?;
            step.backward(&loss)?;
            drop(loss);
            let report = step.finish()?;
            let planned = report.plan.map_or_else(
                || "nothing".to_owned(),
                |plan| format!("{} (plan {})", ByteSize(plan.prediction.peak()), plan.plans),
            );
            println!(
                "step {:2}: {:6.0} ms, peak {}, planned {planned}",
                report.step,
                report.wall.as_secs_f64() * 1e3,
                ByteSize(report.act_peak_bytes)
            );
        }
    }
    Ok(())
}
