//! A CUDA device, used through its driver, which is found at run time.
//!
//! The copy lanes are our own streams in the primary context, which libtorch uses too. They do not wait for the legacy default stream by
//! themselves. Marks are events that carry times. A thread that has to wait for one asks for it again and again: the driver's own waits
//! have no limit, and events that threads can sleep on are more expensive to record.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::{DriverError, result, sys};
use ssdtrain_libtorch::{CudaDevice, SegmentWatcher, Storage, VERSION, load_cuda, watch_segments};
use ssdtrain_store as store;
use ssdtrain_store::sync::Mutex;
use ssdtrain_store::{Gpu, Pin, node_of_device};

use super::patience::{Patience, Queued, unknown};
use super::{Device, Lane};
use crate::error::{Error, ErrorKind, Result};

/// What the driver answers if it does not tell, because another thread is capturing a graph in the mode that forbids it.
const CAPTURING: DriverError = DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);

/// One CUDA device.
pub(crate) struct Cuda {
    driver: Arc<Driver>,
    device: CudaDevice,
    copies_out: Copies,
    copies_in: Copies,
    /// How many events were recorded on other streams.
    computed: AtomicU64,
    patience: Patience<Event>,
}

/// A point in a stream's queue.
#[derive(Clone)]
pub(crate) struct Event {
    raw: Arc<RawEvent>,
    lane: Lane,
    /// The stream, and its position among the events of a copy lane or among all others.
    stream: usize,
    number: u64,
}

/// A copy lane. Its events are reached in the order of their numbers, so one that is reached implies all before it.
struct Copies {
    stream: Stream,
    recorded: Mutex<u64>,
    reached: AtomicU64,
}

/// The primary context, retained, and the handles of dropped events, for reuse.
pub(super) struct Driver {
    pub(super) handle: sys::CUdevice,
    context: sys::CUcontext,
    events: Mutex<Vec<sys::CUevent>>,
}

struct Stream {
    driver: Arc<Driver>,
    raw: sys::CUstream,
}

pub(super) struct RawEvent {
    driver: Arc<Driver>,
    raw: sys::CUevent,
}

/// The primary context of a device, for threads that address its memory.
pub(crate) struct Context(Driver);

/// While it lives, our context is current on the calling thread; after that, the one before it is again. That one is the program's choice
/// of a GPU, for itself and for libtorch.
#[must_use = "the context is current until this is dropped"]
pub(crate) struct Current {
    /// `None` if our context was already current; null if there was none.
    before: Option<sys::CUcontext>,
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
unsafe impl Send for RawEvent {}
// SAFETY: as above; an event is recorded once, before it is shared.
unsafe impl Sync for RawEvent {}

impl Cuda {
    /// Opens the device with this number and creates its copy streams. Threads wait for it up to `limit`.
    pub(crate) fn open(index: usize, limit: Duration) -> Result<Cuda> {
        load_cuda().map_err(|reason| {
            refused(format!(
                "libtorch has no CUDA here ({reason}); install the full torch {VERSION} with its dependencies"
            ))
        })?;
        let device = CudaDevice::new(index).map_err(|error| refused(error.to_string()))?;
        let driver = Arc::new(Driver::open(index)?);
        let (copies_out, copies_in) = (Copies::new(&driver)?, Copies::new(&driver)?);
        Ok(Cuda {
            driver,
            device,
            copies_out,
            copies_in,
            computed: AtomicU64::new(0),
            patience: Patience::new(limit),
        })
    }

    fn queue(&self, lane: Lane) -> Result<sys::CUstream> {
        self.copies(lane).map_or_else(|| self.compute(), |copies| Ok(copies.stream.raw))
    }

    fn compute(&self) -> Result<sys::CUstream> {
        let stream = self.device.stream().map_err(|error| refused(error.to_string()))?;
        Ok(stream.cast())
    }

    fn copies(&self, lane: Lane) -> Option<&Copies> {
        match lane {
            Lane::Compute => None,
            Lane::Out => Some(&self.copies_out),
            Lane::In => Some(&self.copies_in),
        }
    }

    /// Whether an event is reached, and thereby all before it.
    fn query(&self, event: &Event) -> Result<bool> {
        let copies = self.copies(event.lane);
        if copies.is_some_and(|copies| copies.reached.load(Ordering::Acquire) >= event.number) {
            return Ok(true);
        }
        let is_reached = event.raw.is_reached()?;
        if is_reached && let Some(copies) = copies {
            copies.reached.fetch_max(event.number, Ordering::AcqRel);
        }
        Ok(is_reached)
    }
}

impl Device for Cuda {
    type Event = Event;

    const IS_HOST: bool = false;

