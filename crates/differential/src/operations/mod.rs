//! What a program may do with tensors: each operation with how its arguments are drawn and how it is run.

mod layers;
mod simple;
mod views;
mod writes;

use ssdtrain_libtorch::Storage;
use tch::{TchError, Tensor};

pub(crate) use self::simple::total;

use crate::draw::{Draft, Draw};
use crate::program;

/// What an operation makes.
pub(crate) type Outcome = Result<Vec<Tensor>, TchError>;

/// An operation on tensors.
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    pub(crate) action: Action,
}

#[derive(Clone, Copy)]
pub(crate) enum Action {
    /// Of one tensor.
    Map(fn(&Tensor) -> Result<Tensor, TchError>),
    /// Changes one tensor.
    Change(fn(&mut Tensor) -> Result<Tensor, TchError>),
    /// Of two tensors of the same shape.
    Zip(fn(&Tensor, &Tensor) -> Result<Tensor, TchError>),
    /// Changes the first of two tensors of the same shape.
    ChangeBy(fn(&mut Tensor, &Tensor) -> Result<Tensor, TchError>),
    /// Any other.
    Other { draw: fn(&mut Draw<'_>) -> Option<Draft>, run: fn(&[Tensor], &[f64]) -> Outcome },
}

/// What only the outermost level of a program does.
const CONTROL: &[&str] = &[
    "leaf",
    "parameter",
    "constant",
    "drop",
    "backward",
    "flush",
    "micro_batch",
    "optimizer",
    "optimize",
    "zero_grad",
];

const TABLES: &[&[Operation]] = &[
    simple::MAPS,
    simple::CHANGES,
    simple::ZIPS,
    simple::CHANGES_BY,
    simple::SUMS,
    views::VIEWS,
    writes::WRITES,
    layers::LAYERS,
];

/// All operations on tensors.
pub(crate) fn all() -> impl Iterator<Item = &'static Operation> {
    TABLES.iter().flat_map(|table| table.iter())
}

/// The operation on tensors of that name.
pub(crate) fn find(name: &str) -> Option<&'static Operation> {
    all().find(|operation| operation.name == name)
}

/// The name of an operation or block as it is known here, if it is.
pub(crate) fn name(name: &str) -> Option<&'static str> {
    let words = program::BLOCKS.iter().chain(CONTROL).copied();
    words.chain(all().map(|operation| operation.name)).find(|known| *known == name)
}

impl Action {
    /// Draws arguments.
    pub(crate) fn draw(&self, draw: &mut Draw<'_>) -> Option<Draft> {
        match self {
            Action::Map(_) => Some(Draft::of(vec![draw.value()?], vec![])),
            Action::Change(_) => Some(Draft::of(vec![draw.changeable()?], vec![])),
            Action::Zip(_) => {
                let first = draw.value()?;
                Some(Draft::of(vec![first, draw.like(first)?], vec![]))
            }
            Action::ChangeBy(_) => {
                let first = draw.changeable()?;
                Some(Draft::of(vec![first, draw.like(first)?], vec![]))
            }
            Action::Other { draw: f, .. } => f(draw),
        }
    }

    /// Runs it.
    pub(crate) fn run(&self, inputs: &[Tensor], numbers: &[f64]) -> Outcome {
        match (self, inputs) {
            (Action::Map(f), [x]) => Ok(vec![f(x)?]),
            // The result is the tensor itself.
            (Action::Change(f), [x]) => f(&mut x.shallow_clone()).map(|_| vec![]),
            (Action::Zip(f), [x, y]) => Ok(vec![f(x, y)?]),
            (Action::ChangeBy(f), [x, y]) => {
                // What is saved to be changed in the same operation holds itself.
                let is_same =
                    Storage::of(x).map(|storage| storage.id()) == Storage::of(y).map(|storage| storage.id());
                let y = if is_same { y.copy() } else { y.shallow_clone() };
                f(&mut x.shallow_clone(), &y).map(|_| vec![])
            }
            (Action::Other { run, .. }, inputs) => run(inputs, numbers),
            _ => Err(TchError::Torch("arguments that the operation does not have".to_owned())),
        }
    }
}

/// What threads that run at once would have another way each time: they draw random numbers, or update statistics.
pub(crate) const ORDERED: &[&str] = &[
    "batch_norm",
    "dropout",
    "dropout_",
    "alpha_dropout",
    "feature_dropout",
    "noisy",
    "bernoulli",
    "bernoulli_",
    "uniform_",
    "normal_",
    "lstm",
];

/// What gives a tensor that no value is and others hold: a function that made it of what it was given could not change it.
pub(crate) const OF_OTHERS: &[&str] = &["gradient"];

/// The arguments of an operation, if they are as many as it has.
pub(crate) fn exactly<T, const N: usize>(arguments: &[T]) -> Result<&[T; N], TchError> {
    arguments.try_into().map_err(|_| TchError::Torch("arguments that the operation does not have".to_owned()))
}
