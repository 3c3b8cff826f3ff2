//! Operations on record: what made a storage, so that it can be made again with the same bits.
//!
//! Only operations that are known to be repeatable are recorded, and only while gradients are. The records hold storages
//! weakly. They see what runs right below autograd and autocast, so a storage that autograd saves is the very one that
//! was recorded.

use std::cell::RefCell;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Device;

use crate::error::{TorchError, check};
use crate::ffi::{self, StDescription, StOperations, StPosition, StRecorded, StTouched};
use crate::storage::{Storage, StorageId, device_of};
use crate::{hooks, observer};

/// Reads a clock before and after each recorded operation.
pub trait Clock: Send + Sync {
    /// Identifies this moment.
    fn stamp(&self) -> u64;
}

/// What the threads of a step have recorded.
pub struct Recording {
    raw: NonNull<StOperations>,
    /// Boxed, because C++ holds its address.
    _clock: Option<Box<Arc<dyn Clock>>>,
}

// SAFETY: the shim guards what is recorded with a lock.
unsafe impl Send for Recording {}
// SAFETY: as above.
unsafe impl Sync for Recording {}

/// One operation that has run.
pub struct Recorded(pub(crate) NonNull<StRecorded>);

// SAFETY: its reference count is atomic, and nothing else of it changes.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

/// A point in what one thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The thread's number among those that recorded, in the order in which they began.
    pub strand: u32,
    /// How many operations it had recorded before.
    pub index: u64,
}

/// A storage that an operation read or made.
pub struct RecordedStorage<'a> {
    raw: StTouched,
    of: PhantomData<&'a Recorded>,
}

impl Recording {
    /// An empty recording. With a `clock`, operations are timed.
    ///
    /// Fails if another library has taken the place in libtorch's dispatcher that recording needs: there is only one for each process.
    pub fn new(clock: Option<Arc<dyn Clock>>) -> Result<Recording, TorchError> {
        // Writes have to be seen, and backward takes over the thread's modes through the engine.
        observer::install()?;
        hooks::install()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check(unsafe { ffi::st_operations_new(&raw mut raw) })?;
        let raw = NonNull::new(raw).ok_or_else(|| TorchError("libtorch records nothing".to_owned()))?;
        let clock = clock.map(Box::new);
        if let Some(clock) = &clock {
            // SAFETY: nothing is recorded yet, and the box lives as long as the recording.
            unsafe { ffi::st_operations_time(raw.as_ptr(), stamp, (&raw const **clock).cast()) };
        }
        Ok(Recording { raw, _clock: clock })
    }

    /// Records what the calling thread does until the guard is dropped. If a thread has several guards, the newest records, in whatever
    /// order they are dropped. What a thread computes while it ends, in destructors of its own values, is not recorded.
    pub fn record(self: &Arc<Self>) -> RecordingThread {
        static GUARDS: AtomicU64 = AtomicU64::new(0);
        let number = GUARDS.fetch_add(1, Ordering::Relaxed);
        let _ = ACTIVE.try_with(|active| {
            let active = &mut active.borrow_mut().0;
            active.push((number, Arc::clone(self)));
            activate_newest(active);
        });
        RecordingThread { number, thread_bound: PhantomData }
    }

    /// The operation that made `storage`, and which of the storages it made this is. `None` if nothing is on record, if the storage may
    /// have been written to since, or if the calling thread computes on another stream.
    pub fn maker(&self, storage: &Storage) -> Option<(Recorded, usize)> {
        let (mut by, mut made) = (std::ptr::null_mut(), 0);
        // SAFETY: both are borrowed, and the places for the results are valid.
        unsafe {
            ffi::st_operations_maker(self.raw.as_ptr(), storage.0.as_ptr(), &raw mut by, &raw mut made)
        };
        NonNull::new(by).map(|by| (Recorded(by), made))
    }

    /// The point that the calling thread has reached.
    pub fn position(&self) -> Position {
        // SAFETY: the recording belongs to this value.
        let StPosition { strand, index } = unsafe { ffi::st_operations_position(self.raw.as_ptr()) };
        Position { strand, index }
    }

