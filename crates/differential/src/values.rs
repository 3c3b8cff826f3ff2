//! The values of a running program, and the operations on them.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::{self, ScopedJoinHandle};

use ssdtrain::{Error, StepHandle};
use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{CpuAutocast, Storage, WeakStorage};
use tch::{Device, Kind, TchError, Tensor};

use crate::bits::{Bits, of_storage};
use crate::operations;
use crate::program::{Op, Slot};
use crate::random::Random;

/// The observable result of an operation.
#[derive(Clone, Debug)]
pub struct Event {
    /// The operation, as a line of text.
    pub what: String,
    /// What it returned, or its error.
    pub outcome: Result<Vec<(String, Bits)>, String>,
    /// Its error, if the cache returned that itself.
    pub error: Option<Error>,
    /// What a segment holds has changed since it ran.
    pub has_changed: bool,
    /// A cache may therefore refuse to rerun it; it may also succeed if it cannot know better.
    pub may_be_refused: bool,
    /// Something is recomputed, so a cache may succeed where autograd itself cannot.
    pub may_be_served: bool,
}

/// Why an operation failed.
#[derive(Debug)]
pub enum Failure {
    /// libtorch's error; what the cache has to say is part of its text.
    Torch(TchError),
    /// An error of a step.
    Cache(Error),
}

impl From<TchError> for Failure {
    fn from(error: TchError) -> Failure {
        Failure::Torch(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Cache(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Torch(error) => error.fmt(f),
            Failure::Cache(error) => error.fmt(f),
        }
    }
}

/// The existing values, and what has happened to them.
pub struct Values {
    /// Where leaves are made.
    pub device: Device,
    /// Values by name.
    pub slots: BTreeMap<Slot, Tensor>,
    /// Leaves that have gradients, in the order in which they were made.
    pub leaves: Vec<(Slot, Tensor)>,
    /// What has happened.
    pub events: Vec<Event>,
    /// What segments hold, if changes to it matter.
    pub watched: Option<Vec<Watched>>,
    /// All storages that were ever made, if changes matter.
    pub made: Vec<WeakStorage>,
    /// The step that threads take part in.
    pub step: Option<StepHandle>,
    /// Whether a segment has run.
    pub recomputes: bool,
    /// A cache may have seen a write that neither a version nor, by chance, a byte reveals: within a segment, or from
    /// an operation that autograd then refused.
    pub writes_unseen: bool,
    /// The same outside of segments, for what they hold or have made.
    pub is_unversioned: bool,
}

/// A tensor that a segment has taken, in its state at that time.
#[derive(Debug)]
pub struct Watched {
    tensor: Tensor,
    records: bool,
    version: Option<u32>,
    /// `None` if it does not matter.
    bytes: Option<Vec<u8>>,
}

impl Watched {
    fn new(tensor: &Tensor) -> Watched {
        Watched {
            tensor: tensor.shallow_clone(),
            records: tensor.requires_grad(),
            version: torch::version(tensor),
            bytes: of_storage(tensor),
        }
    }

    fn has_changed(&self) -> bool {
        self.tensor.requires_grad() != self.records
            || torch::version(&self.tensor) != self.version
            || self.bytes.is_some() && of_storage(&self.tensor) != self.bytes
    }
}

/// Operations whose results change without the version of their source changing, and an optimizer's step, which may
/// write the same bytes.
const UNVERSIONED: &[&str] = &[
    "unsafe_chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "data",
    "data_fill_",
    "data_scale_",
    "optimize",
];

impl Values {
    /// No values yet; leaves are made on this device.
    pub fn on(device: Device) -> Values {
        Values {
            device,
            slots: BTreeMap::new(),
            leaves: Vec::new(),
            events: Vec::new(),
            watched: None,
            made: Vec::new(),
            step: None,
            recomputes: false,
            writes_unseen: false,
            is_unversioned: false,
        }
    }

    /// Runs all of `body`, one operation after the other.
    pub fn run_all(&mut self, body: &[Op]) {
        for op in body {
            self.run(op);
        }
    }

    /// Runs `op`, and records the outcome.
    pub fn run(&mut self, op: &Op) {
        let Some(outcome) = self.outcome(op) else { return };
        self.note(op, outcome.map(|()| Vec::new()).map_err(Failure::from));
    }

