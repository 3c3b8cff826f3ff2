//! Raw ceilings of the path between device and host: asynchronous copies from and to pinned memory, without any
//! overhead.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use anyhow::{Result, anyhow};
use cudarc::driver::{result, sys};
use ssdtrain_store::{IoBuf, Pin, Slot};

use super::memory::buffers;
use crate::common::gpu::{Gpu, check};

/// Which way bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the device to the host.
    Out,
    /// From the host to the device.
    In,
}

/// Both directions, each with its own stream and memory.
pub(crate) struct RawCopies {
    out: Way,
    back: Way,
}

struct Way {
    gpu: Arc<Gpu>,
    direction: Direction,
    // Declared before the chunks: its drop waits for their copies.
    stream: Stream,
    chunks: Vec<Chunk>,
    chunk_bytes: usize,
}

/// The two ends of a copy, and the event that marks its completion.
struct Chunk {
    host: Arc<Slot>,
    device: DeviceMemory,
    copied: Event,
}

impl RawCopies {
    /// Takes and pins the memory for `depth` copies of `chunk_bytes` in flight at once, in each direction.
    pub(crate) fn create(gpu: &Arc<Gpu>, chunk_bytes: usize, depth: usize) -> Result<RawCopies> {
        let way = |direction| Way::create(gpu, direction, chunk_bytes, depth);
        Ok(RawCopies { out: way(Direction::Out)?, back: way(Direction::In)? })
    }

    /// Bytes per second of copies in one direction alone, over at least `bytes` bytes.
    pub(crate) fn alone(&self, direction: Direction, bytes: u64) -> Result<f64> {
        let way = if direction == Direction::Out { &self.out } else { &self.back };
        let moved = AtomicU64::new(0);
        way.run(|chunk| moved.fetch_add(chunk, Ordering::Relaxed) + chunk < bytes)
    }

    /// Bytes per second out and in at the same time, over at least `bytes` bytes each way on average.
    pub(crate) fn both(&self, bytes: u64) -> Result<[f64; 2]> {
        // Whichever direction is faster, both end when this is used up.
        let moved = AtomicU64::new(0);
        let go_on = |chunk| moved.fetch_add(chunk, Ordering::Relaxed) + chunk < 2 * bytes;
        thread::scope(|scope| {
            let ways = [&self.out, &self.back].map(|way| scope.spawn(move || way.run(go_on)));
            joined(ways)
        })
    }

    /// Bytes per second out and in while `work` runs on the calling thread, and the result of `work`.
    pub(crate) fn beside<T>(&self, work: impl FnOnce() -> T) -> Result<(T, [f64; 2])> {
        /// However the work ends, the copies end too.
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Relaxed);
            }
        }

        let working = AtomicBool::new(true);
        let go_on = |_| working.load(Ordering::Relaxed);
        thread::scope(|scope| {
            let end = End(&working);
            let ways = [&self.out, &self.back].map(|way| scope.spawn(move || way.run(go_on)));
            let outcome = work();
            drop(end);
            Ok((outcome, joined(ways)?))
        })
    }
}

impl Way {
    fn create(gpu: &Arc<Gpu>, direction: Direction, chunk_bytes: usize, depth: usize) -> Result<Way> {
        gpu.enter()?;
        let stream = Stream::create(gpu)?;
        let pin: Arc<dyn Pin> = Arc::<Gpu>::clone(gpu);
        let chunks: Result<Vec<_>> = buffers(depth, chunk_bytes, &pin)?
            .into_iter()
            .map(|host| {
                let (device, copied) = (DeviceMemory::take(gpu, chunk_bytes)?, Event::create(gpu)?);
                Ok(Chunk { host, device, copied })
            })
            .collect();
        Ok(Way { gpu: Arc::clone(gpu), direction, stream, chunks: chunks?, chunk_bytes })
    }

    /// Bytes per second of consecutive copies until `go_on`, called with the bytes of each finished copy, returns
    /// false. Copies still in flight then do not count.
    fn run(&self, go_on: impl Fn(u64) -> bool) -> Result<f64> {
        self.gpu.enter()?;
        let start = Instant::now();
        self.chunks.iter().try_for_each(|chunk| self.copy(chunk))?;
        let mut moved = 0;
        for chunk in self.chunks.iter().cycle() {
            chunk.copied.wait()?;
            moved += self.chunk_bytes;
            if !go_on(self.chunk_bytes as u64) {
                break;
            }
            self.copy(chunk)?;
        }
        let rate = moved as f64 / start.elapsed().as_secs_f64();
        self.stream.finish()?;
        Ok(rate)
    }

    /// Queues a copy.
    fn copy(&self, chunk: &Chunk) -> Result<()> {
        let Chunk { host, device, copied } = chunk;
        let (host, bytes, stream) = (host.part(0).0, self.chunk_bytes, self.stream.raw);
        match self.direction {
            Direction::Out => {
                // SAFETY: both ends are contiguous, that long and this chunk's alone; they live until the stream, which
                // is dropped before them, has done the copy.
                let outcome =
                    unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), device.address, bytes, stream) };
                check("cuMemcpyDtoHAsync", outcome.result())?;
            }
            Direction::In => {
                // SAFETY: as above.
                let outcome =
                    unsafe { sys::cuMemcpyHtoDAsync_v2(device.address, host.cast(), bytes, stream) };
                check("cuMemcpyHtoDAsync", outcome.result())?;
            }
        }
        // SAFETY: event and stream are of this context and alive.
        check("cuEventRecord", unsafe { result::event::record(copied.raw, stream) })
    }
}

fn joined(ways: [ScopedJoinHandle<'_, Result<f64>>; 2]) -> Result<[f64; 2]> {
    let [out, back] = ways.map(|way| way.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))));
    Ok([out?, back?])
}

struct Stream {
    gpu: Arc<Gpu>,
    raw: sys::CUstream,
}

struct Event {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
}

struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: sys::CUdeviceptr,
}

// SAFETY: a stream's handle may be used from any thread, and does not change.
unsafe impl Sync for Stream {}
// SAFETY: as above; an event is recorded and waited for by one thread at a time, that of its way.
unsafe impl Sync for Event {}

impl Stream {
    /// A stream of the context that is current.
    fn create(gpu: &Arc<Gpu>) -> Result<Stream> {
        let raw = check("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Stream { gpu: Arc::clone(gpu), raw })
    }

    fn finish(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // If the context cannot be entered or waited for, it no longer exists, and neither do its copies.
        if self.gpu.enter().is_ok() && self.finish().is_ok() {
            // SAFETY: nothing is queued on the stream, and it is no one's any more.
            _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

impl Event {
    /// An event of the current context; waiting for it sleeps.
    fn create(gpu: &Arc<Gpu>) -> Result<Event> {
        let raw = check("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC))?;
        Ok(Event { gpu: Arc::clone(gpu), raw })
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { result::event::synchronize(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: the event is no one's any more. A failure means that the context is gone, and the event with it.
            _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

impl DeviceMemory {
    /// Memory of the context that is current.
    fn take(gpu: &Arc<Gpu>, bytes: usize) -> Result<DeviceMemory> {
        // SAFETY: what the memory holds does not matter.
        let address = check("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?;
        Ok(DeviceMemory { gpu: Arc::clone(gpu), address })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: the memory is no one's any more, and freed once. A failure means that the context is gone.
            _ = unsafe { result::free_sync(self.address) };
        }
    }
}