    /// Forgets the operations of the thread with this number; `None`: of all threads. Those that someone holds stay valid.
    pub fn clear(&self, strand: Option<u32>) {
        // SAFETY: the recording belongs to this value.
        unsafe { ffi::st_operations_clear(self.raw.as_ptr(), strand.map_or(-1, i64::from)) };
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: the recording belongs to this value. Threads that record into it hold the value, so there are none.
        unsafe { ffi::st_operations_free(self.raw.as_ptr()) };
    }
}

extern "C" fn stamp(clock: *const c_void) -> u64 {
    // SAFETY: the box of the recording that calls this.
    let clock: &Arc<dyn Clock> = unsafe { &*clock.cast() };
    // A panic must not unwind into C++; the panic hook has printed it. The operation counts as not timed.
    catch_unwind(AssertUnwindSafe(|| clock.stamp())).unwrap_or_default()
}

thread_local! {
    /// What this thread records into, with numbers, newest last.
    static ACTIVE: RefCell<Stack> = const { RefCell::new(Stack(Vec::new())) };
}

#[derive(Default)]
struct Stack(Vec<(u64, Arc<Recording>)>);

impl Drop for Stack {
    fn drop(&mut self) {
        // The thread ends. What it drops after this may still compute.
        activate_newest(&[]);
    }
}

fn activate_newest(active: &[(u64, Arc<Recording>)]) {
    let raw = active.last().map_or(std::ptr::null_mut(), |(_, recording)| recording.raw.as_ptr());
    // SAFETY: the list holds the recording until it is replaced here.
    unsafe { ffi::st_operations_exchange(raw) };
}

/// In a child process: what its parent's threads record into is not recorded into any more, and is kept.
pub(crate) fn leave_to_parent() {
    let of_parent = ACTIVE.try_with(RefCell::take);
    activate_newest(&[]);
    Box::leak(Box::new(of_parent));
}

/// Guard of [`Recording::record`].
#[must_use = "the thread stops recording when this guard is dropped"]
pub struct RecordingThread {
    number: u64,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for RecordingThread {
    fn drop(&mut self) {
        // A thread that is shutting down has dropped its list already.
        let ended = ACTIVE.try_with(|active| {
            let active = &mut active.borrow_mut().0;
            let place = active.iter().position(|(number, _)| *number == self.number)?;
            let ended = active.remove(place);
            activate_newest(active);
            Some(ended)
        });
        drop(ended);
    }
}

impl Recorded {
    /// The operator's name, such as `aten::mul`.
    pub fn name(&self) -> &'static str {
        // SAFETY: operators' names live as long as the process.
        let name = unsafe { CStr::from_ptr(self.describe().name) };
        name.to_str().unwrap_or("an operation")
    }

    /// Identifies the operation while it is held.
    pub fn id(&self) -> usize {
        self.0.as_ptr().addr()
    }

    /// How many operations were recorded before it, on whatever thread.
    pub fn number(&self) -> u64 {
        self.describe().number
    }

    /// The thread that it was recorded on, and how many were recorded there before it.
    pub fn position(&self) -> Position {
        let StDescription { strand, index, .. } = self.describe();
        Position { strand, index }
    }

    /// What the clock said before and after it ran; zero without a clock.
    pub fn stamps(&self) -> (u64, u64) {
        let facts = self.describe();
        (facts.begun, facts.ended)
    }

    /// Whether the calling thread's current stream is the one that it ran on; always on the CPU.
    pub fn is_on_stream(&self) -> bool {
        self.describe().on_stream
    }

    /// How many threads the CPU might have run it with; none on a GPU.
    pub fn threads(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(u32::try_from(self.describe().threads).ok()?)
    }

