//! One step: what is saved in it, its backwards, and its end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ssdtrain_libtorch as torch;
use ssdtrain_plan::{Observation, Planning, PolicyReport, Saves};
use ssdtrain_store::sync::Mutex;
use tch::Tensor;

use super::checksums::read_between;
use super::steering::Noted;
use super::unplanned::Strange;
use super::{TensorCache, warnings};
use crate::device::Span;
use crate::endurance::Endurance;
use crate::error::{Error, ErrorKind, Result};
use crate::step::{Level, Marks, Recorder, StepContext, Within, enter};
use crate::telemetry::events::warn_once;
use crate::telemetry::{ScopeId, StepReport, events};
use crate::tier::Tier;
use crate::trace::{Name, Range, Stamp};

/// What errors say about a tensor that was changed: the texts of autograd, of our hooks, and of a rerun.
const CHANGED: [&str; 2] = ["modified by an inplace operation", "was changed in place"];

/// One training step. Until it is finished or dropped, what autograd saves on the thread that began it goes through the cache. It must
/// therefore be bound to a name: `let _ = cache.step()` drops it at once.
///
/// Tensors saved in a step stay valid after it: a later backward can still load them.
#[must_use = "the step ends when it is dropped"]
pub struct Step<'a> {
    // Declared first, so that this thread's hooks end before anything they use.
    pub(super) entered: Entered,
    pub(super) handle: StepHandle,
    pub(super) cache: &'a TensorCache,
    /// How long it took the cache to begin it, once it was decided how, and when the program went on.
    pub(super) overhead: Duration,
    pub(super) start: Instant,
    pub(super) allocated: u64,
    pub(super) _ceiling: Option<torch::Ceiling>,
    /// Bytes of gradients when the step began.
    pub(super) gradients: u64,
    /// Highest allocated bytes seen at the end of a backward.
    pub(super) peak: Mutex<Option<u64>>,
    /// Where the last backward ended, if the step is timed to its end.
    pub(super) computed: Mutex<Option<Stamp>>,
    /// How fast the device's clock runs meanwhile, if the step is timed.
    pub(super) clock: Option<Span>,
    pub(super) noted: Noted,
    pub(super) is_finished: bool,
    // Last, since its range in the trace and its span cover the whole step.
    pub(super) _range: Range,
    pub(super) _span: tracing::span::EnteredSpan,
}

