// The C interface of the shim. Everything that crosses it is a plain value, a borrowed pointer, or a pointer whose
// ownership the comment states. No C++ exception leaves a function declared here: failures are returned as a non-zero
// status, and st_last_error() returns the message for the calling thread. Callbacks into Rust follow the same rule in
// the other direction.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct st_tensor st_tensor;    // at::Tensor, as torch-sys passes it
typedef struct st_storage st_storage;  // c10::StorageImpl
typedef struct st_variable st_variable;  // torch::autograd::SavedVariableHooks
typedef struct st_random st_random;    // states of generators
typedef struct st_modes st_modes;      // at::ThreadLocalState
typedef struct st_entered st_entered;  // a guard over them
typedef struct st_reads st_reads;      // what a function reads that it did not make
typedef struct st_statistics st_statistics;  // values of running statistics
typedef struct st_operations st_operations;  // operations on record
typedef struct st_recorded st_recorded;  // one of them, counted by references
typedef int32_t st_status;             // 0: done; anything else: see st_last_error()

#define ST_STOP 2

// Message of the calling thread's last failed call; valid until its next failed call.
const char* st_last_error(void);

// ---- saved-tensor hooks ------------------------------------------------------------------------------------------------

// What autograd is about to save. `storage` is borrowed and lives at least until the callback returns.
typedef struct {
  st_storage* storage;
  uint64_t storage_bytes;
  uint64_t tensor_bytes;
  uint32_t version;       // of the tensor's version counter, at this moment
  int8_t device_type;     // c10::DeviceType
  int8_t device_index;
  bool eligible;          // plain strided dense tensor with data: its storage can be moved
  const st_tensor* tensor;  // borrowed, as the storage; null if not eligible
} st_saved;

typedef struct {
  // Decides about a saved tensor. Leaves *handle null if the graph should keep the tensor itself. May return ST_STOP: the
  // operation then fails, with a message of its own.
  st_status (*pack)(const void* context, const st_saved* saved, void** handle);
  // Returns the packed tensor's storage in *storage, with a strong reference that the caller takes over.
  st_status (*unpack)(const void* handle, st_storage** storage);
  // The graph has released the handle. Called once per handle.
  void (*release)(void* handle);
  // Message of the calling thread's last failed callback; valid until its next one.
  const char* (*error)(void);
} st_callbacks;

// Makes autograd ask us about every tensor it saves. Call once per process; `callbacks` must live forever.
st_status st_install(const st_callbacks* callbacks);
// Sets the context for tensors saved by the calling thread (null: none).
void st_activate(const void* context);

// Runs backward from one scalar.
st_status st_backward(const st_tensor* loss, bool retain_graph, bool create_graph);

// Saves `tensor` as an autograd node would, unpacks it (a new at::Tensor each time), and frees it.
st_status st_variable_save(const st_tensor* tensor, st_variable** variable);
st_status st_variable_unpack(st_variable* variable, st_tensor** out);
void st_variable_free(st_variable* variable);

// ---- recomputation -----------------------------------------------------------------------------------------------------

// The states of the default generators of the CPU and of `count` CUDA devices.
st_status st_random_of(const int8_t* cuda, size_t count, st_random** random);
st_status st_random_restore(const st_random* random);
bool st_random_same(const st_random* left, const st_random* right);
void st_random_free(st_random* random);

// Whether the calling thread records gradients.
bool st_recording(void);
// The modes of the calling thread: recording, autocast and the like. The thread that entered them must leave them,
// newest first.
st_status st_modes_of_thread(st_modes** modes);
void st_modes_free(st_modes* modes);
st_status st_modes_enter(const st_modes* modes, st_entered** entered);
void st_modes_leave(st_entered* entered);
// Autocast for what the calling thread computes on the CPU; entering returns what leaving has to restore.
bool st_cpu_autocast_enter(void);
void st_cpu_autocast_leave(bool before);

st_status st_tensor_version(const st_tensor* tensor, uint32_t* version);  // fails for inference tensors, which have none
// Whether the tensor passes a gradient on: a view of a leaf that was made without recording does not, although it
// requires one.
st_status st_tensor_takes_gradient(const st_tensor* tensor, bool* takes);
// A hash of kind, device, sizes, strides and offset. Fails for a tensor that is not strided or has no storage.
st_status st_tensor_layout(const st_tensor* tensor, uint64_t* layout);

// ---- what operations write and read ----------------------------------------------------------------------------------------

