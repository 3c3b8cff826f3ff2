//! The position of the calling thread in the model, for reports and for policies that decide by scope.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Device;

use super::context::StepContext;
use super::marks::Marks;
use super::part::Part;
use crate::cache::Cache;
use crate::telemetry::ScopeId;
use crate::trace::{Name, Range, Trace};

thread_local! {
    /// The steps that are active on this thread, innermost last.
    static STEPS: RefCell<Vec<ActiveStep>> = const { RefCell::new(Vec::new()) };
}

/// The position of this thread in one step.
struct ActiveStep {
    number: u64,
    step: Arc<StepContext>,
    level: Level,
    current: ScopeId,
}

/// How a thread's saves in a step are treated, from the normal way to the one within reruns.
#[derive(Clone)]
pub(crate) enum Level {
    /// The cache decides about each tensor; marked ones have recipes.
    Step(Arc<Marks>),
    /// Within a segment that the step may run again for what it does not want to keep.
    Part(Arc<dyn Part>),
    /// Within a segment that is run again for all that it saves.
    Segment,
    /// Within the rerun of a segment: tensors are collected in the order in which they were saved.
    Rerun,
    /// Within the rerun of a single operation: nothing is kept.
    Discard,
}

/// Names what the calling thread does until the guard is dropped: tensors saved meanwhile are reported under `name`. Scopes may be
/// nested. They appear in a trace, and in NVIDIA's tools once [`load_cuda`](crate::load_cuda) has succeeded. Without an active step on
/// this thread it does nothing, so model code can always use it.
///
/// ```no_run
/// # fn attention(x: &tch::Tensor) -> tch::Tensor { x.shallow_clone() }
/// # let x = tch::Tensor::from(0.0);
/// let _scope = ssdtrain::scope("block.3.attn");
/// let y = attention(&x);
/// ```
pub fn scope(name: &str) -> Scope {
    // A thread that is being torn down has no steps any more.
    let descended = STEPS.try_with(|steps| {
        let steps = &mut *steps.borrow_mut();
        let mut descended = Vec::new();
        // For each cache that has steps on this thread, the innermost one.
        for place in (0..steps.len()).rev() {
            let (step, inner) = match steps.get_mut(place..) {
                Some([step, inner @ ..]) if !step.step.origin.is_parent() => (step, inner),
                _ => continue,
            };
            if !inner.iter().any(|inner| Arc::ptr_eq(&inner.step.cache, &step.step.cache)) {
                descended.push(step.descend(name));
            }
        }
        descended
    });
    let entered = descended.unwrap_or_default().into_iter().enumerate().map(
        |(index, (step, before, current, trace))| {
            let shown = (index == 0).then_some(name);
            EnteredScope { before, step, _range: Range::open(trace, Name::Scope(current), shown) }
        },
    );
    Scope { entered: entered.collect(), thread_bound: PhantomData }
}

impl ActiveStep {
    /// Enters a child scope with this name. Returns the number of the step, the scopes before and now, and the cache's trace.
    fn descend(&mut self, name: &str) -> (u64, ScopeId, ScopeId, Option<Arc<Trace>>) {
        let Cache { scopes, trace, .. } = &*self.step.cache;
        let before = self.current;
        self.current = scopes.child(before, name);
        (self.number, before, self.current, trace.clone())
    }
}

/// Guard of a named scope; see [`scope`].
#[must_use = "the scope ends when this guard is dropped"]
pub struct Scope {
    /// The scopes entered, innermost first.
    entered: Vec<EnteredScope>,
    thread_bound: PhantomData<*const ()>,
}

struct EnteredScope {
    before: ScopeId,
    step: u64,
    _range: Range,
}

impl Drop for Scope {
    fn drop(&mut self) {
        // A thread that is being torn down has no steps any more.
        let _ = STEPS.try_with(|steps| {
            let mut steps = steps.borrow_mut();
            for entered in &self.entered {
                // The step may have ended before its scopes did; the one around it keeps its own.
                if let Some(step) = steps.iter_mut().find(|step| step.number == entered.step) {
                    step.current = entered.before;
                }
            }
        });
    }
}

