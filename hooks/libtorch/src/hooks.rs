//! Saved-tensor hooks: autograd asks a [`SavedTensorHooks`] what the graph should hold in place of each tensor that
//! it saves.

use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tch::{Device, Tensor};

use crate::error::{TorchError, check, last_callback_error, panic_text, park};
use crate::ffi::{self, StCallbacks, StSaved, StStatus, StStorage, StVariable};
use crate::origin::{Origin, SAVED_BY_PARENT, once};
use crate::storage::{Storage, StorageId, device_of};
use crate::thread_state::layout;

/// Decides what happens to the tensors that autograd saves on the threads where it is [active](activate).
pub trait SavedTensorHooks: Send + Sync {
    /// Called for each tensor as it is saved. An error (or a panic) is raised by the operation that saves the tensor.
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String>;

    /// Whether these hooks decide about `saved`. If not, the hooks that were active on the thread before them do. If
    /// none of them accepts it, the newest has to decide.
    fn takes(&self, _saved: &SavedTensor<'_>) -> bool {
        true
    }
}

/// What the graph holds for a saved tensor.
pub enum Packed {
    /// The tensor itself.
    Keep,
    /// A handle, dropped when the graph releases it. The view is rebuilt on the storage that the handle returns.
    Handle(Box<dyn Handle>),
    /// Whatever the hooks that were active on the thread before these decide; the tensor itself if there are none.
    Pass,
    /// Nothing: the operation ends at once, with an error that has no backtrace. For whoever needs nothing more of the function that
    /// runs it. An operation that saves what it is given has not begun to compute.
    Stop,
}

/// Represents a saved tensor in the graph.
pub trait Handle: Send + Sync {
    /// The tensor's storage, or one with the same bytes. Called once per backward pass through the node; an error (or
    /// a panic) is raised by that backward pass.
    fn unpack(&self) -> Result<Storage, String>;
}

/// A tensor that autograd is about to save.
pub struct SavedTensor<'a> {
    raw: &'a StSaved,
}

impl SavedTensor<'_> {
    /// Whether the tensor's storage can be moved: it must be a plain strided dense tensor with data. All others are
    /// kept.
    pub fn eligible(&self) -> bool {
        self.raw.eligible && !self.raw.storage.is_null()
    }

    /// The device that it is on; only CPU and CUDA tensors are eligible.
    pub fn device(&self) -> Device {
        device_of(self.raw.device_type, self.raw.device_index)
    }

    /// The identity of its storage. `None` if not eligible.
    pub fn storage_id(&self) -> Option<StorageId> {
        self.eligible().then(|| NonNull::new(self.raw.storage).map(StorageId::of)).flatten()
    }

    /// A strong reference to its storage. `None` if not eligible.
    pub fn storage(&self) -> Option<Storage> {
        let raw = NonNull::new(self.raw.storage).filter(|_| self.raw.eligible)?;
        // SAFETY: the shim holds the tensor, and with it the storage, during the callback that this value is borrowed from.
        Some(unsafe { Storage::retain(raw) })
    }

    /// The size of the whole storage in bytes.
    pub fn storage_bytes(&self) -> u64 {
        self.raw.storage_bytes
    }

    /// The size of the tensor's elements in bytes.
    pub fn tensor_bytes(&self) -> u64 {
        self.raw.tensor_bytes
    }

    /// The tensor itself, without its gradient. `None` if not eligible.
    pub fn tensor(&self) -> Option<Tensor> {
        let tensor = NonNull::new(self.raw.tensor.cast_mut()).filter(|_| self.raw.eligible)?;
        // SAFETY: the shim holds the tensor during the callback that this value is borrowed from.
        Some(unsafe { Tensor::clone_from_ptr(tensor.as_ptr()) })
    }

    /// The result of [`layout`](crate::layout) for it. `None` if not eligible.
    pub fn layout(&self) -> Option<u64> {
        self.tensor().as_ref().and_then(layout)
    }

    /// The tensor's version counter: two values differ if the storage was changed in place between them.
    pub fn version(&self) -> u32 {
        self.raw.version
    }
}

/// The hooks of a thread; see [`activate`].
pub type Hooks = Arc<dyn SavedTensorHooks>;

thread_local! {
    /// This thread's hooks with their numbers, newest last. They are boxed, because C++ holds the address of the
    /// newest.
    static ACTIVE: RefCell<Stack> = const { RefCell::new(Stack(Vec::new())) };
}

