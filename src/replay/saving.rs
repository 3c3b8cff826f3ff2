//! What is known where a tensor is saved.

use std::collections::HashSet;
use std::sync::Arc;

use ssdtrain_libtorch::{SavedVariable, StorageId};
use ssdtrain_plan::{Placement, Position};
use ssdtrain_store::sync::Mutex;
use tch::Device;

use super::together::Together;
use crate::cache::By;

/// What is known where a tensor is saved.
pub(crate) struct Saving<'a> {
    pub(crate) by: By<'a>,
    pub(crate) stays: Stays<'a>,
    /// Whether reruns are compared with first runs.
    pub(crate) verify: bool,
    /// Whether a storage is to be had again from the part of the program that is running.
    pub(crate) is_taken: &'a dyn Fn(StorageId) -> bool,
    /// The planned placement of an operation's result: when it ran, and which of its results it is.
    pub(crate) planned: &'a dyn Fn(Position, usize) -> Option<Placement>,
    /// Which operations may make it again.
    pub(crate) makers: Makers,
    /// Whether a result stays on the device for whose bytes nothing was planned.
    pub(crate) keeps_unplanned: bool,
    /// The part of the program that is running, if what it saves is made again from what went into it.
    pub(crate) bounds: Option<Bounds<'a>>,
}

/// Which recorded operations may make something again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Makers {
    /// All of them.
    Any,
    /// A few pointwise ones or norms in a row, of what is there anyway: parameters, what is small, and what the cache has. Others too, if no
    /// more than so many bytes are made at once, and the cache has fewer of what they read than they make.
    Near(Option<u64>),
}

/// A part of the program that is made again from what went into it.
pub(crate) struct Bounds<'a> {
    /// Where it began. What was made before, or on another thread, went into it.
    pub(crate) begin: Position,
    /// Where a storage comes from that went into it.
    pub(crate) given: &'a dyn Fn(StorageId) -> Option<Given>,
    /// What it saved is made again in one rerun.
    pub(crate) together: &'a Arc<Together>,
}

impl Saving<'_> {
    /// Whether what an operation made that ran then may be computed again, rather than taken as it is.
    pub(super) fn goes_through(&self, ran: Position) -> bool {
        let begin = self.bounds.as_ref().map(|bounds| bounds.begin);
        begin.is_none_or(|begin| ran.strand == begin.strand && ran.index >= begin.index)
    }

    /// Whether a storage of the cache's device stays where it is.
    pub(super) fn is_left(&self, id: StorageId, bytes: u64) -> bool {
        let Saving { stays, makers, .. } = self;
        // The program may write to what it holds, which would have to be copied.
        stays.has(id, bytes) && (*makers == Makers::Any || !stays.held.contains(&id))
    }

    /// Where a storage comes from that the cache need not take.
    pub(super) fn given(&self, storage: StorageId) -> Option<Given> {
        (self.bounds.as_ref()?.given)(storage)
    }
}

/// Where a storage comes from that went into a part of the program.
pub(crate) enum Given {
    /// It was saved for this, as the step wants it.
    Saved(Arc<Mutex<SavedVariable>>),
    /// It stays where it is.
    Held,
}

/// What a cache does not move.
#[derive(Clone, Copy)]
pub(crate) struct Stays<'a> {
    /// The device whose storages it moves.
    pub(crate) device: Device,
    pub(crate) min_bytes: u64,
    pub(crate) parameters: &'a HashSet<StorageId>,
    /// Storages that the program holds besides the graph.
    pub(crate) held: &'a HashSet<StorageId>,
}

impl Stays<'_> {
    /// Whether a storage of its device stays there in any case.
    pub(super) fn has(&self, id: StorageId, bytes: u64) -> bool {
        bytes < self.min_bytes || self.parameters.contains(&id) || self.held.contains(&id)
    }
}
