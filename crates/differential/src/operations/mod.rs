//! The operations of a program on tensors: how the arguments of each are drawn, and how it is run.

mod layers;
mod simple;
mod views;
mod writes;

use ssdtrain_libtorch::Storage;
use tch::{TchError, Tensor};

pub(crate) use self::simple::total;

use crate::draw::{Draft, Draw};
use crate::program;

/// The results of an operation.
pub(crate) type Outcome = Result<Vec<Tensor>, TchError>;

/// An operation on tensors.
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    pub(crate) action: Action,
}

#[derive(Clone, Copy)]
pub(crate) enum Action {
    /// A function of one tensor.
    Map(fn(&Tensor) -> Result<Tensor, TchError>),
    /// Changes one tensor.
    Change(fn(&mut Tensor) -> Result<Tensor, TchError>),
    /// A function of two tensors of the same shape.
    Zip(fn(&Tensor, &Tensor) -> Result<Tensor, TchError>),
    /// Changes the first of two tensors of the same shape.
    ChangeBy(fn(&mut Tensor, &Tensor) -> Result<Tensor, TchError>),
    /// Anything else.
    Other { draw: fn(&mut Draw<'_>) -> Option<Draft>, run: fn(&[Tensor], &[f64]) -> Outcome },
}

/// Operations that occur only at the outermost level of a program.
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

/// The operation on tensors with this name.
pub(crate) fn find(name: &str) -> Option<&'static Operation> {
    all().find(|operation| operation.name == name)
}

/// The same name of an operation or block from the tables; `None` if it is not in them.
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

    /// Runs the operation.
    pub(crate) fn run(&self, inputs: &[Tensor], numbers: &[f64]) -> Outcome {
        match (self, inputs) {
            (Action::Map(f), [x]) => Ok(vec![f(x)?]),
            // The result is the tensor itself.
            (Action::Change(f), [x]) => f(&mut x.shallow_clone()).map(|_| vec![]),
            (Action::Zip(f), [x, y]) => Ok(vec![f(x, y)?]),
            (Action::ChangeBy(f), [x, y]) => {
                // An operation that saves a tensor and changes it would make a graph that holds itself for ever.
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

/// Operations whose results depend on the order of threads, because they draw random numbers or update statistics.
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

/// Operations that return a tensor which is no value of the program and which others hold. A function of a segment must
/// not change such a tensor, although it looks like one of its own.
pub(crate) const OF_OTHERS: &[&str] = &["gradient"];

/// The arguments of an operation that takes `N` of them.
pub(crate) fn exactly<T, const N: usize>(arguments: &[T]) -> Result<&[T; N], TchError> {
    arguments.try_into().map_err(|_| TchError::Torch("arguments that the operation does not have".to_owned()))
}
