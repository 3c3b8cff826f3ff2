//! Recomputing in backward what need not be kept, at two granularities: a [`segment`] of the model, and a single operation ([`remat`]).
//! This is the recomputation that the SSDTrain paper compares itself with (section 4), but here it can be mixed with moving.
//!
//! `recipe` holds what is needed to run a function again with the same bits, and `digest` verifies that it did. `segment` and `remat`
//! decide what the graph holds in place of bytes, and serve it from a rerun.

mod digest;
mod recipe;
mod remat;
mod segment;

use ssdtrain_libtorch as torch;
use tch::{TchError, Tensor};

use crate::step::{Level, current_step};

/// Computes `f(x)` and makes backward compute it again instead of keeping what `f` saves. Of all that autograd saves while `f` runs, only
/// `x` stays, in the step's cache: its bytes may go to the host or the disk like any other tensor's. Parameters of the cache, and what it
/// finds too small to move, are kept. Gradients have the same bits as without a segment, because the rerun uses the random numbers and
/// the modes (autocast and the like) of the first run.
///
/// Segments may be nested. Without an active step on this thread, or where no gradients are recorded, this is a plain call of `f`. `name`
/// identifies the segment in errors, and names a [`scope`](crate::scope) around it.
///
/// Backward calls `f` a second time, on whichever thread runs it. Therefore:
/// - `f` must save the same tensors each time, and must not change anything that it did not create, buffers included. Running statistics
///   of batch normalisation are the exception: they are updated once, and no other thread may use them meanwhile;
/// - `f` must own what it uses, as a [`shallow_clone`](Tensor::shallow_clone). For parameters that costs nothing; any other tensor it
///   owns stays in memory;
/// - if `f` draws random numbers, no other thread may draw from its generators meanwhile;
/// - `f` must compute on the thread that calls it and must not wait for another thread's function: reruns of functions that draw random
///   numbers or update statistics are serialised.
///
/// What goes wrong in the rerun is an error from backward, never a wrong gradient. The tensors that `f` reads are checked for operations
/// that wrote to them. That check does not notice other inputs of `f`, such as a counter or a tensor that something writes to through its
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
/// # Errors
/// Those of `f`, and of saving `x`.
pub fn segment<F>(name: &str, x: &Tensor, f: F) -> Result<Tensor, TchError>
where
    F: Fn(&Tensor) -> Result<Tensor, TchError> + Send + 'static,
{
    let is_saving = torch::is_recording() && torch::is_active();
    match current_step(x.device()).filter(|_| is_saving) {
        None | Some((_, Level::Discard, _)) => f(x),
        Some((step, level, _)) => segment::run(name, x, Box::new(move |inputs| f(inputs[0])), step, &level),
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
