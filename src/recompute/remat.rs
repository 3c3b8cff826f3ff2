//! Single operations: the storage of a result is marked, and whoever saves it gets the recipe.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Handle, Packed, Reads, SavedTensor, Storage, StorageId, Watch, WeakStorage};
use tch::{TchError, Tensor};

use super::recipe::{Before, Discard, Function, Recipe};
use super::{Level, refused};
use crate::cache::StepContext;
use crate::profile::Shown;
use crate::telemetry::{Counters, ScopeId};

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
    let shown = probe.zip(begun).map(|(probe, from)| Arc::new(Shown { from, to: probe.stamp(), first }));
    let of_input = |storage: &Storage| {
        inputs.iter().filter_map(|input| Storage::of(input)).any(|input| input.id() == storage.id())
    };
    // A result that needs no gradient was recorded by no one, and a view of an input has no bytes of its own.
    let storage = Storage::of(&output).filter(|storage| output.requires_grad() && !of_input(storage));
    let known = storage.zip(torch::version(&output)).zip(torch::layout(&output)).zip(reads);
    if let Some((((storage, version), layout), reads)) = known {
        let recipe = before.recipe(function, inputs, &output, reads)?;
        marks.mark(&storage, version, layout, recipe, shown);
    }
    Ok(output)
}

/// The results on one thread of a step that have recipes.
#[derive(Default)]
pub(crate) struct Marks(Mutex<Marked>);

#[derive(Default)]
struct Marked {
    results: HashMap<StorageId, Mark>,
    /// How many were alive when those that were not were last let go of.
    alive: usize,
}

/// So many that no one needs any more may stay until the next is marked.
const FEW: usize = 8;

struct Mark {
    /// Keeps the address from being used again, but not the bytes.
    result: Watch,
    version: u32,
    remat: Held,
    /// What computing it took, if the step is profiled.
    shown: Option<Arc<Shown>>,
}

/// The first to save the result takes the recipe over: from then on it lives as long as the graph needs it.
enum Held {
    Here(Arc<Remat>),
    ByGraph(Weak<Remat>),
    /// The result is saved with its bytes.
    No,
}

impl Marks {
    /// What the graph holds for a marked result in place of its bytes.
    pub(crate) fn recipe_of(&self, saved: &SavedTensor<'_>, counters: &Counters) -> Option<Packed> {
        let id = saved.storage_id()?;
        let mut marks = self.0.lock();
        let mark = marks.results.get_mut(&id).filter(|mark| mark.is_of(saved))?;
        let bytes = saved.storage_bytes();
        let remat = match &mark.remat {
            Held::Here(remat) => {
                let remat = Arc::clone(remat);
                mark.remat = Held::ByGraph(Arc::downgrade(&remat));
                counters.recomputed.add(bytes);
                remat
            }
            Held::ByGraph(remat) => {
                let remat = remat.upgrade()?;
                counters.deduplicated.add(bytes);
                remat
            }
            Held::No => return None,
        };
        Some(Packed::Handle(Box::new(RematHandle(remat))))
    }

    /// The result is saved with its bytes: its recipe, and the inputs that it holds, may go.
    pub(crate) fn is_saved(&self, saved: &SavedTensor<'_>) {
        let Some(id) = saved.storage_id() else { return };
        let before = {
            let mut marks = self.0.lock();
            let mark = marks.results.get_mut(&id).filter(|mark| mark.is_of(saved));
            mark.map(|mark| std::mem::replace(&mut mark.remat, Held::No))
        };
        // A recipe goes without the lock.
        drop(before);
    }

    /// What it took to compute a marked result, if the step is profiled.
    pub(crate) fn shown_of(&self, saved: &SavedTensor<'_>) -> Option<Arc<Shown>> {
        let marks = self.0.lock();
        let mark = marks.results.get(&saved.storage_id()?)?;
        mark.shown.clone().filter(|_| mark.is_of(saved))
    }

    /// Recipes whose results no one has saved, nor can any more, may go, and the inputs that they hold.
    pub(crate) fn drop_unsaved(&self) {
        let dead = self.0.lock().take_dead();
        // Recipes go without the lock.
        drop(dead);
    }

    fn mark(&self, storage: &Storage, version: u32, layout: u64, recipe: Recipe, shown: Option<Arc<Shown>>) {
        let remat = Remat {
            bytes: storage.bytes(),
            layout,
            recipe: Mutex::new(recipe),
            first: Watch::new(storage),
            result: Mutex::new(storage.downgrade()),
        };
        let result = Watch::new(storage);
        let mark = Mark { result, version, remat: Held::Here(Arc::new(remat)), shown };
        let gone: Vec<Mark> = {
            let mut marks = self.0.lock();
            let before = marks.results.insert(storage.id(), mark);
            let dead =
                if marks.results.len() > 2 * marks.alive + FEW { marks.take_dead() } else { Vec::new() };
            dead.into_iter().chain(before).collect()
        };
        // Recipes go without the lock.
        drop(gone);
    }
}

impl Mark {
    /// Whether what is saved is what was marked: nothing has written to it since.
    fn is_of(&self, saved: &SavedTensor<'_>) -> bool {
        self.version == saved.version() && !self.result.is_written()
    }
}

impl Marked {
    fn take_dead(&mut self) -> Vec<Mark> {
        let dead = self.results.extract_if(|_, mark| mark.result.upgrade().is_none());
        let dead = dead.map(|(_, mark)| mark).collect();
        self.alive = self.results.len();
        dead
    }
}

/// A result that is computed again when it is asked for.
struct Remat {
    bytes: u64,
    layout: u64,
    /// Locked while it runs, so that one thread does.
    recipe: Mutex<Recipe>,
    /// The result of the first run.
    first: Watch,
    /// The latest result, while anyone holds it.
    result: Mutex<WeakStorage>,
}

impl Remat {
    fn serve(&self) -> Result<Storage, String> {
        let recipe = self.recipe.lock();
        let alive = self.result.lock().upgrade();
        if let Some(storage) = alive {
            return Ok(storage);
        }
        if self.first.is_written() {
            return Err("ssdtrain: the result of an operation that was to be computed again was changed in place after it was \
                        saved. Change a copy of it"
                .to_owned());
        }
        let start = Instant::now();
        let output = recipe.run(Arc::new(Discard), Level::Discard)?;
        let storage = Storage::of(&output)
            .filter(|storage| storage.bytes() == self.bytes && torch::layout(&output) == Some(self.layout));
        let Some(storage) = storage else {
            return Err("ssdtrain: an operation that was to be computed again gave a tensor of another size or kind than \
                        before. Its function must do the same each time"
                .to_owned());
        };
        *self.result.lock() = storage.downgrade();
        recipe.ran(self.bytes, start);
        Ok(storage)
    }
}

/// Stands in the graph for a result that is computed again.
struct RematHandle(Arc<Remat>);

impl Handle for RematHandle {
    fn unpack(&self) -> Result<Storage, String> {
        self.0.serve()
    }
}
