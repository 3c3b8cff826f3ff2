//! Memory that runs out: before an allocation fails, or exceeds what it is to stay below, whoever can do without some memory of the device
//! is asked for it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, RwLockWriteGuard, Weak};

use tch::Device;

use crate::cuda::CudaDevice;
use crate::error::TorchError;
use crate::ffi;
use crate::origin::Lock;
use crate::storage::device_of;

/// Can free memory of a device.
pub trait Reliever: Send + Sync {
    /// An allocation on the calling thread found no room; `bytes` more should be free. Returns how many it has freed; fewer than `bytes`,
    /// but not 0, if other threads may have freed some meanwhile. If these are any, the allocation is tried again. If it fails once more,
    /// this is called again: with twice as many if it had freed all of them, because they lie in pieces then.
    ///
    /// The same goes for an allocation that would exceed a [`Ceiling`], but that is made in any case.
    ///
    /// No lock of the allocator is held. What the calling thread allocates meanwhile fails without asking anyone.
    fn relieve(self: Arc<Self>, bytes: u64) -> u64;
}

/// Who can be asked, and the limits.
pub(crate) struct Asked {
    relievers: Vec<(Device, Weak<dyn Reliever>)>,
    ceilings: Vec<(Device, u64)>,
}

static ASKED: Lock<Asked> = Lock::new(Asked { relievers: Vec::new(), ceilings: Vec::new() });

/// While it exists, no other thread registers a reliever or a ceiling, or looks one up.
pub(crate) type Locked = RwLockWriteGuard<'static, Asked>;

/// Keeps others from relievers and ceilings until the result is dropped.
pub(crate) fn lock() -> Locked {
    ASKED.write()
}

/// In a child process: the relievers and ceilings there were are its parent's.
pub(crate) fn leave_to_parent(mut asked: Locked) {
    asked.relievers.clear();
    for (device, _) in std::mem::take(&mut asked.ceilings) {
        set_lowest(&[], device);
    }
}

thread_local! {
    /// Whether allocations of this thread that fail do so at once.
    static FAILS: Cell<bool> = const { Cell::new(false) };
}

/// Has `reliever` asked for memory of `device`, the CPU or a CUDA device, for as long as it lives. On the CPU only
/// [our allocator](crate::install_cpu_allocator) asks.
///
/// # Errors
///
/// The device does not exist, or the allocator of this libtorch is not known. Then allocations fail as ever.
pub fn relieve_with(device: Device, reliever: Weak<dyn Reliever>) -> Result<(), TorchError> {
    // SAFETY: the callbacks are functions, which live forever.
    unsafe { ffi::st_shortage_relieve(relieve, asks) };
    if let Device::Cuda(index) = device {
        CudaDevice::new(index)?.ask()?;
    }
    let relievers = &mut ASKED.write().relievers;
    relievers.retain(|(_, reliever)| reliever.strong_count() > 0);
    relievers.push((device, reliever));
    Ok(())
}

/// A limit on what is allocated of a device, the CPU or a CUDA device, for as long as it exists. An allocation that would exceed it has
/// [relievers](Reliever) asked first, as one that finds no memory does, and is made then, whatever they could free. So the limit holds as long
/// as anything can go. After an allocation that could not be averted, none asks until what it reached, and a quarter of its excess, is
/// exceeded. Allocations [`without_relief`] fail instead.
///
/// It is a limit for the whole process, whichever thread allocates; threads that allocate at once may exceed it together. Where there are
/// several of a device, the lowest counts.
#[derive(Debug)]
#[must_use = "the limit ends when this is dropped"]
pub struct Ceiling {
    device: Device,
    bytes: u64,
}

impl Ceiling {
    /// No more than `bytes` are to be allocated of `device`, by the whole process.
    pub fn new(device: Device, bytes: u64) -> Ceiling {
        let ceilings = &mut ASKED.write().ceilings;
        ceilings.push((device, bytes));
        set_lowest(ceilings, device);
        Ceiling { device, bytes }
    }

    /// How often allocations of `device` asked for memory because of a ceiling, in the whole process.
    pub fn asked(device: Device) -> u64 {
        ffi::st_ceiling_asked(index(device))
    }
}

impl Drop for Ceiling {
    fn drop(&mut self) {
        let ceilings = &mut ASKED.write().ceilings;
        // A child process has none of its parent's.
        if let Some(place) = ceilings.iter().position(|ceiling| *ceiling == (self.device, self.bytes)) {
            ceilings.swap_remove(place);
            set_lowest(ceilings, self.device);
        }
    }
}

fn set_lowest(ceilings: &[(Device, u64)], device: Device) {
    let of_device = ceilings.iter().filter(|(of, _)| *of == device).map(|(_, bytes)| *bytes);
    ffi::st_ceiling_set(index(device), of_device.min().unwrap_or(u64::MAX));
}

/// The index of a CUDA device; -1 for the CPU.
fn index(device: Device) -> i8 {
    match device {
        // No device has such an index.
        Device::Cuda(index) => i8::try_from(index).unwrap_or(i8::MAX),
        _ => -1,
    }
}

/// Runs `work`, whose allocations on this thread fail without asking for memory.
pub fn without_relief<R>(work: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            FAILS.set(self.0);
        }
    }
    let _before = Before(FAILS.replace(true));
    work()
}

