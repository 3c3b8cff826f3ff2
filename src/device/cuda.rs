//! A CUDA device through its driver, which is found at run time.
//!
//! The copy lanes are streams of our own in the primary context, the one that libtorch uses; they do not wait for the
//! legacy default stream by themselves. Events sleep in the kernel when a thread waits for them, and carry times.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{DriverError, result, sys};
use parking_lot::Mutex;
use ssdtrain_libtorch::{CudaDevice, Storage, load_cuda};

use super::{Device, Lane};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::Pin;

/// One CUDA device.
pub(crate) struct Cuda {
    driver: Arc<Driver>,
    device: CudaDevice,
    copies_out: Stream,
    copies_in: Stream,
}

/// A point in a stream's queue.
#[derive(Clone)]
pub(crate) struct Mark(Arc<Event>);

/// The primary context, retained, and the events that are not in use.
struct Driver {
    handle: sys::CUdevice,
    context: sys::CUcontext,
    events: Mutex<Vec<sys::CUevent>>,
}

struct Stream {
    driver: Arc<Driver>,
    raw: sys::CUstream,
}

struct Event {
    driver: Arc<Driver>,
    raw: sys::CUevent,
}

// SAFETY: the handles are the driver's, which may be called from any thread; the context is made current on each that does.
unsafe impl Send for Driver {}
// SAFETY: as above; what changes is behind a lock.
unsafe impl Sync for Driver {}
// SAFETY: as above.
unsafe impl Send for Stream {}
// SAFETY: as above; a stream handle does not change.
unsafe impl Sync for Stream {}
// SAFETY: as above.
unsafe impl Send for Event {}
// SAFETY: as above; an event is recorded once, before it is shared.
unsafe impl Sync for Event {}

impl Cuda {
    /// Opens the device of this number and makes the streams of its copies.
    pub(crate) fn open(index: usize) -> Result<Cuda> {
        load_cuda().map_err(|reason| {
            refused(format!(
                "libtorch has no CUDA here ({reason}); install the full torch 2.11.0 with its dependencies"
            ))
        })?;
        let device = CudaDevice::new(index).map_err(|error| refused(error.to_string()))?;
        let driver = Arc::new(Driver::open(index)?);
        let (copies_out, copies_in) = (Stream::new(&driver)?, Stream::new(&driver)?);
        Ok(Cuda { driver, device, copies_out, copies_in })
    }

    fn stream(&self, lane: Lane) -> Result<sys::CUstream> {
        match lane {
            Lane::Compute => {
                let stream = self.device.stream().map_err(|error| refused(error.to_string()))?;
                Ok(stream.cast())
            }
            Lane::Out => Ok(self.copies_out.raw),
            Lane::In => Ok(self.copies_in.raw),
        }
    }
}

impl Device for Cuda {
    type Mark = Mark;

    fn mark(&self, lane: Lane) -> Result<Mark> {
        let stream = self.stream(lane)?;
        self.driver.enter()?;
        let event = Event::new(&self.driver)?;
        // SAFETY: event and stream are of this context and alive.
        check("cuEventRecord", unsafe { result::event::record(event.raw, stream) })?;
        Ok(Mark(Arc::new(event)))
    }

    fn wait(&self, lane: Lane, mark: &Mark) -> Result<()> {
        let stream = self.stream(lane)?;
        self.driver.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are of this context and alive; the wait takes note of the event's record at once.
        check("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream, mark.0.raw, flags) })
    }

    fn is_reached(&self, mark: &Mark) -> bool {
        // SAFETY: the event is alive. A failed device says false, and whoever waits then is told why.
        self.driver.enter().is_ok() && unsafe { result::event::query(mark.0.raw) }.is_ok()
    }

    fn block_on(&self, mark: &Mark) -> Result<()> {
        self.driver.enter()?;
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { result::event::synchronize(mark.0.raw) })
    }