// Calls `written` for each operation, on any thread, that writes to a watched storage: before the write and, if
// autograd may have saved the storage in between, also after it. Call once per process; `written` must live forever.
// Writes through raw pointers are not seen.
st_status st_writes_observe(void (*written)(const st_storage* storage));
// Watches a storage that the caller holds a weak reference to, until it has been unwatched as many times; returns its
// last write.
uint64_t st_storage_watch(const st_storage* storage);
void st_storage_unwatch(const st_storage* storage);
uint64_t st_storage_last_write(const st_storage* storage);  // a number of its own for each; zero: none since it is watched

// Records the tensors that operations of the calling thread read but did not create, until st_reads_end on the same
// thread.
st_status st_reads_begin(st_reads** reads);
void st_reads_end(st_reads* reads);
// Fail, naming a tensor by its shape, if one that is still alive was changed between begin and end, or since it was
// first read.
st_status st_reads_check_unchanged_within(const st_reads* reads);
st_status st_reads_check_unchanged_since(const st_reads* reads);
void st_reads_free(st_reads* reads);
bool st_reads_contain(const st_reads* reads, const st_storage* storage);  // to which the caller holds a reference
// Whether the outermost function whose reads the calling thread notes has read it, and not made it.
bool st_reads_noted(const st_storage* storage);
bool st_reads_update_statistics(const st_reads* reads);  // whether there are running statistics among what was written
// Sets the running statistics (of batch normalisation) that were updated between begin and end back to their values
// from before that. Restoring, which must happen on the same thread, returns them to their present values and frees
// `rewound`. It fails if another thread has written to them in between. It also fails if `rerun` (null: nothing was
// recorded) has statistics that `reads` does not have; those are restored as well.
st_status st_statistics_rewind(const st_reads* reads, st_statistics** rewound);
st_status st_statistics_restore(st_statistics* rewound, const st_reads* rerun);

// ---- operations on record --------------------------------------------------------------------------------------------------

// A storage that an operation read or made.
typedef struct {
  st_storage* storage;  // weakly held by the record
  uint64_t bytes;
  uint32_t version;   // of the tensor's version counter when the operation ran
  int8_t device_type;  // c10::DeviceType
  int8_t device_index;
  bool unwritten;     // since the operation ran; may be false without a write
} st_touched;

typedef struct {
  const char* name;   // of the operator; lives forever
  uint64_t number;    // of those recorded before it
  uint64_t index;     // of those recorded before it on its thread
  uint32_t strand;    // the number of its thread among those that recorded, in the order of their beginning
  size_t read;        // how many storages it read
  size_t made;        // how many it made
  uint64_t begun;     // what `stamp` returned before and after it ran
  uint64_t ended;
  bool on_stream;     // whether the calling thread's current stream is the one that it ran on
  int32_t threads;    // how many threads the CPU might have run it with; 0 on a GPU
} st_description;

typedef struct {
  uint32_t strand;
  uint64_t index;
} st_position;

// How a tensor lies in its storage.
typedef struct {
  size_t storage;      // which of those that the operation read, or of those that it made
  int8_t scalar_type;  // c10::ScalarType
  int8_t device_type;  // c10::DeviceType
  int64_t offset;      // in elements, as the strides
  size_t dimensions;
  const int64_t* sizes;  // sizes and strides live as long as the record
  const int64_t* strides;
} st_view;

#define ST_ARGUMENT_OTHER 0
#define ST_ARGUMENT_NONE 1
#define ST_ARGUMENT_TENSOR 2
#define ST_ARGUMENT_INTEGER 3  // a number of Python's, if it is a tensor that stands for one
#define ST_ARGUMENT_REAL 4
#define ST_ARGUMENT_TRUTH 5
#define ST_ARGUMENT_TEXT 6

// An argument of an operation.
typedef struct {
  int8_t form;       // one of ST_ARGUMENT_*
  int64_t integer;   // also of a truth
  double real;
  const char* text;  // lives as long as the record
  st_view view;      // of a tensor
} st_argument;

typedef struct {
  const char* overload;  // of the operator; lives forever
  size_t arguments;
  size_t results;
} st_call;

