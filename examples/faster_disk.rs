//! What `Policy::Auto` does when the disk becomes faster in the middle of training: steps are planned for a disk limited to
//! 150 MB/s, then the limit goes. Each line is a step: how long it took, its activation peak, and the peak that its plan expected.
//!
//! `cargo run --release --example faster_disk [DIRECTORY]`

use std::num::NonZero;
use std::sync::Arc;

use ssdtrain::plan::Goal;
use ssdtrain::store::{Backend, Pool, Store, StoreConfig, Throttled, Uring};
use ssdtrain::{Bytes, Policy, TensorCache, remat, scope};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const LAYERS: usize = 8;
const LIMIT: NonZero<u64> = NonZero::new(150_000_000).unwrap();
/// Steps with the limit, and without.
const STEPS: [usize; 2] = [14, 12];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let vs = nn::VarStore::new(Device::Cpu);
    let layers: Vec<_> =
        (0..LAYERS).map(|layer| nn::linear(vs.root() / layer, 1024, 1024, Default::default())).collect();
    let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;

    let disk: Arc<dyn Backend> = match Uring::new(16) {
        Ok(uring) => Arc::new(uring),
        Err(_) => Arc::new(Pool::new(8)?),
    };
    let disk = Arc::new(Throttled::new(disk, LIMIT)?);
    let files = StoreConfig { directories: vec![directory], ..StoreConfig::default() };
    let store = Store::open_with(files, Arc::clone(&disk) as _)?;
    let builder = TensorCache::builder().policy(Policy::Auto(Goal::overhead(0.02))).parameters(&vs);
    let cache = TensorCache::with_store(builder, store)?;

    let x = Tensor::randn([2048, 1024], (Kind::Float, Device::Cpu));
    for (steps, limit) in STEPS.into_iter().zip([Some(LIMIT), None]) {
        disk.set_limit(limit);
        println!("{}", limit.map_or("no limit".to_owned(), |limit| format!("{}/s", Bytes(limit.get()))));
        for _ in 0..steps {
            let step = cache.step();
            optimizer.zero_grad();
            let y = layers.iter().enumerate().try_fold(x.shallow_clone(), |y, (layer, linear)| {
                let _scope = scope(&format!("layer.{layer}"));
                remat(&[&linear.forward(&y)], |y| y[0].f_gelu("tanh"))
            })?;
            step.backward(&y.square().mean(Kind::Float))?;
            optimizer.step();
            drop(y);
            let report = step.finish()?;
            let planned = report.plan.map_or("-".to_owned(), |plan| {
                format!("{} by plan {}", Bytes(plan.prediction.peak()), plan.plans)
            });
            println!(
                "step {:2}: {:6.0} ms, peak {}, planned {planned}",
                report.step,
                report.wall.as_secs_f64() * 1e3,
                Bytes(report.act_peak_bytes)
            );
        }
    }
    Ok(())
}
