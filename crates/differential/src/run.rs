//! Running a program, with a cache or as plain autograd.

use ssdtrain::{Backward, Step, TensorCache};
use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::WeakStorage;
use tch::nn::{self, Optimizer, OptimizerConfig, VarStore};
use tch::{TchError, Tensor};

use crate::bits::Bits;
use crate::operations::total;
use crate::program::{Op, Program};
use crate::values::{Event, Failure, Values, caught, leaf};

/// Runs `program`, whose parameters become variables of `vs`, and returns everything that was observable. Its steps take turns with
/// the caches; without any it is plain autograd.
pub fn run(program: &Program, vs: &VarStore, caches: &[TensorCache]) -> Ran {
    if program.is_ordered() {
        tch::manual_seed(program.seed as i64);
    }
    let mut run = Run::new(vs, caches);
    run.run_all(&program.body, None);
    run.end()
}

/// The observable results of a program.
pub struct Ran {
    /// The events, ending with a look at everything.
    pub events: Vec<Event>,
    /// The storages it made, without a cache.
    pub made: Vec<WeakStorage>,
}

/// A running program.
pub(crate) struct Run<'a> {
    pub(crate) values: Values,
    vs: &'a VarStore,
    caches: &'a [TensorCache],
    /// How many steps have begun.
    steps: usize,
    optimizer: Option<Optimizer>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(vs: &'a VarStore, caches: &'a [TensorCache]) -> Run<'a> {
        clear(vs);
        let watched = caches.is_empty().then(Vec::new);
        Run { values: Values { watched, ..Values::on(vs.device()) }, vs, caches, steps: 0, optimizer: None }
    }

    pub(crate) fn run_all(&mut self, body: &[Op], step: Option<&Step<'_>>) {
        for op in body {
            self.run(op, step);
        }
    }

    /// Everything that is observable in the end.
    fn end(mut self) -> Ran {
        let end = Op { name: "end", outputs: vec![], inputs: vec![], numbers: vec![], body: vec![] };
        let all = self.values.all();
        self.values.note(&end, all.map_err(Failure::from));
        // A gradient with a graph of its own holds its leaf, which in turn holds the gradient.
        for (_, leaf) in &mut self.values.leaves {
            leaf.zero_grad();
        }
        clear(self.vs);
        Ran { events: std::mem::take(&mut self.values.events), made: std::mem::take(&mut self.values.made) }
    }

    fn run(&mut self, op: &Op, step: Option<&Step<'_>>) {
        if op.name == "step" {
            self.step(op);
            return;
        }
        let outcome = match op.name {
            "parameter" => self.parameter(op).map(|()| vec![]).map_err(Failure::from),
            "backward" => match self.backward(op, step) {
                Some(outcome) => outcome,
                None => return,
            },
            "flush" => {
                step.iter().for_each(|step| step.flush());
                Ok(vec![])
            }
            "micro_batch" => {
                step.iter()
                    .for_each(|step| step.micro_batch(op.numbers.first().map_or(0, |index| *index as usize)));
                Ok(vec![])
            }
            "optimizer" => self.optimizer(&op.numbers).map(|()| vec![]).map_err(Failure::from),
            "optimize" => {
                let steps = self.values.leaves.iter().any(|(_, leaf)| leaf.grad().defined());
                let optimizers = self.optimizer.iter_mut().filter(|_| steps);
                caught(|| {
                    optimizers.for_each(Optimizer::step);
                    Ok(vec![])
                })
                .map_err(Failure::from)
            }
            "zero_grad" => {
                self.values.leaves.iter_mut().for_each(|(_, leaf)| leaf.zero_grad());
                Ok(vec![])
            }
            _ => {
                self.values.run(op);
                return;
            }
        };
        self.values.note(op, outcome);
    }

    fn step(&mut self, op: &Op) {
        let cache = self.caches.get(self.steps % self.caches.len().max(1));
        self.steps += 1;
        let step = cache.map(TensorCache::step);
        let outer = self.values.step.take();
        self.values.step = step.as_ref().map(Step::handle);
        self.run_all(&op.body, step.as_ref());
        self.values.step = outer;
        let Some(step) = step else { return };
        // Half of the steps are dropped.
        if op.numbers.first() == Some(&0.0) {
            drop(step);
        } else if let Err(error) = step.finish() {
            self.values.note(op, Err(error.into()));
        }
    }

    fn parameter(&mut self, op: &Op) -> Result<(), TchError> {
        for slot in &op.outputs {
            let parameter = self
                .vs
                .root()
                .var_copy(&format!("p{slot}"), &leaf(&op.numbers, true, self.vs.device())?.detach());
            self.values.leaves.push((*slot, parameter.shallow_clone()));
            self.values.slots.insert(*slot, parameter);
        }
        Ok(())
    }

    /// Backward from the sum of all inputs; inputs that do not exist are skipped. Numbers: keep the graph, record the
    /// backward, use tch's own backward.
    fn backward(&mut self, op: &Op, step: Option<&Step<'_>>) -> Option<Result<Vec<(String, Bits)>, Failure>> {
        let inputs: Vec<Tensor> = op
            .inputs
            .iter()
            .map(|slot| self.values.slots.get(slot).map(Tensor::shallow_clone))
            .collect::<Option<_>>()?;
        let flag = |index: usize| op.numbers.get(index).is_some_and(|number| *number != 0.0);
        let options = Backward { retain_graph: flag(0), create_graph: flag(1) };
        let loss = match total(&inputs) {
            Ok(loss) => loss,
            Err(error) => return Some(Err(error.into())),
        };
        drop(inputs);
        let bits = Bits::of(&loss);
        let outcome = match step {
            Some(step) if !flag(2) => step.backward_with(&loss, options).map_err(Failure::from),
            _ => torch::backward(&loss, options.retain_graph, options.create_graph)
                .map_err(|error| TchError::Torch(error.to_string()).into()),
        };
        drop(loss);
        Some(outcome.and_then(|()| {
            let mut seen = self.values.gradients()?;
            seen.push(("loss".to_owned(), bits?));
            Ok(seen)
        }))
    }

    fn optimizer(&mut self, numbers: &[f64]) -> Result<(), TchError> {
        if self.vs.is_empty() {
            return Err(TchError::Torch("there are no parameters".to_owned()));
        }
        let optimizer = match numbers.first().map_or(0, |kind| *kind as i64) {
            0 => nn::Sgd::default().build(self.vs, 0.05)?,
            1 => nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(self.vs, 0.05)?,
            2 => nn::Adam::default().build(self.vs, 0.05)?,
            3 => nn::AdamW::default().build(self.vs, 0.05)?,
            _ => nn::RmsProp::default().build(self.vs, 0.05)?,
        };
        self.optimizer = Some(optimizer);
        Ok(())
    }
}

/// Removes all variables.
fn clear(vs: &VarStore) {
    // Whether or not the lock is poisoned, nothing stays in it.
    let mut variables = vs.variables_.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    variables.named_variables.clear();
    variables.trainable_variables.clear();
}