// Fails if another library has taken the place in the dispatcher that recording needs. Must be freed after every thread
// has stopped recording into it.
st_status st_operations_new(st_operations** recording);
void st_operations_free(st_operations* recording);
// Calls `stamp` before and after each operation. To be set before anything is recorded.
void st_operations_time(st_operations* recording, uint64_t (*stamp)(const void* context), const void* context);
// Records the repeatable operations of the calling thread that run while gradients are recorded (null: none). Returns
// what it recorded into before.
st_operations* st_operations_exchange(st_operations* recording);
// The number of the calling thread among those that recorded, and how many operations it has recorded.
st_position st_operations_position(st_operations* recording);
// Forgets the operations of the thread with this number (-1: of all); those that someone holds stay valid.
void st_operations_clear(st_operations* recording, int64_t strand);
// The operation that made a storage on the current stream, if it has not been written to since, and which of its storages
// that is. The caller owns one reference; null if there is none.
void st_operations_maker(st_operations* recording, const st_storage* storage, st_recorded** by, size_t* made);
// The operation that made what `recorded` read.
void st_recorded_maker(const st_recorded* recorded, size_t read, st_operations* recording, st_recorded** by, size_t* made);
void st_recorded_retain(st_recorded* recorded);
void st_recorded_release(st_recorded* recorded);
st_description st_recorded_describe(const st_recorded* recorded);
st_touched st_recorded_read(const st_recorded* recorded, size_t read);
st_touched st_recorded_made(const st_recorded* recorded, size_t made);
// How the operation was called, and what it returned.
st_call st_recorded_call(const st_recorded* recorded);
st_argument st_recorded_argument(const st_recorded* recorded, size_t argument);
st_view st_recorded_result(const st_recorded* recorded, size_t result);
// Runs the operation again on the calling thread and its current stream. `storages` has the storages that it read;
// `out`, which must be null, gets those that it makes, and the caller owns one reference to each.
st_status st_recorded_repeat(const st_recorded* recorded, st_storage* const* storages, st_storage** out);

// Elements of a result that operations compute one after another. They lie side by side.
typedef struct {
  int64_t first;
  int64_t rows;  // how many of the dimension that tiles divide
} st_tile;

// How the results of operations, all of which have as many elements, are divided.
typedef struct {
  const int64_t* sizes;  // of the dimensions that what is read has, innermost first
  size_t dimensions;
  size_t split;          // the dimension that tiles divide; they have all of those within it
  const st_tile* tiles;
  size_t tiles_count;
  const size_t* ends;    // of each thread's share of the tiles: the one after its last
  size_t shares;
  int32_t threads;
} st_tiling;

// A tensor that an operation reads: of a storage, or what a step before it made.
typedef struct {
  size_t argument;            // of the operation
  const st_storage* storage;  // null: what the step made
  size_t step;
  int64_t offset;             // of the first element, in elements
  const int64_t* strides;     // as many as there are dimensions
} st_part;

typedef struct {
  const st_recorded* operation;
  const st_part* operands;
  size_t count;
  st_storage* output;  // null if only steps read what it makes
} st_step;

// Runs recorded pointwise operations of the CPU tile by tile and fills the outputs, whose elements lie side by side from
// their beginnings. Everything is borrowed. No observer sees what is run.
st_status st_tiles_run(const st_tiling* tiling, const st_step* steps, size_t count);
// Runs them as well, but compares the outputs.
st_status st_tiles_compare(const st_tiling* tiling, const st_step* steps, size_t count, bool* differs);

// ---- storages ----------------------------------------------------------------------------------------------------------

st_storage* st_tensor_storage(const st_tensor* tensor);  // borrowed; null if the tensor has none
uint64_t st_tensor_gradient_bytes(const st_tensor* tensor);  // of the storage of its gradient, if it has one
uint64_t st_storage_bytes(const st_storage* storage);
uint64_t st_storage_owners(const st_storage* storage);  // strong references
void* st_storage_data(const st_storage* storage);
// The number of the stream of its device that the calling thread computes on; 0 on the CPU.
st_status st_storage_stream(const st_storage* storage, int64_t* stream);
// Once freed, its memory is reused only after everything queued by then on that stream. Does nothing on the CPU.
st_status st_storage_record_use(const st_storage* storage);
st_status st_storage_allocate(uint64_t bytes, st_storage** storage);  // on the CPU; the caller owns one strong reference
// The bytes of a storage, as a tensor of bytes that shares them; the caller owns it.
st_status st_storage_elements(const st_storage* storage, st_tensor** out);
// A new storage with the same bytes, which are there when this returns; the caller owns one strong reference.
st_status st_storage_copy(const st_storage* storage, st_storage** copy);
void st_storage_retain(st_storage* storage);
void st_storage_release(st_storage* storage);
void st_storage_weak_retain(st_storage* storage);
void st_storage_weak_release(st_storage* storage);
// Bytes that may be read and written starting at st_storage_data: at least st_storage_bytes, more if our allocator
// rounded up.
uint64_t st_storage_capacity(const st_storage* storage);
// The bytes of a storage at this moment; whoever receives it must keep the storage alive.
typedef struct {
  void* data;
  uint64_t bytes;
  uint64_t capacity;
  bool held;          // it is our allocator's, and stays until st_block_release, whatever the storage is given meanwhile
} st_block;
st_block st_storage_block(const st_storage* storage);
void st_block_hold(void* data);     // once more, of a block that is held
void st_block_release(void* data);  // once for each time it was held
// Turns a weak reference into an additional strong one; false if the storage has been freed.
bool st_storage_lock(st_storage* storage);

