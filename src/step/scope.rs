//! Where in the model the calling thread is, for reports and for policies that go by scope.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Device;

use super::context::StepContext;
use super::marks::Marks;
use crate::cache::Cache;
use crate::telemetry::ScopeId;
use crate::trace::{Name, Range, Trace};

thread_local! {
    /// The steps that are active on this thread, innermost last.
    static STEPS: RefCell<Vec<ActiveStep>> = const { RefCell::new(Vec::new()) };
}

/// Where this thread is in one step.
struct ActiveStep {
    number: u64,
    step: Arc<StepContext>,
    level: Level,
    current: ScopeId,
}

/// How what a thread saves in a step is treated, from the step's own way to that within reruns.
#[derive(Clone)]
pub(crate) enum Level {
    /// The cache decides about each tensor; marked ones have recipes.
    Step(Arc<Marks>),
    /// Within a segment.
    Segment,
    /// Within the rerun of a segment: tensors are collected in the order in which they were saved.
    Rerun,
    /// Within the rerun of a single operation: nothing is kept.
    Discard,
}

/// Names what the calling thread does until the guard is dropped: tensors saved meanwhile are reported under `name`, and
/// scopes may be nested. A trace shows them, and so do NVIDIA's tools once [`load_cuda`](crate::load_cuda) has succeeded. Without
/// an active step on this thread it does nothing, so model code can always use it.
///
/// ```no_run
/// # fn attention(x: &tch::Tensor) -> tch::Tensor { x.shallow_clone() }
/// # let x = tch::Tensor::from(0.0);
/// let _scope = ssdtrain::scope("block.3.attn");
/// let y = attention(&x);
/// ```
pub fn scope(name: &str) -> Scope {
    let descended = STEPS.with_borrow_mut(|steps| {
        let mut descended = Vec::new();
        // Of each cache whose steps this thread is in, the innermost.
        for place in (0..steps.len()).rev() {
            let (step, inner) = match steps.get_mut(place..) {
                Some([step, inner @ ..]) => (step, inner),
                _ => continue,
            };
            if !inner.iter().any(|inner| Arc::ptr_eq(&inner.step.cache, &step.step.cache)) {
                descended.push(step.descend(name));
            }
        }
        descended
    });
    let entered = descended.into_iter().enumerate().map(|(index, (step, before, current, trace))| {
        let shown = (index == 0).then_some(name);
        EnteredScope { before, step, _range: Range::open(trace, Name::Scope(current), shown) }
    });
    Scope { entered: entered.collect(), thread_bound: PhantomData }
}

impl ActiveStep {
    /// Goes down to a scope of this name. Returns the number of the step, the scopes before and now, and the cache's trace.
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
    /// Innermost first.
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
        STEPS.with_borrow_mut(|steps| {
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
    STEPS.with_borrow(|steps| {
        let innermost = steps.iter().rev().find(|active| std::ptr::eq(&raw const *active.step, step));
        innermost.map_or_else(ScopeId::default, |active| active.current)
    })
}

/// The step on this thread that tensors of `device` belong to, how what it saves is treated, and the innermost scope. Within a segment
/// that is the segment's; else the innermost one whose cache is for the device; if there is none, the innermost.
pub(crate) fn current_step(device: Device) -> Option<(Arc<StepContext>, Level, ScopeId)> {
    STEPS.with_borrow(|steps| {
        let innermost = steps.last()?;
        let of_device = steps.iter().rev().find(|active| active.step.device == device);
        let is_step = matches!(innermost.level, Level::Step(_));
        let active = of_device.filter(|_| is_step).unwrap_or(innermost);
        Some((Arc::clone(&active.step), active.level.clone(), active.current))
    })
}

/// Makes `step` the innermost of this thread, with `current` as its scope, until the guard is dropped.
pub(crate) fn enter(step: Arc<StepContext>, level: Level, current: ScopeId) -> Within {
    static GUARDS: AtomicU64 = AtomicU64::new(0);
    let number = GUARDS.fetch_add(1, Ordering::Relaxed);
    STEPS.with_borrow_mut(|steps| steps.push(ActiveStep { number, step, level, current }));
    Within { number, thread_bound: PhantomData }
}

pub(crate) struct Within {
    number: u64,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for Within {
    fn drop(&mut self) {
        // A thread that is being torn down has given its steps up already.
        let ended = STEPS.try_with(|steps| {
            let mut steps = steps.borrow_mut();
            let place = steps.iter().position(|step| step.number == self.number)?;
            Some(steps.remove(place))
        });
        // Not within the borrow: what ends with it may ask for the current scope.
        drop(ended);
    }
}
