//! Segments: each tensor that autograd saves within one is a position in the order of saving, and a rerun fills the positions. It ends at
//! the last one that is wanted.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch::{Handle, Hooks, Storage, StorageId, Watch};
use ssdtrain_store::sync::Mutex;

use super::collector::Collector;
use super::fact::Fact;
use super::operations::Stand;
use super::recipe::Recipe;
use super::stop;
use crate::cache::Cache;
use crate::step::Level;

/// One run of a segment, held by its handles in the graph.
pub(super) struct Segment {
    pub(super) name: String,
    pub(super) cache: Arc<Cache>,
    pub(super) slots: Mutex<Vec<Slot>>,
    /// `None` until the function has returned. Locked during a rerun, so that only one thread runs it.
    pub(super) done: Mutex<Option<Done>>,
}

pub(super) struct Done {
    pub(super) recipe: Recipe,
    /// How a rerun treats what is in turn computed within it.
    pub(super) level: Level,
    pub(super) facts: Arc<[Fact]>,
    /// On which stream each position was saved, where a device says so. It will be asked for there.
    pub(super) streams: Arc<[Option<usize>]>,
    /// The storages taken that the function created and that outlived it, in the state in which it left them.
    pub(super) taken: Vec<Watch>,
    /// The first position at which a rerun may end. `None` if it must not end before the function does, because all of it is verified or
    /// because the function writes to what has been saved.
    pub(super) settled: Option<usize>,
}

/// A position in the order of saving.
pub(super) enum Slot {
    /// The bytes are not there.
    Empty,
    /// A rerun has filled it, and backward has not asked for it yet. The rerun was on the stream with this number, if the device says
    /// which: others would have to wait for it.
    Filled(Storage, Option<usize>),
    /// It comes from elsewhere, as do all that the segment took.
    Stands(Stand),
    /// The segment did not take it, or the graph has released it.
    Closed,
}

impl Segment {
    /// Serves a position once: from then on the graph holds the bytes, or asks for another rerun.
    fn serve(&self, position: usize) -> Result<Storage, String> {
        if let Some(stand) = self.stand(position) {
            return stand.serve();
        }
        if let Some(storage) = self.take_here(position) {
            return Ok(storage);
        }
        let done = self.done.lock();
        // Another thread may have run it in the meantime.
        if let Some(storage) = self.take_here(position) {
            return Ok(storage);
        }
        let Some(done) = &*done else {
            return Err(format!(
                "backward ran within segment \"{}\" of ssdtrain, which is not possible. Run it outside",
                self.name
            ));
        };
        if done.taken.iter().any(Watch::is_written) {
            return Err(format!(
                "a tensor that segment \"{}\" of ssdtrain saved for backward was changed in place after it. Change it within the \
                 segment, or a copy of it",
                self.name
            ));
        }
        self.rerun(done, position)?;
        self.take(position, |_, _| true)
            .ok_or_else(|| format!("internal error: segment \"{}\" has no position {position}", self.name))
    }

    fn stand(&self, position: usize) -> Option<Stand> {
        match self.slots.lock().get(position)? {
            Slot::Stands(stand) => Some(stand.clone()),
            _ => None,
        }
    }

    /// The function has returned, and these stand for all that was taken, as far as the graph still holds it.
    pub(super) fn stand_in(&self, stands: Vec<(usize, Stand)>) {
        let mut closed = Vec::new();
        let mut slots = self.slots.lock();
        for (position, stand) in stands {
            match slots.get_mut(position) {
                Some(slot @ Slot::Empty) => *slot = Slot::Stands(stand),
                _ => closed.push(stand),
            }
        }
        drop(slots);
        // Memory is given back without the lock.
        drop(closed);
    }

    /// What a rerun on the stream that the calling thread computes on has filled the position with.
    fn take_here(&self, position: usize) -> Option<Storage> {
        let is_here = |storage: &Storage, made_on: Option<usize>| {
            made_on.is_some() && self.cache.stream(storage) == made_on
        };
        self.take(position, is_here)
    }

