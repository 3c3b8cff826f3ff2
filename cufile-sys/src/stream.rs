//! Transfers that run when a CUDA stream comes to them.
//!
//! cuFile reads the size and the offsets of such a transfer when it runs, not when it is queued, and writes the
//! outcome then. They live in a [`Block`] that nobody can touch until the stream has passed the transfer.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use libc::{off_t, size_t, ssize_t};

use crate::driver::Driver;
use crate::file::{File, offsets};
use crate::result::{Cause, Error, Result, check, told};
use crate::sys::{CUstream, cuFileReadAsync};

/// No transfer has this outcome: the transfer has not run.
const NOT_RUN: ssize_t = ssize_t::MIN;

/// A registered CUDA stream. Clones share the registration, which ends with the last of them.
#[derive(Clone)]
pub struct Stream(Arc<Registered>);

struct Registered {
    raw: CUstream,
    driver: Driver,
}

// SAFETY: the vendor's reference says that all functions are thread-safe, as CUDA's driver is; the stream is only
// passed to them.
unsafe impl Send for Registered {}
// SAFETY: as above; the handle does not change.
unsafe impl Sync for Registered {}

/// The size, the offsets and the outcome of one transfer at a time, at an address that does not change.
pub struct Block(NonNull<Transfer>);

struct Transfer {
    size: size_t,
    file_offset: off_t,
    memory_offset: off_t,
    outcome: ssize_t,
}

// SAFETY: it owns its numbers.
unsafe impl Send for Block {}
// SAFETY: as above; they cannot be reached through it.
unsafe impl Sync for Block {}

/// A transfer in the queue of a stream. Dropped before [`Queued::finish`], it leaves its block, file and stream to
/// cuFile for good: the stream may still come to it, and nobody says when it has.
#[must_use = "its block comes back from `finish` alone"]
pub struct Queued(ManuallyDrop<Held>);

/// What a transfer needs until the stream has passed it.
struct Held {
    name: &'static str,
    block: Block,
    len: usize,
    file: File,
    stream: Stream,
}

/// A transfer that could not be queued, at least not whole: parts of it may have been.
#[derive(Debug)]
pub struct NotQueued {
    /// Why.
    pub error: Error,
    /// The transfer, whose block comes back once the stream has passed what may have been queued.
    pub queued: Queued,
}

impl Driver {
    /// Registers a CUDA stream, with flags of `CU_FILE_STREAM_*`.
    ///
    /// # Safety
    ///
    /// The stream is alive, and is not destroyed before the last clone of the [`Stream`] and all that was queued with
    /// it are gone.
    pub unsafe fn register_stream(&self, stream: CUstream, flags: u32) -> Result<Stream> {
        // The drop of the stream will need it.
        self.functions().stream_deregister()?;
        let function = self.functions().stream_register()?;
        // SAFETY: the caller vouches for the stream.
        check("cuFileStreamRegister", unsafe { function(stream, flags) })?;
        Ok(Stream(Arc::new(Registered { raw: stream, driver: self.clone() })))
    }
}

impl Stream {
    /// The stream as CUDA's driver has it.
    pub fn raw(&self) -> CUstream {
        self.0.raw
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.raw()).finish()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let outcome = self.driver.functions().stream_deregister().and_then(|function| {
            // SAFETY: the stream was registered and is deregistered once; what is queued on it holds it.
            check("cuFileStreamDeregister", unsafe { function(self.raw) })
        });
        self.driver.keep_error(outcome);
    }
}

impl Block {
    /// A block for one transfer at a time.
    pub fn new() -> Block {
        let transfer = Transfer { size: 0, file_offset: 0, memory_offset: 0, outcome: NOT_RUN };
        Block(NonNull::from(Box::leak(Box::new(transfer))))
    }
}

