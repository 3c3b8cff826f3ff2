//! Chains as kernels: compiled once per process, and launched on libtorch's stream.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::driver::{result, sys};
use ssdtrain_libtorch::{CudaDevice, Storage};
use ssdtrain_store::sync::Mutex;

use super::cuda::{Driver, RawEvent, check, refused};
use super::joined::{Arguments, Joined, Size};
use super::{nvrtc, patience};
use crate::error::{Error, Result};
use crate::fusion::{ALIGNMENT, Chain, ENTRY, Shape, TABLE_BYTES, source};

/// Makes kernels for one device.
pub(crate) struct Compiler {
    driver: Arc<Driver>,
    device: CudaDevice,
    architecture: String,
    multiprocessors: u32,
    /// The most bytes that a block may have to itself.
    shared: u32,
}

/// The kernel of a chain, on one device.
pub(crate) struct Kernel {
    driver: Arc<Driver>,
    device: CudaDevice,
    function: sys::CUfunction,
    chain: Chain,
    multiprocessors: u32,
    /// Whether its table is there, if it has one.
    has_table: AtomicBool,
}

// SAFETY: a function's handle does not change, and the driver may be called from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// By device and source.
type Kernels = HashMap<(usize, String), Arc<Kernel>>;

/// A process has no more kernels than these: each stays in its memory, and a program whose operations come in ever new orders would have
/// ever more of them.
const MOST: usize = 1000;

/// The kernels of this process. Their modules are never unloaded.
static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);

/// Where a kernel notes that what it made differs: four bytes of the host's memory, which every GPU can write to.
struct Note(NonNull<u32>);

// SAFETY: the memory is never freed, and whoever has the note has it alone.
unsafe impl Send for Note {}

/// The notes that no kernel may still write to. They are never freed: the driver waits for all of the GPU then.
static NOTES: Mutex<Vec<Note>> = Mutex::new(Vec::new());

/// How many bytes a block may have to itself.
const SHARED: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;

fn attribute(driver: &Driver, which: sys::CUdevice_attribute) -> Result<u32> {
    // SAFETY: the handle is the driver's.
    let value = unsafe { result::device::get_attribute(driver.handle, which) };
    check("cuDeviceGetAttribute", value).map(i32::unsigned_abs)
}

/// Whether kernels of the CUDA device with this number can look results up.
pub(crate) fn has_room_for_tables(index: usize) -> bool {
    Driver::open(index)
        .and_then(|driver| attribute(&driver, SHARED))
        .is_ok_and(|shared| shared >= TABLE_BYTES)
}

impl Compiler {
    /// Fails if there is no run-time compiler, or if the device cannot compute with all types.
    pub(crate) fn open(index: usize) -> Result<Compiler> {
        nvrtc::load().map_err(refused)?;
        let device = CudaDevice::new(index).map_err(|error| refused(error.to_string()))?;
        let driver = Arc::new(Driver::open(index)?);
        let attribute = |which| attribute(&driver, which);
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(refused(format!(
                "compute capability {major}.{minor} has no conversions to bfloat16"
            )));
        }
        let multiprocessors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(SHARED)?;
        Ok(Compiler { driver, device, architecture: format!("sm_{major}{minor}"), multiprocessors, shared })
    }

    /// The kernel of a chain. Takes some tenths of a second if no one has asked for it before. Fails if there are too many.
    pub(crate) fn compile(&self, chain: &Chain) -> Result<Arc<Kernel>> {
        let chain = if self.shared >= TABLE_BYTES { chain.clone() } else { chain.without_table() };
        let text = source(&chain);
        let key = (self.device.index(), text);
        if let Some(kernels) = &*KERNELS.lock() {
            match kernels.get(&key) {
                Some(known) => return Ok(Arc::clone(known)),
                None if kernels.len() >= MOST => {
                    return Err(refused(format!("this process has {MOST} kernels already")));
                }
                None => {}
            }
        }
        let text = CString::new(key.1.as_str()).map_err(|_| refused("a source with a zero".to_owned()))?;
        let image = nvrtc::compile(&text, &self.architecture).map_err(refused)?;
        let _current = self.driver.enter()?;
        // SAFETY: the image is whole, and the driver copies it.
        let module = check("cuModuleLoadData", unsafe { result::module::load_data(image.as_ptr().cast()) })?;
        let name = CString::new(ENTRY).map_err(|_| refused("a name with a zero".to_owned()))?;
        // SAFETY: the module is loaded, and stays so.
        let function = check("cuModuleGetFunction", unsafe { result::module::get_function(module, name) })?;
        let shared = Shape::of(&chain, 1, 1).shared;
        if shared > 0 {
            let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the module stays loaded.
            let outcome =
                unsafe { result::function::set_function_attribute(function, most, shared.cast_signed()) };
            check("cuFuncSetAttribute", outcome)?;
        }
        let kernel = Arc::new(Kernel {
            driver: Arc::clone(&self.driver),
            device: self.device,
            function,
            chain,
            multiprocessors: self.multiprocessors,
            has_table: AtomicBool::new(false),
        });
        let mut kernels = KERNELS.lock();
        Ok(Arc::clone(kernels.get_or_insert_default().entry(key).or_insert(kernel)))
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compiler for {} of CUDA device {}", self.architecture, self.device.index())
    }
}

impl Joined for Kernel {
    fn takes(&self, size: Size) -> bool {
        self.chain.has_room(size.count)
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        self.device.allocate(bytes).map_err(Error::torch)
    }

