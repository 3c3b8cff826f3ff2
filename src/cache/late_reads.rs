//! Storages of the program that reruns read, as far as the device may not have come to that yet.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ssdtrain_libtorch::{Storage, StorageId, Watch};

use crate::error::{Error, Result};

/// With so many storages, those that are gone are looked for first.
const FEW: usize = 256;

/// The storages that reruns have read, and on which streams. Without a cache backward would not read them, so who writes to them may have
/// waited for forward alone.
#[derive(Default)]
pub(super) struct LateReads {
    reads: HashMap<StorageId, LateRead>,
    /// With how many storages those that are gone are looked for next.
    full_at: usize,
    /// Why a write did not wait for one of them.
    failure: Option<Error>,
}

struct LateRead {
    /// Has writes be told.
    watch: Watch,
    /// The streams that it was read on. Each has those that come after the latest read there. A write does not end it: it may have been
    /// to another part of the storage.
    streams: BTreeMap<usize, BTreeSet<usize>>,
}

impl LateReads {
    /// A rerun on `stream` is about to read `storage`. What is returned is to be dropped without a lock.
    pub(super) fn add(&mut self, storage: &Storage, stream: usize) -> Vec<Storage> {
        let held = if self.reads.len() >= self.full_at { self.alive() } else { Vec::new() };
        let new = || LateRead { watch: Watch::new(storage), streams: BTreeMap::new() };
        self.reads.entry(storage.id()).or_insert_with(new).streams.insert(stream, BTreeSet::new());
        held
    }

    /// The storage is about to be written to `here`, on the stream that the calling thread computes on: `after` puts that after what a
    /// stream has to do so far.
    pub(super) fn written(
        &mut self,
        storage: StorageId,
        here: impl FnOnce() -> Result<usize>,
        after: impl Fn(usize) -> Result<()>,
    ) {
        let Some(read) = self.reads.get_mut(&storage) else { return };
        let order = |here: usize| {
            let mut outcome = Ok(());
            for (stream, later) in read.streams.iter_mut().filter(|(stream, _)| **stream != here) {
                if !later.contains(&here) {
                    let ordered = after(*stream);
                    if ordered.is_ok() {
                        later.insert(here);
                    }
                    outcome = outcome.and(ordered);
                }
            }
            outcome
        };
        if let Err(cause) = here().and_then(order) {
            let told = || {
                cause.within(
                "a tensor was overwritten on another stream than the one on which an earlier backward read it, maybe before it was read: that \
                 backward's gradients may be wrong",
            )
            };
            self.failure.get_or_insert_with(told);
        }
    }

    /// Why a write may have come too early. It is told once.
    pub(super) fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
    }

    /// The storages that others may still write to. Forgets those that are gone. What is returned is to be dropped without a lock.
    pub(super) fn alive(&mut self) -> Vec<Storage> {
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
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::time::Duration;

    use ssdtrain_plan::{InTurn, Offload, Placement};
    use tch::{Kind, Tensor};

    use super::*;
    use crate::device::Simulated;
    use crate::{DeviceCall, DeviceFaults, ErrorKind, MIB, TensorCache};

    /// One step whose backward reads its input again on stream 1; the input is overwritten on stream 2 before the step ends.
    fn overwritten(cache: &TensorCache) -> Result<()> {
        let x = Tensor::ones([64, 64], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        Simulated::enter(1);
        let step = cache.step();
        let loss = (&x * 2.0).sin().sum(Kind::Float);
        step.backward(&loss)?;
        Simulated::enter(2);
        drop(tch::no_grad(|| x.detach().zero_()));
        let report = step.finish();
        Simulated::enter(0);
        report.map(|report| assert!(report.reruns.bytes > 0, "{report}"))
    }

    #[test]
    fn a_writer_that_could_not_wait_is_an_error_of_the_step() {
        let faults = Arc::new(DeviceFaults::default());
        let recompute = InTurn::new(Offload::default(), vec![Placement::Recompute]);
        let builder =
            TensorCache::builder().min_bytes(0).simulated_device(Duration::ZERO).host_pool(16 * MIB);
        let cache = builder.policy(recompute).device_faults(&faults).build().unwrap();
        overwritten(&cache).unwrap();
        faults.inject(Some(DeviceCall::After), 0, u64::MAX);
        let error = overwritten(&cache).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device, "{error}");
        assert!(error.to_string().contains(DeviceFaults::WORDS), "{error}");
        faults.heal();
        overwritten(&cache).unwrap();
    }

    #[test]
    fn a_stream_is_put_after_those_that_have_read_once() {
        let mut late = LateReads::default();
        let storage = Storage::allocate(64).unwrap();
        let written = |late: &mut LateReads, on: usize| {
            let waits = RefCell::new(Vec::new());
            let after = |stream| {
                waits.borrow_mut().push(stream);
                Ok(())
            };
            late.written(storage.id(), || Ok(on), after);
            waits.into_inner()
        };
        assert!(written(&mut late, 2).is_empty(), "nobody has read it");
        [1, 2].into_iter().for_each(|reader| drop(late.add(&storage, reader)));
        assert_eq!(
            [2, 2, 1, 3, 3].map(|writer| written(&mut late, writer)),
            [vec![1], vec![], vec![2], vec![1, 2], vec![]]
        );
        drop(late.add(&storage, 1));
        assert_eq!(written(&mut late, 3), [1], "it was read again");
    }

    #[test]
    fn a_writer_that_waits_in_vain_tries_again() {
        let mut late = LateReads::default();
        let storage = Storage::allocate(64).unwrap();
        drop(late.add(&storage, 1));
        let refuse = || Err(Error::new(ErrorKind::Device, "no event"));
        drop(late.add(&storage, 3));
        let tried = RefCell::new(Vec::new());
        let one_refuses = |stream| {
            tried.borrow_mut().push(stream);
            if stream == 1 { refuse() } else { Ok(()) }
        };
        late.written(storage.id(), || Ok(2), one_refuses);
        assert!(late.take_failure().is_some() && late.take_failure().is_none());
        late.written(storage.id(), || Ok(2), one_refuses);
        assert_eq!((tried.take(), late.take_failure().is_some()), (vec![1, 3, 1], true));
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
        assert!(late.reads.contains_key(&kept.id()) && late.alive().len() == 1);
        drop(kept);
        assert!(late.alive().is_empty());
    }
}
