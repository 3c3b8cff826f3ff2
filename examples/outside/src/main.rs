//! A training loop whose activations go to disk: `cargo run --release -- [SPILL_DIRECTORY]`.

use std::error::Error;
use std::path::PathBuf;

use ssdtrain::{MIB, Offload, TensorCache};
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const WIDTH: i64 = 256;
const STEPS: usize = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    // Linking alone does not load CUDA: a program that uses a GPU has to load it.
    let device = ssdtrain::load_cuda().map_or(Device::Cpu, |()| Device::cuda_if_available());
    tch::manual_seed(1);

    let vs = nn::VarStore::new(device);
    let model = network(vs.root());
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    let cache = TensorCache::builder()
        .spill_to(directory) // on a local disk: ext4 or xfs
        .policy(Offload::default().device_budget(8 * MIB)) // what may stay in memory
        .parameters(&vs) // are there anyway
        .build()?;

    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let (x, y) = batch(device);
        let step = cache.step(); // from here on, what this thread saves for backward goes through the cache
        let loss = (model.forward_t(&x, true) - y).square().mean(Kind::Float);
        optimizer.zero_grad();
        step.backward(&loss)?; // in the place of loss.backward()
        optimizer.step();
        losses.push(loss.double_value(&[]));
        println!("loss {:.4}; {}", losses[losses.len() - 1], step.finish()?);
    }
    if losses[STEPS - 1] >= losses[0] {
        return Err("the loss did not fall".into());
    }
    Ok(())
}

/// Six layers with dropout.
fn network(vs: nn::Path<'_>) -> nn::SequentialT {
    (0..6).fold(nn::seq_t(), |network, layer| {
        network
            .add(nn::linear(&vs / layer, WIDTH, WIDTH, nn::LinearConfig::default()))
            .add_fn(|x| x.gelu("none"))
            .add_fn_t(|x, train| x.dropout(0.1, train))
    })
}

/// Rows of noise, and the cumulative sums that are to be learned from them.
fn batch(device: Device) -> (Tensor, Tensor) {
    let x = Tensor::randn([4096, WIDTH], (Kind::Float, device));
    let y = x.cumsum(1, Kind::Float) / (WIDTH as f64).sqrt();
    (x, y)
}
