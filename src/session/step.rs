//! One step: what is saved in it, its backwards, and its end.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use ssdtrain_libtorch as torch;
use tch::{Device, Tensor};

use super::steering::Noted;
use super::{TensorCache, warnings};
use crate::error::{Error, ErrorKind, Result};
use crate::policy::Adherence;
use crate::step::{Level, Marks, Recorder, StepContext, Within, enter};
use crate::telemetry::{ScopeId, StepReport};
use crate::trace::{Name, Range};

/// What errors say of tensors that are no longer what they were: autograd's words and our hooks', and those of a rerun.
const CHANGED: [&str; 2] = ["modified by an inplace operation", "was changed in place"];

/// One training step. What autograd saves on the thread that made it goes through the cache until it is finished or dropped, so it has to
/// have a name: `let _ = cache.step()` drops it at once.
///
/// Tensors saved in a step stay valid after it: a backward that runs later is served all the same.
#[must_use = "the step ends when it is dropped"]
pub struct Step<'a> {
    // Declared first, so that this thread's hooks end before anything they use.
    pub(super) entered: Entered,
    pub(super) handle: StepHandle,
    pub(super) cache: &'a TensorCache,
    pub(super) start: Instant,
    pub(super) allocated: u64,
    /// Bytes of gradients when the step began.
    pub(super) gradients: u64,
    /// Highest allocated bytes seen at the end of a backward.
    pub(super) peak: Mutex<Option<u64>>,
    pub(super) noted: Noted,
    pub(super) is_finished: bool,
    // Last, since it is the step's name for all of it.
    pub(super) _range: Range,
}