    fn record(&self, lane: Lane) -> Result<Event> {
        let stream = self.queue(lane)?;
        let raw = RawEvent::new(&self.driver)?;
        // Held while the event is recorded, so that numbers rise in the queue's order.
        let mut recorded = self.copies(lane).map(|copies| copies.recorded.lock());
        raw.record(stream)?;
        let number = match &mut recorded {
            // Threads that record at the same moment may get numbers the other way round: then the earlier one may end its wait with the
            // later one's.
            None => self.computed.fetch_add(1, Ordering::Relaxed),
            Some(recorded) => {
                **recorded += 1;
                **recorded
            }
        };
        Ok(Event { raw: Arc::new(raw), lane, stream: stream.addr(), number })
    }

    fn wait(&self, lane: Lane, event: &Event) -> Result<()> {
        let stream = self.queue(lane)?;
        let _current = self.driver.enter()?;
        event.raw.before(stream)
    }

    /// For a failed device this is false, and a thread that then waits gets the error.
    fn is_reached(&self, event: &Event) -> bool {
        self.query(event).unwrap_or(false)
    }

    fn block_on(&self, event: &Event) -> Result<()> {
        self.patience.wait(event, |event| self.query(event))
    }

    fn block_unless_late(&self, event: &Event) -> Result<()> {
        self.patience.wait_unless_late(event, |event| self.query(event))
    }

    fn synchronize(&self) -> Result<()> {
        let driver = Arc::clone(&self.driver);
        let waits = move || {
            let _current = driver.enter()?;
            match result::ctx::synchronize() {
                Err(CAPTURING) => Err(unknown("cuCtxSynchronize: another thread is capturing a graph")),
                outcome => check("cuCtxSynchronize", outcome),
            }
        };
        self.patience.outlast(|event| self.query(event), waits)
    }

    fn between(&self, from: &Event, to: &Event) -> Result<Duration> {
        let _current = self.driver.enter()?;
        // SAFETY: both events are alive and were made with times.
        let millis =
            check("cuEventElapsedTime", unsafe { result::event::elapsed(from.raw.raw, to.raw.raw) })?;
        Ok(Duration::from_secs_f64(f64::from(millis.max(0.0)) / 1e3))
    }

    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        let _current = self.driver.enter()?;
        let from = from.addr() as sys::CUdeviceptr;
        // SAFETY: the caller's promise; the stream is alive.
        let outcome =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.copies_out.stream.raw) };
        check("cuMemcpyDtoHAsync", outcome.result())
    }

    unsafe fn copy_in(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        let _current = self.driver.enter()?;
        let to = to.addr() as sys::CUdeviceptr;
        // SAFETY: the caller's promise; the stream is alive.
        let outcome = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.copies_in.stream.raw) };
        check("cuMemcpyHtoDAsync", outcome.result())
    }

    fn stream(&self) -> Result<usize> {
        self.compute().map(|stream| stream.expose_provenance())
    }

    fn after(&self, stream: usize) -> Result<()> {
        let here = self.compute()?;
        let event = RawEvent::new(&self.driver)?;
        // It is alive: libtorch uses it, too, once a storage is freed that was allocated for it or whose use there was recorded.
        event.record(ptr::with_exposed_provenance_mut(stream))?;
        let _current = self.driver.enter()?;
        event.before(here)
    }

    fn record_use(&self, storage: &Storage) -> Result<()> {
        storage.record_use().map_err(|error| refused(error.to_string()))
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        self.device.allocate(bytes).map_err(Error::torch)
    }
}

impl Pin for Cuda {
    unsafe fn pin(&self, memory: NonNull<u8>, bytes: usize) -> Result<(), String> {
        let _current = self.driver.enter().map_err(|error| error.to_string())?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise: the bytes are mapped, and stay so until `unpin`.
        let outcome = unsafe { sys::cuMemHostRegister_v2(memory.as_ptr().cast(), bytes, flags) };
        check("cuMemHostRegister", outcome.result()).map_err(|error| error.to_string())
    }

    unsafe fn unpin(&self, memory: NonNull<u8>, _bytes: usize) {
        let outcome = self.driver.enter().and_then(|_current| {
            // SAFETY: the caller's promise: `pin` registered memory that begins here.
            let outcome = unsafe { sys::cuMemHostUnregister(memory.as_ptr().cast::<c_void>()) };
            check("cuMemHostUnregister", outcome.result())
        });
        if let Err(error) = outcome {
            tracing::debug!(%error, "host memory could not be unpinned");
        }
    }

    fn node(&self) -> Option<u32> {
        node_of_device(&self.driver.address().ok()?)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {}", self.device.index())
    }
}

impl Context {
    pub(crate) fn open(index: usize) -> Result<Context> {
        Driver::open(index).map(Context)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "context of CUDA device {}", self.0.handle)
    }
}

// SAFETY: libtorch's allocator tells of a segment once it is there, and of its end before it frees it.
unsafe impl Gpu for Context {
    fn within(&self, work: &mut dyn FnMut()) -> std::result::Result<(), String> {
        let _current = self.0.enter().map_err(|error| error.to_string())?;
        work();
        Ok(())
    }

