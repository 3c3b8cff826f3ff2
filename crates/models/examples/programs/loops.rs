//! A language model whose training loop does more than steps that are all alike.

use tch::nn::{self, OptimizerConfig};
use tch::{Device, Tensor};

use crate::layers::{Gpt, INDEX, sequences};
use crate::program::{Named, Program, Result};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] = &[
    ("lengths-two", || trained(|number| [160, 96][number % 2])),
    ("lengths-eight", || trained(|number| 64 + 16 * (number as i64 % 8))),
    ("lengths-random", || {
        trained(|_| i64::try_from(Tensor::randint_low(48, 192, [1], INDEX)).unwrap_or(128))
    }),
    ("lengths-rare-long", || trained(|number| if number.is_multiple_of(10) { 320 } else { 96 })),
    ("lengths-curriculum", || trained(|number| 64 + 4 * number as i64)),
    ("accumulate-2", || accumulated(|_| 2, false)),
    ("accumulate-4", || accumulated(|_| 4, false)),
    ("accumulate-by-tch", || accumulated(|_| 3, true)),
    ("accumulate-any-number", || accumulated(|number| [2, 3, 1, 4, 2, 2, 3][number % 7], false)),
    ("gradient-norms", gradient_norms),
    ("averaged-weights", averaged_weights),
    ("optimizer-swap", optimizer_swap),
];

/// A GPT whose sequences have a length that depends on the iteration.
fn trained(length: fn(usize) -> i64) -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), 128, 3, 0.0);
    let mut optimizer = nn::AdamW::default().build(&vs, 3e-4)?;
    Program::new(vs, move |number, session| {
        let batch = sequences(8, length(number));
        session.step(|step| {
            let loss = model.loss(&batch);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A GPT whose gradients are the sums of several micro-batches'.
fn accumulated(micro_batches: fn(usize) -> usize, is_by_tch: bool) -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), 128, 3, 0.0);
    let mut optimizer = nn::AdamW::default().build(&vs, 3e-4)?;
    Program::new(vs, move |number, session| {
        let micro_batches = micro_batches(number);
        optimizer.zero_grad();
        session.step(|step| {
            for _ in 0..micro_batches {
                let loss = model.loss(&sequences(4, 96)) / micro_batches as f64;
                if is_by_tch {
                    loss.backward();
                } else {
                    step.backward(&loss)?;
                }
            }
            optimizer.step();
            Ok(())
        })
    })
}

/// The norm of the weights is part of the loss, and that of the gradients is limited.
fn gradient_norms() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), 128, 3, 0.0);
    let weights = vs.trainable_variables();
    let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
    Program::new(vs, move |_, session| {
        let batch = sequences(8, 112);
        session.step(|step| {
            let norms: Vec<Tensor> = weights.iter().map(Tensor::norm).collect();
            let loss = model.loss(&batch) + Tensor::stack(&norms, 0).norm() * 1e-4;
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.clip_grad_norm(0.5);
            optimizer.step();
            Ok(())
        })
    })
}

/// Weights that decay, and their moving average, which is evaluated now and then.
fn averaged_weights() -> Result<Program> {
    let [mut averages, vs] = [(); 2].map(|()| nn::VarStore::new(Device::Cpu));
    let model = Gpt::new(&vs.root(), 128, 3, 0.0);
    let averaged = Gpt::new(&averages.root(), 128, 3, 0.0);
    averages.copy(&vs)?;
    averages.freeze();
    let mut optimizer = nn::AdamW { wd: 0.1, ..nn::AdamW::default() }.build(&vs, 3e-4)?;
    let (weights, mut means) = (vs.variables(), averages.variables());
    Program::of(vec![vs, averages], move |number, session| {
        let batch = sequences(8, 112);
        session.step(|step| {
            let loss = model.loss(&batch);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            tch::no_grad(|| {
                means.iter_mut().for_each(|(name, mean)| drop(mean.lerp_(&weights[name], 0.05)));
            });
            Ok(())
        })?;
        if number.is_multiple_of(5) {
            drop(tch::no_grad(|| averaged.loss(&batch)));
        }
        Ok(())
    })
}

/// A learning rate that rises and falls, and another optimizer from iteration 15 on.
fn optimizer_swap() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), 128, 3, 0.0);
    let mut early = nn::AdamW::default().build(&vs, 1e-3)?;
    let mut late = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&vs, 0.05)?;
    Program::new(vs, move |number, session| {
        let batch = sequences(8, 112);
        let (optimizer, rate) = if number < 15 { (&mut early, 1e-3) } else { (&mut late, 0.05) };
        optimizer.set_lr(rate * (number as f64 / 10.0).sin().abs());
        session.step(|step| {
            let loss = model.loss(&batch);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}