impl Step<'_> {
    /// Runs backward from the scalar `loss`. If the cache cannot supply a tensor, this returns an error, never a wrong gradient.
    ///
    /// # Errors
    ///
    /// The error of the load that failed, such as [`ErrorKind::Io`] or [`ErrorKind::Corrupt`]; the message names tensor, scope, file and
    /// offset. [`ErrorKind::ChangedInPlace`] for a tensor that no longer holds what was saved, and [`ErrorKind::Torch`] for everything
    /// else.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, Backward::default())
    }

    /// Runs backward from the scalar `loss`, optionally keeping the graph for another backward or recording a graph of the gradients.
    /// Errors are those of [`Step::backward`].
    pub fn backward_with(&self, loss: &Tensor, options: Backward) -> Result<()> {
        if self.is_parents() {
            let outcome = torch::backward(loss, options.retain_graph, options.create_graph);
            return outcome.map_err(|torch::TorchError(text)| Step::unrelated(text));
        }
        self.handle.context.probe.iter().for_each(|probe| probe.backward_begins());
        self.entered.marks.drop_unsaved();
        let _range = self.cache.range(Name::Backward, "backward");
        let outcome = torch::backward(loss, options.retain_graph, options.create_graph);
        let peak = torch::memory(self.cache.device).peak;
        let mut highest = self.peak.lock();
        *highest = Some(highest.unwrap_or(0).max(peak));
        // What the program does then, such as looking at the loss, may wait for the device.
        if self.handle.context.plan.timed {
            *self.computed.lock() = self.cache.cache.trace.as_ref().map(|trace| trace.stamp());
        }
        if options.retain_graph || options.create_graph {
            self.handle.context.cursor.keeps_graph();
        }
        self.handle.context.micro_batch_ends();
        outcome.map_err(|torch::TorchError(text)| self.failure(text))?;
        self.cache.cache.check_late_reads()
    }

    /// Why a backward failed. Errors cross libtorch as text, which contains the text of the load's error that caused them.
    fn failure(&self, text: String) -> Error {
        if let Some(failure) = self.cache.cache.failure_in(&text) {
            return failure.told_as(text);
        }
        Step::unrelated(text)
    }

    /// The error of a backward that no load has caused.
    fn unrelated(text: String) -> Error {
        let says = |words: &str| text.contains(words);
        let kind = match () {
            () if CHANGED.into_iter().any(says) => ErrorKind::ChangedInPlace,
            () if says(torch::SAVED_BY_PARENT) => ErrorKind::Forked,
            () => ErrorKind::Torch,
        };
        Error::new(kind, text)
    }

    /// Whether the step was begun before this process was forked off. Nothing of it may be used here.
    fn is_parents(&self) -> bool {
        self.handle.context.origin.is_parent()
    }

    /// Switches to micro-batch `index` (each step begins with 0): from now on, tensors saved on any thread of the step belong to it.
    /// Backward prefetches within a micro-batch, in the reverse of the order in which each thread saved. Needed only if several
    /// micro-batches are open at once.
    pub fn micro_batch(&self, index: usize) {
        if self.is_parents() {
            return;
        }
        self.handle.context.orders.switch_to(index);
        self.handle.context.cursor.switch();
    }

    /// Lets everything saved so far that is not to stay leave the device. Waits until each storage has left, or is known to stay.
    pub fn flush(&self) {
        if self.is_parents() {
            return;
        }
        let _range = self.cache.range(Name::Wait("flush"), "flush");
        self.cache.cache.flush(&self.handle.context.counters);
    }

    /// Lets other threads take part in the step.
    pub fn handle(&self) -> StepHandle {
        self.handle.clone()
    }

    /// Ends the step: waits for the transfers in flight and reports what was done. Fails if a condition that the cache was built with is
    /// not met, or if the step was begun before this process was forked off.
    pub fn finish(mut self) -> Result<StepReport> {
        let context = Arc::clone(&self.handle.context);
        if self.is_parents() {
            let message = format!(
                "step {} was begun before this process was forked off, which it does not belong to: finish it in the other",
                context.number
            );
            return Err(Error::new(ErrorKind::Forked, message));
        }
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
        let clock = self.clock.take().and_then(|clock| {
            clock
                .end()
                .inspect_err(|error| warn_once!(%error, "the clock of the device was not read"))
                .ok()
                .flatten()
        });
        let launched = Instant::now();
        let awaited = match context.cache.tier() {
            Some(tier) if self.cache.device.is_cuda() && context.plan.timed => tier
                .synchronize()
                .inspect_err(|error| warn_once!(%error, "a step was not waited for"))
                .is_ok(),
            _ => !self.cache.device.is_cuda(),
        };
        let wait = launched.elapsed();
        let wall = self.start.elapsed();
        let clock = clock.filter(|_| awaited).and_then(|clock| clock.rate().ok().flatten());
        // The probe resets the peak as it goes, so its own maximum counts too.
        let peak = peak.max(context.probe.as_ref().map_or(0, |probe| probe.peak()));
        let steering = &self.cache.steering;
        let followed = context.cursor.followed();
        let is_planned = context.cursor.is_planned() || context.plan.saves == Saves::Leave;
        let course = followed.map_or(0, |followed| followed.course);
        let (plan, adaptive) = match steering.report(course, &context.cache.scopes) {
            Some(PolicyReport::Plan(plan)) => (Some(plan).filter(|_| is_planned), None),
            Some(PolicyReport::Adaptive(adaptive)) => (None, Some(adaptive)),
            _ => (None, None),
        };
        let (disks, of_disks) = self.cache.endurance.as_ref().map(Endurance::report).unwrap_or_default();
        let mut report = StepReport {
            adaptive,
            disks,
            plan,
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
        if let (Some(store), Some(before)) = (context.cache.tier().and_then(Tier::store), &self.noted.store) {
            (report.checked, report.unchecked) = read_between(before, &store.stats());
            self.cache.checksums.end(store, before, wall);
        }
        let lag = self.computed.lock().take().map(|computed| computed.lag());
        let (behind, is_told) = (lag.unwrap_or_default().max(wait), lag.is_some());
        let compiled = self.cache.chains.as_ref().is_some_and(|chains| chains.were_settling());
        let has_grown = self.noted.has_grown(self.cache.device);
        let observed = Observation {
            overhead: self.overhead,
            compiled,
            has_grown,
            behind,
            is_told,
            clock,
            ..steering.observe(&self.noted, &context, &report)
        };
        report.planning = steering.planning(&context, &observed);
        let strange = context
            .strange
            .get()
            .map(|&(bytes, scope)| Strange { bytes, scope: context.cache.scopes.name(scope) });
        report.warnings = warnings::of(&report, observed.at_ceiling);
        report.warnings.extend(steering.warnings(&context, &observed));
        report.warnings.extend(self.cache.unplanned.saw(report.planning, strange));
        report.warnings.extend(of_disks);
        report.warnings.extend(self.cache.notices.iter().cloned());
        self.cache.warned.tell(&report);
        tell(&report);
        let is_settled = steering.end(&context, observed);
        self.cache.accounts.ended(&report, is_settled);
        self.is_finished = true;
        let config = &self.cache.config;
        let is_held_back = report.planning.is_some_and(Planning::keeps_what_fits);
        if config.fail_if_nothing_offloaded
            && !is_held_back
            && !self.cache.is_checked.swap(true, Ordering::Relaxed)
        {
            let left = report.offloaded.bytes + report.recomputed.bytes;
            if left == 0 {
                return Err(Error::new(
                    ErrorKind::Unmet,
                    format!(
                        "fail_if_nothing_offloaded: the first step that was to offload something offloaded nothing ({report})"
                    ),
                ));
            }
        }
        context.cache.check_late_reads()?;
        Ok(report)
    }
}