    fn take(&self, position: usize, may: impl FnOnce(&Storage, Option<usize>) -> bool) -> Option<Storage> {
        let mut slots = self.slots.lock();
        let slot = slots.get_mut(position)?;
        match std::mem::replace(slot, Slot::Empty) {
            Slot::Filled(storage, made_on) if may(&storage, made_on) => Some(storage),
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Runs it again for `asked`, and for what will be asked for on the same stream.
    fn rerun(&self, done: &Done, asked: usize) -> Result<(), String> {
        let Done { recipe, level, facts, streams, settled, .. } = done;
        let start = Instant::now();
        let wanted: Vec<bool> = self.slots.lock().iter().map(|slot| !matches!(slot, Slot::Closed)).collect();
        let last = settled.zip(wanted.iter().rposition(|wanted| *wanted)).filter(|_| stop::is_possible());
        let last = last.map(|(settled, wanted)| wanted.max(settled));
        let collector = Arc::new(Collector {
            name: self.name.clone(),
            cache: Arc::clone(&self.cache),
            verify: recipe.is_verified(),
            facts: Arc::clone(facts),
            streams: Arc::clone(streams),
            asked,
            wanted,
            last,
            devices: recipe.devices().to_vec(),
            found: Mutex::default(),
        });
        let result = recipe.run(Arc::clone(&collector) as Hooks, level.clone(), last.is_some())?;
        let found = std::mem::take(&mut *collector.found.lock());
        if result.is_some() && found.len() != facts.len() {
            return Err(collector.differs(&format!("{} tensors", found.len()), &format!("{}", facts.len())));
        }
        let bytes = bytes_of(&found);
        let mut replaced = Vec::new();
        {
            let mut slots = self.slots.lock();
            for (slot, storage) in slots.iter_mut().zip(found) {
                // A position that was closed in the meantime stays closed.
                if let (Some(storage), Slot::Empty | Slot::Filled(..)) = (storage, &*slot) {
                    let made_on = self.cache.stream(&storage);
                    replaced.push(std::mem::replace(slot, Slot::Filled(storage, made_on)));
                }
            }
        }
        // Storages are freed without the lock.
        drop(replaced);
        recipe.ran(bytes, start);
        Ok(())
    }
}

/// Bytes of the distinct storages among them.
fn bytes_of(found: &[Option<Storage>]) -> u64 {
    let distinct: HashMap<StorageId, u64> =
        found.iter().flatten().map(|storage| (storage.id(), storage.bytes())).collect();
    distinct.values().sum()
}

/// The graph's handle to one tensor that a segment took.
pub(super) struct SlotHandle {
    pub(super) segment: Arc<Segment>,
    pub(super) position: usize,
}

impl Handle for SlotHandle {
    fn unpack(&self) -> Result<Storage, String> {
        self.segment.serve(self.position)
    }
}

impl Drop for SlotHandle {
    fn drop(&mut self) {
        let closed = {
            let mut slots = self.segment.slots.lock();
            slots.get_mut(self.position).map(|slot| std::mem::replace(slot, Slot::Closed))
        };
        drop(closed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use ssdtrain_libtorch::SavedVariable;
    use ssdtrain_plan::Offload;
    use tch::{Kind, TchError, Tensor};

    use super::*;
    use crate::device::Simulated;
    use crate::{MIB, TensorCache, segment};

    /// On drop, the thread computes on this stream again.
    struct Back(usize);

    impl Drop for Back {
        fn drop(&mut self) {
            Simulated::enter(self.0);
        }
    }

    /// How often a segment runs again of which each position is saved on one of these streams and then asked for there, last ones first.
    /// If its function `enters` them itself, it does so each time.
    fn reruns(streams: [usize; 6], enters: bool) -> usize {
        let builder = TensorCache::builder()
            .min_bytes(0)
            .simulated_device(Duration::ZERO)
            .host_pool(16 * MIB)
            .fuse_reruns(false);
        let cache = builder.policy(Offload::default()).build().unwrap();
        let x = Tensor::ones([64], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let step = cache.step();
        let runs = Arc::new(AtomicUsize::new(0));
        let saved: Arc<Mutex<Vec<SavedVariable>>> = Arc::default();
        let (counts, keeps, here) = (Arc::clone(&runs), Arc::clone(&saved), Arc::new(AtomicUsize::new(0)));
        let outside = Arc::clone(&here);
        let function = move |x: &Tensor| -> Result<Tensor, TchError> {
            let run = counts.fetch_add(1, Ordering::Relaxed);
            let _back = Back(outside.load(Ordering::Relaxed));
            for (position, stream) in (0_u32..).zip(streams) {
                if run == 0 || enters {
                    Simulated::enter(stream);
                }
                let made = tch::no_grad(|| x.f_add_scalar(f64::from(position)))?;
                let one = SavedVariable::new(&made).map_err(|error| TchError::Torch(error.0))?;
                if run == 0 {
                    keeps.lock().push(one);
                }
            }
            x.f_neg()
        };
        let output = segment("part", &x, function).unwrap();
        let saved = std::mem::take(&mut *saved.lock());
        assert_eq!(saved.len(), streams.len());
        for (one, stream) in saved.into_iter().zip(streams).rev() {
            Simulated::enter(stream);
            here.store(stream, Ordering::Relaxed);
            drop(one.unpack().unwrap());
        }
        Simulated::enter(0);
        drop((output, step));
        runs.load(Ordering::Relaxed) - 1
    }

    #[test]
    fn each_stream_runs_it_once_for_all_that_it_asks_for() {
        for enters in [false, true] {
            let reruns = |streams| reruns(streams, enters);
            assert_eq!([[0; 6], [1, 1, 1, 2, 2, 2], [1, 2, 1, 2, 1, 2]].map(reruns), [1, 2, 2], "{enters}");
        }
    }
}
