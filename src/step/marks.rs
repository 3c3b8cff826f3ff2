//! Results of single operations that need not be saved: an operation that saves one gets the recipe instead.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use ssdtrain_libtorch::{Handle, Packed, SavedTensor, Storage, StorageId, Watch};
use ssdtrain_store::sync::Mutex;

use crate::profile::RecipeTiming;
use crate::telemetry::Counters;

/// A result that is computed again when it is asked for.
pub(crate) trait Recomputed: Send + Sync {
    /// Its storage, or one with the same bytes.
    fn serve(&self) -> Result<Storage, String>;
}

/// The results on one thread of a step that have recipes.
#[derive(Default)]
pub(crate) struct Marks(Mutex<Marked>);

#[derive(Default)]
struct Marked {
    results: HashMap<StorageId, Mark>,
    /// How many were alive when dead ones were last removed.
    alive: usize,
}

/// This many dead results may remain until the next one is marked.
const FEW: usize = 8;

struct Mark {
    /// Keeps the address from being reused, but does not keep the bytes.
    result: Watch,
    version: u32,
    recipe: Stands,
    /// How its computation was timed, if the step is profiled.
    timing: Option<Arc<RecipeTiming>>,
}

/// Who holds the recipe. The first to save the result takes it over: from then on it lives as long as the graph needs it.
enum Stands {
    Here(Arc<dyn Recomputed>),
    ByGraph(Weak<dyn Recomputed>),
    /// The result is saved with its bytes.
    No,
}

impl Marks {
    /// What the graph holds for a marked result instead of its bytes.
    pub(crate) fn recipe_of(&self, saved: &SavedTensor<'_>, counters: &Counters) -> Option<Packed> {
        let id = saved.storage_id()?;
        let mut marks = self.0.lock();
        let mark = marks.results.get_mut(&id).filter(|mark| mark.is_of(saved))?;
        let bytes = saved.storage_bytes();
        let recipe = match &mark.recipe {
            Stands::Here(recipe) => {
                let recipe = Arc::clone(recipe);
                mark.recipe = Stands::ByGraph(Arc::downgrade(&recipe));
                counters.recomputed.add(bytes);
                recipe
            }
            Stands::ByGraph(recipe) => {
                let recipe = recipe.upgrade()?;
                counters.deduplicated.add(bytes);
                recipe
            }
            Stands::No => return None,
        };
        Some(Packed::Handle(Box::new(Stand(recipe))))
    }

    /// The result is saved with its bytes, so its recipe is dropped, with the inputs that it holds.
    pub(crate) fn is_saved(&self, saved: &SavedTensor<'_>) {
        let Some(id) = saved.storage_id() else { return };
        let before = {
            let mut marks = self.0.lock();
            let mark = marks.results.get_mut(&id).filter(|mark| mark.is_of(saved));
            mark.map(|mark| std::mem::replace(&mut mark.recipe, Stands::No))
        };
        // Recipes are dropped without the lock.
        drop(before);
    }

    /// How computing a marked result was timed, if the step is profiled.
    pub(crate) fn timing_of(&self, saved: &SavedTensor<'_>) -> Option<Arc<RecipeTiming>> {
        let marks = self.0.lock();
        let mark = marks.results.get(&saved.storage_id()?)?;
        mark.timing.clone().filter(|_| mark.is_of(saved))
    }

    /// Drops recipes whose results were not saved and no longer can be, with the inputs that they hold.
    pub(crate) fn drop_unsaved(&self) {
        let dead = self.0.lock().take_dead();
        // Recipes are dropped without the lock.
        drop(dead);
    }

    /// From now on `storage`, in this version, need not be saved: `recipe` computes its bytes.
    pub(crate) fn mark(
        &self,
        storage: &Storage,
        version: u32,
        recipe: Arc<dyn Recomputed>,
        timing: Option<Arc<RecipeTiming>>,
    ) {
        let result = Watch::new(storage);
        let mark = Mark { result, version, recipe: Stands::Here(recipe), timing };
        let gone: Vec<Mark> = {
            let mut marks = self.0.lock();
            let before = marks.results.insert(storage.id(), mark);
            let dead =
                if marks.results.len() > 2 * marks.alive + FEW { marks.take_dead() } else { Vec::new() };
            dead.into_iter().chain(before).collect()
        };
        // Recipes are dropped without the lock.
        drop(gone);
    }
}

impl Mark {
    /// Whether the saved tensor is what was marked: nothing has written to it since.
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

/// The graph's handle to a result that is computed again.
struct Stand(Arc<dyn Recomputed>);

impl Handle for Stand {
    fn unpack(&self) -> Result<Storage, String> {
        self.0.serve()
    }
}
