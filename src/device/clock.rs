//! How fast a GPU's clock runs. One that has reached its limit of power runs slower and faster by some percent from one step to the next, and
//! with it all that computes. The multiprocessors count their cycles; a kernel notes how many there were, and when.
//!
//! The special registers are those of NVIDIA's PTX ISA, chapter 10: `%smid`, `%clock64` and `%globaltimer`.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::{result, sys};
use ssdtrain_libtorch::{CudaDevice, Storage};
use ssdtrain_store::sync::Mutex;

use super::cuda::{Driver, check, refused};
use crate::error::{Error, Result};

const PTX: &str = include_str!("clock.ptx");
const ENTRY: &str = "note_cycles";
/// The most multiprocessors of which any is looked at.
const MOST: usize = 512;
/// Cycles and time.
const ROW: usize = 2;
const BYTES: usize = MOST * ROW * size_of::<u64>();

/// Reads the clock of one device.
pub(crate) struct Clock {
    driver: Arc<Driver>,
    device: CudaDevice,
    function: sys::CUfunction,
    blocks: u32,
}

/// The clock between two points of a stream.
pub(crate) struct Span {
    clock: Arc<Clock>,
    /// Two tables of cycles and times, by multiprocessor.
    rows: Storage,
    stream: sys::CUstream,
}

/// One whose end was queued.
pub(crate) struct Ended(Span);

// SAFETY: a function's handle does not change, and the driver may be called from any thread.
unsafe impl Send for Clock {}
// SAFETY: as above.
unsafe impl Sync for Clock {}
// SAFETY: a stream's handle does not change, and the driver may be called from any thread.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

/// By device. Their modules are never unloaded.
static CLOCKS: Mutex<Option<HashMap<usize, Arc<Clock>>>> = Mutex::new(None);

impl Clock {
    /// A span of the device's clock that begins after what the calling thread has queued. `None` where that is recorded in a graph: each
    /// replay would write to memory that is another's by then.
    pub(crate) fn begin(index: usize) -> Result<Option<Span>> {
        let known = CLOCKS.lock().get_or_insert_default().get(&index).map(Arc::clone);
        if let Some(clock) = known {
            return clock.span();
        }
        let device = CudaDevice::new(index).map_err(Error::torch)?;
        let driver = Arc::new(Driver::open(index)?);
        // Nor is anything loaded while a graph is recorded.
        if stream(device, &driver)?.is_none() {
            return Ok(None);
        }
        let clock = Arc::new(Clock::open(device, driver)?);
        Arc::clone(CLOCKS.lock().get_or_insert_default().entry(index).or_insert(clock)).span()
    }

    fn open(device: CudaDevice, driver: Arc<Driver>) -> Result<Clock> {
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the handle is the driver's.
        let count =
            check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(driver.handle, which) })?;
        let text = |text: &str| CString::new(text).map_err(|_| refused("a text with a zero".to_owned()));
        let (image, name) = (text(PTX)?, text(ENTRY)?);
        let _current = driver.enter()?;
        // SAFETY: the text ends with a zero, and the driver copies it.
        let module = check("cuModuleLoadData", unsafe { result::module::load_data(image.as_ptr().cast()) })?;
        // SAFETY: the module is loaded, and stays so.
        let function = check("cuModuleGetFunction", unsafe { result::module::get_function(module, name) })?;
        let blocks = u32::try_from(count).unwrap_or(1).max(1);
        drop(_current);
        Ok(Clock { driver, device, function, blocks })
    }

    fn span(self: &Arc<Clock>) -> Result<Option<Span>> {
        let Some(stream) = stream(self.device, &self.driver)? else { return Ok(None) };
        let rows = self.device.allocate(2 * BYTES as u64).map_err(Error::torch)?;
        let _current = self.driver.enter()?;
        let place = rows.data().addr() as sys::CUdeviceptr;
        // SAFETY: the storage has so many bytes, is ours, and is freed behind what this stream was given.
        let outcome = unsafe { result::memset_d8_async(place, 0, 2 * BYTES, stream) };
        check("cuMemsetD8Async", outcome)?;
        let span = Span { clock: Arc::clone(self), rows, stream };
        span.note(0)?;
        Ok(Some(span))
    }
}

