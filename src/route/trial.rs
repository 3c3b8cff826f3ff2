//! Tries a tier before it is used: whether bytes come back unchanged, and how fast they move.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::BLOCK;
use ssdtrain_store::Store;

use super::path::PathRates;
use crate::device::{Device, Lane, keep};
use crate::error::Completion;
use crate::error::{Error, ErrorKind, Result};
use crate::telemetry::{Counters, ScopeId, StallCause};
use crate::tier::{Here, Parcel, Room, RoomListener, Tier};

/// Bytes of one storage.
const PIECE: u64 = 16 << 20;
/// Storages of a round trip: 64 MiB.
const ROUND_TRIP: u64 = 4;
/// Storages that move in each direction: 256 MiB.
const EACH_WAY: usize = 16;

/// A tier on trial, and the device above it.
pub(crate) struct Trial<'a, D: Device> {
    tier: Arc<dyn Tier>,
    device: &'a D,
    /// What was moved, and the storages whose bytes it was: both stay until nothing is in flight.
    moved: RefCell<Moved>,
    /// Receives a message when a parcel may ask for room again.
    room: Receiver<()>,
    _listener: Arc<RoomListener>,
}

#[derive(Default)]
struct Moved {
    parcels: Vec<Arc<dyn Parcel>>,
    storages: Vec<Storage>,
}

impl<'a, D: Device> Trial<'a, D> {
    pub(crate) fn new(tier: Arc<dyn Tier>, device: &'a D) -> Trial<'a, D> {
        let (tell, room) = channel();
        let listener: Arc<RoomListener> = Arc::new(move || tell.send(()).unwrap_or_default());
        tier.on_room(&listener);
        Trial { tier, device, moved: RefCell::default(), room, _listener: listener }
    }
}

impl<D: Device> Drop for Trial<'_, D> {
    fn drop(&mut self) {
        self.moved.get_mut().parcels.iter().for_each(|parcel| parcel.abandon(None));
        self.tier.settle();
        // Copies that the device still runs must end before their storages go.
        let over = self.tier.synchronize();
        let storages = std::mem::take(&mut self.moved.get_mut().storages);
        keep(&over, (!storages.is_empty()).then_some(storages));
        if let Err(error) = over {
            tracing::debug!(%error, "the device failed while a way to the disk was tried out");
        }
    }
}

