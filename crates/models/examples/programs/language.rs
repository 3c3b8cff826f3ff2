//! Language models.

use tch::nn::{self, OptimizerConfig};
use tch::{Device, Tensor};

use crate::layers::{Gpt, sequences};
use crate::program::{Named, Program, Result};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] = &[
    ("gpt", gpt),
    ("gpt-dropout", gpt_dropout),
    ("lengths-two", two_lengths),
    ("lengths-eight", eight_lengths),
    ("lengths-random", random_lengths),
    ("lengths-rare-long", rare_long),
    ("lengths-curriculum", curriculum),
    ("accumulate-2", accumulate_two),
    ("accumulate-4", accumulate_four),
    ("accumulate-by-tch", accumulate_by_tch),
    ("accumulate-any-number", accumulate_any),
];

fn gpt() -> Result<Program> {
    trained(0.0, |_| 128)
}

fn gpt_dropout() -> Result<Program> {
    trained(0.1, |_| 128)
}

fn two_lengths() -> Result<Program> {
    trained(0.0, |number| [160, 96][number % 2])
}

fn eight_lengths() -> Result<Program> {
    trained(0.0, |number| 64 + 16 * (number as i64 % 8))
}

fn random_lengths() -> Result<Program> {
    trained(0.0, |_| i64::try_from(Tensor::randint_low(48, 192, [1], crate::layers::INDEX)).unwrap_or(128))
}

fn rare_long() -> Result<Program> {
    trained(0.0, |number| if number.is_multiple_of(10) { 320 } else { 96 })
}

fn curriculum() -> Result<Program> {
    trained(0.0, |number| 64 + 4 * number as i64)
}

/// A GPT whose sequences have a length that depends on the iteration.
fn trained(dropout: f64, length: fn(usize) -> i64) -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), 128, 3, dropout);
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

fn accumulate_two() -> Result<Program> {
    accumulated(|_| 2, false)
}

fn accumulate_four() -> Result<Program> {
    accumulated(|_| 4, false)
}

fn accumulate_by_tch() -> Result<Program> {
    accumulated(|_| 3, true)
}

fn accumulate_any() -> Result<Program> {
    accumulated(|number| [2, 3, 1, 4, 2, 2, 3][number % 7], false)
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
