//! Trains networks of tch's own, which know nothing of a cache, in turns without one and with planned activations:
//! `cargo run --release --example vision -- [resnet50|vit] [BATCH] [IMAGE] [OVERHEAD] [STEPS] [SPILL_DIRECTORY]`.
//!
//! `resnet50` is a residual network with batch norms, `vit` a small vision transformer (patches of 14 × 14). IMAGE is the side of an image in
//! pixels, a multiple of 14 for `vit`. All has 32 bits. `RUST_LOG=ssdtrain=info` logs what becomes of plans.

#[path = "../crates/models/examples/shared/logging.rs"]
mod logging;

use std::time::{Duration, Instant};

use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Keep, TensorCache};
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Tensor, vision};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// At most this many steps come before the measured ones: until the plan is settled.
const WARMUP: usize = 256;

fn main() -> Result<()> {
    logging::start()?;
    let mut arguments = std::env::args().skip(1);
    let mut argument = |default: &str| arguments.next().unwrap_or_else(|| default.to_owned());
    let name = argument("resnet50");
    let (batch, image): (i64, i64) = (argument("8").parse()?, argument("224").parse()?);
    let (overhead, steps): (f64, usize) = (argument("0.05").parse()?, argument("10").parse()?);
    let directory = argument(&std::env::temp_dir().to_string_lossy());
    let device = ssdtrain::load_cuda().map_or(Device::Cpu, |()| Device::cuda_if_available());
    let mut trained = Trained::new(&name, device)?;
    let x = Tensor::randn([batch, 3, image, image], (Kind::Float, device));
    let targets = Tensor::randint(1000, [batch], (Kind::Int64, device));
    let keep = TensorCache::builder().device(device).policy(Keep).build()?;
    let auto = TensorCache::builder()
        .device(device)
        .spill_to(directory)
        .policy(Auto::new(Goal::overhead(overhead)))
        .parameters(&trained.vs)
        .build()?;
    let caches = [None, Some(&keep), Some(&auto)];
    let mut times = caches.map(|_| Vec::new());
    let mut peaks = caches.map(|_| 0);
    let mut measured = 0;
    for round in 0..WARMUP + steps {
        let is_measured = auto.is_settled() || round >= WARMUP;
        for (turn, cache) in caches.into_iter().enumerate() {
            let (time, peak) = trained.step(cache, &x, &targets)?;
            if is_measured {
                times[turn].push(time);
                peaks[turn] = peaks[turn].max(peak);
            }
        }
        measured += usize::from(is_measured);
        if measured == steps {
            break;
        }
    }
    if let Some(plan) = auto.plan() {
        println!("{plan}");
    }
    let medians = times.map(|mut times| {
        times.sort_unstable();
        times[steps / 2]
    });
    println!(
        "{name}, batch {batch}, image {image}, on {device:?}, overhead {overhead}: medians of {steps} steps"
    );
    for (turn, name) in ["without", "keep", "auto"].iter().enumerate() {
        let ratio = medians[turn].as_secs_f64() / medians[0].as_secs_f64();
        let mib = peaks[turn] >> 20;
        println!(
            "{name:<8}{:>9.1} ms  {ratio:.3} of without, activation peak {mib} MiB",
            medians[turn].as_secs_f64() * 1e3
        );
    }
    println!("activation peak of auto / keep: {:.3}", peaks[2] as f64 / peaks[1] as f64);
    Ok(())
}

struct Trained {
    vs: nn::VarStore,
    model: Box<dyn ModuleT>,
    optimizer: nn::Optimizer,
}

impl Trained {
    fn new(name: &str, device: Device) -> Result<Trained> {
        let vs = nn::VarStore::new(device);
        let model: Box<dyn ModuleT> = match name {
            "resnet50" => Box::new(vision::resnet::resnet50(&vs.root(), 1000)),
            "vit" => Box::new(vision::dinov2::vit_small(&vs.root())),
            _ => return Err(format!("{name}: this example knows resnet50 and vit").into()),
        };
        let optimizer = nn::Sgd::default().build(&vs, 1e-3)?;
        Ok(Trained { vs, model, optimizer })
    }

    /// The time of a step, and the activation peak if a cache reports it.
    fn step(&mut self, cache: Option<&TensorCache>, x: &Tensor, targets: &Tensor) -> Result<(Duration, u64)> {
        self.optimizer.zero_grad();
        let start = Instant::now();
        let loss = || {
            let logits = self.model.forward_t(x, true);
            logits.log_softmax(-1, Kind::Float).nll_loss(targets)
        };
        let mut peak = 0;
        if let Some(cache) = cache {
            let step = cache.step();
            let loss = loss();
            step.backward(&loss)?;
            drop(loss);
            peak = step.finish()?.act_peak_bytes;
        } else {
            loss().f_backward()?;
        }
        if let Device::Cuda(index) = self.vs.device() {
            tch::Cuda::synchronize(index as i64);
        }
        let time = start.elapsed();
        self.optimizer.step();
        Ok((time, peak))
    }
}
