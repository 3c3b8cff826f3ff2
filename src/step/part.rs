//! Parts of the program that can be run again for anything that is saved within them.

use std::sync::Arc;

use ssdtrain_libtorch::{Packed, SavedTensor, StorageId};

use crate::profile::SegmentTiming;

/// A part of the program that is running and can be run again. The step decides what of its saves is to be had that way.
pub(crate) trait Part: Send + Sync {
    /// What the graph holds for the tensor that is being saved now instead of its bytes; `None` if the part cannot make them again.
    fn stand_for(&self, saved: &SavedTensor<'_>) -> Option<Packed>;

    /// Whether the graph holds something for this storage instead of its bytes that the part makes again.
    fn has_taken(&self, storage: StorageId) -> bool;

    /// How it was timed, if the step is profiled.
    fn timing(&self) -> Option<Arc<SegmentTiming>>;
}