impl Step<'_> {
    /// Runs backward from the scalar `loss`. What the cache cannot serve is an error here, never a wrong gradient.
    ///
    /// # Errors
    ///
    /// Those of the load that failed, such as [`ErrorKind::Io`] and [`ErrorKind::Corrupt`]; the message names tensor, scope, file and
    /// offset. [`ErrorKind::ChangedInPlace`] for a tensor that is no longer what was saved, and [`ErrorKind::Torch`] for all else.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, Backward::default())
    }

    /// Runs backward from the scalar `loss`, keeping the graph for another backward or recording one of the gradients. Errors are
    /// those of [`Step::backward`].
    pub fn backward_with(&self, loss: &Tensor, options: Backward) -> Result<()> {
        self.noted.forward_ends(&self.handle.0);
        self.handle.0.probe.iter().for_each(|probe| probe.backward_begins());
        self.entered.marks.drop_unsaved();
        let _range = self.cache.range(Name::Backward, "backward");
        let outcome = torch::backward(loss, options.retain_graph, options.create_graph);
        let peak = torch::memory(self.cache.device).peak;
        let mut highest = self.peak.lock();
        *highest = Some(highest.unwrap_or(0).max(peak));
        self.handle.0.micro_batch_ends();
        outcome.map_err(|torch::TorchError(text)| self.failure(text))
    }

    /// What a backward failed of. Errors cross libtorch as text, which has that of the load that failed within it.
    fn failure(&self, text: String) -> Error {
        if let Some(failure) = self.cache.cache.failure_in(&text) {
            return failure.told_as(text);
        }
        let changed = CHANGED.iter().any(|words| text.contains(words));
        Error::new(if changed { ErrorKind::ChangedInPlace } else { ErrorKind::Torch }, text)
    }

    /// Switches to micro-batch `index` (from 0, where each step begins): tensors saved from now on, on every thread of the step, belong
    /// to it, and backward looks ahead within it, in the reverse of the order in which each thread saved. Needed only where several are open at once, or to report them apart.
    pub fn micro_batch(&self, index: usize) {
        self.handle.0.orders.switch_to(index);
        self.handle.0.cursor.rewind();
    }

    /// Lets all that was saved so far, and is not to stay, leave the device; waits until it has left, or is known to stay.
    pub fn flush(&self) {
        let _range = self.cache.range(Name::Wait("flush"), "flush");
        self.cache.cache.flush(&self.handle.0.counters);
    }

    /// Lets other threads take part in the step.
    pub fn handle(&self) -> StepHandle {
        self.handle.clone()
    }

    /// Ends the step: waits for the transfers under way and reports what was done. Fails if a condition the cache was built with is
    /// not met.
    pub fn finish(mut self) -> Result<StepReport> {
        let context = Arc::clone(&self.handle.0);
        context.probe.iter().for_each(|probe| probe.all_computed());
        let peak = self.peak.lock().unwrap_or_else(|| torch::memory(self.cache.device).peak);
        {
            let _range = self.cache.range(Name::Wait("finish"), "finish");
            context.cache.quiesce();
            if let Some(tier) = context.cache.tier() {
                tier.settle();
            }
        }
        if let Some(trace) = &context.cache.trace {
            trace.settle();
        }
        let awaited = match self.cache.device {
            Device::Cuda(index) if self.cache.steering.is_timed() => {
                tch::Cuda::synchronize(index as i64);
                true
            }
            device => !device.is_cuda(),
        };
        let wall = self.start.elapsed();
        // The probe sets the peak back as it goes.
        let peak = peak.max(context.probe.as_ref().map_or(0, |probe| probe.peak()));
        let steering = &self.cache.steering;
        let kept_to_plan = context.cursor.followed().is_some_and(|followed| followed != Adherence::Lost);
        let mut report = StepReport {
            adaptive: steering.adaptive(&context.cache.scopes),
            plan: steering.plan(&context.cache.scopes).filter(|_| kept_to_plan),
            left_plan: context.cursor.is_lost(),
            step: context.number,
            wall,
            awaited,
            act_peak_bytes: peak.saturating_sub(self.allocated),
            step_peak_bytes: peak.saturating_sub(self.allocated) + self.gradients,
            scopes: context.record.report(&context.cache.scopes),
            io_path: self.cache.io_path(),
            ..StepReport::of(&context.counters)
        };
        report.warnings = warnings::of(&report, &self.cache.config, &self.cache.route);
        self.cache.warned.tell(&report);
        steering.end(&self.noted, &context, &report);
        self.is_finished = true;
        let config = &self.cache.config;
        if config.fail_if_nothing_offloaded && report.step == 1 && report.offloaded.bytes == 0 {
            return Err(Error::new(
                ErrorKind::Unmet,
                format!("fail_if_nothing_offloaded: the first step offloaded nothing ({report})"),
            ));
        }
        Ok(report)
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if !self.is_finished && self.handle.0.counters.saved.tally().count == 0 {
            self.cache.warned.tell_empty(self.handle.0.number);
        }
        if self.handle.0.probe.is_some() {
            self.cache.cache.hold_back(false);
        }
        for tape in self.handle.0.orders.end() {
            self.cache.cache.close_tape(tape);
        }
        torch::end_step();
    }
}

/// How a backward treats its graph; see [`Step::backward_with`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backward {
    /// Keep the graph, and what the cache holds for it, for another backward.
    pub retain_graph: bool,
    /// Record the backward itself, so that gradients can be differentiated.
    pub create_graph: bool,
}

/// A step, as other threads see it. Once the step has ended, what they save stays in the graph.
#[derive(Clone)]
pub struct StepHandle(pub(super) Arc<StepContext>);

impl StepHandle {
    /// Makes what autograd saves on the calling thread go through the step's cache until the guard is dropped.
    pub fn enter(&self) -> Entered {
        let marks = Arc::new(Marks::default());
        let hooks = torch::activate(Arc::new(Recorder::new(Arc::clone(&self.0), Arc::clone(&marks))));
        let scopes = enter(Arc::clone(&self.0), Level::Step(Arc::clone(&marks)), ScopeId::default());
        Entered { _hooks: hooks, _scopes: scopes, marks }
    }
}

/// Guard of [`StepHandle::enter`].
#[must_use = "the thread leaves the step when this guard is dropped"]
pub struct Entered {
    _hooks: torch::Active,
    _scopes: Within,
    marks: Arc<Marks>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Policy;

    #[test]
    fn a_step_that_was_replaced_by_the_next_one_is_gone() {
        let cache = TensorCache::builder().policy(Policy::Keep).build().unwrap();
        let first = cache.step();
        let of_first = Arc::downgrade(&first.handle.0);
        let second = cache.step();
        drop(first);
        assert!(of_first.upgrade().is_none());
        drop(second);
    }
}
