//! What checksums cost: steps of a small GPT that move everything to a disk, with each level of verification in turn, so that whatever
//! disturbs the machine disturbs all of them.
//!
//! `cargo run --release -p ssdtrain-models --example checks [ROUNDS] [DIRECTORY]`

use std::error::Error;
use std::path::PathBuf;

use ssdtrain::{Offload, TensorCache, Verify};
use ssdtrain_models::{Gpt, GptConfig, LanguageModel};
use tch::{Device, Kind, Tensor, nn};

const TOKENS: i64 = 256;
/// Steps of each level that come first and do not count: checksums by default are taken once steps have shown what they cost.
const WARM_UP: usize = 5;
const LEVELS: [(&str, Verify); 3] =
    [("off", Verify::Off), ("auto", Verify::Auto), ("checksums", Verify::Checksums)];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let rounds: usize = match arguments.next() {
        Some(given) => match given.to_string_lossy().parse() {
            Ok(rounds) if rounds > 0 => rounds,
            _ => return Err(format!("{}: give a number of rounds, from 1 on", given.display()).into()),
        },
        None => 100,
    };
    let directory = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let vs = nn::VarStore::new(Device::Cpu);
    let config = GptConfig { context: TOKENS, ..GptConfig::preset("mini")? };
    let vocab = config.vocab;
    let model = Gpt::new(&vs.root(), config)?;
    let build = |(name, verify)| -> Result<_, Box<dyn Error>> {
        let builder = TensorCache::builder().spill_to(&directory).policy(Offload::default()).verify(verify);
        Ok((name, builder.parameters(&vs).build()?))
    };
    let caches = LEVELS.into_iter().map(build).collect::<Result<Vec<_>, _>>()?;
    let tokens = Tensor::randint(vocab, [8, TOKENS + 1], (Kind::Int64, Device::Cpu));
    let mut times = vec![Vec::new(); caches.len()];
    let mut told = vec![String::new(); caches.len()];
    for round in 0..rounds + WARM_UP {
        // Each begins as often as the others.
        for place in (0..caches.len()).map(|place| (place + round) % caches.len()) {
            let step = caches[place].1.step();
            vs.variables().values_mut().for_each(Tensor::zero_grad);
            let loss = model.loss(&tokens.narrow(1, 0, TOKENS), &tokens.narrow(1, 1, TOKENS), true)?;
            step.backward(&loss)?;
            drop(loss);
            let report = step.finish()?;
            if round >= WARM_UP {
                times[place].push(report.wall.as_secs_f64());
                told[place] =
                    format!("{} storages checked, {} not", report.checked.count, report.unchecked.count);
            }
        }
    }
    println!(
        "median ms, and the time of all steps as a multiple of those without checksums of the same rounds, with its standard error"
    );
    for (((name, _), of_level), told) in caches.iter().zip(&times).zip(&told) {
        let mut sorted = of_level.clone();
        sorted.sort_by(f64::total_cmp);
        let ratios: Vec<f64> = of_level.iter().zip(&times[0]).map(|(one, off)| one / off).collect();
        let (mean, error) = trimmed(ratios);
        println!("{name:10} {:8.1}  {mean:.4} +- {error:.4}  {told}", 1e3 * sorted[sorted.len() / 2]);
    }
    Ok(())
}

/// The mean without the lowest and the highest tenth, and its standard error.
fn trimmed(mut ratios: Vec<f64>) -> (f64, f64) {
    ratios.sort_by(f64::total_cmp);
    let cut = ratios.len() / 10;
    let kept = &ratios[cut..ratios.len() - cut];
    let count = kept.len() as f64;
    let mean = kept.iter().sum::<f64>() / count;
    let variance = kept.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>() / count;
    (mean, (variance / count).sqrt())
}
