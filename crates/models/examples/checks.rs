//! What checks cost: steps of a small GPT, with each level of verification in turn, so that whatever disturbs the machine disturbs all of
//! them. Once all that it saves moves to a disk, and once its blocks are computed again as well, which is what the highest level compares.
//!
//! `cargo run --release -p ssdtrain-models --example checks [ROUNDS] [DIRECTORY] [cpu|cuda]`

use std::error::Error;
use std::path::{Path, PathBuf};

use ssdtrain::{Offload, TensorCache, Verify};
use ssdtrain_models::{Gpt, GptConfig, LanguageModel, Recompute};
use tch::{Device, Kind, Tensor, nn};

const TOKENS: i64 = 256;
/// Steps of each level that come first and do not count: checksums by default are taken once steps have shown what they cost.
const WARM_UP: usize = 5;
const LEVELS: [(&str, Verify); 4] =
    [("off", Verify::Off), ("auto", Verify::Auto), ("checksums", Verify::Checksums), ("full", Verify::Full)];

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
    let device = match arguments.next() {
        None => Device::Cpu,
        Some(given) if given == "cpu" => Device::Cpu,
        Some(given) if given == "cuda" => {
            ssdtrain::load_cuda()?;
            Device::Cuda(0)
        }
        Some(given) => return Err(format!("{}: give cpu or cuda", given.display()).into()),
    };
    println!(
        "median ms, and the time of all steps as a multiple of those without checks of the same rounds, with its standard error"
    );
    for (what, recompute) in
        [("everything is moved", Recompute::None), ("blocks are computed again", Recompute::Layer)]
    {
        println!("{what}:");
        compare(rounds, &directory, device, recompute)?;
    }
    Ok(())
}

/// Takes steps of each level in turn, and prints what they took.
fn compare(
    rounds: usize,
    directory: &Path,
    device: Device,
    recompute: Recompute,
) -> Result<(), Box<dyn Error>> {
    let vs = nn::VarStore::new(device);
    let config = GptConfig { context: TOKENS, ..GptConfig::preset("mini")? };
    let vocab = config.vocab;
    let model = Gpt::new(&vs.root(), config)?.with_recompute(recompute);
    let build = |(_, verify)| {
        let builder = TensorCache::builder().spill_to(directory).verify(verify).parameters(&vs);
        // Of a GPU, what fits stays unless it is told otherwise, and what is in host memory has no checksums.
        let builder = match device.is_cuda() {
            true => builder.policy(Offload::default().device_budget(0)).host_pool(0),
            false => builder.policy(Offload::default()),
        };
        builder.build()
    };
    let caches = LEVELS.into_iter().map(build).collect::<Result<Vec<_>, _>>()?;
    let tokens = Tensor::randint(vocab, [8, TOKENS + 1], (Kind::Int64, device));
    let mut times = vec![Vec::new(); caches.len()];
    let mut told = vec![String::new(); caches.len()];
    for round in 0..rounds + WARM_UP {
        // Each begins as often as the others.
        for place in (0..caches.len()).map(|place| (place + round) % caches.len()) {
            let step = caches[place].step();
            vs.variables().values_mut().for_each(Tensor::zero_grad);
            let loss = model.loss(&tokens.narrow(1, 0, TOKENS), &tokens.narrow(1, 1, TOKENS), true)?;
            step.backward(&loss)?;
            drop(loss);
            let report = step.finish()?;
            if round >= WARM_UP {
                times[place].push(report.wall.as_secs_f64());
                told[place] = format!(
                    "{} storages checked, {} not, {} reruns",
                    report.checked.count, report.unchecked.count, report.reruns.count
                );
            }
        }
    }
    for (((name, _), of_level), told) in LEVELS.iter().zip(&times).zip(&told) {
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
