//! Where in the model the calling thread is, for reports and for policies that go by scope.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::Arc;

use crate::telemetry::{ScopeId, Scopes};

thread_local! {
    /// The scope names of the caches that are active on this thread, innermost last.
    static ACTIVE: RefCell<Vec<Arc<Scopes>>> = const { RefCell::new(Vec::new()) };
    static CURRENT: Cell<ScopeId> = Cell::default();
}

/// Names what the calling thread does until the guard is dropped: tensors saved meanwhile are reported under `name`, and
/// scopes may be nested. Without an active step on this thread it does nothing, so model code can always use it.
///
/// ```no_run
/// # fn attention(x: &tch::Tensor) -> tch::Tensor { x.shallow_clone() }
/// # let x = tch::Tensor::from(0.0);
/// let _scope = ssdtrain::scope("block.3.attn");
/// let y = attention(&x);
/// ```
pub fn scope(name: &str) -> Scope {
    let scopes = ACTIVE.with_borrow(|active| active.last().cloned());
    let before = CURRENT.get();
    if let Some(scopes) = scopes {
        CURRENT.set(scopes.child(before, name));
    }
    Scope { before, thread_bound: PhantomData }
}

/// Guard of a named scope; see [`scope`].
#[must_use = "the scope ends when this guard is dropped"]
#[derive(Debug)]
pub struct Scope {
    before: ScopeId,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for Scope {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

pub(crate) fn current_scope() -> ScopeId {
    CURRENT.get()
}

/// Makes `scopes` the names in use on this thread, from the root on, until the guard is dropped.
pub(crate) fn enter(scopes: Arc<Scopes>) -> Entered {
    ACTIVE.with_borrow_mut(|active| active.push(scopes));
    Entered { before: CURRENT.replace(ScopeId::default()) }
}

#[derive(Debug)]
pub(crate) struct Entered {
    before: ScopeId,
}

impl Drop for Entered {
    fn drop(&mut self) {
        ACTIVE.with_borrow_mut(|active| active.pop());
        CURRENT.set(self.before);
    }
}
