//! A safe Rust interface to what libtorch 2.11 offers only to C++: default saved-tensor hooks without Python, the
//! state that recomputation needs, storages by identity, a CPU allocator suited to `O_DIRECT`, and CUDA and NVTX
//! looked up at run time.
//!
//! Errors cross the border as values in both directions: no C++ exception reaches Rust, and no Rust panic reaches
//! C++.

mod block;
mod call;
mod cuda;
mod error;
mod ffi;
mod folder;
mod fork;
mod hooks;
mod huge_pages;
mod memory;
mod memory_stats;
mod observer;
mod origin;
mod random;
mod ranges;
mod recording;
mod segments;
mod shortage;
mod storage;
mod thread_state;
mod tiles;
mod version;

pub use block::Block;
pub use call::{Argument, Call, View};
pub use cuda::{CudaDevice, OnStream, load_cuda, make_deterministic};
pub use error::TorchError;
pub use folder::library_folder;
pub use fork::notice_forks;
pub use hooks::{
    Active, Handle, Hooks, Packed, SavedTensor, SavedTensorHooks, SavedVariable, activate, backward, install,
    is_active,
};
pub use memory::{end_step, gradient_bytes, install_cpu_allocator, memory, reset_peak, trim};
pub use memory_stats::MemoryStats;
pub use observer::{Reading, Reads, Statistics, Watch, WriteObserver, observe_writes};
pub use origin::{Origin, PerProcess, SAVED_BY_PARENT, once};
pub use random::RandomState;
pub use ranges::{Range, range};
pub use recording::{Clock, Position, Recorded, RecordedStorage, Recording, RecordingThread};
pub use segments::{SegmentWatcher, watch_segments};
pub use shortage::{Ceiling, Reliever, limit_cpu_memory, press_cpu_memory, relieve_with, without_relief};
pub use storage::{Storage, StorageId, WeakStorage};
pub use thread_state::{CpuAutocast, Entered, Modes, is_recording, layout, takes_gradient, version};
pub use tiles::{Origin as PartOrigin, Part, Step, Tile, Tiling};
pub use version::VERSION;