/// What the calling thread computes on, unless it records that in a graph.
fn stream(device: CudaDevice, driver: &Driver) -> Result<Option<sys::CUstream>> {
    let stream = device.stream().map_err(Error::torch)?.cast();
    let _current = driver.enter()?;
    // SAFETY: libtorch's streams live as long as the process.
    let status = check("cuStreamIsCapturing", unsafe { result::stream::is_capturing(stream) })?;
    Ok((status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE).then_some(stream))
}

impl Span {
    /// It ends after what the calling thread has queued. Gone if that does not compute where it began, since its memory might be another's by
    /// then, or records a graph.
    pub(crate) fn end(self) -> Result<Option<Ended>> {
        if stream(self.clock.device, &self.clock.driver)? != Some(self.stream) {
            return Ok(None);
        }
        self.note(1)?;
        Ok(Some(Ended(self)))
    }

    fn note(&self, table: usize) -> Result<()> {
        let (place, count) = (self.place(table), MOST as u32);
        let mut parameters: [*mut c_void; 2] =
            [(&raw const place).cast_mut().cast(), (&raw const count).cast_mut().cast()];
        let _current = self.clock.driver.enter()?;
        // SAFETY: the parameters are those that the kernel declares, and the driver copies them. The table has as many rows as it is told.
        let outcome = unsafe {
            result::launch_kernel(
                self.clock.function,
                (self.clock.blocks, 1, 1),
                (1, 1, 1),
                0,
                self.stream,
                &mut parameters,
            )
        };
        check("cuLaunchKernel", outcome)
    }

    fn place(&self, table: usize) -> sys::CUdeviceptr {
        (self.rows.data().addr() + table * BYTES) as sys::CUdeviceptr
    }
}

impl Ended {
    /// The cycles in a second, if both ends are known of any multiprocessor; the median of all. The end has to be reached, and the calling
    /// thread to be the one that ended the span.
    pub(crate) fn rate(self) -> Result<Option<f64>> {
        let Ended(span) = self;
        let mut rows = vec![0_u64; 2 * MOST * ROW];
        let _current = span.clock.driver.enter()?;
        // SAFETY: the storage has as many bytes. Memory that is not pinned has been written when this returns; it waits for this stream alone.
        let outcome = unsafe { result::memcpy_dtoh_async(&mut rows, span.place(0), span.stream) };
        check("cuMemcpyDtoHAsync", outcome)?;
        Ok(rate(&rows))
    }
}

/// Of two tables, one after the other.
fn rate(rows: &[u64]) -> Option<f64> {
    let (first, last) = rows.split_at(MOST * ROW);
    let both = first.as_chunks::<ROW>().0.iter().zip(last.as_chunks::<ROW>().0);
    let mut rates: Vec<f64> = both
        .filter_map(|([cycles, begun], [more, ended])| {
            let (cycles, time) = (more.checked_sub(*cycles)?, ended.checked_sub(*begun)?);
            (*begun > 0 && time > 0).then(|| cycles as f64 * 1e9 / time as f64)
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_most_processors_that_both_tables_have() {
        let mut rows = vec![0_u64; 2 * MOST * ROW];
        assert_eq!(rate(&rows), None);
        let mut note = |table: usize, processor: usize, cycles: u64, time: u64| {
            let first = (table * MOST + processor) * ROW;
            rows[first..first + ROW].copy_from_slice(&[cycles, time]);
        };
        for processor in [0, 1, 7] {
            note(0, processor, 100, 1_000);
            note(1, processor, 100 + 3_000, 1_000 + 2_000);
        }
        // One that only one of them has, and one whose counter began anew.
        note(0, 3, 100, 1_000);
        note(1, 4, 9_000, 1_500);
        note(0, 5, 9_000, 1_000);
        note(1, 5, 10, 3_000);
        assert_eq!(rate(&rows), Some(1.5e9));
    }
}
