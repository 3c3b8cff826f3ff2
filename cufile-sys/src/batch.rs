//! Many transfers at once.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use libc::timespec;

use crate::driver::Driver;
use crate::file::{File, offsets};
use crate::result::{Cause, Error, Result, check, told};
use crate::sys::{
    CUfileBatchHandle_t, CUfileBatchMode_t, CUfileIOEvents_t, CUfileIOParams_t, CUfileIOParamsBatch,
    CUfileIOParamsUnion, CUfileOpcode_t, CUfileStatus_t,
};

/// How long a drop waits for cancelled requests to end: so many times this long.
const PATIENCE: (u32, Duration) = (30, Duration::from_secs(1));

/// The direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

/// One transfer of a batch.
pub struct Request<T> {
    /// The file.
    pub file: File,
    /// Whether it is read or written.
    pub direction: Direction,
    /// The base of the memory, on a device or the host.
    pub base: *mut c_void,
    /// Bytes to transfer.
    pub len: usize,
    /// Where in the file.
    pub file_offset: u64,
    /// Where in memory, in bytes from `base`.
    pub memory_offset: usize,
    /// What owns the memory; it comes back with the completion.
    pub owner: T,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion<T> {
    /// The owner of the memory; none where cuFile gave the request up and may still use the memory, which is then
    /// kept for good.
    pub owner: Option<T>,
    /// Bytes transferred, or what went wrong.
    pub outcome: Result<usize>,
}

/// Requests that were not submitted.
pub struct Refused<T> {
    /// Why.
    pub error: Error,
    /// The requests; none where the library refused them, for it may have started some. The batch then keeps them,
    /// and gives back those that complete.
    pub requests: Vec<Request<T>>,
}

/// Up to `depth` transfers under way. It owns what they need until they complete.
///
/// A drop cancels what is under way and waits for it. What does not end, within half a minute, is left to cuFile for
/// good.
pub struct Batch<T: Send + 'static> {
    handle: CUfileBatchHandle_t,
    depth: usize,
    in_flight: BTreeMap<usize, Slot<T>>,
    next: usize,
    driver: Driver,
}

/// A request under way.
struct Slot<T> {
    request: Request<T>,
    /// Those of its submission, which cuFile may look at until the last of them has completed.
    _parameters: Arc<Parameters>,
    /// The submission failed: the request may not have been started.
    doubtful: bool,
}

/// An array that cuFile has the address of.
struct Parameters(*mut [CUfileIOParams_t]);

// SAFETY: the vendor's reference says that all functions are thread-safe; handle and pointers are used by them alone,
// and what owns the memory may change threads.
unsafe impl<T: Send> Send for Batch<T> {}
// SAFETY: the array is owned, and between its making and its drop nobody but cuFile looks at it.
unsafe impl Send for Parameters {}
// SAFETY: as above.
unsafe impl Sync for Parameters {}

impl Driver {
    /// Makes a batch of at most `depth` requests at a time; the driver's `max_batch_io_size` limits it.
    pub fn batch<T: Send + 'static>(&self, depth: usize) -> Result<Batch<T>> {
        const NAME: &str = "cuFileBatchIOSetUp";
        // Its later life will need them.
        self.functions().batch_submit()?;
        self.functions().batch_status()?;
        self.functions().batch_cancel()?;
        self.functions().batch_destroy()?;
        let function = self.functions().batch_set_up()?;
        let number = c_uint::try_from(depth).ok().filter(|depth| *depth > 0);
        let number = number.ok_or_else(|| {
            Error::argument(
                NAME,
                format!("a batch of {depth} requests: it takes 1 to max_batch_io_size of them"),
            )
        })?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for the result.
        let outcome = unsafe { function(&raw mut handle, number) };
        check(NAME, outcome).map_err(|error| error.about(format!("a batch of {depth} requests")))?;
        Ok(Batch { handle, depth, in_flight: BTreeMap::new(), next: 0, driver: self.clone() })
    }
}

