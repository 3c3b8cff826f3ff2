//! A library for `LD_PRELOAD` that registers GPU memory with NVIDIA cuFile after it is allocated, and deregisters it
//! before it is freed.
//!
//! cuFile moves data between files and GPU memory. It accesses memory that is registered with it directly; data for
//! other memory goes through cuFile's own buffers, with one more copy. A program that was not written for cuFile,
//! such as a PyTorch program, does not register the memory of its tensors. With this library preloaded in front of
//! CUDA, it does not have to.
//!
//! # Use
//!
//! ```sh
//! cargo build --release --package ssdtrain-malloc-hook
//! LD_PRELOAD=$PWD/target/release/libssdtrain_malloc_hook.so SSDTRAIN_MALLOC_HOOK=1 python train.py
//! ```
//!
//! | variable | means |
//! |---|---|
//! | `SSDTRAIN_MALLOC_HOOK=1` | the hook is on from the start; otherwise it is off until it is turned on |
//! | `SSDTRAIN_MALLOC_HOOK_REPORT=1` | a line of counters goes to standard error when a process ends that has loaded CUDA |
//!
//! A program turns the hook on and off and reads its counters through a few C functions, which
//! `include/ssdtrain_malloc_hook.h` declares. From Python:
//!
//! ```python
//! import ctypes
//!
//! FIELDS = ("allocations", "frees", "unknown_frees", "registrations", "deregistrations", "refusals",
//!           "live_segments", "live_bytes", "registered_segments", "registered_bytes", "last_error")
//!
//! class Stats(ctypes.Structure):
//!     _fields_ = [(name, ctypes.c_int64) for name in FIELDS]
//!
//! hook = ctypes.CDLL(None)  # what is preloaded is there under its own name
//! hook.ssdtrain_malloc_hook_stats.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
//! hook.ssdtrain_malloc_hook_enable(1)
//! hook.ssdtrain_malloc_hook_wait()  # what was allocated since then is registered a little later
//! stats = Stats()
//! hook.ssdtrain_malloc_hook_stats(ctypes.byref(stats), ctypes.sizeof(stats))
//! print(stats.registered_segments, stats.registered_bytes)
//! ```
//!
//! # What is intercepted
//!
//! - The CUDA runtime: `cudaMalloc`, `cudaFree`, `cudaMallocAsync`, `cudaMallocFromPoolAsync`, `cudaFreeAsync`.
//! - The CUDA driver: `cuMemAlloc`, `cuMemFree`; and `cuMemMap`, `cuMemSetAccess`, `cuMemUnmap`, which PyTorch's expandable
//!   segments use. A mapping is registered once access to it has been granted, each separately, because each may be unmapped
//!   separately.
//! - The same driver functions when a program gets their addresses from `cudaGetDriverEntryPoint`,
//!   `cudaGetDriverEntryPointByVersion` or `cuGetProcAddress`. PyTorch does; it need not be changed.
//!
//! A registration that cuFile refuses is counted, and the program continues with memory that is not registered; it is
//! not tried again. cuFile promises registration for memory from `cudaMalloc`, but not for that of pools: once memory
//! of a pool has been refused, cuFile is not asked for such memory any more, and the rest of it counts as refused.
//! Mapped memory has to be created with `gpuDirectRDMACapable`, as PyTorch's is on devices that have it.
//!
//! # Limits
//!
//! - A program that links the runtime statically (`libcudart_static.a`, the default of nvcc) calls nothing that a preloaded
//!   library could intercept. PyTorch from PyPI links `libcudart.so`.
//! - A program that finds CUDA's functions with `dlsym` on a handle of its own gets the real ones, and is not intercepted. In
//!   Python `ctypes.CDLL("libcudart.so.13").cudaMalloc` is such a case; `ctypes.CDLL(None).cudaMalloc` is the hook's function.
//!   Libraries that are loaded with `RTLD_DEEPBIND` are not intercepted either.
//! - Managed, pitched and host memory, arrays, and the driver's own `cuMemAllocAsync` are not intercepted. Allocations of a
//!   graph (`cudaMallocAsync` on a stream that is being captured) are ignored: they have no memory yet.
//! - When the hook is turned on, memory that is already live is not registered, and is freed as if there were no hook. When it
//!   is turned off, all registrations are undone.
//! - Memory is registered some milliseconds after it was allocated. Until then transfers go through cuFile's own buffers, as for
//!   memory that is not registered. Memory that is freed before its turn is never registered.
//! - cuFile is looked up as `libcufile.so.0` when the first memory is allocated. It counts registered memory against the
//!   `max_device_pinned_mem_size_kb` of `cufile.json` and against the BAR1 aperture of the GPU, and refuses any excess.
//! - A buffer that the program registers with cuFile itself must not have been registered by the hook: a second registration of
//!   the same memory is refused.
//! - `cudaDeviceReset`, or the end of a context, frees memory without any call that the hook intercepts. The memory counts as
//!   live until its addresses are used again; then its registration is undone.
//! - Only one CUDA runtime per process is supported. In a fork, which cannot use CUDA, the hook is off.
//! - At the end of a process registrations are left to the kernel: cuFile may be shut down before memory is freed.
//!
//! # Cost
//!
//! While the hook is off, a call costs one additional relaxed load, of the switch, besides the jump to the real
//! function. While it is on, an allocation also costs an entry in the book (a lock that nobody holds for long, and
//! two insertions) and, if the registering thread is asleep, waking it, which is most of the cost: a few microseconds
//! in all. Registering, which takes cuFile from 4 ms for 2 MiB to 25 ms for 256 MiB on an H200, is left to that
//! thread. A free costs the time that cuFile takes to deregister and, if that very memory is being registered at the
//! moment, the rest of that time too; memory that is still waiting is freed at once. With PyTorch this is paid per
//! segment of the caching allocator, not per tensor; with pools (`backend:cudaMallocAsync`) it would be paid per
//! tensor. `tests/gpu/preload_torch.py` measures it.
//!
//! # Threads
//!
//! All functions may be called from any thread. No lock that an allocation or a free takes is held while CUDA or cuFile runs.
//!
//! One thread, `ssdtrain-reg`, opens cuFile and makes all registrations, one after the other. It starts with the
//! first memory that is allocated while the hook is on. It sleeps while nothing is waiting (from a tenth of a second
//! after its last work), and does not run in place of the thread that wakes it. On this thread cuFile finds the CUDA
//! context that the allocating thread had. What it does there does not disturb graph captures that other threads have
//! begun. If the thread cannot be started, the memory counts as refused (last error -2), and the next allocation
//! tries again. Memory is deregistered by the thread that frees it.
//!
//! Memory that cuFile allocates while it registers, on the same thread, is not registered. A panic stops at the
//! border, and the call proceeds to the real function; in a registration it counts as a refusal. When the process
//! ends, it waits at most five seconds for the cuFile call that the thread is in, and no further call follows.

pub mod book;
mod context;
mod control;
pub mod cufile;
mod driver;
mod entry;
pub mod hook;
mod real;
mod runtime;

pub use control::{
    Stats, ssdtrain_malloc_hook_enable, ssdtrain_malloc_hook_find, ssdtrain_malloc_hook_print,
    ssdtrain_malloc_hook_stats, ssdtrain_malloc_hook_wait,
};