#[derive(Default)]
struct Stack(Vec<(u64, Box<Hooks>)>);

impl Drop for Stack {
    fn drop(&mut self) {
        // The thread ends. What it drops after this may still save.
        activate_newest(&[]);
    }
}

/// Makes `hooks` decide about what the calling thread saves, until the guard is dropped. Autograd asks only after
/// [`install`] has been called. If a thread has several guards, the newest decides, in whatever order they are
/// dropped. About what a thread saves while it ends, in destructors of its own values, nobody decides.
#[must_use = "the hooks end when this guard is dropped"]
pub fn activate(hooks: Hooks) -> Active {
    static GUARDS: AtomicU64 = AtomicU64::new(0);
    let number = GUARDS.fetch_add(1, Ordering::Relaxed);
    let _ = ACTIVE.try_with(|active| {
        let active = &mut active.borrow_mut().0;
        active.push((number, Box::new(hooks)));
        activate_newest(active);
    });
    Active { number, thread_bound: PhantomData }
}

/// Whether any hooks currently decide about what the calling thread saves.
pub fn is_active() -> bool {
    ACTIVE.try_with(|active| !active.borrow().0.is_empty()).unwrap_or(false)
}

/// Guard of [`activate`].
pub struct Active {
    number: u64,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for Active {
    fn drop(&mut self) {
        // A thread that is shutting down has dropped its hooks already.
        let ended = ACTIVE.try_with(|active| {
            let active = &mut active.borrow_mut().0;
            let place = active.iter().position(|(number, _)| *number == self.number)?;
            let ended = active.remove(place);
            activate_newest(active);
            Some(ended)
        });
        drop(ended);
    }
}

/// The hooks of the calling thread that decide about `saved`, and their number, considering only those older than
/// number `than`.
fn older(than: u64, saved: &SavedTensor<'_>) -> Option<(u64, Hooks)> {
    ACTIVE.with_borrow(|active| {
        let older = || active.0.iter().rev().filter(|(number, _)| *number < than);
        let (number, hooks) = older().find(|(_, hooks)| hooks.takes(saved)).or_else(|| older().next())?;
        Some((*number, Hooks::clone(hooks)))
    })
}

/// What the calling thread's hooks decide about `saved`; `newest` is the newest of them.
fn decide(newest: &Hooks, saved: &SavedTensor<'_>) -> Result<Packed, String> {
    let mut than = u64::MAX;
    if newest.takes(saved) {
        // Returned as it is: moving it costs several nanoseconds of every save.
        let packed = newest.pack(saved);
        if !matches!(packed, Ok(Packed::Pass)) {
            return packed;
        }
        than = newest_number();
    }
    while let Some((number, hooks)) = older(than, saved) {
        match hooks.pack(saved)? {
            Packed::Pass => than = number,
            packed => return Ok(packed),
        }
    }
    Ok(Packed::Keep)
}

fn newest_number() -> u64 {
    ACTIVE.with_borrow(|active| active.0.last().map_or(0, |(number, _)| *number))
}

fn activate_newest(active: &[(u64, Box<Hooks>)]) {
    ffi::st_activate(active.last().map_or(std::ptr::null(), |(_, hooks)| (&raw const **hooks).cast()));
}

/// In a child process: its parent's hooks decide about nothing any more, and are kept.
pub(crate) fn leave_to_parent() {
    let of_parent = ACTIVE.try_with(RefCell::take);
    activate_newest(&[]);
    Box::leak(Box::new(of_parent));
}

/// Runs backward from the scalar `loss`. If a hook refuses, its error is returned.
pub fn backward(loss: &Tensor, retain_graph: bool, create_graph: bool) -> Result<(), TorchError> {
    // SAFETY: the tensor is borrowed, so its pointer is valid.
    check(unsafe { ffi::st_backward(loss.as_ptr(), retain_graph, create_graph) })
}

/// A tensor that was saved outside of any operation: what an autograd node would hold.
pub struct SavedVariable {
    raw: NonNull<StVariable>,
}

// SAFETY: the variable belongs to this value alone. It holds a handle of ours, which any thread may use, or a tensor
// and a version counter, whose reference counts are atomic; an autograd node that holds one moves between threads as
// well.
unsafe impl Send for SavedVariable {}

impl SavedVariable {
    /// Packs `tensor` with the calling thread's hooks, as an autograd node would.
    pub fn new(tensor: &Tensor) -> Result<SavedVariable, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the tensor is borrowed, and `raw` is a valid place for the result.
        check(unsafe { ffi::st_variable_save(tensor.as_ptr(), &raw mut raw) })?;
        let raw = NonNull::new(raw).ok_or_else(|| TorchError("libtorch saved nothing".to_owned()))?;
        Ok(SavedVariable { raw })
    }