impl<T: Send + 'static> Batch<T> {
    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Requests that [`Batch::submit`] takes now.
    pub fn room(&self) -> usize {
        self.depth - self.in_flight.len()
    }

    /// Starts the requests.
    ///
    /// # Safety
    ///
    /// The memory of each request is allocated, and nobody else's, for as long as its owner lives and is not touched
    /// through it. If its base is registered, it is within the buffer, which stays registered that long. For memory of
    /// a device its CUDA context is current.
    pub unsafe fn submit(&mut self, requests: Vec<Request<T>>) -> Result<(), Refused<T>> {
        const NAME: &str = "cuFileBatchIOSubmit";
        if requests.is_empty() {
            return Ok(());
        }
        if requests.len() > self.room() {
            let error = format!("{} requests, but the batch has room for {}", requests.len(), self.room());
            return Err(Refused { error: Error::argument(NAME, error), requests });
        }
        let prepared = self.driver.functions().batch_submit().and_then(|function| {
            let described =
                requests.iter().zip(self.next..).map(|(request, key)| request.describe(NAME, key));
            Ok((function, described.collect::<Result<Box<[_]>>>()?))
        });
        let (function, parameters) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(Refused { error, requests }),
        };
        let count = requests.len();
        let parameters = Arc::new(Parameters(Box::into_raw(parameters)));
        let first = self.next;
        for request in requests {
            let slot = Slot { request, _parameters: Arc::clone(&parameters), doubtful: false };
            self.in_flight.insert(self.next, slot);
            // The keys of a batch do not run out: at a billion a second they last for centuries.
            self.next += 1;
        }
        // A depth that C can count was checked when the batch was made.
        let number = c_uint::try_from(count).unwrap_or(c_uint::MAX);
        // SAFETY: the batch is set up; the slots own files, parameters and memory until each request has completed; the
        // caller vouches that the owners own the memory.
        let outcome = unsafe { function(self.handle, number, parameters.0.cast(), 0) };
        check(NAME, outcome).map_err(|error| {
            for slot in self.in_flight.range_mut(first..).map(|(_, slot)| slot) {
                slot.doubtful = true;
            }
            Refused { error: error.about(format!("{count} requests")), requests: Vec::new() }
        })
    }

    /// Waits until at least `least` requests have completed, or for `limit`, and returns all that have. It waits for
    /// no more requests than are surely under way.
    pub fn wait(&mut self, least: usize, limit: Option<Duration>) -> Result<Vec<Completion<T>>> {
        const NAME: &str = "cuFileBatchIOGetStatus";
        if self.in_flight.is_empty() {
            return Ok(Vec::new());
        }
        let sure = self.in_flight.values().filter(|slot| !slot.doubtful).count();
        let function = self.driver.functions().batch_status()?;
        let none = CUfileIOEvents_t { cookie: ptr::null_mut(), status: CUfileStatus_t(0), ret: 0 };
        let mut events = vec![none; self.in_flight.len()];
        // Both are at most the depth, which C can count.
        let least = c_uint::try_from(least.min(sure)).unwrap_or(0);
        let mut count = c_uint::try_from(events.len()).unwrap_or(0);
        let mut limit = limit.map(|limit| timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let limit = limit.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the batch is set up; there is room for `count` events; the limit is null or alive.
        let outcome = unsafe { function(self.handle, least, &raw mut count, events.as_mut_ptr(), limit) };
        check(NAME, outcome)?;
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(events.len());
        Ok(events.iter().take(count).filter_map(|event| self.complete(event)).collect())
    }

    /// Asks for an early end of all that is under way. Each request still completes, in its own way.
    pub fn cancel(&mut self) -> Result<()> {
        let function = self.driver.functions().batch_cancel()?;
        // SAFETY: the batch is set up.
        check("cuFileBatchIOCancel", unsafe { function(self.handle) })
    }

    /// Ends the request of the event, if it has one that has ended.
    fn complete(&mut self, event: &CUfileIOEvents_t) -> Option<Completion<T>> {
        const NAME: &str = "cuFileBatchIOGetStatus";
        if matches!(event.status, CUfileStatus_t::CUFILE_WAITING | CUfileStatus_t::CUFILE_PENDING) {
            return None;
        }
        let slot = self.in_flight.remove(&event.cookie.addr())?;
        let Request { len, file_offset, ref file, .. } = slot.request;
        let outcome = event.ret.cast_signed();
        let outcome = match event.status {
            CUfileStatus_t::CUFILE_COMPLETE => told(NAME, outcome, len),
            // Some releases say in `ret` what went wrong, some do not.
            CUfileStatus_t::CUFILE_FAILED if outcome < -1 => told(NAME, outcome, len),
            state => Err(Error::new(NAME, Cause::State(state))),
        };
        let outcome = outcome.map_err(|error| file.explain(error, file_offset, len));
        let ended = matches!(
            event.status,
            CUfileStatus_t::CUFILE_COMPLETE
                | CUfileStatus_t::CUFILE_FAILED
                | CUfileStatus_t::CUFILE_CANCELED
                | CUfileStatus_t::CUFILE_INVALID
        );
        if ended {
            return Some(Completion { owner: Some(slot.request.owner), outcome });
        }
        // It ran out of time, or into a state that this release does not know: the device may be at it still.
        Box::leak(Box::new(slot));
        Some(Completion { owner: None, outcome })
    }

    /// Cancels all requests and waits for their end.
    fn drain(&mut self) -> Result<()> {
        let cancelled = if self.in_flight.is_empty() { Ok(()) } else { self.cancel() };
        let (times, limit) = PATIENCE;
        for _ in 0..times {
            if self.in_flight.is_empty() {
                break;
            }
            drop(self.wait(self.in_flight.len(), Some(limit))?);
        }
        cancelled
    }
}