/// The innermost scope of `step` on this thread.
pub(crate) fn current_scope(step: &StepContext) -> ScopeId {
    let of = |steps: &[ActiveStep]| {
        let innermost = steps.iter().rev().find(|active| std::ptr::eq(&raw const *active.step, step))?;
        Some(innermost.current)
    };
    STEPS.try_with(|steps| of(&steps.borrow())).ok().flatten().unwrap_or_default()
}

/// The part of the program that this thread runs in `step`.
pub(super) fn current_part(step: &StepContext) -> Option<Arc<dyn Part>> {
    let of = |steps: &[ActiveStep]| {
        let innermost = steps.iter().rev().find(|active| std::ptr::eq(&raw const *active.step, step))?;
        match &innermost.level {
            Level::Part(part) => Some(Arc::clone(part)),
            _ => None,
        }
    };
    STEPS.try_with(|steps| of(&steps.borrow())).ok().flatten()
}

/// The step on this thread that tensors of `device` belong to, how its saves are treated, and its innermost scope. Within a segment that
/// is the segment's step; otherwise the innermost step whose cache is for the device, or the innermost of all if there is none.
pub(crate) fn current_step(device: Device) -> Option<(Arc<StepContext>, Level, ScopeId)> {
    let of = |steps: &[ActiveStep]| {
        let innermost = steps.last().filter(|active| !active.step.origin.is_parent())?;
        let own = |active: &&ActiveStep| active.step.device == device && !active.step.origin.is_parent();
        let of_device = steps.iter().rev().find(own);
        let is_step = matches!(innermost.level, Level::Step(_));
        let active = of_device.filter(|_| is_step).unwrap_or(innermost);
        Some((Arc::clone(&active.step), active.level.clone(), active.current))
    };
    STEPS.try_with(|steps| of(&steps.borrow())).ok().flatten()
}

/// Makes `step` this thread's innermost step, with `current` as its scope, until the guard is dropped.
pub(crate) fn enter(step: Arc<StepContext>, level: Level, current: ScopeId) -> Within {
    static GUARDS: AtomicU64 = AtomicU64::new(0);
    let number = GUARDS.fetch_add(1, Ordering::Relaxed);
    // A thread that is being torn down has no steps any more: what it saves stays in the graph, as without a cache.
    let _ = STEPS.try_with(|steps| steps.borrow_mut().push(ActiveStep { number, step, level, current }));
    Within { number, thread_bound: PhantomData }
}

pub(crate) struct Within {
    number: u64,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for Within {
    fn drop(&mut self) {
        // A thread that is being torn down has already dropped its steps.
        let ended = STEPS.try_with(|steps| {
            let mut steps = steps.borrow_mut();
            let place = steps.iter().position(|step| step.number == self.number)?;
            Some(steps.remove(place))
        });
        // After the borrow, because dropping the step may ask for the current scope.
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_scope_may_last_as_long_as_its_thread() {
        thread_local!(static KEPT: RefCell<Option<Scope>> = const { RefCell::new(None) });
        let keeps = || {
            // Made before what scopes need, and so dropped after it.
            KEPT.with_borrow_mut(|kept| assert!(kept.is_none()));
            KEPT.set(Some(scope("kept")));
        };
        thread::Builder::new().name("keeps".to_owned()).spawn(keeps).unwrap().join().unwrap();
    }

    #[test]
    fn a_thread_that_ends_has_no_steps() {
        struct Late(mpsc::Sender<bool>);

        impl Drop for Late {
            fn drop(&mut self) {
                let is_empty = scope("late").entered.is_empty() && current_step(Device::Cpu).is_none();
                self.0.send(is_empty).unwrap();
            }
        }

        thread_local!(static LATE: RefCell<Option<Late>> = const { RefCell::new(None) });
        let (tell, told) = mpsc::channel();
        let works = || {
            LATE.set(Some(Late(tell)));
            drop(scope("early"));
        };
        thread::Builder::new().name("works".to_owned()).spawn(works).unwrap().join().unwrap();
        assert_eq!(told.recv(), Ok(true));
    }
}