/// Tells of a step that has ended.
fn tell(report: &StepReport) {
    tracing::debug!(
        target: events::STEP,
        step = report.step,
        planning = report.planning.map(tracing::field::display),
        plan = report.plan.as_ref().map(|plan| plan.plans),
        wall_seconds = report.wall.as_secs_f64(),
        awaited = report.awaited,
        peak_bytes = report.act_peak_bytes,
        saved_bytes = report.saved.bytes,
        offloaded_bytes = report.offloaded.bytes,
        loaded_bytes = report.loaded.bytes,
        forwarded_bytes = report.forwarded.bytes,
        recomputed_bytes = report.recomputed.bytes,
        pressed_bytes = report.pressed.bytes,
        stall_seconds = report.stall.total().as_secs_f64(),
        warnings = report.warnings.len(),
        "a step has ended"
    );
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if self.is_parents() {
            return;
        }
        let is_looked_at = !self.handle.is_off && !self.handle.is_left;
        if !self.is_finished && is_looked_at && self.handle.context.counters.saved.tally().count == 0 {
            self.cache.warned.tell_empty(self.handle.context.number);
        }
        if !self.is_finished {
            tracing::debug!(target: events::STEP, step = self.handle.context.number, "a step was dropped before its end");
            self.cache.accounts.dropped();
            self.cache.steering.end_profile(&self.handle.context);
        }
        if self.handle.context.is_latest_profile() {
            self.cache.cache.hold_back(false);
        }
        for tape in self.handle.context.orders.end() {
            self.cache.cache.close_tape(tape);
        }
        // Steps that are compared keep the memory that the other kind needs, or those that keep everything would have to ask for it anew.
        if !self.handle.context.plan.timed {
            torch::end_step();
        }
    }
}

/// Options of a backward; see [`Step::backward_with`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backward {
    /// Keep the graph, and what the cache holds for it, for another backward.
    pub retain_graph: bool,
    /// Record the backward itself, so that gradients can be differentiated.
    pub create_graph: bool,
}

/// A step, to be entered by other threads. What they save after the step has ended stays in the graph.
#[derive(Clone)]
pub struct StepHandle {
    pub(super) context: Arc<StepContext>,
    /// Whether the environment switches the cache off.
    pub(super) is_off: bool,
    /// Whether the step goes as without a cache.
    pub(super) is_left: bool,
}

