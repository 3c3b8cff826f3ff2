//! The C interface of the shim, as declared in `csrc/shim.h`; a test compares the two.

use std::ffi::{c_char, c_void};

use torch_sys::C_tensor;

#[cfg(test)]
mod layout;

/// A `c10::StorageImpl`.
#[repr(C)]
pub(crate) struct StStorage {
    _opaque: [u8; 0],
}

/// A `torch::autograd::SavedVariableHooks`.
#[repr(C)]
pub(crate) struct StVariable {
    _opaque: [u8; 0],
}

/// States of generators.
#[repr(C)]
pub(crate) struct StRandom {
    _opaque: [u8; 0],
}

/// An `at::ThreadLocalState`.
#[repr(C)]
pub(crate) struct StModes {
    _opaque: [u8; 0],
}

/// A guard over [`StModes`].
#[repr(C)]
pub(crate) struct StEntered {
    _opaque: [u8; 0],
}

/// The tensors that a function reads but did not create.
#[repr(C)]
pub(crate) struct StReads {
    _opaque: [u8; 0],
}

/// Operations on record.
#[repr(C)]
pub(crate) struct StOperations {
    _opaque: [u8; 0],
}

/// One of them.
#[repr(C)]
pub(crate) struct StRecorded {
    _opaque: [u8; 0],
}

/// The values of running statistics.
#[repr(C)]
pub(crate) struct StStatistics {
    _opaque: [u8; 0],
}

pub(crate) type StStatus = i32;

/// The status of a callback that ends the operation, which is no failure.
pub(crate) const ST_STOP: StStatus = 2;

#[repr(C)]
pub(crate) struct StSaved {
    pub(crate) storage: *mut StStorage,
    pub(crate) storage_bytes: u64,
    pub(crate) tensor_bytes: u64,
    pub(crate) version: u32,
    pub(crate) device_type: i8,
    pub(crate) device_index: i8,
    pub(crate) eligible: bool,
    pub(crate) tensor: *const C_tensor,
}

#[repr(C)]
pub(crate) struct StSegments {
    pub(crate) was: extern "C" fn(*const c_void, i8, usize, usize),
    pub(crate) came: extern "C" fn(*const c_void, i8, usize, usize),
    pub(crate) goes: extern "C" fn(*const c_void, i8, usize),
}

#[repr(C)]
pub(crate) struct StCallbacks {
    pub(crate) pack: extern "C" fn(*const c_void, *const StSaved, *mut *mut c_void) -> StStatus,
    pub(crate) unpack: extern "C" fn(*const c_void, *mut *mut StStorage) -> StStatus,
    pub(crate) release: extern "C" fn(*mut c_void),
    pub(crate) error: extern "C" fn() -> *const c_char,
}

#[repr(C)]
pub(crate) struct StTouched {
    pub(crate) storage: *mut StStorage,
    pub(crate) bytes: u64,
    pub(crate) version: u32,
    pub(crate) device_type: i8,
    pub(crate) device_index: i8,
    pub(crate) unwritten: bool,
}

#[repr(C)]
pub(crate) struct StDescription {
    pub(crate) name: *const c_char,
    pub(crate) number: u64,
    pub(crate) index: u64,
    pub(crate) strand: u32,
    pub(crate) read: usize,
    pub(crate) made: usize,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    pub(crate) on_stream: bool,
    pub(crate) threads: i32,
}

#[repr(C)]
pub(crate) struct StPosition {
    pub(crate) strand: u32,
    pub(crate) index: u64,
}

#[repr(C)]
pub(crate) struct StTile {
    pub(crate) first: i64,
    pub(crate) rows: i64,
}

#[repr(C)]
pub(crate) struct StTiling {
    pub(crate) sizes: *const i64,
    pub(crate) dimensions: usize,
    pub(crate) split: usize,
    pub(crate) tiles: *const StTile,
    pub(crate) tiles_count: usize,
    pub(crate) ends: *const usize,
    pub(crate) shares: usize,
    pub(crate) threads: i32,
}

