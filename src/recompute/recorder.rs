//! The first run of a segment, and what it saves.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{
    Hooks, Packed, RandomState, Reads, SavedTensor, SavedTensorHooks, Storage, StorageId, Watch,
};
use tch::{Device, TchError, Tensor};

use super::fact::Fact;
use super::recipe::{Before, Function};
use super::refused;
use super::segment::{Done, Segment, Slot, SlotHandle};
use crate::step::{Level, StepContext, current_scope, enter, scope};
use crate::telemetry::Counters;

/// Runs `function` on `inputs` as a segment of `step`.
pub(super) fn run(
    name: &str,
    inputs: &[&Tensor],
    function: Function,
    step: Arc<StepContext>,
    level: &Level,
) -> Result<Tensor, TchError> {
    let _scope = scope(name);
    let scope = current_scope(&step);
    let before =
        Before::new(format!("segment \"{name}\""), inputs, Arc::clone(&step), scope).map_err(refused)?;
    // What a rerun saves was already counted when it was first saved.
    let counters = if matches!(level, Level::Rerun) { Arc::default() } else { Arc::clone(&step.counters) };
    let segment =
        Arc::new(Segment { name: name.to_owned(), slots: Mutex::default(), done: Mutex::new(None) });
    let recorder = Arc::new(Recorder {
        segment: Arc::clone(&segment),
        inputs: inputs.iter().filter_map(|input| Some(Storage::of(input)?.id())).collect(),
        devices: before.devices().to_vec(),
        step: Arc::clone(&step),
        counters,
        order: Mutex::default(),
    });
    let reading = Reads::begin().map_err(refused)?;
    let output = {
        let _active = torch::activate(Arc::clone(&recorder) as Hooks);
        let _within = enter(step, Level::Segment, scope);
        function(inputs)?
    };
    let reads = reading.end();
    let Order { facts, seen, settled, by_stop } = std::mem::take(&mut *recorder.order.lock());
    let last = facts.iter().rposition(|fact| fact.taken);
    if let Some((reads, last)) = reads.zip(last) {
        // What the function did not create, the recipe checks.
        let is_made = |watch: &&Watch| watch.upgrade().is_none_or(|storage| !reads.contains(&storage));
        let is_settled = !seen.values().filter(is_made).any(Watch::is_written);
        // Nobody can write to storages that are gone already.
        let alive = seen.values().filter(is_made).filter_map(Watch::upgrade);
        let taken = alive.map(|storage| Watch::new(&storage)).collect();
        let recipe = before.recipe(function, &output, reads, by_stop)?;
        let settled = if recipe.draws() { last } else { settled };
        let settled = (is_settled && !recipe.is_verified()).then_some(settled);
        *segment.done.lock() = Some(Done { recipe, facts: facts.into(), taken, settled });
    }
    Ok(output)
}

/// Hooks of a segment's first run.
struct Recorder {
    segment: Arc<Segment>,
    /// The inputs' storages, which the caller holds.
    inputs: Vec<StorageId>,
    /// Where random numbers may be drawn.
    devices: Vec<Device>,
    step: Arc<StepContext>,
    counters: Arc<Counters>,
    order: Mutex<Order>,
}

#[derive(Default)]
struct Order {
    facts: Vec<Fact>,
    /// Storages that were taken. Held weakly, so that a later storage at the same address is not mistaken for one of them.
    seen: HashMap<StorageId, Watch>,
    /// The latest position before which a storage had been written to since it was taken. A rerun must get there, so that what it finds
    /// has been written to as well.
    settled: usize,
    /// The state of the generators at the last position that was taken.
    by_stop: Option<RandomState>,
}

impl SavedTensorHooks for Recorder {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let id = saved.storage_id();
        let is_input = id.is_some_and(|id| self.inputs.contains(&id));
        let taken = !is_input && self.step.could_move(saved);
        let fact = Fact::of(saved, taken, self.step.verify)?;
        let position = {
            let mut order = self.order.lock();
            order.facts.push(fact);
            let mut slots = self.segment.slots.lock();
            slots.push(if taken { Slot::Empty } else { Slot::Closed });
            slots.len() - 1
        };
        if !taken {
            return Ok(Packed::Pass);
        }
        let bytes = saved.storage_bytes();
        self.counters.saved.add(bytes);
        let by_stop = RandomState::of(&self.devices).map_err(|error| error.0)?;
        let known = {
            let mut order = self.order.lock();
            order.by_stop = Some(by_stop);
            let before =
                id.zip(saved.storage()).and_then(|(id, storage)| order.seen.insert(id, Watch::new(&storage)));
            if before.as_ref().is_some_and(Watch::is_written) {
                order.settled = position;
            }
            before.is_some_and(|before| !before.is_written())
        };
        let counter = if known { &self.counters.deduplicated } else { &self.counters.recomputed };
        counter.add(bytes);
        Ok(Packed::Handle(Box::new(SlotHandle { segment: Arc::clone(&self.segment), position })))
    }
}
