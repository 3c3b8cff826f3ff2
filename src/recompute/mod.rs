//! Recomputing in backward what need not be kept, at two granularities: a [`segment`] of the model, and a single operation ([`remat`]).
//! This is the recomputation that the SSDTrain paper compares itself with (section 4), but here it can be mixed with moving.
//!
//! `recipe` holds what is needed to run a function again with the same bits, `stop` ends it early, and [`Digest`](crate::digest::Digest)
//! verifies what it did.
//! `segment` and `remat` decide what the graph holds in place of bytes, and serve it from a rerun. `recorder` sees what a segment saves, and
//! `collector` what its rerun does.

mod collector;
mod fact;
mod inputs;
mod offer;
mod operations;
mod recipe;
mod recorder;
mod remat;
mod segment;
mod stop;

use ssdtrain_libtorch as torch;
use tch::{TchError, Tensor};

pub use self::inputs::Inputs;
use crate::policy::{Segments, segments};
use crate::step::{Level, current_step, scope};

/// Computes `f(inputs)` and makes backward compute it again instead of keeping what `f` saves. Of all that autograd saves while `f` runs,
/// only the inputs stay, in the step's cache: their bytes may go to the host or the disk like any other tensor's. Parameters of the
/// cache, and what it finds too small to move, are kept. Gradients have the same bits as without a segment, because the rerun uses the
/// random numbers and the modes (autocast and the like) of the first run.
///
/// Where the step follows a plan ([`Auto`](crate::Auto)), the segment is a candidate. Each tensor that `f` saves is kept, moved or computed
/// again as planned, and the segment runs again for those that no recorded operation makes, such as what dropout drew. What `f` saves
/// without a plan is computed again by the segment in any case.
///
/// Segments may be nested. Without an active step on this thread, or where no gradients are recorded, this is a plain call of `f`. `name`
/// identifies the segment in errors, and names a [`scope`](crate::scope) around it.
///
/// Without a plan, backward runs the operations of `f` again, without calling `f`, if they can make again all that was saved: what runs
/// element by element becomes one then ([`fuse_reruns`](crate::TensorCacheBuilder::fuse_reruns)). `f` is dropped once it has returned.
/// Random numbers, what tch itself writes through an address (as `Tensor::from_slice` does), and operations that need not have the same
/// bits again cannot be made so, and then `f` is called again for everything. What `f` itself writes through an address to the result
/// of an operation is not seen: only [`verify`](crate::TensorCacheBuilder::verify) shows that, and
/// [`fuse_reruns(false)`](crate::TensorCacheBuilder::fuse_reruns) has `f` called again.
///
/// Otherwise backward calls `f` a second time, on whichever thread runs it, and ends it where the last tensor is saved that it needs: the matrix
/// product at the end of a block is not computed again. The operation that saves that tensor, and every later one that saves anything,
/// fails, and `f` is expected to return the error or to panic, as the operations of `tch` do that return no `Result`. Nothing is printed
/// of that panic (a panic hook of this library keeps it from the program's), and it poisons no [`std::sync::Mutex`] that `f` holds. A
/// function that goes on instead changes nothing, except for the time it takes. `f` runs to its end where
/// [`verify`](crate::TensorCacheBuilder::verify) compares all of it, where it writes to a tensor that has been saved before, and in a
/// program whose panics abort.
///
/// Therefore, since `f` may be called again:
/// - `f` must save the same tensors each time, and must not change anything that it did not create, buffers included. Running statistics
///   of batch normalisation are the exception: they are updated once, and no other thread may use them meanwhile;
/// - `f` must own what it uses, as a [`shallow_clone`](Tensor::shallow_clone): the graph holds `f`, and any thread may run the graph's
///   backward after the caller has returned, so `f` can neither borrow nor be tied to a thread. For parameters that costs nothing. Any
///   other tensor that it owns stays in memory: better make it an input, whether or not it needs a gradient;
/// - backward reads what `f` reads: whoever overwrites that on another stream of a GPU has to wait for backward, and not for forward alone;
/// - if `f` draws random numbers, no other thread may draw from its generators meanwhile;
/// - `f` must compute on the thread that calls it and must not wait for another thread's function: reruns of functions that draw random
///   numbers or update statistics are serialised.
///
/// What goes wrong in the rerun before it ends is an error from backward, never a wrong gradient. What `f` would do after that is neither
/// done nor checked. Where `f` is called again, the tensors that it reads are checked for operations that wrote to them; else their bytes
/// are copied before an operation writes to them. That check does not notice other inputs of `f`, such as a counter or a tensor that something writes to through its
/// address: [`verify`](crate::TensorCacheBuilder::verify) also compares the result of the second call with that of the first.
///
/// ```no_run
/// # use tch::{TchError, Tensor, nn, nn::Module};
/// # fn forward(blocks: &[std::sync::Arc<std::sync::Mutex<nn::Linear>>], mut x: Tensor) -> Result<Tensor, TchError> {
/// for (index, block) in blocks.iter().enumerate() {
///     let block = std::sync::Arc::clone(block);
///     x = ssdtrain::segment(&format!("block.{index}"), &x, move |x| {
///         block.lock().unwrap().forward(x).f_gelu("tanh")?.f_dropout(0.1, true)
///     })?;
/// }
/// # Ok(x)
/// # }
/// ```
///
/// Several inputs are given as an array, or as a slice where their number varies (see [`Inputs`]). Each gets its gradient. The device of
/// the first one decides to which step the segment belongs.
///
/// ```no_run
/// # fn attention(x: &tch::Tensor, cos: &tch::Tensor, sin: &tch::Tensor) -> Result<tch::Tensor, tch::TchError> {
/// ssdtrain::segment("rotate", [x, cos, sin], |[x, cos, sin]| {
///     let halves = x.f_chunk(2, -1)?;
///     let turned = tch::Tensor::f_cat(&[&halves[1].f_neg()?, &halves[0]], -1)?;
///     x.f_mul(cos)?.f_add(&turned.f_mul(sin)?)
/// })
/// # }
/// ```
///
/// # Errors
/// Those of `f`, and of saving the inputs.
pub fn segment<I, F>(name: &str, inputs: I, f: F) -> Result<Tensor, TchError>
where
    I: Inputs,
    F: for<'a> Fn(I::Given<'a>) -> Result<Tensor, TchError> + Send + 'static,
{
    let function = move |tensors: &[&Tensor]| {
        f(I::given(tensors).ok_or_else(|| refused("ssdtrain: these inputs have another form"))?)
    };
    let tensors = inputs.tensors();
    let is_saving = torch::is_recording() && torch::is_active();
    let (step, level) =
        match tensors.first().filter(|_| is_saving).and_then(|first| current_step(first.device())) {
            None | Some((_, Level::Discard, _)) => return function(&tensors),
            Some((step, level, _)) => (step, level),
        };
    let segments = match level {
        Level::Step(_) => segments(&step.plan),
        // It belongs to the one around it.
        Level::Part(_) => Segments::Left,
        Level::Segment | Level::Rerun | Level::Discard => Segments::Recomputed,
    };
    match segments {
        Segments::Recomputed => recorder::run(name, &tensors, Box::new(function), step, &level),
        Segments::Offered => recorder::offer(name, &tensors, Box::new(function), &step),
        Segments::Left => {
            let _scope = scope(name);
            function(&tensors)
        }
    }
}