    /// Runs `op`; `None` if it is skipped.
    pub fn outcome(&mut self, op: &Op) -> Option<Result<(), TchError>> {
        let inputs: Vec<Tensor> = op
            .inputs
            .iter()
            .map(|slot| self.slots.get(slot).map(Tensor::shallow_clone))
            .collect::<Option<_>>()?;
        let outcome = match op.name {
            "leaf" | "constant" => leaf(&op.numbers, op.name == "leaf", self.device).map(|leaf| vec![leaf]),
            "drop" => {
                for slot in &op.inputs {
                    drop(self.slots.remove(slot));
                }
                Ok(vec![])
            }
            "no_grad" => {
                let _guard = tch::no_grad_guard();
                self.run_all(&op.body);
                Ok(vec![])
            }
            "scope" => {
                let _scope = ssdtrain::scope(&format!("scope.{}", op.numbers.first().unwrap_or(&0.0)));
                self.run_all(&op.body);
                Ok(vec![])
            }
            "autocast" => {
                let _region = CpuAutocast::enter();
                self.run_all(&op.body);
                Ok(vec![])
            }
            "thread" => self.thread(&op.body),
            "parallel" => self.parallel(&op.body),
            "segment" | "remat" => self.segment(op, &inputs),
            name => match operations::find(name) {
                Some(operation) => caught(|| operation.action.run(&inputs, &op.numbers)),
                None => return None,
            },
        };
        Some(outcome.map(|made| {
            for (slot, tensor) in op.outputs.iter().zip(made) {
                if op.name == "leaf" {
                    self.leaves.push((*slot, tensor.shallow_clone()));
                }
                if self.watched.is_some() {
                    self.made.extend(Storage::of(&tensor).map(|storage| storage.downgrade()));
                }
                self.slots.insert(*slot, tensor);
            }
        }))
    }

    /// Records the outcome of `op`.
    pub fn note(&mut self, op: &Op, outcome: Result<Vec<(String, Bits)>, Failure>) {
        let has_changed = self.watched.iter().flatten().any(Watched::has_changed);
        self.writes_unseen |= outcome.is_err() && op.name != "backward";
        self.is_unversioned |= UNVERSIONED.contains(&op.name);
        let error = match &outcome {
            Err(Failure::Cache(error)) => Some(error.clone()),
            _ => None,
        };
        self.events.push(Event {
            what: op.to_string().lines().next().unwrap_or_default().to_owned(),
            outcome: outcome.map_err(|error| message(&error.to_string())),
            error,
            has_changed,
            may_be_refused: has_changed || self.writes_unseen || self.is_unversioned && self.recomputes,
            may_be_served: self.recomputes,
        });
    }

    /// Gradients of all leaves.
    pub fn gradients(&self) -> Result<Vec<(String, Bits)>, TchError> {
        let bits =
            |(slot, leaf): &(Slot, Tensor)| Ok((format!("gradient of %{slot}"), Bits::of(&leaf.f_grad()?)?));
        self.leaves.iter().map(bits).collect()
    }

    /// Everything observable about the values.
    pub fn all(&self) -> Result<Vec<(String, Bits)>, TchError> {
        let mut all = self.gradients()?;
        for (slot, leaf) in &self.leaves {
            all.push((format!("leaf %{slot}"), Bits::of(leaf)?));
        }
        for (slot, value) in &self.slots {
            all.push((format!("%{slot}"), Bits::of(value)?));
        }
        Ok(all)
    }

    fn thread(&mut self, body: &[Op]) -> operations::Outcome {
        let step = self.step.clone();
        let records = torch::is_recording();
        let run = || {
            let _entered = step.as_ref().map(StepHandle::enter);
            let _guard = (!records).then(tch::no_grad_guard);
            self.run_all(body);
        };
        let outcome = thread::scope(|scope| scope.spawn(run).join());
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        Ok(vec![])
    }

    /// Runs each branch on a thread of its own, all at once, and returns what they make.
    fn parallel(&mut self, branches: &[Op]) -> operations::Outcome {
        let mut forks: Vec<Values> = branches.iter().map(|_| self.fork()).collect();
        thread::scope(|scope| {
            let threads: Vec<_> = forks
                .iter_mut()
                .zip(branches)
                .map(|(fork, branch)| scope.spawn(|| fork.thread(&branch.body)))
                .collect();
            for outcome in threads.into_iter().map(ScopedJoinHandle::join) {
                outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
            }
            Ok::<_, TchError>(())
        })?;
        for fork in forks {
            self.slots.extend(fork.slots);
            self.events.extend(fork.events);
            self.made.extend(fork.made);
            if let Some(watched) = &mut self.watched {
                watched.extend(fork.watched.into_iter().flatten());
            }
            self.recomputes |= fork.recomputes;
            self.writes_unseen |= fork.writes_unseen;
            self.is_unversioned |= fork.is_unversioned;
        }
        Ok(vec![])
    }

    /// The same values for another thread, which has made nothing yet.
    pub(crate) fn fork(&self) -> Values {
        Values {
            slots: self.slots.iter().map(|(slot, tensor)| (*slot, tensor.shallow_clone())).collect(),
            watched: self.watched.as_ref().map(|_| Vec::new()),
            step: self.step.clone(),
            recomputes: self.recomputes,
            writes_unseen: self.writes_unseen,
            is_unversioned: self.is_unversioned,
            ..Values::on(self.device)
        }
    }