    /// Unpacks the tensor, as the node's backward would.
    pub fn unpack(&self) -> Result<Tensor, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the variable is this value's and not shared between threads; `raw` is a valid place for the result.
        check(unsafe { ffi::st_variable_unpack(self.raw.as_ptr(), &raw mut raw) })?;
        // SAFETY: the shim created the tensor and gave it to us.
        Ok(unsafe { Tensor::from_ptr(raw) })
    }
}

impl Drop for SavedVariable {
    fn drop(&mut self) {
        // SAFETY: the shim gave the variable to this value, and nobody uses it after it.
        unsafe { ffi::st_variable_free(self.raw.as_ptr()) }
    }
}

/// Makes autograd ask our engine for hooks; threads without [active](activate) hooks are not affected. It may be
/// called repeatedly.
///
/// Hooks and handles stay with their process: in one that is forked off, no hooks are active until some are activated there, and unpacking
/// a handle of its parent is an error that contains [`SAVED_BY_PARENT`].
pub fn install() -> Result<(), TorchError> {
    static INSTALLED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    static CALLBACKS: StCallbacks = StCallbacks { pack, unpack, release, error: last_callback_error };
    // SAFETY: the table is a static.
    once(&INSTALLED, || check(unsafe { ffi::st_install(&raw const CALLBACKS) })).clone()
}

const DONE: StStatus = 0;

/// What C++ holds for a handle.
struct Held {
    handle: Box<dyn Handle>,
    origin: Origin,
}

/// Runs a callback's body. An error or a panic is stored for C++ to raise.
fn guarded(body: impl FnOnce() -> Result<StStatus, String>) -> StStatus {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(message)) => park(&message),
        Err(payload) => park(&panic_text(&*payload)),
    }
}

extern "C" fn pack(context: *const c_void, saved: *const StSaved, handle: *mut *mut c_void) -> StStatus {
    guarded(|| {
        // SAFETY: the context is the newest of this thread's boxed hooks; it is replaced before the box is dropped.
        let hooks: &Hooks = unsafe { &*context.cast() };
        // SAFETY: the shim passes a pointer to a value on its stack.
        let raw = unsafe { &*saved };
        match decide(hooks, &SavedTensor { raw }) {
            Ok(Packed::Handle(packed)) => {
                let held = Box::new(Held { handle: packed, origin: Origin::default() });
                // SAFETY: the shim passes a valid place for the handle.
                unsafe { *handle = Box::into_raw(held).cast() };
                Ok(DONE)
            }
            Ok(Packed::Keep | Packed::Pass) => Ok(DONE),
            Ok(Packed::Stop) => Ok(ffi::ST_STOP),
            Err(refusal) => Err(refusal),
        }
    })
}

extern "C" fn unpack(handle: *const c_void, storage: *mut *mut StStorage) -> StStatus {
    guarded(|| {
        // SAFETY: the handle was made by `pack` and has not been passed to `release` yet.
        let held = unsafe { &*handle.cast::<Held>() };
        if held.origin.is_parent() {
            return Err(format!("a tensor {SAVED_BY_PARENT}: run backward there, or forward here"));
        }
        let unpacked = held.handle.unpack()?.into_raw();
        // SAFETY: the shim passes a valid place for the storage.
        unsafe { *storage = unpacked };
        Ok(DONE)
    })
}

extern "C" fn release(handle: *mut c_void) {
    // A panic while a handle is dropped cannot be passed on: it is caught here, after the panic hook has printed it.
    _ = guarded(|| {
        // SAFETY: the handle was made by `pack`, and the shim releases it once.
        let held: Box<Held> = unsafe { Box::from_raw(handle.cast()) };
        if held.origin.is_parent() {
            // What it would give back is the parent's.
            Box::leak(held);
        }
        Ok(DONE)
    });
}
