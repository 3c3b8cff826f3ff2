//! A device made of threads, for tests on machines without a GPU: its memory is the host's, each copy lane is a thread
//! that works through its queue, and the compute lane is the calling thread itself.

use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ssdtrain_libtorch::Storage;
use ssdtrain_store::sync::{Condvar, Mutex};
use ssdtrain_store::{Pin, no_thread};

use super::patience::unanswered;
use super::{Device, DeviceFaults, FaultyDevice, Lane};
use crate::error::{Error, Result};

/// The settings of a simulated device.
#[derive(Clone, Debug)]
pub(crate) struct Simulation {
    /// By how much longer each copy takes.
    pub(crate) delay: Duration,
    /// The least that a pool has which only stages, in bytes; `None` for what it has on a GPU.
    pub(crate) staging: Option<u64>,
}

impl Simulation {
    pub(crate) fn start(&self, faults: &Arc<DeviceFaults>) -> Result<FaultyDevice<Simulated>> {
        Ok(FaultyDevice::new(Simulated::with(self.delay, faults)?, faults))
    }
}

/// A device whose copies run in threads.
#[derive(Debug)]
pub(crate) struct Simulated {
    copies_out: Worker,
    copies_in: Worker,
    faults: Arc<DeviceFaults>,
    #[cfg(test)]
    used: Used,
}

/// How often who waits looks whether the device has stopped.
const LOOK: Duration = Duration::from_millis(1);

thread_local! {
    /// The stream that the calling thread would compute on if there were several.
    static STREAM: Cell<usize> = const { Cell::new(0) };
}

/// Recorded uses: storages, each with the stream that it was used on.
#[cfg(test)]
pub(crate) type Used = Arc<Mutex<Vec<(ssdtrain_libtorch::StorageId, usize)>>>;

/// A point in a lane's queue, with the time when it was reached.
#[derive(Clone, Debug, Default)]
pub(crate) struct Event(Arc<(Mutex<Option<Instant>>, Condvar)>);

struct Worker {
    /// `None` once the device is being dropped.
    queue: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
    faults: Arc<DeviceFaults>,
}

enum Work {
    Reach(Event),
    Wait(Event),
    Copy { from: usize, to: usize, bytes: usize },
}

impl Simulated {
    /// Starts the lanes. Each copy takes `delay` longer than copying the bytes does, so that tests see it in flight.
    #[cfg(test)]
    pub(crate) fn start(delay: Duration) -> Result<Simulated> {
        Simulated::with(delay, &Arc::default())
    }

    /// As [`start`](Simulated::start), with lanes that stop when `faults` says so.
    fn with(delay: Duration, faults: &Arc<DeviceFaults>) -> Result<Simulated> {
        Ok(Simulated {
            copies_out: Worker::start("out", delay, faults)?,
            copies_in: Worker::start("in", delay, faults)?,
            faults: Arc::clone(faults),
            #[cfg(test)]
            used: Used::default(),
        })
    }

    /// The recorded uses of storages.
    #[cfg(test)]
    pub(crate) fn used(&self) -> Used {
        Arc::clone(&self.used)
    }

    /// Makes the calling thread compute on another stream from now on.
    #[cfg(test)]
    pub(crate) fn enter(stream: usize) {
        STREAM.set(stream);
    }

    fn lane(&self, lane: Lane) -> Option<&Worker> {
        match lane {
            Lane::Compute => None,
            Lane::Out => Some(&self.copies_out),
            Lane::In => Some(&self.copies_in),
        }
    }
}

impl Device for Simulated {
    type Event = Event;

    const IS_HOST: bool = true;

    fn record(&self, lane: Lane) -> Result<Event> {
        let event = Event::default();
        match self.lane(lane) {
            None => event.reach(),
            Some(worker) => worker.queue(Work::Reach(event.clone())),
        }
        Ok(event)
    }

