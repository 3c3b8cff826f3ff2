//! Memory that runs out: before an allocation fails, whoever can do without some memory of the device is asked for it.

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
    /// No lock of the allocator is held. What the calling thread allocates meanwhile fails without asking anyone.
    fn relieve(self: Arc<Self>, bytes: u64) -> u64;
}

type Relievers = Vec<(Device, Weak<dyn Reliever>)>;

static RELIEVERS: Lock<Relievers> = Lock::new(Vec::new());

/// While it exists, no other thread registers a reliever or looks one up.
pub(crate) type Locked = RwLockWriteGuard<'static, Relievers>;

/// Keeps others from relievers until the result is dropped.
pub(crate) fn lock() -> Locked {
    RELIEVERS.write()
}

/// In a child process: the relievers there were are its parent's.
pub(crate) fn leave_to_parent(mut relievers: Locked) {
    relievers.clear();
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
    // SAFETY: the callback is a function, which lives forever.
    unsafe { ffi::st_shortage_relieve(relieve) };
    if let Device::Cuda(index) = device {
        CudaDevice::new(index)?.ask()?;
    }
    let mut relievers = RELIEVERS.write();
    relievers.retain(|(_, reliever)| reliever.strong_count() > 0);
    relievers.push((device, reliever));
    Ok(())
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
    let relievers: Vec<_> = RELIEVERS
        .read()
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
        RELIEVERS.write().push((device, weak));
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
