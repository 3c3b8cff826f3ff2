//! Steps in which several threads take part.

use std::thread;

use ssdtrain::StepHandle;
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::layers::{FLOAT, draw};
use crate::program::{Named, Program, Result};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] =
    &[("threads-halves", || threaded(false)), ("threads-two-models", || threaded(true))];

const WIDTH: i64 = 384;

/// Two threads that each compute the loss of half a batch, with one model or each with its own.
fn threaded(are_two: bool) -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let weights = |name: &str| -> Vec<Tensor> {
        let path = vs.root() / name;
        (0..5).map(|layer| path.kaiming_uniform(&format!("weight{layer}"), &[WIDTH, WIDTH])).collect()
    };
    let first = weights("first");
    let second = if are_two { weights("second") } else { first.iter().map(Tensor::shallow_clone).collect() };
    let mut models = [first, second];
    let mut optimizer = nn::Sgd::default().build(&vs, 0.05)?;
    let data = Tensor::randn([8192, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let halves = [draw(&data, 512), draw(&data, 512)];
        session.step(|step| {
            let handle = step.handle();
            let losses = thread::scope(|scope| -> Result<Vec<Tensor>> {
                let mut threads = Vec::new();
                for (index, (model, x)) in models.iter_mut().zip(halves).enumerate() {
                    let handle = handle.as_ref();
                    let builder = thread::Builder::new().name(format!("half {index}"));
                    threads.push(builder.spawn_scoped(scope, move || {
                        let _entered = handle.map(StepHandle::enter);
                        loss(model, &x)
                    })?);
                }
                let joined =
                    threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked".into()));
                joined.collect()
            })?;
            let loss = &losses[0] + &losses[1];
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

fn loss(model: &[Tensor], x: &Tensor) -> Tensor {
    let y = model.iter().fold(x.shallow_clone(), |x, weight| x.matmul(weight).gelu("none") + x);
    (y - x.roll([1i64], [1i64])).square().mean(Kind::Float)
}
