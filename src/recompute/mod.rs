//! Computing again in backward what need not be kept, at two grains: a [`segment`] of the model, and a single operation
//! ([`remat`]). Recompute as the paper of SSDTrain compares it with (section 4), but free to be mixed with moving.
//!
//! `recipe` is what it takes to run a function again with the same bits, `digest` what shows that it did; `segment` and `remat` decide
//! what the graph holds in place of bytes, and serve it from a rerun.

mod digest;
mod recipe;
mod remat;
mod segment;

use ssdtrain_libtorch as torch;
use tch::{TchError, Tensor};

use crate::step::{Level, current_step};

/// Computes `f(x)`, and has backward compute it again rather than keep what `f` saves: of all that autograd saves while `f` runs, only
/// `x` stays in the step's cache, whose bytes may go to the host or the disk as any other tensor's. Gradients have the bits they
/// have without it: the rerun has the random numbers and the modes (autocast and the like) of the first run. Parameters of the
/// cache, and what it finds too small to move, are kept.
///
/// Segments may be nested, and without an active step on this thread, or where no gradients are recorded, this is a plain call of `f`.
/// `name` is what errors call the segment, and a [`scope`](crate::scope) around it.
///
/// `f` is called a second time in backward, by whatever thread runs it, so:
/// - it must save the same tensors each time, and change nothing that it does not make, buffers included. Running statistics of batch
///   normalisation are the exception: they are updated once, and no other thread may use them meanwhile;
/// - it holds what it uses, as a [`shallow_clone`](Tensor::shallow_clone): of parameters that costs nothing, while any other
///   tensor it holds stays in memory;
/// - no other thread may draw from its random generators meanwhile, if it draws itself;
/// - it computes on the thread that calls it, and does not wait for another thread's function: functions that draw or update
///   statistics run again one after the other.
///
/// What goes wrong there is an error out of backward, never a wrong gradient. What `f` reads is checked by what operations have written
/// to. That does not show what `f` computes from elsewhere, such as a counter or a tensor that something writes to by its
/// address: [`verify`](crate::TensorCacheBuilder::verify) compares the result of the second call with that of the first as well.
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

/// Computes `f(inputs)` for a cheap `f` such as GELU, SwiGLU or a normalisation, and marks its result: when a later operation saves
/// it, the graph gets the recipe, `f` and its inputs, instead of the bytes. What `f` itself saves is saved as usual.
///
/// The inputs are saved in the step's cache, once with what saves them anyway. This pays where `f` saves its inputs itself, as the ones
/// above do; the sum of two tensors does not, unless both are saved by others.
///
/// Without an active step on this thread, where no gradients are recorded, and within a [`segment`](crate::segment), this is a
/// plain call of `f`. What is said of the segment's `f` holds for this one as well. A result that is changed in place is saved as any
/// other.
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

/// An error of ours as one of the model's.
fn refused(message: impl std::fmt::Display) -> TchError {
    TchError::Torch(message.to_string())
}