    fn segment(&mut self, op: &Op, inputs: &[Tensor]) -> operations::Outcome {
        let held: BTreeMap<Slot, Tensor> = op
            .free()
            .iter()
            .filter_map(|slot| Some((*slot, self.slots.get(slot)?.shallow_clone())))
            .collect();
        if let Some(watched) = &mut self.watched {
            // Its result does not depend on the bytes that it updates.
            watched.extend(held.iter().map(|(slot, tensor)| match Watched::new(tensor) {
                watched if op.only_updates(*slot) => Watched { bytes: None, ..watched },
                watched => watched,
            }));
        }
        self.recomputes = true;
        self.writes_unseen |= op.has(UNVERSIONED);
        let body = op.body.clone();
        let names = op.inputs.clone();
        let (watches, device) = (self.watched.is_some(), self.device);
        let function = move |inputs: &[&Tensor]| -> Result<(Tensor, Values), TchError> {
            let mut slots: BTreeMap<Slot, Tensor> =
                held.iter().map(|(slot, tensor)| (*slot, tensor.shallow_clone())).collect();
            for (slot, input) in names.iter().zip(inputs) {
                slots.insert(*slot, input.shallow_clone());
            }
            let mut values = Values { slots, watched: watches.then(Vec::new), ..Values::on(device) };
            values.run_all(&body);
            // As `?` would.
            if let Some(error) = values.events.iter().find_map(|event| event.outcome.as_ref().err()) {
                return Err(TchError::Torch(error.clone()));
            }
            let result =
                body.iter().rev().flat_map(|op| op.outputs.last()).find_map(|slot| values.slots.get(slot));
            let result = result.map_or_else(|| inputs[0].shallow_clone(), Tensor::shallow_clone);
            Ok((result, values))
        };
        let output = if let Some(watched) = &mut self.watched {
            // A plain call.
            let (output, within) = function(&inputs.iter().collect::<Vec<_>>())?;
            watched.extend(within.watched.into_iter().flatten());
            self.made.extend(within.made);
            output
        } else if op.name == "segment" {
            let inputs: Vec<&Tensor> = inputs.iter().collect();
            ssdtrain::segment("s", &inputs[..], move |inputs| Ok(function(inputs)?.0))?
        } else {
            ssdtrain::remat(&inputs.iter().collect::<Vec<_>>(), move |inputs| Ok(function(inputs)?.0))?
        };
        if let Some(watched) = &mut self.watched {
            // The function may have saved it.
            watched.push(Watched::new(&output));
        }
        Ok(vec![output])
    }
}

/// What an error says, without the addresses of libtorch's functions that were being called: with two threads these differ from run to run.
fn message(text: &str) -> String {
    // Once more escaped where tch has panicked with it.
    let ends = ["\nException raised from ", "\\nException raised from "];
    let end = ends.iter().filter_map(|end| text.find(end)).min();
    text[..end.unwrap_or(text.len())].to_owned()
}

/// Runs `f`, and turns a panic of tch into the error that it stands for. tch's fallible operations with a scalar
/// panic when libtorch refuses, since they free the scalar first, and so does an optimizer's step.
pub(crate) fn caught<T>(f: impl FnOnce() -> Result<T, TchError>) -> Result<T, TchError> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| match panic.downcast::<String>() {
        Ok(text) if text.contains("Torch(") => Err(TchError::Torch(*text)),
        Ok(text) => resume_unwind(text),
        Err(panic) => resume_unwind(panic),
    })
}

/// A tensor whose first number is the seed of its values, and whose others are its shape.
pub(crate) fn leaf(numbers: &[f64], requires_grad: bool, device: Device) -> Result<Tensor, TchError> {
    let (seed, shape) = numbers.split_first().unwrap_or((&0.0, &[]));
    let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
    let mut random = Random::new(*seed as u64);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.signed() as f32).collect();
    let leaf =
        Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?.to_device(device).to_kind(Kind::Float);
    // Batch norm's variances, for example, are not negative.
    let leaf = if requires_grad { leaf } else { leaf.f_abs()? };
    leaf.f_set_requires_grad(requires_grad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_without_the_addresses_of_functions() {
        let text = "sizes differ\nin two lines\nException raised from f at /a.cpp:1 (most recent call first):\nframe #0: 0x7f";
        assert_eq!(message(text), "sizes differ\nin two lines");
        assert_eq!(message(&format!("{text:?}")), "\"sizes differ\\nin two lines");
        assert_eq!(message("sizes differ"), "sizes differ");
    }
}