impl StepHandle {
    /// Sends what autograd saves on the calling thread through the step's cache until the guard is dropped.
    pub fn enter(&self) -> Entered {
        let (context, marks) = (&self.context, Arc::new(Marks::default()));
        // What a step around this one, or the last one, which is open yet, would decide about otherwise, this one has to leave in the graph.
        let is_left = self.is_left && !torch::is_active();
        let is_off = self.is_off || is_left || context.origin.is_parent();
        let taking_part = (!is_off).then(|| TakingPart {
            _hooks: torch::activate(Arc::new(Recorder::new(Arc::clone(context), Arc::clone(&marks)))),
            _scopes: enter(Arc::clone(context), Level::Step(Arc::clone(&marks)), ScopeId::default()),
            _recording: context.records(),
        });
        Entered { _taking_part: taking_part, marks }
    }
}

/// Guard of [`StepHandle::enter`].
#[must_use = "the thread leaves the step when this guard is dropped"]
pub struct Entered {
    _taking_part: Option<TakingPart>,
    marks: Arc<Marks>,
}

/// A thread's part in a step, for as long as this is there.
struct TakingPart {
    _hooks: torch::Active,
    _scopes: Within,
    _recording: Option<torch::RecordingThread>,
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use ssdtrain_plan::Keep;
    use tch::{Device, Kind};

    #[test]
    fn a_step_that_was_replaced_by_the_next_one_is_gone() {
        let cache = TensorCache::builder().policy(Keep).build().unwrap();
        let first = cache.step();
        let of_first = Arc::downgrade(&first.handle.context);
        let second = cache.step();
        drop(first);
        assert!(of_first.upgrade().is_none());
        drop(second);
    }

    #[test]
    fn a_step_of_a_thread_that_ends_goes_as_without_a_cache() {
        struct Late(Arc<TensorCache>, mpsc::Sender<Option<u64>>);

        impl Drop for Late {
            fn drop(&mut self) {
                let step = self.0.step();
                let _entered = step.handle().enter();
                let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
                let is_right = step.backward(&x.sin().sum(Kind::Float)).is_ok();
                let report = step.finish().ok().filter(|_| is_right);
                self.1.send(report.map(|report| report.saved.count)).unwrap();
            }
        }

        thread_local!(static LATE: RefCell<Option<Late>> = const { RefCell::new(None) });
        let cache = Arc::new(TensorCache::builder().policy(Keep).build().unwrap());
        let (tell, told) = mpsc::channel();
        let works = move || {
            LATE.set(Some(Late(Arc::clone(&cache), tell)));
            drop(cache.step());
        };
        thread::Builder::new().name("works".to_owned()).spawn(works).unwrap().join().unwrap();
        assert_eq!(told.recv(), Ok(Some(0)));
    }

    #[test]
    fn a_step_that_is_profiled_while_another_begins_and_ends_has_no_profile() {
        let cache = TensorCache::builder().spill_to(std::env::temp_dir()).build().unwrap();
        drop(cache.step());
        let compute = |step: &Step<'_>| {
            let x = Tensor::ones([512, 512], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            step.backward(&x.sin().sin().sum(Kind::Float)).unwrap();
        };
        let is_observed = |step: &Step<'_>| {
            let (steering, context) = (&cache.steering, &step.handle.context);
            context.probe.iter().for_each(|probe| probe.all_computed());
            steering.observe(&step.noted, context, &StepReport::default()).profile.is_some()
        };
        let outer = cache.step();
        compute(&outer);
        let inner = cache.step();
        compute(&inner);
        assert_eq!([&inner, &outer].map(is_observed), [true, false]);
    }

    #[test]
    fn the_profile_of_a_step_goes_on_when_the_one_that_it_replaced_is_dropped() {
        let cache = TensorCache::builder().spill_to(std::env::temp_dir()).build().unwrap();
        let is_recording = || cache.cache.trace.as_ref().unwrap().is_recording();
        let mut step = cache.step();
        for _ in 0..2 {
            step = cache.step();
            assert!(step.handle.context.is_latest_profile() && is_recording());
        }
        drop(step);
        assert!(!is_recording());
    }
}
