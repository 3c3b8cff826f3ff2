//! Where in the model the calling thread is, for reports and for policies that go by scope.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::telemetry::{ScopeId, Scopes};
use crate::trace::{Name, Range, Trace};

thread_local! {
    /// The steps that are active on this thread, innermost last.
    static STEPS: RefCell<Vec<ActiveStep>> = const { RefCell::new(Vec::new()) };
}

/// Where this thread is in one step.
struct ActiveStep {
    number: u64,
    /// Its cache's scope names.
    scopes: Arc<Scopes>,
    trace: Option<Arc<Trace>>,
    current: ScopeId,
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
    let entered = STEPS.with_borrow_mut(|steps| {
        let step = steps.last_mut()?;
        let before = step.current;
        step.current = step.scopes.child(before, name);
        Some((before, step.number, step.current, step.trace.clone()))
    });
    let entered = entered.map(|(before, step, current, trace)| EnteredScope {
        before,
        step,
        _range: Range::open(trace, Name::Scope(current), name),
    });
    Scope { entered, thread_bound: PhantomData }
}

/// Guard of a named scope; see [`scope`].
#[must_use = "the scope ends when this guard is dropped"]
pub struct Scope {
    entered: Option<EnteredScope>,
    thread_bound: PhantomData<*const ()>,
}

struct EnteredScope {
    before: ScopeId,
    step: u64,
    _range: Range,
}

impl Drop for Scope {
    fn drop(&mut self) {
        let Some(entered) = &self.entered else { return };
        STEPS.with_borrow_mut(|steps| {
            // The step may have ended before its scopes did; the one around it keeps its own.
            if let Some(step) = steps.iter_mut().find(|step| step.number == entered.step) {
                step.current = entered.before;
            }
        });
    }
}

/// The innermost scope of the innermost step on this thread.
pub(crate) fn current_scope() -> ScopeId {
    STEPS.with_borrow(|steps| steps.last().map_or_else(ScopeId::default, |step| step.current))
}

/// Makes `scopes` the names in use on this thread, from the root on, until the guard is dropped.
pub(crate) fn enter(scopes: Arc<Scopes>, trace: Option<Arc<Trace>>) -> Entered {
    static GUARDS: AtomicU64 = AtomicU64::new(0);
    let number = GUARDS.fetch_add(1, Ordering::Relaxed);
    let step = ActiveStep { number, scopes, trace, current: ScopeId::default() };
    STEPS.with_borrow_mut(|steps| steps.push(step));
    Entered { number, thread_bound: PhantomData }
}

pub(crate) struct Entered {
    number: u64,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        STEPS.with_borrow_mut(|steps| steps.retain(|step| step.number != self.number));
    }
}
