//! What is needed to run a function again so that it returns the same bits.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{
    Handle, Hooks, Modes, Packed, PerProcess, RandomState, Reading, Reads, SavedTensor, SavedTensorHooks,
    SavedVariable, Storage, TorchError,
};
use ssdtrain_store::sync::{Mutex, MutexGuard};
use tch::{Device, TchError, Tensor};

use super::refused;
use super::stop::{self, Ended};
use crate::cache::Cache;
use crate::digest::Digest;
use crate::step::{Level, StepContext, enter};
use crate::telemetry::ScopeId;
use crate::trace::{Name, Range};

/// The function to rerun. It may move to backward's thread, and is run by one thread at a time.
pub(super) type Function = Box<dyn Fn(&[&Tensor]) -> Result<Tensor, TchError> + Send>;

/// Serialises the reruns that draw random numbers or update statistics: generators belong to the process, and several functions may share
/// statistics.
static ALONE: PerProcess<Mutex<()>> = PerProcess::new(Mutex::new(()));

thread_local! {
    /// Whether this thread is alone: a function that is run again may have others run again.
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };
}

/// While it exists, no other thread has one.
struct Alone {
    was_alone: bool,
    _lock: Option<MutexGuard<'static, ()>>,
}

impl Alone {
    fn new() -> Alone {
        let lock = (!IS_ALONE.get()).then(|| ALONE.here().lock());
        Alone { was_alone: IS_ALONE.replace(true), _lock: lock }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        IS_ALONE.set(self.was_alone);
    }
}

/// A function, its inputs as autograd would save them, and everything else that its result depends on.
pub(super) struct Recipe {
    before: Before,
    function: Function,
    /// What it read and had not created itself.
    reads: Reads,
    /// The states of the generators, if it drew random numbers.
    drawn: Option<Drawn>,
    /// The digest of its result, if that is verified.
    result: Option<Digest>,
}

/// The state before the function ran.
pub(super) struct Before {
    /// Identifies it in errors.
    name: String,
    inputs: Vec<Input>,
    modes: Modes,
    /// Where the function may draw random numbers.
    devices: Vec<Device>,
    random: RandomState,
    step: Arc<StepContext>,
    scope: ScopeId,
}

/// The states of the generators that a function drew from.
struct Drawn {
    /// Where a rerun may be stopped.
    by_stop: Option<RandomState>,
    after: RandomState,
}

/// An input as autograd would save it.
pub(super) struct Input {
    saved: Arc<Mutex<SavedVariable>>,
    gradient: Gradient,
}

/// What autograd does with the gradient of an input.
#[derive(Clone, Copy)]
enum Gradient {
    NotRequired,
    Taken,
    /// A gradient is required but goes nowhere, as for a view of a leaf that was made without recording. What operations save depends on
    /// that.
    Dropped,
}

impl Before {
    /// Captures the modes and random states, and saves `inputs` with the thread's hooks.
    pub(super) fn new(
        name: String,
        inputs: &[&Tensor],
        step: Arc<StepContext>,
        scope: ScopeId,
    ) -> Result<Before, TorchError> {
        let before = Before::without_inputs(name, inputs, step, scope)?;
        Ok(Before { inputs: Input::save_all(inputs)?, ..before })
    }

    /// The same, but `inputs` are saved later, or not at all.
    pub(super) fn without_inputs(
        name: String,
        inputs: &[&Tensor],
        step: Arc<StepContext>,
        scope: ScopeId,
    ) -> Result<Before, TorchError> {
        let devices: Vec<_> = inputs.iter().map(|input| input.device()).chain([step.device]).collect();
        let random = RandomState::of(&devices)?;
        let modes = Modes::of_thread()?;
        Ok(Before { name, inputs: Vec::new(), modes, devices, random, step, scope })
    }

    /// With inputs that were saved since.
    pub(super) fn with(self, inputs: Vec<Input>) -> Before {
        Before { inputs, ..self }
    }

    /// What was saved of the inputs, in their order.
    pub(super) fn saved(&self) -> impl Iterator<Item = &Arc<Mutex<SavedVariable>>> {
        self.inputs.iter().map(|input| &input.saved)
    }

