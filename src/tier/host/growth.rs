//! The size of the pool, and its growth, which runs on a thread of its own.

use std::sync::Weak;

use ssdtrain_store::contained;

use super::super::event_thread::EventThread;
use super::{Books, HostTier, internal};
use crate::device::Device;
use crate::error::Error;
use crate::mem::available_memory;

/// The size of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolSize {
    /// A fixed number of bytes, pinned at once.
    Fixed(u64),
    /// What steps need, up to `cap` bytes; nothing before one needs it.
    Learned { cap: u64 },
    /// Only what staging between device and disk needs, once a storage takes that way: these bytes, unless a storage needs more.
    Bounce(u64),
}

/// The size of a pool that only stages.
pub(crate) const BOUNCE_BYTES: u64 = 256 << 20;
/// A learned pool doubles, by at least and at most these numbers of bytes at a time: pinning a GiB takes about 0.3 s.
const PORTION: (u64, u64) = (64 << 20, 1 << 30);
/// What is pinned ahead is pinned by so many bytes at a time, since the driver serves nobody else meanwhile.
pub(super) const AHEAD: u64 = 256 << 20;

impl<D: Device> HostTier<D> {
    /// Whether more is being pinned, so that a parcel of `bytes` bytes should ask again. Pinning is slow and has its own thread.
    pub(super) fn grows(&self, books: &mut Books<D>, bytes: u64) -> bool {
        let Some(pins) = &self.pins else { return false };
        let more = self.portion(bytes);
        self.begin_to_pin(pins, books, more)
    }

    /// Whether more is being pinned. That begins if the pool has less than is wanted.
    pub(super) fn grows_ahead(&self, books: &mut Books<D>) -> bool {
        let Some(pins) = &self.pins else { return false };
        let lacking = match self.size {
            PoolSize::Learned { .. } => {
                books.wanted.min(self.pool.cap()).saturating_sub(self.pool.capacity())
            }
            PoolSize::Fixed(_) | PoolSize::Bounce(_) => 0,
        };
        self.begin_to_pin(pins, books, lacking.min(AHEAD))
    }

    /// Has this many bytes pinned, unless more is being pinned or cannot be. Returns whether any is.
    fn begin_to_pin(&self, pins: &EventThread<D>, books: &mut Books<D>, bytes: u64) -> bool {
        if books.growing || books.short || books.refused || bytes == 0 {
            return books.growing;
        }
        books.growing = true;
        let tier = Weak::clone(&self.this);
        pins.after(Vec::new(), move |_| {
            if let Some(tier) = tier.upgrade() {
                tier.grow(bytes);
            }
        });
        true
    }

    /// How much the pool grows for a parcel that finds no room; 0 if it may not grow, or would still be too small.
    fn portion(&self, bytes: u64) -> u64 {
        let capacity = self.pool.capacity();
        match self.size {
            PoolSize::Fixed(_) => 0,
            PoolSize::Learned { .. } => {
                let lacking = bytes.saturating_sub(self.pool.free_bytes()).next_multiple_of(2 << 20);
                let room = self.pool.cap().saturating_sub(capacity);
                let (least, most) = PORTION;
                if lacking > room { 0 } else { capacity.clamp(least, most).max(lacking).min(room) }
            }
            // Room for two of the largest parcel, so that one can be filled while the other is written.
            PoolSize::Bounce(least) => (2 * bytes).max(least).saturating_sub(capacity),
        }
    }

    /// Pins more, and notifies those who asked for room.
    fn grow(&self, bytes: u64) {
        // It may have grown since this was asked for.
        let capacity = self.pool.capacity();
        let bytes = bytes.min(self.pool.cap().saturating_sub(capacity));
        // Memory that others have taken since the cache was built is not available any more.
        let short = matches!(self.size, PoolSize::Learned { .. }) && bytes > available_memory() / 2;
        let grown = if short {
            Ok(())
        } else {
            contained("pinning", || self.pool.grow(bytes).map_err(Error::from))
                .unwrap_or_else(|| Err(internal("pinning panicked")))
        };
        if short {
            tracing::debug!(
                pool_bytes = self.pool.capacity(),
                "memory is short: the host pool does not grow"
            );
        }
        if let Err(error) = &grown {
            tracing::warn!(%error, pool_bytes = self.pool.capacity(), "the host pool does not grow");
        }
        {
            let mut books = self.books.lock();
            books.growing = false;
            books.short |= short;
            // A trial of copies may have grown it by what there was room for.
            books.refused |= grown.is_err() && self.pool.capacity() == capacity;
            self.grows_ahead(&mut books);
        }
        self.tell_room();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use ssdtrain_libtorch::{Block, Storage};

    use super::super::super::{Here, Room, Tier};
    use super::super::HostSettings;
    use super::*;
    use crate::device::Simulated;
    use crate::error::Completion;
    use crate::telemetry::ScopeId;
    use crate::units::MIB;

    fn tier(pool: PoolSize) -> Arc<HostTier<Simulated>> {
        let device = Simulated::start(Duration::ZERO).unwrap();
        HostTier::new(device, None, HostSettings { pool, read_ahead: 0 }, None).unwrap()
    }

    /// Waits until as much as there may be is pinned.
    fn provided(tier: &HostTier<Simulated>, bytes: u64) -> u64 {
        while !tier.provide(bytes) {
            thread::yield_now();
        }
        tier.pool.capacity()
    }

    #[test]
    fn as_much_is_pinned_ahead_as_the_pool_may_have_and_again_after_a_pause() {
        // No whole number of the portions that are pinned.
        let tier = tier(PoolSize::Learned { cap: 5 * MIB + 1 });
        assert_eq!(provided(&tier, 3 * MIB), 4 * MIB);
        assert_eq!(provided(&tier, u64::MAX), 4 * MIB);
        assert_eq!((tier.shrink(), tier.pool.capacity()), (4 * MIB, 0));
        assert_eq!(provided(&tier, 2 * MIB), 2 * MIB);
    }

    #[test]
    fn copies_are_tried_out_in_a_pool_of_any_size_whose_slots_were_in_use_a_moment_ago() {
        for pool in [2 * MIB, 16 * MIB, 20 * MIB] {
            let tier = tier(PoolSize::Fixed(pool));
            let storage = Storage::allocate(pool).unwrap();
            let parcel = Arc::clone(&tier).parcel(pool, ScopeId::default(), &Here::default()).unwrap();
            assert_eq!(parcel.reserve(), Room::Reserved);
            // It is there until its copy is done.
            Arc::clone(&parcel).store(Block::of(storage.clone()), Completion::new(|_| {}));
            parcel.abandon(None);
            drop(parcel);
            let (out, back) = tier.try_copies().unwrap().unwrap();
            assert!(out > 0.0 && back > 0.0);
            tier.assert_nothing_is_held();
            drop(storage);
        }
    }
}
