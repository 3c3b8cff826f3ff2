//! Where reruns begin: storages that are not computed again.

use std::sync::Arc;

use ssdtrain_libtorch::{SavedVariable, Storage, StorageId, Watch};
use ssdtrain_store::sync::Mutex;

use super::demand::Demand;
use crate::cache::EntryHandle;

/// A storage that operations read, with the bytes that it had then, whatever the program writes to it later.
pub(super) struct Leaf {
    watch: Watch,
    source: Source,
    /// A copy of the bytes, once the program is about to change them.
    copy: Mutex<Option<Result<Storage, String>>>,
    /// How many of the operations that read it are still needed.
    pub(super) demand: Demand,
}

/// Where the bytes are.
pub(super) enum Source {
    /// In a storage that stays on its device: a parameter, something small, or something that the program holds anyway.
    Held(Storage),
    /// In the cache.
    Entry(EntryHandle),
    /// Where those that saved it have left it, and how often it came from there. Each is asked in turn, because what all of them share stays
    /// on the device until each was served.
    Saved(Mutex<(Vec<Arc<Mutex<SavedVariable>>>, usize)>),
}

impl Leaf {
    pub(super) fn new(watch: Watch, source: Source) -> Leaf {
        Leaf { watch, source, copy: Mutex::new(None), demand: Demand::default() }
    }

    pub(super) fn id(&self) -> StorageId {
        self.watch.id()
    }

    /// A storage with the bytes. Another thread may begin to change them: see [`Leaf::has_served`].
    pub(super) fn fetch(&self) -> Result<Storage, String> {
        if self.watch.is_written() {
            // The writer may not have come to this yet; it waits for the copy.
            self.is_written();
        }
        if let Some(copy) = &*self.copy.lock() {
            return copy.clone();
        }
        match &self.source {
            Source::Held(storage) => Ok(storage.clone()),
            // Several results may be computed from it, at different times. In another backward over the same graph nobody knows of the
            // next one.
            Source::Entry(entry) if self.demand.is_some() => {
                let storage = entry.borrow();
                // The last one may have been served meanwhile, on another thread.
                if !self.demand.is_some() {
                    entry.is_done();
                }
                storage
            }
            Source::Entry(entry) => entry.fetch(),
            Source::Saved(saved) => {
                let next = {
                    let (all, asked) = &mut *saved.lock();
                    *asked += 1;
                    all.get((*asked - 1) % all.len().max(1)).map(Arc::clone)
                };
                let next = next.ok_or_else(|| "internal error: an input was not saved".to_owned())?;
                let tensor = next.lock().unpack().map_err(|error| error.0)?;
                Storage::of(&tensor).ok_or_else(|| "internal error: an input has no storage".to_owned())
            }
        }
    }

    pub(super) fn is_in_cache(&self) -> bool {
        matches!(self.source, Source::Entry(_))
    }

    /// It was saved once more.
    pub(super) fn is_saved(&self, by: Arc<Mutex<SavedVariable>>) {
        if let Source::Saved(saved) = &self.source {
            let (all, _) = &mut *saved.lock();
            if !all.iter().any(|one| Arc::ptr_eq(one, &by)) {
                all.push(by);
            }
        }
    }

    /// All that is computed from it has been, or is not wanted any more.
    pub(super) fn is_done(&self) {
        match &self.source {
            Source::Entry(entry) => entry.is_done(),
            Source::Held(_) | Source::Saved(_) => {}
        }
    }

    /// Whether what was fetched has had the bytes until now: no one has begun to change it.
    pub(super) fn has_served(&self, fetched: &Storage) -> bool {
        fetched.id() != self.watch.id() || !self.watch.is_written()
    }

    /// The storage is about to be written: its bytes are copied first.
    pub(super) fn is_written(&self) {
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