    /// Where the function may draw random numbers.
    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The recipe for `output`, which `function` has just computed. `by_stop` is the state of the generators where a rerun
    /// may be stopped.
    pub(super) fn recipe(
        self,
        function: Function,
        output: &Tensor,
        reads: Reads,
        by_stop: Option<RandomState>,
    ) -> Result<Recipe, TchError> {
        if let Err(changed) = reads.check_unchanged_within() {
            return Err(refused(format!(
                "ssdtrain: {} changes {}, and would change it again in backward. Change it outside",
                self.name, changed.0
            )));
        }
        let after = RandomState::of(&self.devices).map_err(refused)?;
        let drawn = (after != self.random).then_some(Drawn { by_stop, after });
        let result = if self.step.verify { Digest::of(output)? } else { None };
        Ok(Recipe { before: self, function, reads, drawn, result })
    }
}

impl Recipe {
    /// Runs the function again and returns its result; `hooks` decide what happens to the tensors that it saves. `None` if they
    /// [stopped](stop::stop) it, which they may do if `may_stop`.
    pub(super) fn run(&self, hooks: Hooks, level: Level, may_stop: bool) -> Result<Option<Tensor>, String> {
        let Before { name, step, .. } = &self.before;
        self.rerun(hooks, level, may_stop).map_err(|failure| {
            format!("ssdtrain cannot compute {name} of step {} again: {failure}", step.number)
        })
    }

    /// The same for the result alone.
    pub(super) fn run_to_its_end(&self) -> Result<Option<Tensor>, String> {
        let discard = Discard(Arc::clone(&self.before.step.cache));
        self.run(Arc::new(discard), Level::Discard, false)
    }

    /// Which stream of its device the calling thread computes on.
    pub(super) fn stream(&self, storage: &Storage) -> Option<usize> {
        self.before.step.cache.stream(storage)
    }

    /// The stream that the calling thread computes on uses `storage`.
    pub(super) fn in_use(&self, storage: &Storage) -> Result<(), String> {
        self.before.step.cache.in_use_again(storage)
    }

    /// Whether the rerun is compared with the first run.
    pub(super) fn is_verified(&self) -> bool {
        self.before.step.verify
    }

    /// Where the function may draw random numbers.
    pub(super) fn devices(&self) -> &[Device] {
        self.before.devices()
    }

    /// Whether the function drew random numbers.
    pub(super) fn draws(&self) -> bool {
        self.drawn.is_some()
    }

    /// Counts a rerun for the step that saved the tensors, whichever step runs backward.
    pub(super) fn ran(&self, bytes: u64, since: Instant) {
        self.before.step.counters.rerun(bytes, since.elapsed());
    }

    fn rerun(&self, hooks: Hooks, level: Level, may_stop: bool) -> Result<Option<Tensor>, String> {
        let Before { name, inputs, modes, devices, random, step, scope } = &self.before;
        // Before anything else, because an input may itself be the result of a rerun.
        let inputs = inputs.iter().map(|input| input.fetch(&step.cache)).collect::<Result<Vec<_>, _>>()?;
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let _active = torch::activate(hooks);
        let cache = &step.cache;
        let within = cache.scopes.child(*scope, "recompute");
        let _scope = enter(Arc::clone(step), level, within);
        let _range = Range::open(cache.trace.clone(), Name::Scope(within), name.as_str());
        let _modes = modes.enter().map_err(|error| error.to_string())?;
        let function = || (self.function)(&inputs);
        let run = || match may_stop {
            true => stop::run(function),
            false => Ended::Itself(catch_unwind(AssertUnwindSafe(function))),
        };
        let updates = self.reads.updates_statistics();
        let _alone = (updates || self.drawn.is_some()).then(Alone::new);
        if let Err(changed) = self.reads.check_unchanged_since() {
            return Err(format!(
                "{} that it uses was changed in place since. Run backward before the optimizer's step, and before anything else \
                 that changes what it uses",
                changed.0
            ));
        }
        let statistics = self.reads.rewind_statistics().map_err(message_of)?;
        let reading = updates.then(Reads::begin).transpose().map_err(message_of)?;
        let mark = cache.mark(&step.counters);
        let outcome = match &self.drawn {
            Some(drawn) => drawing(random, drawn, || RandomState::of(devices), run),
            None => result_of(run()),
        };
        cache.reran(mark, &step.counters);
        let rerun = reading.and_then(Reading::end);
        statistics.restore(rerun.as_ref()).map_err(message_of)?;
        let Some(output) = outcome? else { return Ok(None) };
        if self.result.is_some() && Digest::of(&output).map_err(text)? != self.result {
            return Err("its result is another than before, which verify(Verify::Full) has shown. Its function must do the same each \
                        time, with what no one else changes"
                .to_owned());
        }
        Ok(Some(output))
    }
}