// ---- CPU allocator -----------------------------------------------------------------------------------------------------

typedef struct {
  uint64_t allocated;  // bytes asked for and not yet freed
  uint64_t peak;       // highest `allocated` since the last reset
  uint64_t reserved;   // bytes held from the system, in use or free
  uint64_t requests;   // how often a device's driver was asked for memory; 0 on the CPU
} st_memory;

// Blocks lie in huge pages only if `huge_pages`.
void st_allocator_install(bool huge_pages);
st_memory st_allocator_memory(void);
void st_allocator_reset_peak(void);
void st_allocator_end_step(void);  // gives free memory back as far as more is held than steps have used of late
void st_allocator_trim(void);      // gives all free memory back to the system

// ---- memory that runs out ----------------------------------------------------------------------------------------------

// Has `relieve` called, from now on and on any thread, before an allocation of `bytes` bytes fails, without a lock of
// the allocator. It returns how many bytes were freed; if any were, the allocation is tried again.
// `asks` says whether allocations of the calling thread ask; otherwise those that would exceed what is to be allocated of
// a device (`st_ceiling_set`) fail.
void st_shortage_relieve(uint64_t (*relieve)(int8_t device_type, int8_t device_index, uint64_t bytes),
                         bool (*asks)(void));
// Allocations with which more than `bytes` bytes of this CUDA device, or of the CPU if `cuda_index` is negative, would
// be allocated have memory freed first. `UINT64_MAX` ends that.
void st_ceiling_set(int8_t cuda_index, uint64_t bytes);
// How often they have asked for that.
uint64_t st_ceiling_asked(int8_t cuda_index);
// Makes the CPU allocator fail beyond so many allocated bytes, for tests.
void st_allocator_limit(uint64_t bytes);
// Makes one in so many of its allocations ask for memory although there is some, for tests; 0 ends it.
void st_allocator_press(uint64_t every);
// Makes libtorch's allocator for CUDA ask as well; until then only the CPU allocator does. May be called repeatedly.
st_status st_device_ask(void);

// ---- forks ---------------------------------------------------------------------------------------------------------------

// Called before and after a fork by the thread that forks, in both processes: it holds the locks that a child needs.
void st_fork_begins(void);
void st_fork_ends(void);
// Called in the child before the latter: what other threads were doing never ends there.
void st_fork_is_child(void);

// ---- CUDA devices ------------------------------------------------------------------------------------------------------

// Makes operations use deterministic kernels; operations without one fail. Must be called before CUDA is first used.
st_status st_deterministic(void);
// What libtorch does before it creates its first CUDA tensor; the functions below need it. May be called repeatedly.
st_status st_device_initialise(void);
// The cudaStream_t that the calling thread computes on; it belongs to libtorch.
st_status st_device_stream(int8_t index, void** stream);
// Makes the calling thread compute on the stream with this number, and returns the number of the previous one. The
// number of a cudaStream_t that is not libtorch's is its address.
st_status st_device_exchange_stream(int8_t index, int64_t stream, int64_t* before);
// Allocated for the calling thread's current stream; the caller owns one strong reference.
st_status st_device_allocate(int8_t index, uint64_t bytes, st_storage** storage);
st_status st_device_memory(int8_t index, st_memory* memory);  // of libtorch's caching allocator
st_status st_device_reset_peak(int8_t index);
st_status st_device_trim(void);  // gives what the caching allocator holds but does not use back to the driver
// Bytes that could be allocated: what the driver has free, plus what the caching allocator holds but does not use.
st_status st_device_free(int8_t index, uint64_t* bytes);

// Segments that libtorch's caching allocator has obtained from CUDA.
typedef struct {
  // Called before st_segments_watch returns: for a segment that existed a moment ago.
  void (*was)(const void* context, int8_t device, uintptr_t start, size_t bytes);
  // Called on any thread, with the allocator's lock held.
  void (*came)(const void* context, int8_t device, uintptr_t start, size_t bytes);
  void (*goes)(const void* context, int8_t device, uintptr_t start);  // before it is freed
} st_segments;

// Tells `watcher`, which must live forever, about each segment that comes or goes from now on, and about those that
// exist. It cannot be undone. Segments that can grow ("expandable") are left out. Fails for allocators that have no
// tracker.
st_status st_segments_watch(st_segments watcher, const void* context);

// ---- named ranges (NVTX) -------------------------------------------------------------------------------------------------

bool st_ranges(void);                        // whether there are any: libtorch's CUDA half is loaded
st_status st_range_push(const char* name);   // on the calling thread; the name is copied
st_status st_range_pop(void);                // the calling thread's latest

#ifdef __cplusplus
}
#endif
