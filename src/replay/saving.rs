//! What is known where a tensor is saved.

use std::collections::HashSet;

use ssdtrain_libtorch::StorageId;
use ssdtrain_plan::Placement;
use tch::Device;

use crate::cache::By;

/// What is known where a tensor is saved.
pub(crate) struct Saving<'a> {
    pub(crate) by: By<'a>,
    /// The device whose storages the cache moves.
    pub(crate) device: Device,
    pub(crate) min_bytes: u64,
    /// Whether reruns are compared with first runs.
    pub(crate) verify: bool,
    pub(crate) parameters: &'a HashSet<StorageId>,
    /// Storages that the program holds besides the graph.
    pub(crate) held: &'a HashSet<StorageId>,
    /// The planned placement of an operation's result: the operation's number, and which of its results it is.
    pub(crate) planned: &'a dyn Fn(u64, usize) -> Option<Placement>,
}

impl Saving<'_> {
    /// Whether a storage stays on its device in any case.
    pub(super) fn stays(&self, id: StorageId, bytes: u64) -> bool {
        bytes < self.min_bytes || self.parameters.contains(&id) || self.held.contains(&id)
    }
}
