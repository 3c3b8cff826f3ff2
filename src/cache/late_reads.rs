//! Storages of the program that reruns read, as far as the device may not have come to that yet.

use std::collections::{BTreeSet, HashMap};

use ssdtrain_libtorch::{Storage, StorageId, Watch};

/// With so many storages, those that are gone are looked for first.
const FEW: usize = 256;

/// The storages that reruns have read since they were last written to, and on which streams. Without a cache backward would not read them,
/// so who writes to them may have waited for forward alone.
#[derive(Default)]
pub(super) struct LateReads {
    reads: HashMap<StorageId, LateRead>,
    /// With how many storages those that are gone are looked for next.
    full_at: usize,
}

struct LateRead {
    /// Has writes be told.
    watch: Watch,
    streams: BTreeSet<usize>,
}

impl LateReads {
    /// A rerun on `stream` is about to read `storage`. What is returned is to be dropped without a lock.
    pub(super) fn add(&mut self, storage: &Storage, stream: usize) -> Vec<Storage> {
        let held = if self.reads.len() >= self.full_at { self.forget_gone() } else { Vec::new() };
        let new = || LateRead { watch: Watch::new(storage), streams: BTreeSet::new() };
        self.reads.entry(storage.id()).or_insert_with(new).streams.insert(stream);
        held
    }

    /// The storage is about to be written to on `stream`: whether the device may still have to read it on another.
    pub(super) fn end(&mut self, storage: StorageId, stream: impl FnOnce() -> Option<usize>) -> bool {
        let Some(read) = self.reads.remove(&storage) else { return false };
        let here = stream();
        read.streams.iter().any(|reader| Some(*reader) != here)
    }

    fn forget_gone(&mut self) -> Vec<Storage> {
        let mut held = Vec::new();
        self.reads.retain(|_, read| {
            let storage = read.watch.upgrade();
            let is_there = storage.is_some();
            held.extend(storage);
            is_there
        });
        self.full_at = 2 * self.reads.len() + FEW;
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_waits_for_readers_on_other_streams_and_once() {
        let mut late = LateReads::default();
        let storage = Storage::allocate(64).unwrap();
        let written = |late: &mut LateReads, on: Option<usize>| late.end(storage.id(), || on);
        assert!(!written(&mut late, Some(2)), "nobody has read it");
        for (readers, writer, waits) in
            [(&[1][..], Some(1), false), (&[1], Some(2), true), (&[1, 2], Some(2), true), (&[1], None, true)]
        {
            readers.iter().for_each(|reader| drop(late.add(&storage, *reader)));
            assert_eq!(written(&mut late, writer), waits, "{readers:?} {writer:?}");
            assert!(!written(&mut late, Some(3)), "it has waited");
        }
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let mut late = LateReads::default();
        let kept = Storage::allocate(64).unwrap();
        drop(late.add(&kept, 1));
        for _ in 0..10 * FEW {
            drop(late.add(&Storage::allocate(64).unwrap(), 1));
        }
        assert!(late.reads.len() <= 2 * FEW, "{}", late.reads.len());
        assert!(late.end(kept.id(), || Some(2)));
    }
}