impl<T: Send + 'static> Drop for Batch<T> {
    fn drop(&mut self) {
        let drained = self.drain();
        if self.in_flight.is_empty()
            && let Ok(function) = self.driver.functions().batch_destroy()
        {
            // SAFETY: the batch was set up, is destroyed once, and has nothing under way.
            unsafe { function(self.handle) };
        } else {
            let error = format!("{} requests did not end; what they use is kept", self.in_flight.len());
            self.driver.keep_error(Err(Error::argument("cuFileBatchIODestroy", error)));
            Box::leak(Box::new(std::mem::take(&mut self.in_flight)));
        }
        self.driver.keep_error(drained);
    }
}

impl<T> Request<T> {
    /// The request as C has it.
    fn describe(&self, function: &'static str, key: usize) -> Result<CUfileIOParams_t> {
        let (file_offset, memory_offset) = offsets(function, self.file_offset, self.memory_offset)?;
        let batch = CUfileIOParamsBatch {
            devPtr_base: self.base,
            file_offset,
            devPtr_offset: memory_offset,
            size: self.len,
        };
        Ok(CUfileIOParams_t {
            mode: CUfileBatchMode_t::CUFILE_BATCH,
            u: CUfileIOParamsUnion { batch },
            fh: self.file.handle(),
            opcode: match self.direction {
                Direction::Read => CUfileOpcode_t::CUFILE_READ,
                Direction::Write => CUfileOpcode_t::CUFILE_WRITE,
            },
            cookie: ptr::without_provenance_mut(key),
        })
    }
}

impl<T: Send + 'static> fmt::Debug for Batch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Request<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("direction", &self.direction)
            .field("len", &self.len)
            .field("file_offset", &self.file_offset)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).field("requests", &self.requests).finish()
    }
}

impl Drop for Parameters {
    fn drop(&mut self) {
        // SAFETY: it was a box, and the last request that cuFile knew it by has completed.
        drop(unsafe { Box::from_raw(self.0) });
    }
}
