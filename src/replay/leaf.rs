//! Where reruns begin: storages that are not computed again.

use std::collections::BTreeSet;

use ssdtrain_libtorch::{Storage, StorageId, Watch};
use ssdtrain_store::sync::Mutex;

use crate::cache::EntryHandle;
use crate::telemetry::events::warn_once;

/// A storage that operations read, with the bytes that it had then, whatever the program writes to it later.
pub(super) struct Leaf {
    watch: Watch,
    source: Source,
    /// A copy of the bytes, once the program is about to change them.
    copy: Mutex<Option<Result<Storage, String>>>,
    /// The streams that it was read on.
    readers: Mutex<BTreeSet<i64>>,
}

/// Where the bytes are.
pub(super) enum Source {
    /// In a storage that stays on its device: a parameter, something small, or something that the program holds anyway.
    Held(Storage),
    /// In the cache.
    Entry(EntryHandle),
}

impl Leaf {
    pub(super) fn new(watch: Watch, source: Source) -> Leaf {
        Leaf { watch, source, copy: Mutex::default(), readers: Mutex::default() }
    }

    pub(super) fn id(&self) -> StorageId {
        self.watch.id()
    }

    /// A storage with the bytes. Another thread may begin to change them: see [`Leaf::has_served`].
    pub(super) fn fetch(&self) -> Result<Storage, String> {
        if self.watch.is_written() {
            // The writer may not have come to this yet; it waits for the copy.
            self.keep_copy();
        }
        if let Some(copy) = &*self.copy.lock() {
            return copy.clone();
        }
        let fetched = match &self.source {
            Source::Held(storage) => storage.clone(),
            Source::Entry(entry) => entry.fetch()?,
        };
        if fetched.id() == self.watch.id() {
            // Before it is read, so that a writer that does not find it here is found by the reader.
            self.readers.lock().insert(fetched.stream().map_err(|error| error.0)?);
        }
        Ok(fetched)
    }

    /// Whether what was fetched has had the bytes until now: no one has begun to change it.
    pub(super) fn has_served(&self, fetched: &Storage) -> bool {
        fetched.id() != self.watch.id() || !self.watch.is_written()
    }

    /// The storage is about to be written: its bytes are copied first. And they are read first wherever they will be: the program may have
    /// waited for forward alone, which is enough without a cache.
    pub(super) fn is_written(&self) {
        self.keep_copy();
        let readers = std::mem::take(&mut *self.readers.lock());
        let Some(storage) = self.watch.upgrade() else { return };
        let is_in_order = |here| readers.iter().all(|reader| *reader == here);
        if readers.is_empty() || storage.stream().is_ok_and(is_in_order) {
            return;
        }
        if let Err(error) = storage.synchronize() {
            warn_once!(%error, "a tensor is overwritten that a rerun on another stream may still read: the device did not say when it is through");
        }
    }

    fn keep_copy(&self) {
        let mut copy = self.copy.lock();
        let Some(storage) = self.watch.upgrade().filter(|_| copy.is_none()) else { return };
        let copied = storage.copy().map_err(|error| {
            format!(
                "{} bytes were changed in place after the forward pass, and there was no memory for a copy: {error}",
                storage.bytes()
            )
        });
        *copy = Some(copied);
    }

    /// Whether the storage still has the bytes.
    pub(super) fn is_original(&self) -> bool {
        self.copy.lock().is_none()
    }
}