impl Default for Block {
    fn default() -> Block {
        Block::new()
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.0).finish()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the block was a box of its own, and no transfer has it: one under way owns it and never drops it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl File {
    /// Queues a read on `stream`, of up to `len` bytes at `file_offset` into `base + memory_offset`.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `base + memory_offset` are allocated and nobody else's until the stream has passed the read;
    /// if `base` is registered, they are within the buffer, which stays registered that long.
    pub unsafe fn read_async(
        &self,
        block: Block,
        base: *mut c_void,
        len: usize,
        file_offset: u64,
        memory_offset: usize,
        stream: &Stream,
    ) -> Result<Queued, NotQueued> {
        let function = self.functions().read_async();
        let held = Held { name: "cuFileReadAsync", block, len, file: self.clone(), stream: stream.clone() };
        // SAFETY: the caller vouches for the memory.
        unsafe { held.queue(function, base, file_offset, memory_offset) }
    }

    /// Queues a write on `stream`, of up to `len` bytes from `base + memory_offset` at `file_offset`.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `base + memory_offset` are allocated and nobody writes them while the stream is at the write,
    /// nor frees them until it has passed it; if `base` is registered, they are within the buffer, which stays
    /// registered that long.
    pub unsafe fn write_async(
        &self,
        block: Block,
        base: *const c_void,
        len: usize,
        file_offset: u64,
        memory_offset: usize,
        stream: &Stream,
    ) -> Result<Queued, NotQueued> {
        let function = self.functions().write_async();
        let held = Held { name: "cuFileWriteAsync", block, len, file: self.clone(), stream: stream.clone() };
        // SAFETY: the caller vouches for the memory.
        unsafe { held.queue(function, base.cast_mut(), file_offset, memory_offset) }
    }
}

impl Held {
    /// Queues the transfer by `function`.
    ///
    /// # Safety
    ///
    /// That of [`File::read_async`] or [`File::write_async`].
    unsafe fn queue(
        self,
        function: Result<cuFileReadAsync>,
        base: *mut c_void,
        file_offset: u64,
        memory_offset: usize,
    ) -> Result<Queued, NotQueued> {
        let transfer = self.block.0.as_ptr();
        let outcome = function.and_then(|function| {
            let (file_offset, memory_offset) = offsets(self.name, file_offset, memory_offset)?;
            let fresh = Transfer { size: self.len, file_offset, memory_offset, outcome: NOT_RUN };
            // SAFETY: no transfer has the block, as it was handed over whole.
            unsafe { transfer.write(fresh) };
            // SAFETY: the field is in the block.
            let size = unsafe { &raw mut (*transfer).size };
            // SAFETY: as above.
            let file_offset = unsafe { &raw mut (*transfer).file_offset };
            // SAFETY: as above.
            let memory_offset = unsafe { &raw mut (*transfer).memory_offset };
            // SAFETY: as above.
            let outcome = unsafe { &raw mut (*transfer).outcome };
            let (handle, stream) = (self.file.handle(), self.stream.raw());
            // SAFETY: file and stream are registered, and they and the numbers stay until the stream has passed the
            // transfer; the caller vouches for the memory.
            let status = unsafe { function(handle, base, size, file_offset, memory_offset, outcome, stream) };
            check(self.name, status)
        });
        match outcome {
            Ok(()) => Ok(Queued(ManuallyDrop::new(self))),
            Err(error) => {
                let error = self.file.explain(error, file_offset, self.len);
                Err(NotQueued { error, queued: Queued(ManuallyDrop::new(self)) })
            }
        }
    }
}

impl Queued {
    /// The block, for the next transfer, and the bytes transferred.
    ///
    /// # Safety
    ///
    /// The stream has passed the transfer: since it was queued, the stream was synchronised, or an event recorded on it
    /// later was reached. A transfer that was [`NotQueued`] counts as queued.
    pub unsafe fn finish(self) -> (Block, Result<usize>) {
        let Held { name, block, len, file, stream: _stream } = ManuallyDrop::into_inner(self.0);
        // SAFETY: the block is alive, and cuFile is done with it, as the caller says.
        let Transfer { file_offset, outcome, .. } = unsafe { block.0.as_ptr().read() };
        let outcome = match outcome {
            NOT_RUN => Err(Error::new(name, Cause::NotRun)),
            outcome => told(name, outcome, len),
        };
        (block, outcome.map_err(|error| file.explain(error, file_offset.cast_unsigned(), len)))
    }
}

impl fmt::Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Queued").field(&self.0.block).finish()
    }
}

impl fmt::Display for NotQueued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for NotQueued {}
