//! Trains a small perceptron with its activations on disk: `cargo run --release --example minimal [SPILL_DIRECTORY]`.

use ssdtrain::{MIB, Offload, TensorCache};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args_os().nth(1).unwrap_or_else(|| std::env::temp_dir().into());
    let vs = nn::VarStore::new(Device::Cpu);
    let model = (0..8).fold(nn::seq(), |model, layer| {
        model
            .add(nn::linear(vs.root() / layer, 512, 512, nn::LinearConfig::default()))
            .add_fn(|x| x.gelu("tanh"))
    });
    let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
    let cache = TensorCache::builder()
        .spill_to(directory)
        .policy(Offload::default().device_budget(32 * MIB))
        .parameters(&vs)
        .build()?;
    for _ in 0..10 {
        let x = Tensor::randn([4096, 512], (Kind::Float, Device::Cpu));
        let step = cache.step(); // saved tensors of this thread now go through the cache
        let loss = (model.forward(&x) - &x).square().mean(Kind::Float);
        optimizer.zero_grad();
        step.backward(&loss)?; // errors come out here, never as wrong numbers
        drop(loss);
        optimizer.step();
        println!("{}", step.finish()?); // what moved, what it cost, which I/O path ran
    }
    Ok(())
}
