//! Which steps of a plan that keeps everything go as without a cache.

use super::{Adherence, Followed};

/// No more in a row go without a look at what they save. With the one that is looked at, that is no multiple of what kinds of steps come in
/// turn by.
const MOST: u32 = 16;
/// None do until so many that were looked at have followed the plan since one last did not: it may need more memory, and others like it
/// may come.
const TRUSTED: u32 = 64;

/// The last steps, as far as they tell whether the next one may go without a look at what it saves.
#[derive(Clone, Debug)]
pub(super) struct Unseen {
    /// Steps in a row that did.
    in_a_row: u32,
    /// Steps that were looked at and have followed a plan since one last did not, if any did not.
    trusted: u32,
    /// Whether a step has begun that has not ended.
    is_open: bool,
}

impl Unseen {
    pub(super) fn new() -> Unseen {
        Unseen { in_a_row: 0, trusted: TRUSTED, is_open: false }
    }

    /// A step begins.
    pub(super) fn begins(&mut self) {
        // One that did not end may have failed for want of memory, and others like it may come.
        if std::mem::replace(&mut self.is_open, true) {
            self.trusted = 0;
        }
    }

    /// Whether that step goes without a look, where its kind allows it.
    pub(super) fn is_next(&mut self, allows: impl FnOnce() -> bool) -> bool {
        let may = self.in_a_row < MOST && self.trusted >= TRUSTED;
        let is_next = may && allows();
        self.in_a_row = if is_next { self.in_a_row + 1 } else { 0 };
        is_next
    }

    /// A step has ended; it has gone like this if it was looked at.
    pub(super) fn ended(&mut self, followed: Option<Followed>) {
        self.is_open = false;
        if let Some(followed) = followed {
            self.trusted = if followed.how == Adherence::Lost { 0 } else { self.trusted.saturating_add(1) };
        }
    }
}
