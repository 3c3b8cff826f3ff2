//! What is handed to the cache, and the handles that it gives in return.

use std::sync::Arc;

use ssdtrain_libtorch::{SavedTensor, Storage};

use super::Cache;
use super::keys::{EntryKey, TapeKey};
use super::table::Part;
use crate::sync::Mutex;

/// A storage that the cache takes in.
pub(crate) struct Subject {
    pub(super) storage: Storage,
    pub(super) bytes: u64,
    pub(super) version: u32,
    /// The view of it that is saved.
    pub(super) part: Part,
}

impl Subject {
    /// The storage of a saved tensor; `None` if it has none that can be moved.
    pub(crate) fn of(saved: &SavedTensor<'_>) -> Option<Subject> {
        let part = Part { layout: saved.layout()?, bytes: saved.tensor_bytes() };
        let (bytes, version) = (saved.storage_bytes(), saved.version());
        Some(Subject { storage: saved.storage()?, bytes, version, part })
    }

    /// All of a storage; `version` is that of a tensor on it.
    pub(crate) fn whole(storage: Storage, version: u32) -> Subject {
        let bytes = storage.bytes();
        Subject { storage, bytes, version, part: Part { layout: 0, bytes } }
    }
}

/// A handle to an entry: it is released when this is dropped.
pub(crate) struct EntryHandle {
    cache: Arc<Cache>,
    key: EntryKey,
    tape: TapeKey,
    position: usize,
    /// Identifies the round in which this handle was last [done](Cache::served).
    round: Mutex<u64>,
}

impl EntryHandle {
    pub(super) fn new(cache: &Arc<Cache>, key: EntryKey, tape: TapeKey, position: usize) -> EntryHandle {
        EntryHandle { cache: Arc::clone(cache), key, tape, position, round: Mutex::new(0) }
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    pub(crate) fn key(&self) -> EntryKey {
        self.key
    }

    /// The entry's storage: from the device if possible, otherwise from the tier below. This handle does not ask again in this backward.
    pub(crate) fn fetch(&self) -> Result<Storage, String> {
        let storage = self.cache.fetch(self.key, self.tape, Some(self.position))?;
        self.is_done();
        Ok(storage)
    }

    /// The same, but it may ask again until it [is done](EntryHandle::is_done), and wherever backward is.
    pub(crate) fn borrow(&self) -> Result<Storage, String> {
        self.cache.fetch(self.key, self.tape, None)
    }

    /// This handle does not ask again in this backward.
    pub(crate) fn is_done(&self) {
        let device = self.cache.served(self.key, &mut self.round.lock());
        self.cache.gives_back(device);
    }
}

impl Drop for EntryHandle {
    fn drop(&mut self) {
        self.cache.release(self.key, self.tape, *self.round.get_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::super::By;
    use super::super::waits::{BYTES, LATE};
    use super::*;
    use crate::telemetry::{ScopeId, ScopeRecord};
    use crate::tier::modelled::{Copies, ModelDevice};
    use crate::tier::{HostSettings, HostTier, PoolSize};

    #[test]
    fn memory_is_given_back_without_a_lock() {
        let settings = HostSettings { pool: PoolSize::Fixed(BYTES), read_ahead: 0 };
        let tier = HostTier::new(ModelDevice::new(Copies::AtLast, None), None, settings, None).unwrap();
        let cache = Cache::new(Some(tier), LATE, None);
        let (tape, counters, record) = (cache.open_tape(), Arc::default(), ScopeRecord::default());
        let by = By { step: 1, scope: ScopeId::default(), tape, counters: &counters, record: &record };
        let subject = Subject::whole(Storage::allocate(BYTES).unwrap(), 0);
        let handle = cache.save(subject, false, by).unwrap();
        cache.flush(&counters);
        drop(handle.borrow().unwrap());
        assert_eq!(cache.held().2, BYTES);
        // This fails if the thread has a lock meanwhile.
        handle.is_done();
        assert_eq!(cache.held().2, 0);
    }
}