/// Computes `f(inputs)` for a cheap `f` such as GELU, SwiGLU or a normalisation, and marks its result: when a later operation saves it,
/// the graph gets a recipe, which is `f` and its inputs, instead of the bytes. What `f` itself saves is saved as usual.
///
/// The inputs are saved in the step's cache; an input that is saved for other reasons anyway is held only once. This pays if `f` saves
/// its inputs itself, as the functions above do. For the sum of two tensors it does not, unless other operations save both.
///
/// Without an active step on this thread, where no gradients are recorded, and within a [`segment`](crate::segment), this is a plain call
/// of `f`. The requirements on a segment's `f` apply here too. A result that is changed in place is saved like any other tensor.
///
/// ```no_run
/// # fn mlp(up: &tch::Tensor, down: &tch::Tensor, x: &tch::Tensor) -> Result<tch::Tensor, tch::TchError> {
/// let h = x.f_matmul(up)?;
/// let y = ssdtrain::remat(&[&h], |inputs| inputs[0].f_gelu("tanh"))?;
/// y.f_matmul(down) // saves y: now a recipe, since gelu saves h
/// # }
/// ```
///
/// # Errors
/// Those of `f`, and of saving the inputs.
pub fn remat<F>(inputs: &[&Tensor], f: F) -> Result<Tensor, TchError>
where
    F: Fn(&[&Tensor]) -> Result<Tensor, TchError> + Send + 'static,
{
    match inputs.first().and_then(|input| current_step(input.device())) {
        Some((step, Level::Step(marks), scope)) if torch::is_recording() && torch::is_active() => {
            remat::run(inputs, Box::new(f), step, scope, &marks)
        }
        _ => f(inputs),
    }
}

/// Turns an error of this library into one that the model's functions return.
fn refused(message: impl std::fmt::Display) -> TchError {
    TchError::Torch(message.to_string())
}