impl Input {
    /// Saves `inputs` with the thread's hooks.
    pub(super) fn save_all(inputs: &[&Tensor]) -> Result<Vec<Input>, TorchError> {
        let save = |input: &&Tensor| {
            let gradient = match input.requires_grad() {
                false => Gradient::NotRequired,
                true if torch::takes_gradient(input)? => Gradient::Taken,
                true => Gradient::Dropped,
            };
            Ok(Input { saved: Arc::new(Mutex::new(SavedVariable::new(input)?)), gradient })
        };
        inputs.iter().map(save).collect()
    }

    fn fetch(&self, cache: &Cache) -> Result<Tensor, String> {
        let fetch = || {
            let input = self.saved.lock().unpack().map_err(refused)?.f_detach()?;
            // It may belong to another stream, and nobody else need hold it until this one has read it.
            Storage::of(&input)
                .map_or(Ok(()), |storage| cache.in_use_again(&storage))
                .map_err(TchError::Torch)?;
            match self.gradient {
                Gradient::NotRequired => Ok(input),
                Gradient::Taken => input.f_set_requires_grad(true),
                Gradient::Dropped => {
                    let leaf = input.f_set_requires_grad(true)?;
                    tch::no_grad(|| leaf.f_view_as(&leaf))
                }
            }
        };
        fetch().map_err(|error| format!("its input: {}", text(error)))
    }
}

/// A function's result, or why it has none. `None` if it was stopped.
fn result_of(ended: Ended<Result<Tensor, TchError>>) -> Result<Option<Tensor>, String> {
    match ended {
        Ended::Stopped(_) => Ok(None),
        Ended::Itself(Ok(outcome)) => outcome.map(Some).map_err(text),
        Ended::Itself(Err(payload)) => Err(format!("it panicked: {}", panic_text(&*payload))),
    }
}

/// Runs `run` with the generators at `from`, and restores them afterwards. They must end as in the first run. Otherwise another thread
/// drew random numbers, in the first run or now, and the result differs from the first one.
fn drawing(
    from: &RandomState,
    drawn: &Drawn,
    now: impl Fn() -> Result<RandomState, TorchError>,
    run: impl FnOnce() -> Ended<Result<Tensor, TchError>>,
) -> Result<Option<Tensor>, String> {
    let before = now().map_err(message_of)?;
    from.restore().map_err(message_of)?;
    let ended = run();
    let after = now();
    before.restore().map_err(message_of)?;
    let is_same = match &ended {
        Ended::Stopped(by_stop) => Ok(drawn.by_stop.as_ref() == Some(by_stop)),
        Ended::Itself(_) => after.map(|after| after == drawn.after),
    };
    let result = result_of(ended)?;
    if !is_same.map_err(message_of)? {
        return Err("it did not draw the same random numbers as before. Either the function differs from call to call, \
                    or another thread drew from the same generator"
            .to_owned());
    }
    Ok(result)
}

/// Hooks that discard everything: the graph of a rerun is never run backward.
struct Discard(Arc<Cache>);

impl SavedTensorHooks for Discard {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        saved.storage().map_or(Ok(()), |storage| self.0.in_use_again(&storage))?;
        Ok(Discarded::packed())
    }
}

/// Takes the place of saved tensors in the graph of a rerun.
pub(super) struct Discarded;

impl Discarded {
    pub(super) fn packed() -> Packed {
        Packed::Handle(Box::new(Discarded))
    }
}

impl Handle for Discarded {
    fn unpack(&self) -> Result<Storage, String> {
        Err("backward ran within a function that is computed again, which is not possible. Run it outside"
            .to_owned())
    }
}

fn message_of(error: TorchError) -> String {
    error.0
}

/// The message of an operation's error, without libtorch's stack trace.
fn text(error: TchError) -> String {
    let message = match error {
        TchError::Torch(message) => message,
        other => other.to_string(),
    };
    message.split("\nException raised from").next().unwrap_or_default().trim_end().to_owned()
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