    /// The storages that it read. Numbers of zero dimensions are not among them.
    pub fn read(&self) -> impl ExactSizeIterator<Item = RecordedStorage<'_>> {
        let count = self.describe().read;
        (0..count).map(|read| {
            // SAFETY: a reference is held, and there are this many.
            let raw = unsafe { ffi::st_recorded_read(self.0.as_ptr(), read) };
            RecordedStorage { raw, of: PhantomData }
        })
    }

    /// The storages that it made.
    pub fn made(&self) -> impl ExactSizeIterator<Item = RecordedStorage<'_>> {
        let count = self.describe().made;
        (0..count).map(|made| {
            // SAFETY: a reference is held, and there are this many.
            let raw = unsafe { ffi::st_recorded_made(self.0.as_ptr(), made) };
            RecordedStorage { raw, of: PhantomData }
        })
    }

    /// The operation of `recording` that made the storage number `read` of those that it read, as it was then, and which of the storages
    /// made that is.
    pub fn maker(&self, read: usize, recording: &Recording) -> Option<(Recorded, usize)> {
        if read >= self.describe().read {
            return None;
        }
        let (mut by, mut made) = (std::ptr::null_mut(), 0);
        // SAFETY: both are borrowed, there is such a storage, and the places for the results are valid.
        unsafe {
            ffi::st_recorded_maker(self.0.as_ptr(), read, recording.raw.as_ptr(), &raw mut by, &raw mut made);
        };
        NonNull::new(by).map(|by| (Recorded(by), made))
    }

    fn describe(&self) -> StDescription {
        // SAFETY: a reference is held.
        unsafe { ffi::st_recorded_describe(self.0.as_ptr()) }
    }

    /// Runs the operation again, on the calling thread and its current stream. Takes the storages that it [read](Recorded::read), or
    /// copies of them, and returns those that it [made](Recorded::made).
    pub fn repeat(&self, read: &[Storage]) -> Result<Vec<Storage>, TorchError> {
        let facts = self.describe();
        if read.len() != facts.read {
            return Err(TorchError(format!(
                "{} storages for an operation that read {}",
                read.len(),
                facts.read
            )));
        }
        let storages: Vec<_> = read.iter().map(|storage| storage.0.as_ptr()).collect();
        let mut made = vec![std::ptr::null_mut(); facts.made];
        // SAFETY: the storages are borrowed, there are as many as it read, and there is a place for each that it makes.
        let outcome =
            check(unsafe { ffi::st_recorded_repeat(self.0.as_ptr(), storages.as_ptr(), made.as_mut_ptr()) });
        // SAFETY: the shim gave its reference to each of them to us, even if it then failed.
        let made = made.into_iter().map(|raw| unsafe { Storage::from_raw(raw) }).collect::<Vec<_>>();
        outcome?;
        made.into_iter().collect()
    }
}

impl Clone for Recorded {
    fn clone(&self) -> Recorded {
        // SAFETY: a reference is held.
        unsafe { ffi::st_recorded_retain(self.0.as_ptr()) };
        Recorded(self.0)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: this value owns one reference.
        unsafe { ffi::st_recorded_release(self.0.as_ptr()) };
    }
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} storages", self.name(), self.read().len())
    }
}

impl RecordedStorage<'_> {
    /// Which storage it is. The record keeps the address from being reused.
    pub fn id(&self) -> Option<StorageId> {
        NonNull::new(self.raw.storage).map(StorageId::of)
    }

    /// The device that it is on.
    pub fn device(&self) -> Device {
        device_of(self.raw.device_type, self.raw.device_index)
    }

    /// Its size in bytes when the operation ran.
    pub fn bytes(&self) -> u64 {
        self.raw.bytes
    }

    /// The version counter of the tensor when the operation ran.
    pub fn version(&self) -> u32 {
        self.raw.version
    }

    /// The storage, if someone still holds it and nothing can have written to it since the operation ran.
    pub fn unwritten(&self) -> Option<Storage> {
        let raw = NonNull::new(self.raw.storage).filter(|_| self.raw.unwritten)?;
        // SAFETY: the record holds a weak reference, so the counts are valid.
        unsafe { ffi::st_storage_lock(raw.as_ptr()) }.then(|| Storage::from_locked(raw))
    }
}