impl<D: Device> Trial<'_, D> {
    /// Stores 64 MiB and loads them again. Fails if a transfer does, or if the bytes differ.
    pub(crate) fn round_trip(&self) -> Result<()> {
        for piece in 0..ROUND_TRIP {
            // The last storage ends within a block.
            let bytes = PIECE - if piece + 1 == ROUND_TRIP { 100 } else { 0 };
            let pattern = pattern(piece, bytes as usize);
            let parcel = self.store(&self.filled(pattern.clone())?)?;
            parcel.order(None, Some(StallCause::DeviceBudget), &Arc::default(), &Here::default())?;
            self.tier.settle();
            let into = self.filled(vec![0; pattern.len()])?;
            self.loaded(&*parcel, &self.load(&parcel, &into))?;
            if self.read(&into, pattern.len())? != pattern {
                let message = "bytes came back from the disk other than they were written";
                return Err(Error::new(ErrorKind::Corrupt, message));
            }
        }
        Ok(())
    }

    /// How fast bytes go to the disk, come back, and move in both directions at once.
    pub(crate) fn rates(&self) -> Result<PathRates> {
        let source = self.tier.allocate(PIECE)?;
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let write = self.rate(|| {
            for _ in 0..EACH_WAY {
                first.push(self.store(&source)?);
            }
            self.finish(&first)
        })?;
        let both = self.rate(|| {
            let mut cursor = Vec::new();
            for parcel in &first {
                cursor.push(self.load(parcel, &self.tier.allocate(PIECE)?));
                second.push(self.store(&source)?);
            }
            self.all_loaded(&first, &cursor)?;
            self.finish(&second)
        })?;
        let read = self.rate(|| {
            let cursor = second.iter().map(|parcel| Ok(self.load(parcel, &self.tier.allocate(PIECE)?)));
            let cursor = cursor.collect::<Result<Vec<_>>>()?;
            self.all_loaded(&second, &cursor)
        })?;
        Ok(PathRates { write, read, both })
    }

    /// Bytes per second to and from the disk while `work` runs.
    fn rate(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let moved = || {
            let stats = self.tier.store().map(Store::stats).unwrap_or_default();
            stats.bytes_written + stats.bytes_read
        };
        let (before, start) = (moved(), Instant::now());
        work()?;
        let took = start.elapsed();
        Ok((moved() - before) as f64 / took.as_secs_f64())
    }

    fn all_loaded(&self, parcels: &[Arc<dyn Parcel>], outcomes: &[Receiver<Result<()>>]) -> Result<()> {
        parcels.iter().zip(outcomes).try_for_each(|(parcel, outcome)| self.loaded(&**parcel, outcome))
    }

    /// A new storage that holds `bytes`.
    fn filled(&self, bytes: Vec<u8>) -> Result<Storage> {
        let storage = self.tier.allocate(bytes.len() as u64)?;
        // Earlier uses of this memory come first.
        self.device.wait(Lane::In, &self.device.record(Lane::Compute)?)?;
        // SAFETY: the storage is as long as the bytes and nobody else's; both are there until the event below is reached.
        unsafe { self.device.copy_in(bytes.as_ptr(), storage.data().cast(), bytes.len()) }?;
        let there = self.device.record_end(Lane::In);
        let there = there.and_then(|event| self.device.block_on(&event).map(|()| event));
        keep(&there, Some((bytes, storage.clone())));
        self.device.wait(Lane::Compute, &there?)?;
        Ok(storage)
    }

    /// The first `bytes` bytes of a storage.
    fn read(&self, storage: &Storage, bytes: usize) -> Result<Vec<u8>> {
        let mut read = vec![0; bytes];
        self.device.wait(Lane::Out, &self.device.record(Lane::Compute)?)?;
        // SAFETY: as in `filled`.
        unsafe { self.device.copy_out(storage.data().cast_const().cast(), read.as_mut_ptr(), bytes) }?;
        let over = self.device.record_end(Lane::Out).and_then(|event| self.device.block_on(&event));
        if let Err(error) = over {
            let failed = Err(error);
            keep(&failed, Some((read, storage.clone())));
            return failed;
        }
        Ok(read)
    }

    /// Begins to store; the outcome is for `order` to report.
    fn store(&self, from: &Storage) -> Result<Arc<dyn Parcel>> {
        let parcel = Arc::clone(&self.tier).parcel(from.bytes(), ScopeId::default(), &Here::default())?;
        loop {
            match parcel.reserve() {
                Room::Reserved => break,
                Room::Later => {
                    self.room.recv().map_err(|_| Error::new(ErrorKind::Io, "internal error: no more room"))?
                }
                Room::None => {
                    return Err(Error::new(ErrorKind::NoSpace, "no room to try the way to the disk"));
                }
            }
        }
        let mut moved = self.moved.borrow_mut();
        moved.parcels.push(Arc::clone(&parcel));
        moved.storages.push(from.clone());
        drop(moved);
        // The outcome is asked for with `order`.
        Arc::clone(&parcel).store(Block::of(from.clone()), Completion::new(|_| {}));
        Ok(parcel)
    }

    fn finish(&self, stored: &[Arc<dyn Parcel>]) -> Result<()> {
        let (counters, here) = (Arc::<Counters>::default(), Here::default());
        stored
            .iter()
            .try_for_each(|parcel| parcel.order(None, Some(StallCause::DeviceBudget), &counters, &here))?;
        self.device.block_on(&self.device.record(Lane::Compute)?)?;
        self.tier.settle();
        Ok(())
    }

    /// Begins to load; the outcome is sent to the returned receiver.
    fn load(&self, parcel: &Arc<dyn Parcel>, into: &Storage) -> Receiver<Result<()>> {
        self.moved.borrow_mut().storages.push(into.clone());
        let (sender, receiver) = channel();
        let done = Completion::new(move |outcome| drop(sender.send(outcome)));
        Arc::clone(parcel).load(into.clone(), &Here::default(), done);
        receiver
    }

    /// Waits until what this thread computes next can use the bytes.
    fn loaded(&self, parcel: &dyn Parcel, outcome: &Receiver<Result<()>>) -> Result<()> {
        let lost = |_| Error::new(ErrorKind::Io, "internal error: a load that never ended");
        outcome.recv().map_err(lost)??;
        parcel.order(None, Some(StallCause::CopyIn), &Arc::default(), &Here::default())
    }
}

