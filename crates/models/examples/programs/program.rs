//! What a program is, and what its steps run in.

use std::cell::{Cell, RefCell};

use ssdtrain::{Backward, Step, StepHandle, StepReport, TensorCache};
use ssdtrain_libtorch as torch;
use tch::nn::VarStore;
use tch::{Device, Tensor};

/// Why a program did not go on.
pub(crate) type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// A program's name, and what makes one copy of it.
pub(crate) type Named = (&'static str, fn() -> Result<Program>);

/// One iteration of a training loop, given its number from 1.
type Iteration = dyn FnMut(usize, &Session<'_>) -> Result<()>;

/// A copy of a training program.
pub(crate) struct Program {
    /// Everything that training changes.
    pub(crate) stores: Vec<VarStore>,
    iteration: Box<Iteration>,
}

impl Program {
    /// A program that trains the variables of `vs`.
    pub(crate) fn new(
        vs: VarStore,
        iteration: impl FnMut(usize, &Session<'_>) -> Result<()> + 'static,
    ) -> Result<Program> {
        Program::of(vec![vs], iteration)
    }

    /// A program that trains the variables of several stores.
    pub(crate) fn of(
        stores: Vec<VarStore>,
        iteration: impl FnMut(usize, &Session<'_>) -> Result<()> + 'static,
    ) -> Result<Program> {
        Ok(Program { stores, iteration: Box::new(iteration) })
    }

    /// Runs iteration `number`.
    pub(crate) fn iterate(&mut self, number: usize, session: &Session<'_>) -> Result<()> {
        (self.iteration)(number, session)
    }
}

/// What was seen of an iteration.
#[derive(Default)]
pub(crate) struct Seen {
    /// The highest activation peak of its steps, in bytes.
    pub(crate) peak: u64,
    /// The cache's reports; none without a cache.
    pub(crate) reports: Vec<StepReport>,
}

/// What the steps of an iteration run with: a cache, or nothing.
pub(crate) struct Session<'a> {
    cache: Option<&'a TensorCache>,
    seen: RefCell<Seen>,
}

impl<'a> Session<'a> {
    /// Begins an iteration.
    pub(crate) fn new(cache: Option<&'a TensorCache>) -> Session<'a> {
        Session { cache, seen: RefCell::default() }
    }

    /// Runs one training step.
    pub(crate) fn step(&self, body: impl FnOnce(&Running<'_>) -> Result<()>) -> Result<()> {
        let step = self.cache.map(TensorCache::step);
        torch::reset_peak(Device::Cpu);
        let allocated = torch::memory(Device::Cpu).allocated;
        let running = Running { step, peak: Cell::new(None) };
        body(&running)?;
        let mut seen = self.seen.borrow_mut();
        let peak = if let Some(step) = running.step {
            let report = step.finish()?;
            let peak = report.act_peak_bytes;
            seen.reports.push(report);
            peak
        } else {
            let peak = running.peak.get().unwrap_or_else(|| torch::memory(Device::Cpu).peak);
            peak.saturating_sub(allocated)
        };
        seen.peak = seen.peak.max(peak);
        Ok(())
    }

    /// Ends the iteration.
    pub(crate) fn end(self) -> Seen {
        self.seen.into_inner()
    }
}

/// A training step that is running.
pub(crate) struct Running<'a> {
    step: Option<Step<'a>>,
    /// Without a cache: the highest number of allocated bytes at the end of a backward, as reports count it.
    peak: Cell<Option<u64>>,
}

impl Running<'_> {
    /// Runs backward from `loss`.
    pub(crate) fn backward(&self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, Backward::default())
    }

    /// Runs backward from `loss`, perhaps keeping its graph for another one.
    pub(crate) fn backward_with(&self, loss: &Tensor, options: Backward) -> Result<()> {
        if let Some(step) = &self.step {
            return Ok(step.backward_with(loss, options)?);
        }
        torch::backward(loss, options.retain_graph, options.create_graph)?;
        self.peak.set(self.peak.get().max(Some(torch::memory(Device::Cpu).peak)));
        Ok(())
    }

    /// What other threads enter the step with; `None` without a cache.
    pub(crate) fn handle(&self) -> Option<StepHandle> {
        self.step.as_ref().map(Step::handle)
    }
}