    fn run(&self, arguments: &Arguments<'_>) -> Result<()> {
        if self.chain.is_table() && !self.has_table.load(Ordering::Acquire) {
            return Err(refused(
                "internal error: a kernel was to look results up before it was compared".to_owned(),
            ));
        }
        self.launch(arguments, 0)
    }

    fn differs(&self, arguments: &Arguments<'_>, limit: Duration) -> Result<bool> {
        let note = self.note()?;
        if let Err(error) = self.launch(arguments, note.place()) {
            NOTES.lock().push(note);
            return Err(error);
        }
        let end = RawEvent::new(&self.driver)?;
        end.record(self.stream()?)?;
        // If the wait is in vain, the note is the GPU's for good.
        patience::wait(limit, || end.is_reached())?;
        let differs = note.is_made();
        NOTES.lock().push(note);
        // Every launch that compares computes the same one.
        self.has_table.store(true, Ordering::Release);
        Ok(differs)
    }
}

impl Kernel {
    fn launch(&self, arguments: &Arguments<'_>, differs: sys::CUdeviceptr) -> Result<()> {
        let Arguments { size: Size { count, .. }, inputs, numbers, outputs, .. } = *arguments;
        self.checked(arguments).map_err(|what| refused(format!("internal error: a kernel {what}")))?;
        let mut places: Vec<sys::CUdeviceptr> = Vec::with_capacity(inputs.len() + outputs.len());
        places.extend(inputs.iter().map(|(storage, offset)| address(storage) + offset));
        places.extend(outputs.iter().map(address));
        let mut parameters: Vec<*mut c_void> = Vec::with_capacity(places.len() + numbers.len() + 2);
        parameters.extend(places.iter().map(|place| (&raw const *place).cast_mut().cast()));
        parameters.extend(numbers.iter().map(|number| (&raw const *number).cast_mut().cast()));
        // A kernel that takes 32 bits of it reads the lower half, which comes first.
        parameters.push((&raw const count).cast_mut().cast());
        parameters.push((&raw const differs).cast_mut().cast());
        let Shape { blocks, threads, shared } = Shape::of(&self.chain, count, self.multiprocessors);
        let blocks = u32::try_from(blocks).map_err(|_| refused(format!("{blocks} blocks of threads")))?;
        let stream = self.stream()?;
        let _current = self.driver.enter()?;
        // SAFETY: the parameters are those that the chain's source declares, and the driver copies them. The storages were checked to have
        // as many bytes as the kernel reads and writes. The calling thread holds them now; what it frees later is reused behind the kernel,
        // as everything that libtorch queues on the stream.
        let outcome = unsafe {
            result::launch_kernel(
                self.function,
                (blocks, 1, 1),
                (threads, 1, 1),
                shared,
                stream,
                &mut parameters,
            )
        };
        check("cuLaunchKernel", outcome)
    }

    /// What is wrong with the arguments.
    fn checked(&self, arguments: &Arguments<'_>) -> std::result::Result<(), String> {
        let Arguments { size: Size { count, .. }, inputs, numbers, outputs, .. } = *arguments;
        let (reads, writes) = (self.chain.reads(count), self.chain.writes(count));
        if inputs.len() != reads.len()
            || outputs.len() != writes.len()
            || numbers.len() != self.chain.numbers()
        {
            return Err("was given other arguments than it takes".to_owned());
        }
        if !self.chain.has_room(count) {
            return Err(format!("was not made for {count} elements"));
        }
        let is_readable = |((storage, offset), (bytes, is_aligned)): (&(Storage, u64), (u64, bool))| {
            let first = address(storage) + offset;
            offset.saturating_add(bytes) <= storage.bytes()
                && (!is_aligned || first.is_multiple_of(ALIGNMENT))
                && !storage.data().is_null()
        };
        let is_writable = |(storage, bytes): (&Storage, u64)| {
            bytes <= storage.bytes() && address(storage).is_multiple_of(ALIGNMENT)
        };
        if !inputs.iter().zip(reads).all(is_readable) || !outputs.iter().zip(writes).all(is_writable) {
            return Err(
                "was given a storage that is too small, or lies elsewhere than it was made for".to_owned()
            );
        }
        Ok(())
    }

    /// A note that says nothing yet.
    fn note(&self) -> Result<Note> {
        let free = NOTES.lock().pop();
        let note = match free {
            Some(note) => note,
            None => {
                let _current = self.driver.enter()?;
                let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
                // SAFETY: any number of bytes may be asked for; the kernel and we write before we read.
                let made = unsafe { result::malloc_host(size_of::<u32>(), flags) };
                let made = NonNull::new(check("cuMemHostAlloc", made)?.cast());
                Note(made.ok_or_else(|| refused("cuMemHostAlloc gave no memory".to_owned()))?)
            }
        };
        // SAFETY: the four bytes are ours alone.
        unsafe { note.0.write_volatile(0) };
        Ok(note)
    }

    fn stream(&self) -> Result<sys::CUstream> {
        let stream = self.device.stream().map_err(|error| refused(error.to_string()))?;
        Ok(stream.cast())
    }
}

impl Note {
    /// Its address, which is the same on the GPU.
    fn place(&self) -> sys::CUdeviceptr {
        self.0.as_ptr().addr() as sys::CUdeviceptr
    }

    /// What the kernel wrote. It has to be done.
    fn is_made(&self) -> bool {
        // SAFETY: nobody writes any more.
        unsafe { self.0.read_volatile() != 0 }
    }
}

fn address(storage: &Storage) -> sys::CUdeviceptr {
    storage.data().addr() as sys::CUdeviceptr
}