    fn watch(&self, watcher: &'static dyn store::SegmentWatcher) -> std::result::Result<(), String> {
        // Leaked, because it must live as long as the watcher that it forwards to.
        let forwarded = Box::leak(Box::new(Forwarded(watcher)));
        watch_segments(forwarded).map_err(|error| error.to_string())
    }
}

/// Forwards the notifications of libtorch's allocator to a store.
struct Forwarded(&'static dyn store::SegmentWatcher);

impl SegmentWatcher for Forwarded {
    fn came(&self, _device: usize, start: usize, bytes: usize) {
        self.0.came(start, bytes);
    }

    fn goes(&self, _device: usize, start: usize) {
        self.0.goes(start);
    }
}

/// Whether CUDA's driver can be loaded.
fn has_cuda() -> bool {
    // SAFETY: loads libcuda, if it is there, and lets go of it again.
    unsafe { sys::is_culib_present() }
}

impl Driver {
    pub(super) fn open(index: usize) -> Result<Driver> {
        if !has_cuda() {
            return Err(refused("libcuda.so cannot be loaded: install NVIDIA's driver".to_owned()));
        }
        check("cuInit", result::init())?;
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        let handle = check("cuDeviceGet", result::device::get(ordinal))?;
        // SAFETY: the driver gave the device's handle.
        let context = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(handle) })?;
        Ok(Driver { handle, context, events: Mutex::default() })
    }

    /// The device's address on the PCI bus, such as `0000:3B:00.0`.
    fn address(&self) -> Result<String> {
        let mut text = [0_u8; 32];
        // SAFETY: there is room for so many bytes, the last of which is 0.
        let outcome = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, self.handle) };
        check("cuDeviceGetPCIBusId", outcome.result())?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    pub(super) fn enter(&self) -> Result<Current> {
        let before = check("cuCtxGetCurrent", result::ctx::get_current())?.unwrap_or(ptr::null_mut());
        if before == self.context {
            return Ok(Current { before: None });
        }
        // SAFETY: the context is retained until drop.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })?;
        Ok(Current { before: Some(before) })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // Should it fail, the program has destroyed a context that was current on its thread.
            // SAFETY: it was current when this value was made, and may be null: none.
            _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Ok(_current) = self.enter() {
            for event in self.events.get_mut().drain(..) {
                // SAFETY: the event is no one's any more. A failure means that the context is gone, and the event with it.
                _ = unsafe { result::event::destroy(event) };
            }
        }
        // SAFETY: retained once, in `open`.
        _ = unsafe { result::primary_ctx::release(self.handle) };
    }
}

impl Queued for Event {
    fn follows(&self, other: &Event) -> bool {
        self.stream == other.stream && self.number >= other.number
    }
}

impl Copies {
    fn new(driver: &Arc<Driver>) -> Result<Copies> {
        Ok(Copies { stream: Stream::new(driver)?, recorded: Mutex::default(), reached: AtomicU64::new(0) })
    }
}

impl Stream {
    fn new(driver: &Arc<Driver>) -> Result<Stream> {
        let _current = driver.enter()?;
        let raw = check("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Stream { driver: Arc::clone(driver), raw })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.driver.enter() {
            // SAFETY: the stream is no one's any more; the driver finishes what is queued on it first.
            _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

impl RawEvent {
    /// An event that carries a time.
    pub(super) fn new(driver: &Arc<Driver>) -> Result<RawEvent> {
        let _current = driver.enter()?;
        let free = driver.events.lock().pop();
        let raw = match free {
            Some(raw) => raw,
            None => check("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?,
        };
        Ok(RawEvent { driver: Arc::clone(driver), raw })
    }

    /// Records it after everything queued on `stream`, which is of the same context.
    pub(super) fn record(&self, stream: sys::CUstream) -> Result<()> {
        let _current = self.driver.enter()?;
        // SAFETY: event and stream are of this context and alive.
        check("cuEventRecord", unsafe { result::event::record(self.raw, stream) })
    }

    pub(super) fn is_reached(&self) -> Result<bool> {
        let _current = self.driver.enter()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY) | CAPTURING) => Ok(false),
            outcome => check("cuEventQuery", outcome).map(|()| true),
        }
    }

    /// Makes what is queued on `stream` from now on come after the event.
    fn before(&self, stream: sys::CUstream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are of this context and alive; the wait takes note of the event's record at once.
        check("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream, self.raw, flags) })
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        self.driver.events.lock().push(self.raw);
    }
}

pub(super) fn check<T>(call: &str, outcome: Result<T, DriverError>) -> Result<T> {
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

pub(super) fn refused(message: String) -> Error {
    Error::new(ErrorKind::Device, message)
}