    fn wait(&self, lane: Lane, event: &Event) -> Result<()> {
        match self.lane(lane) {
            None => self.block_on(event)?,
            Some(worker) => worker.queue(Work::Wait(event.clone())),
        }
        Ok(())
    }

    fn is_reached(&self, event: &Event) -> bool {
        event.at().is_some()
    }

    /// A device that has stopped has had its time.
    fn block_on(&self, event: &Event) -> Result<()> {
        event.wait(|| self.faults.is_stopped())
    }

    fn between(&self, from: &Event, to: &Event) -> Result<Duration> {
        Ok(from.at().zip(to.at()).map_or(Duration::ZERO, |(from, to)| to.saturating_duration_since(from)))
    }

    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        self.copies_out.queue(Work::Copy {
            from: from.expose_provenance(),
            to: to.expose_provenance(),
            bytes,
        });
        Ok(())
    }

    unsafe fn copy_in(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        self.copies_in.queue(Work::Copy {
            from: from.expose_provenance(),
            to: to.expose_provenance(),
            bytes,
        });
        Ok(())
    }

    fn stream(&self) -> Result<usize> {
        Ok(STREAM.get())
    }

    /// Threads compute at once.
    fn after(&self, _stream: usize) -> Result<()> {
        Ok(())
    }

    /// Threads compute at once, so there is nothing to wait for.
    fn record_use(&self, storage: &Storage) -> Result<()> {
        tracing::trace!(?storage, stream = STREAM.get(), "used on another stream than its own");
        #[cfg(test)]
        self.used.lock().push((storage.id(), STREAM.get()));
        Ok(())
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        #[cfg(test)]
        crate::sync::assert_nothing_is_locked();
        Storage::allocate(bytes).map_err(Error::torch)
    }
}

impl Pin for Simulated {
    unsafe fn pin(&self, _memory: NonNull<u8>, _bytes: usize) -> Result<(), String> {
        Ok(())
    }

    unsafe fn unpin(&self, _memory: NonNull<u8>, _bytes: usize) {}
}

impl Event {
    pub(crate) fn reach(&self) {
        *self.0.0.lock() = Some(Instant::now());
        self.0.1.notify_all();
    }

    fn at(&self) -> Option<Instant> {
        *self.0.0.lock()
    }

    /// Waits until it is reached, or a device that has stopped has had its time.
    fn wait(&self, is_over: impl Fn() -> bool) -> Result<()> {
        let mut reached = self.0.0.lock();
        while reached.is_none() {
            self.0.1.wait_until(&mut reached, Instant::now() + LOOK);
            if reached.is_none() && is_over() {
                return Err(unanswered(LOOK));
            }
        }
        Ok(())
    }
}

impl Worker {
    fn start(name: &str, delay: Duration, faults: &Arc<DeviceFaults>) -> Result<Worker> {
        let (queue, work) = channel();
        let stops = Arc::clone(faults);
        let run = move || {
            for item in work {
                stops.proceed();
                match item {
                    Work::Reach(event) => event.reach(),
                    // Without a limit, this does not fail.
                    Work::Wait(event) => event.wait(|| false).unwrap_or_default(),
                    Work::Copy { from, to, bytes } => {
                        thread::sleep(delay);
                        let from: *const u8 = std::ptr::with_exposed_provenance(from);
                        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
                        // SAFETY: whoever queued the copy promised that both places stay valid and apart until it is done.
                        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
                    }
                }
            }
        };
        let thread = thread::Builder::new().name(format!("ssdtrain-sim-{name}")).spawn(run);
        let thread = thread.map_err(|error| no_thread("a thread of the simulated device", error))?;
        Ok(Worker { queue: Some(queue), thread: Some(thread), faults: Arc::clone(faults) })
    }

    fn queue(&self, work: Work) {
        if let Some(queue) = &self.queue {
            // The worker ends only after the queue does, unless it panicked, which joining it reports.
            drop(queue.send(work));
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.queue.take());
        if self.faults.is_stopped() {
            return;
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a lane of the simulated device panicked");
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}