/// A pattern in which no two blocks are the same.
fn pattern(piece: u64, bytes: usize) -> Vec<u8> {
    let block: Vec<u8> = (0..BLOCK).map(|at| ((at * at) >> 4) as u8).collect();
    let mut pattern = block.repeat(bytes.div_ceil(BLOCK));
    for (number, block) in pattern.chunks_exact_mut(BLOCK).enumerate() {
        block[..8].copy_from_slice(&(piece << 32 | number as u64).to_le_bytes());
    }
    pattern.truncate(bytes);
    pattern
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::device::{DeviceFaults, Simulated, Simulation};
    use crate::tier::{DirectTier, HostSettings, HostTier, PoolSize};
    use ssdtrain_store::{BackendKind, Direction, Fault, Faulty, Pool, StoreConfig};

    fn device() -> Simulated {
        Simulated::start(Duration::ZERO).unwrap()
    }

    fn config() -> StoreConfig {
        StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() }
    }

    fn tiers() -> [Arc<dyn Tier>; 2] {
        let store = || Store::open(config()).unwrap();
        let settings = HostSettings { pool: PoolSize::Fixed(4 * PIECE), read_ahead: PIECE };
        let host = HostTier::new(device(), Some(store()), settings, None).unwrap();
        [DirectTier::new(device(), store(), PIECE, None).unwrap(), host]
    }

    #[test]
    fn bytes_come_back_and_go_both_ways() {
        for tier in tiers() {
            let device = device();
            let trial = Trial::new(tier, &device);
            trial.round_trip().unwrap();
            let PathRates { write, read, both } = trial.rates().unwrap();
            assert!(write > 0.0 && read > 0.0 && both > 0.0, "{write}, {read}, {both}");
        }
    }

    /// The tier that was tried is the one that is used afterwards.
    #[test]
    fn who_uses_a_tier_after_a_trial_hears_of_room() {
        let store = Store::open(config()).unwrap();
        let tier: Arc<dyn Tier> = DirectTier::new(device(), store.clone(), PIECE, None).unwrap();
        Trial::new(Arc::clone(&tier), &device()).round_trip().unwrap();
        let (sender, receiver) = channel();
        let listener: Arc<RoomListener> = Arc::new(move || sender.send(()).unwrap());
        tier.on_room(&listener);
        let _full = store.reserve(store.stats().file_bytes).unwrap();
        let parcel = Arc::clone(&tier).parcel(PIECE, ScopeId::default(), &Here::default()).unwrap();
        assert_eq!(parcel.reserve(), Room::Later);
        receiver.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(parcel.reserve(), Room::Reserved);
    }

    #[test]
    fn a_device_that_does_not_answer_fails_the_trial_and_keeps_what_it_may_still_use() {
        // After the storage was filled, written, filled with zeros, read into, and copied back.
        for done in [0, 4, 5, 8, 9, 10, 11, 12] {
            let faults = Arc::<DeviceFaults>::default();
            let device = Simulation { delay: Duration::ZERO, staging: None };
            let [above, below] = [(); 2].map(|()| device.start(&faults).unwrap());
            let tier = DirectTier::new(below, Store::open(config()).unwrap(), PIECE, None).unwrap();
            let tier: Arc<dyn Tier> = tier;
            faults.stop_after(done);
            let outcome = Trial::new(Arc::clone(&tier), &above).round_trip();
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::TimedOut, "{done}");
            // Copies go on, from and to what was kept for them.
            faults.heal();
            above.synchronize().unwrap();
            tier.synchronize().unwrap();
        }
    }

    #[test]
    fn bytes_that_are_not_the_same_are_noticed() {
        let backend = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
        backend.inject(Direction::Read, Fault::FlippedBit, 3, 1);
        let store = Store::open_with(config(), backend).unwrap();
        let tier = DirectTier::new(device(), store, PIECE, None).unwrap();
        let error = Trial::new(tier, &device()).round_trip().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
}
