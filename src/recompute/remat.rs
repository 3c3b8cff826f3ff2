//! Single operations: the storage of a result is marked, and an operation that saves it gets the recipe.

use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Reads, Storage, Watch, WeakStorage};
use ssdtrain_store::sync::Mutex;
use tch::{TchError, Tensor};

use super::recipe::{Before, Function, Recipe};
use super::refused;
use crate::profile::RecipeTiming;
use crate::step::{Marks, Recomputed, StepContext};
use crate::telemetry::ScopeId;

/// Runs `function` on `inputs` in `step`, and marks its result.
pub(super) fn run(
    inputs: &[&Tensor],
    function: Function,
    step: Arc<StepContext>,
    scope: ScopeId,
    marks: &Marks,
) -> Result<Tensor, TchError> {
    let name = match step.cache.scopes.name(scope).as_str() {
        "" => "an operation".to_owned(),
        scope => format!("an operation of scope \"{scope}\""),
    };
    let probe = step.probe.clone();
    let first = probe.as_ref().map_or(0, |probe| probe.notes());
    let before = Before::new(name, inputs, step, scope).map_err(refused)?;
    let begun = probe.as_ref().map(|probe| probe.stamp());
    let reading = Reads::begin().map_err(refused)?;
    let output = function(inputs)?;
    let reads = reading.end();
    let timing =
        probe.zip(begun).map(|(probe, from)| Arc::new(RecipeTiming { from, to: probe.stamp(), first }));
    let of_input = |storage: &Storage| {
        inputs.iter().filter_map(|input| Storage::of(input)).any(|input| input.id() == storage.id())
    };
    // A result that needs no gradient was not recorded, and a view of an input has no bytes of its own.
    let storage = Storage::of(&output).filter(|storage| output.requires_grad() && !of_input(storage));
    let known = storage.zip(torch::version(&output)).zip(torch::layout(&output)).zip(reads);
    if let Some((((storage, version), layout), reads)) = known {
        let recipe = before.recipe(function, &output, reads, None)?;
        let remat = Remat {
            bytes: storage.bytes(),
            layout,
            recipe: Mutex::new(recipe),
            first: Watch::new(&storage),
            result: Mutex::new((storage.downgrade(), None)),
        };
        marks.mark(&storage, version, Arc::new(remat), timing);
    }
    Ok(output)
}

/// A result that is computed again when it is asked for.
struct Remat {
    bytes: u64,
    layout: u64,
    /// Locked during a rerun, so that only one thread runs it.
    recipe: Mutex<Recipe>,
    /// The result of the first run.
    first: Watch,
    /// The latest result, as long as anyone holds it, and the stream that a rerun made it on. Only who computes there has it: others
    /// would have to wait for it.
    result: Mutex<(WeakStorage, Option<usize>)>,
}

impl Recomputed for Remat {
    fn serve(&self) -> Result<Storage, String> {
        let recipe = self.recipe.lock();
        let (alive, made_on) = {
            let result = self.result.lock();
            (result.0.upgrade(), result.1)
        };
        if let Some(storage) = alive
            && (made_on.is_none() || recipe.stream(&storage) == made_on)
        {
            recipe.in_use(&storage)?;
            return Ok(storage);
        }
        if self.first.is_written() {
            return Err("ssdtrain: the result of an operation that was to be computed again was changed in place after it was \
                        saved. Change a copy of it"
                .to_owned());
        }
        let start = Instant::now();
        // The result is what is wanted, so it runs to its end.
        let output = recipe.run_to_its_end()?;
        let alike = output.filter(|output| torch::layout(output) == Some(self.layout));
        let storage = alike.as_ref().and_then(Storage::of).filter(|storage| storage.bytes() == self.bytes);
        let Some(storage) = storage else {
            return Err("ssdtrain: an operation that was to be computed again gave a tensor of another size or kind than \
                        before. Its function must do the same each time"
                .to_owned());
        };
        // It may have been made on a stream within.
        recipe.in_use(&storage)?;
        if let Some(stream) = recipe.stream(&storage) {
            *self.result.lock() = (storage.downgrade(), Some(stream));
        }
        recipe.ran(self.bytes, start);
        Ok(storage)
    }
}