    fn between(&self, from: &Mark, to: &Mark) -> Result<Duration> {
        self.driver.enter()?;
        // SAFETY: both events are alive and were made with times.
        let millis = check("cuEventElapsedTime", unsafe { result::event::elapsed(from.0.raw, to.0.raw) })?;
        Ok(Duration::from_secs_f64(f64::from(millis.max(0.0)) / 1e3))
    }

    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        self.driver.enter()?;
        let from = from.addr() as sys::CUdeviceptr;
        // SAFETY: the caller's promise; the stream is alive.
        let outcome = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.copies_out.raw) };
        check("cuMemcpyDtoHAsync", outcome.result())
    }

    unsafe fn copy_in(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        self.driver.enter()?;
        let to = to.addr() as sys::CUdeviceptr;
        // SAFETY: the caller's promise; the stream is alive.
        let outcome = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.copies_in.raw) };
        check("cuMemcpyHtoDAsync", outcome.result())
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        self.device.allocate(bytes).map_err(|error| Error::new(ErrorKind::Torch, error.to_string()))
    }
}

impl Pin for Cuda {
    unsafe fn pin(&self, memory: NonNull<u8>, bytes: usize) -> Result<(), String> {
        self.driver.enter().map_err(|error| error.to_string())?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise: the bytes are mapped, and stay so until `unpin`.
        let outcome = unsafe { sys::cuMemHostRegister_v2(memory.as_ptr().cast(), bytes, flags) };
        check("cuMemHostRegister", outcome.result()).map_err(|error| error.to_string())
    }

    unsafe fn unpin(&self, memory: NonNull<u8>, _bytes: usize) {
        let outcome = self.driver.enter().and_then(|()| {
            // SAFETY: the caller's promise: `pin` registered memory that begins here.
            let outcome = unsafe { sys::cuMemHostUnregister(memory.as_ptr().cast::<c_void>()) };
            check("cuMemHostUnregister", outcome.result())
        });
        if let Err(error) = outcome {
            tracing::debug!(%error, "host memory could not be unpinned");
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {}", self.device.index())
    }
}

impl Driver {
    fn open(index: usize) -> Result<Driver> {
        // SAFETY: loads libcuda, as libtorch has done already, and lets go of it again.
        if !unsafe { sys::is_culib_present() } {
            return Err(refused("libcuda.so cannot be loaded: install NVIDIA's driver".to_owned()));
        }
        check("cuInit", result::init())?;
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        let handle = check("cuDeviceGet", result::device::get(ordinal))?;
        // SAFETY: the driver gave the device's handle.
        let context = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(handle) })?;
        Ok(Driver { handle, context, events: Mutex::default() })
    }

    /// Makes the context current on the calling thread.
    fn enter(&self) -> Result<()> {
        if matches!(result::ctx::get_current(), Ok(Some(current)) if current == self.context) {
            return Ok(());
        }
        // SAFETY: the context is retained until drop.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            for event in self.events.get_mut().drain(..) {
                // SAFETY: the event is no one's any more. A failure means that the context is gone, and the event with it.
                _ = unsafe { result::event::destroy(event) };
            }
        }
        // SAFETY: retained once, in `open`.
        _ = unsafe { result::primary_ctx::release(self.handle) };
    }
}

impl Stream {
    fn new(driver: &Arc<Driver>) -> Result<Stream> {
        driver.enter()?;
        let raw = check("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Stream { driver: Arc::clone(driver), raw })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.driver.enter().is_ok() {
            // SAFETY: the stream is no one's any more; the driver finishes what is queued on it first.
            _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

impl Event {
    fn new(driver: &Arc<Driver>) -> Result<Event> {
        let free = driver.events.lock().pop();
        let raw = match free {
            Some(raw) => raw,
            None => {
                check("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC))?
            }
        };
        Ok(Event { driver: Arc::clone(driver), raw })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.driver.events.lock().push(self.raw);
    }
}

fn check<T>(call: &str, outcome: Result<T, DriverError>) -> Result<T> {
    outcome.map_err(|error| {
        let name = error
            .error_name()
            .map_or_else(|_| format!("{error:?}"), |name| name.to_string_lossy().into_owned());
        let what = error
            .error_string()
            .map_or_else(|_| String::new(), |text| format!(" ({})", text.to_string_lossy()));
        refused(format!("{call}: {name}{what}"))
    })
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Device, message)
}
