//! What a segment's rerun saves.

use std::sync::Arc;

use ssdtrain_libtorch::{Packed, RandomState, SavedTensor, SavedTensorHooks, Storage};
use ssdtrain_store::sync::Mutex;
use tch::Device;

use super::fact::Fact;
use super::recipe::Discarded;
use super::stop;
use crate::cache::Cache;

/// Hooks of a segment's rerun: they take what is saved at the positions that are wanted, and check all positions up to the one at which
/// they stop it.
pub(super) struct Collector {
    pub(super) name: String,
    pub(super) cache: Arc<Cache>,
    pub(super) verify: bool,
    pub(super) facts: Arc<[Fact]>,
    /// On which stream each position was saved first.
    pub(super) streams: Arc<[Option<usize>]>,
    /// The position that was asked for.
    pub(super) asked: usize,
    /// The positions that will be asked for at some time, each on the stream that it was saved on.
    pub(super) wanted: Vec<bool>,
    /// The last position that is needed, if the function may be stopped there.
    pub(super) last: Option<usize>,
    /// Where random numbers may be drawn.
    pub(super) devices: Vec<Device>,
    pub(super) found: Mutex<Vec<Option<Storage>>>,
}

impl Collector {
    pub(super) fn differs(&self, now: &str, then: &str) -> String {
        format!(
            "segment \"{}\" of ssdtrain saved {now} when it was computed again, and {then} before. Its function must do the \
             same each time",
            self.name
        )
    }

    /// Whether the position is one to be filled: others than the one asked for if they will be asked for on the same stream.
    fn wants(&self, position: usize) -> bool {
        let stream = |position: usize| self.streams.get(position).copied().flatten();
        self.wanted.get(position) == Some(&true) && stream(position) == stream(self.asked)
    }

    fn stop(&self) -> Result<Packed, String> {
        stop::stop(|| RandomState::of(&self.devices)).map_err(|error| error.0)
    }
}

impl SavedTensorHooks for Collector {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let mut found = self.found.lock();
        let position = found.len();
        if self.last.is_some_and(|last| position > last) {
            // The function has gone on in spite of the error.
            return self.stop();
        }
        let Some(then) = self.facts.get(position) else {
            return Err(self.differs("more tensors", &position.to_string()));
        };
        let now = Fact::of(saved, then.taken, self.verify)?;
        if now != *then {
            let (now, then) = (now.told_from(then), format!("{} bytes", then.storage_bytes));
            return Err(self.differs(&format!("{now} as tensor {position}"), &then));
        }
        let storage = saved.storage();
        if let Some(storage) = &storage {
            self.cache.in_use_again(storage)?;
        }
        found.push(storage.filter(|_| then.taken && self.wants(position)));
        if self.last == Some(position) { self.stop() } else { Ok(Discarded::packed()) }
    }
}
