//! What the cache needs from a device: queues of work in order, events in them, copies, and memory. Mechanism only.

mod clock;
mod cuda;
mod faulty;
mod joined;
mod kernel;
mod nvrtc;
mod patience;
mod simulated;
mod tiles;

use std::sync::LazyLock;
use std::time::Duration;

use ssdtrain_libtorch::Storage;
use ssdtrain_store::Pin;
use ssdtrain_store::sync::Mutex;

pub(crate) use self::clock::{Clock, Span};
pub(crate) use self::cuda::{Context, Cuda};
pub(crate) use self::faulty::FaultyDevice;
pub use self::faulty::{DeviceCall, DeviceFaults};
pub(crate) use self::joined::{Arguments, Joined, Size};
pub(crate) use self::kernel::{Compiler, Kernel, has_room_for_tables};
pub(crate) use self::simulated::Simulation;
#[cfg(test)]
pub(crate) use self::simulated::{Event as SimulatedEvent, Simulated, Used as SimulatedUsed};
pub(crate) use self::tiles::Tiles;
use crate::error::{Error, ErrorKind, Result};

/// A queue whose work is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// What the calling thread computes: libtorch's current stream of that thread.
    Compute,
    /// Copies from the device to the host.
    Out,
    /// Copies from the host to the device.
    In,
}

/// A device that works through its lanes while the threads that queue the work continue.
pub(crate) trait Device: Pin + 'static {
    /// A point in a lane's queue, reached once all that was queued before it is done.
    type Event: Clone + Send + Sync + 'static;

    /// Whether its memory is the host's, so that the processor can access it.
    const IS_HOST: bool;

    /// Records an event after everything queued on `lane` so far.
    fn record(&self, lane: Lane) -> Result<Self::Event>;

    /// As [`record`](Device::record), after copies. Where no event can be recorded, nobody could wait for their end later, so this does: the
    /// caller may let go of their memory, unless the error is that the device [keeps](keep) it.
    fn record_end(&self, lane: Lane) -> Result<Self::Event> {
        self.record(lane).map_err(|error| match self.synchronize() {
            Err(unanswered) if is_unanswered(&unanswered) => unanswered,
            outcome => {
                if let Err(error) = outcome {
                    tracing::warn!(%error, "the device has failed, and with it the copies that it was given");
                }
                error
            }
        })
    }

    /// Makes what is queued on `lane` from now on wait for `event`; the calling thread continues.
    fn wait(&self, lane: Lane, event: &Self::Event) -> Result<()>;

    /// Whether `event` is reached.
    fn is_reached(&self, event: &Self::Event) -> bool;

    /// Sleeps until `event` is reached. Fails with [`ErrorKind::TimedOut`] if it is not within the device's time limit: then the device may
    /// still use what it was given.
    fn block_on(&self, event: &Self::Event) -> Result<()>;

    /// As [`block_on`](Device::block_on), but fails at once while anything is not reached that was waited for in vain, in any queue: for
    /// waits that follow one another and that nobody's next step depends on.
    fn block_unless_late(&self, event: &Self::Event) -> Result<()> {
        self.block_on(event)
    }

    /// Sleeps until everything that was queued before is done, on all lanes and streams, as [`block_on`](Device::block_on) does.
    fn synchronize(&self) -> Result<()> {
        for lane in [Lane::Compute, Lane::Out, Lane::In] {
            self.block_on(&self.record(lane)?)?;
        }
        Ok(())
    }

    /// Time from one event to another, both of which are reached; zero if `to` came first.
    fn between(&self, from: &Self::Event, to: &Self::Event) -> Result<Duration>;

    /// Queues a copy of `bytes` bytes of device memory to the host, on [`Lane::Out`].
    ///
    /// # Safety
    /// Both places are valid for `bytes` bytes until the copy is done, and nobody else writes either or reads `to`
    /// meanwhile.
    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()>;

    /// Queues a copy of `bytes` bytes of host memory to the device, on [`Lane::In`].
    ///
    /// # Safety
    /// As for [`copy_out`](Device::copy_out).
    unsafe fn copy_in(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()>;

    /// Which of several queues the calling thread's computation goes to.
    fn stream(&self) -> Result<usize>;

    /// What the calling thread computes from now on comes after all that was queued on this [`stream`](Device::stream). It lives: a storage
    /// is there that was allocated for it, or whose use on it was [recorded](Device::record_use).
    fn after(&self, stream: usize) -> Result<()>;

    /// Keeps the memory of `storage`, once freed, from being reused before everything that the calling thread has queued by then is done.
    /// Needed for a storage that was not allocated for that thread's queue.
    fn record_use(&self, storage: &Storage) -> Result<()>;

    /// A new storage of `bytes` bytes on the device, which the calling thread's computation may use at once.
    fn allocate(&self, bytes: u64) -> Result<Storage>;
}

/// Leaves `memory` to the device for good, with a warning, if `outcome` is that this has not answered in time, and may still use it. A
/// device that has failed uses nothing any more.
pub(crate) fn keep<T, M: Send + 'static>(outcome: &Result<T>, memory: Option<M>) {
    /// Never dropped. What nothing pointed to would be taken for lost by mistake.
    static KEPT: LazyLock<Mutex<Vec<Box<dyn Send>>>> = LazyLock::new(Mutex::default);
    if outcome.as_ref().err().is_some_and(is_unanswered)
        && let Some(memory) = memory
    {
        tracing::warn!("memory that the device may still use is never freed or used again");
        KEPT.lock().push(Box::new(memory));
    }
}

pub(crate) fn is_unanswered(error: &Error) -> bool {
    error.kind() == ErrorKind::TimedOut
}