#[repr(C)]
pub(crate) struct StPart {
    pub(crate) argument: usize,
    pub(crate) storage: *const StStorage,
    pub(crate) step: usize,
    pub(crate) offset: i64,
    pub(crate) strides: *const i64,
}

#[repr(C)]
pub(crate) struct StStep {
    pub(crate) operation: *const StRecorded,
    pub(crate) operands: *const StPart,
    pub(crate) count: usize,
    pub(crate) output: *mut StStorage,
}

#[repr(C)]
pub(crate) struct StView {
    pub(crate) storage: usize,
    pub(crate) scalar_type: i8,
    pub(crate) device_type: i8,
    pub(crate) offset: i64,
    pub(crate) dimensions: usize,
    pub(crate) sizes: *const i64,
    pub(crate) strides: *const i64,
}

pub(crate) const ST_ARGUMENT_NONE: i8 = 1;
pub(crate) const ST_ARGUMENT_TENSOR: i8 = 2;
pub(crate) const ST_ARGUMENT_INTEGER: i8 = 3;
pub(crate) const ST_ARGUMENT_REAL: i8 = 4;
pub(crate) const ST_ARGUMENT_TRUTH: i8 = 5;
pub(crate) const ST_ARGUMENT_TEXT: i8 = 6;

#[repr(C)]
pub(crate) struct StArgument {
    pub(crate) form: i8,
    pub(crate) integer: i64,
    pub(crate) real: f64,
    pub(crate) text: *const c_char,
    pub(crate) view: StView,
}