/// Makes allocations of CPU tensors fail beyond so many bytes in all, as on a device with so much memory; for tests.
#[doc(hidden)]
pub fn limit_cpu_memory(bytes: u64) {
    ffi::st_allocator_limit(bytes);
}

/// Makes one in `every` allocations of CPU tensors ask for memory although there is some; 0 ends that. For tests.
#[doc(hidden)]
pub fn press_cpu_memory(every: u64) {
    ffi::st_allocator_press(every);
}

extern "C" fn relieve(device_type: i8, device_index: i8, bytes: u64) -> u64 {
    if FAILS.get() {
        return 0;
    }
    let device = device_of(device_type, device_index);
    // Not under the lock: a reliever whose last reference is dropped here may want to take it.
    let here = |of: &Device| *of == device;
    let relievers: Vec<_> = ASKED
        .read()
        .relievers
        .iter()
        .filter(|(of, _)| here(of))
        .filter_map(|(_, reliever)| reliever.upgrade())
        .collect();
    let mut freed = 0;
    for reliever in relievers {
        if freed < bytes {
            // A panic must not unwind into C++. Its message has been printed by now; what it freed counts as nothing.
            let relief = || without_relief(|| reliever.relieve(bytes - freed));
            freed += catch_unwind(AssertUnwindSafe(relief)).unwrap_or(0);
        }
    }
    freed
}

/// Whether allocations of the calling thread ask for memory.
extern "C" fn asks() -> bool {
    !FAILS.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs;

    use parking_lot::Mutex;

    use crate::folder::library_folder;

    /// Frees what it is given to free, a part at a time.
    struct Hoard {
        parts: Mutex<Vec<u64>>,
        asked: Mutex<Vec<u64>>,
    }

    impl Reliever for Hoard {
        fn relieve(self: Arc<Self>, bytes: u64) -> u64 {
            assert_eq!(relieve(0, 0, 1), 0, "nobody is asked while somebody is");
            self.asked.lock().push(bytes);
            self.parts.lock().pop().unwrap_or_else(|| panic!("on purpose, in a reliever"))
        }
    }

    fn hoard(device: Device, parts: &[u64]) -> Arc<Hoard> {
        let hoard = Arc::new(Hoard { parts: Mutex::new(parts.to_vec()), asked: Mutex::default() });
        let weak: Weak<dyn Reliever> = Arc::downgrade(&(Arc::clone(&hoard) as Arc<dyn Reliever>));
        ASKED.write().relievers.push((device, weak));
        hoard
    }

    #[test]
    fn those_of_the_device_are_asked_in_turn_until_enough_is_free() {
        let (first, gone, other, second) = (
            hoard(Device::Cuda(7), &[9, 4]),
            hoard(Device::Cuda(7), &[100]),
            hoard(Device::Cuda(6), &[100]),
            hoard(Device::Cuda(7), &[6]),
        );
        drop(gone);
        assert_eq!(relieve(1, 7, 10), 10);
        assert_eq!(relieve(1, 7, 8), 9, "the first one has enough");
        assert_eq!((&*first.asked.lock(), &*second.asked.lock()), (&vec![10, 8], &vec![6]));
        assert!(other.asked.lock().is_empty());
        // Both panic, having nothing left.
        assert_eq!(relieve(1, 7, 5), 0);
        assert_eq!(without_relief(|| relieve(1, 6, 1)), 0);
        assert_eq!(relieve(1, 6, 1), 100);
    }

    /// The name before the first bracket.
    fn name(declaration: &str) -> String {
        let before = declaration.split('(').next().unwrap_or_default();
        before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default().to_owned()
    }

    /// The names of the virtual functions that a class declares, but for its destructor.
    fn declared(header: &str, class: &str) -> Vec<String> {
        let include = library_folder().unwrap().with_file_name("include");
        let text = fs::read_to_string(include.join(header)).unwrap();
        let (_, body) = text.split_once(class).unwrap_or_else(|| panic!("{header} has no {class}"));
        let (body, _) = body.split_once("\n};").unwrap();
        let code: String = body.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
        let functions = code.split("virtual ").skip(1).filter(|function| !function.starts_with('~'));
        functions.map(name).collect()
    }

    /// A function that is not passed on would do what the base class does, which is mostly an error.
    #[test]
    fn the_allocator_that_asks_passes_every_function_on() {
        let _loaded = tch::Tensor::from(1.0);
        let mut all = declared("c10/core/Allocator.h", "struct C10_API Allocator {");
        all.extend(declared("c10/core/CachingDeviceAllocator.h", "struct C10_API DeviceAllocator :"));
        all.extend(declared("c10/cuda/CUDACachingAllocator.h", "class CUDAAllocator :"));
        let ours = include_str!("../csrc/shortage.cpp");
        let (_, body) = ours.split_once("class Asking final").unwrap();
        let (body, _) = body.split_once("\n};").unwrap();
        let mut passed: Vec<String> = Vec::new();
        let mut functions = body.split(" override").peekable();
        while let Some(function) = functions.next().filter(|_| functions.peek().is_some()) {
            passed.push(name(function.rsplit('}').next().unwrap_or_default()));
        }
        all.sort_unstable();
        passed.sort_unstable();
        assert!(all.len() > 40, "{all:?}");
        assert_eq!(all, passed);
    }
}