#[repr(C)]
pub(crate) struct StCall {
    pub(crate) overload: *const c_char,
    pub(crate) arguments: usize,
    pub(crate) results: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct StBlock {
    pub(crate) data: *mut c_void,
    pub(crate) bytes: u64,
    pub(crate) capacity: u64,
    pub(crate) held: bool,
}

#[derive(Default)]
#[repr(C)]
pub(crate) struct StMemory {
    pub(crate) allocated: u64,
    pub(crate) peak: u64,
    pub(crate) reserved: u64,
    pub(crate) requests: u64,
}

unsafe extern "C" {
    pub(crate) safe fn st_last_error() -> *const c_char;
    pub(crate) fn st_install(callbacks: *const StCallbacks) -> StStatus;
    pub(crate) safe fn st_activate(context: *const c_void);
    pub(crate) fn st_backward(loss: *const C_tensor, retain_graph: bool, create_graph: bool) -> StStatus;
    pub(crate) fn st_variable_save(tensor: *const C_tensor, variable: *mut *mut StVariable) -> StStatus;
    pub(crate) fn st_variable_unpack(variable: *mut StVariable, out: *mut *mut C_tensor) -> StStatus;
    pub(crate) fn st_variable_free(variable: *mut StVariable);
    pub(crate) fn st_random_of(cuda: *const i8, count: usize, random: *mut *mut StRandom) -> StStatus;
    pub(crate) fn st_random_restore(random: *const StRandom) -> StStatus;
    pub(crate) fn st_random_same(left: *const StRandom, right: *const StRandom) -> bool;
    pub(crate) fn st_random_free(random: *mut StRandom);
    pub(crate) safe fn st_recording() -> bool;
    pub(crate) fn st_modes_of_thread(modes: *mut *mut StModes) -> StStatus;
    pub(crate) fn st_modes_free(modes: *mut StModes);
    pub(crate) fn st_modes_enter(modes: *const StModes, entered: *mut *mut StEntered) -> StStatus;
    pub(crate) fn st_modes_leave(entered: *mut StEntered);
    pub(crate) safe fn st_cpu_autocast_enter() -> bool;
    pub(crate) safe fn st_cpu_autocast_leave(before: bool);
    pub(crate) fn st_writes_observe(written: extern "C" fn(*const StStorage)) -> StStatus;
    pub(crate) fn st_storage_watch(storage: *const StStorage) -> u64;
    pub(crate) fn st_storage_unwatch(storage: *const StStorage);
    pub(crate) fn st_storage_last_write(storage: *const StStorage) -> u64;
    pub(crate) fn st_reads_begin(reads: *mut *mut StReads) -> StStatus;
    pub(crate) fn st_reads_end(reads: *mut StReads);
    pub(crate) fn st_reads_check_unchanged_within(reads: *const StReads) -> StStatus;
    pub(crate) fn st_reads_check_unchanged_since(reads: *const StReads) -> StStatus;
    pub(crate) fn st_reads_free(reads: *mut StReads);
    pub(crate) fn st_reads_contain(reads: *const StReads, storage: *const StStorage) -> bool;
    pub(crate) fn st_reads_noted(storage: *const StStorage) -> bool;
    pub(crate) fn st_reads_update_statistics(reads: *const StReads) -> bool;
    pub(crate) fn st_statistics_rewind(reads: *const StReads, rewound: *mut *mut StStatistics) -> StStatus;
    pub(crate) fn st_statistics_restore(rewound: *mut StStatistics, rerun: *const StReads) -> StStatus;
    pub(crate) fn st_operations_new(recording: *mut *mut StOperations) -> StStatus;
    pub(crate) fn st_operations_free(recording: *mut StOperations);
    pub(crate) fn st_operations_time(
        recording: *mut StOperations,
        stamp: extern "C" fn(*const c_void) -> u64,
        context: *const c_void,
    );
    pub(crate) fn st_operations_exchange(recording: *mut StOperations) -> *mut StOperations;
    pub(crate) fn st_operations_position(recording: *mut StOperations) -> StPosition;
    pub(crate) fn st_operations_clear(recording: *mut StOperations, strand: i64);
    pub(crate) fn st_operations_maker(
        recording: *mut StOperations,
        storage: *const StStorage,
        by: *mut *mut StRecorded,
        made: *mut usize,
    );
    pub(crate) fn st_recorded_maker(
        recorded: *const StRecorded,
        read: usize,
        recording: *mut StOperations,
        by: *mut *mut StRecorded,
        made: *mut usize,
    );
    pub(crate) fn st_recorded_retain(recorded: *mut StRecorded);
    pub(crate) fn st_recorded_release(recorded: *mut StRecorded);
    pub(crate) fn st_recorded_describe(recorded: *const StRecorded) -> StDescription;
    pub(crate) fn st_recorded_read(recorded: *const StRecorded, read: usize) -> StTouched;
    pub(crate) fn st_recorded_made(recorded: *const StRecorded, made: usize) -> StTouched;
    pub(crate) fn st_recorded_call(recorded: *const StRecorded) -> StCall;
    pub(crate) fn st_recorded_argument(recorded: *const StRecorded, argument: usize) -> StArgument;
    pub(crate) fn st_recorded_result(recorded: *const StRecorded, result: usize) -> StView;
    pub(crate) fn st_recorded_repeat(
        recorded: *const StRecorded,
        storages: *const *mut StStorage,
        out: *mut *mut StStorage,
    ) -> StStatus;
    pub(crate) fn st_tiles_run(tiling: *const StTiling, steps: *const StStep, count: usize) -> StStatus;
    pub(crate) fn st_tiles_compare(
        tiling: *const StTiling,
        steps: *const StStep,
        count: usize,
        differs: *mut bool,
    ) -> StStatus;
    pub(crate) fn st_tensor_version(tensor: *const C_tensor, version: *mut u32) -> StStatus;
    pub(crate) fn st_tensor_takes_gradient(tensor: *const C_tensor, takes: *mut bool) -> StStatus;
    pub(crate) fn st_tensor_layout(tensor: *const C_tensor, layout: *mut u64) -> StStatus;
    pub(crate) fn st_tensor_storage(tensor: *const C_tensor) -> *mut StStorage;
    pub(crate) fn st_tensor_gradient_bytes(tensor: *const C_tensor) -> u64;
    pub(crate) fn st_storage_bytes(storage: *const StStorage) -> u64;
    pub(crate) fn st_storage_stream(storage: *const StStorage, stream: *mut i64) -> StStatus;
    pub(crate) fn st_storage_record_use(storage: *const StStorage) -> StStatus;
    pub(crate) fn st_storage_owners(storage: *const StStorage) -> u64;
    pub(crate) fn st_storage_data(storage: *const StStorage) -> *mut c_void;
    pub(crate) fn st_storage_capacity(storage: *const StStorage) -> u64;
    pub(crate) fn st_storage_block(storage: *const StStorage) -> StBlock;
    pub(crate) fn st_block_hold(data: *mut c_void);
    pub(crate) fn st_block_release(data: *mut c_void);
    pub(crate) fn st_storage_allocate(bytes: u64, storage: *mut *mut StStorage) -> StStatus;
    pub(crate) fn st_storage_elements(storage: *const StStorage, out: *mut *mut C_tensor) -> StStatus;
    pub(crate) fn st_storage_copy(storage: *const StStorage, copy: *mut *mut StStorage) -> StStatus;
    pub(crate) fn st_storage_retain(storage: *mut StStorage);
    pub(crate) fn st_storage_release(storage: *mut StStorage);
    pub(crate) fn st_storage_weak_retain(storage: *mut StStorage);
    pub(crate) fn st_storage_weak_release(storage: *mut StStorage);
    pub(crate) fn st_storage_lock(storage: *mut StStorage) -> bool;
    pub(crate) safe fn st_allocator_install(huge_pages: bool);
    pub(crate) safe fn st_allocator_memory() -> StMemory;
    pub(crate) safe fn st_allocator_reset_peak();
    pub(crate) safe fn st_allocator_end_step();
    pub(crate) safe fn st_allocator_trim();
    pub(crate) safe fn st_allocator_limit(bytes: u64);
    pub(crate) safe fn st_allocator_press(every: u64);
    pub(crate) fn st_shortage_relieve(
        relieve: extern "C" fn(i8, i8, u64) -> u64,
        asks: extern "C" fn() -> bool,
    );
    pub(crate) safe fn st_ceiling_set(cuda_index: i8, bytes: u64);
    pub(crate) safe fn st_ceiling_asked(cuda_index: i8) -> u64;
    pub(crate) safe fn st_device_ask() -> StStatus;
    pub(crate) safe fn st_fork_begins();
    pub(crate) safe fn st_fork_ends();
    pub(crate) safe fn st_fork_is_child();
    pub(crate) safe fn st_deterministic() -> StStatus;
    pub(crate) safe fn st_device_initialise() -> StStatus;
    pub(crate) fn st_device_stream(index: i8, stream: *mut *mut c_void) -> StStatus;
    pub(crate) fn st_device_exchange_stream(index: i8, stream: i64, before: *mut i64) -> StStatus;
    pub(crate) fn st_device_allocate(index: i8, bytes: u64, storage: *mut *mut StStorage) -> StStatus;
    pub(crate) fn st_device_memory(index: i8, memory: *mut StMemory) -> StStatus;
    pub(crate) safe fn st_device_reset_peak(index: i8) -> StStatus;
    pub(crate) safe fn st_device_trim() -> StStatus;
    pub(crate) fn st_device_free(index: i8, bytes: *mut u64) -> StStatus;
    pub(crate) fn st_segments_watch(watcher: StSegments, context: *const c_void) -> StStatus;
    pub(crate) safe fn st_ranges() -> bool;
    pub(crate) fn st_range_push(name: *const c_char) -> StStatus;
    pub(crate) safe fn st_range_pop() -> StStatus;
}
