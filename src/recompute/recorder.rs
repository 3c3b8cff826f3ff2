//! The first run of a segment, and what it saves.

use std::collections::HashMap;
use std::sync::Arc;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{
    Hooks, Packed, RandomState, Reads, SavedTensor, SavedTensorHooks, Storage, StorageId, Watch,
};
use ssdtrain_store::sync::Mutex;
use tch::{Device, TchError, Tensor};

use super::fact::Fact;
use super::offer::Offer;
use super::operations::Operations;
use super::recipe::{Before, Function};
use super::refused;
use super::segment::{Done, Segment, Slot, SlotHandle};
use crate::profile::SegmentTiming;
use crate::step::{Level, Part, StepContext, current_scope, enter, scope};
use crate::telemetry::{Counters, ScopeId};

/// Runs `function` on `inputs` as a segment of `step` that is computed again for all that it saves.
pub(super) fn run(
    name: &str,
    inputs: &[&Tensor],
    function: Function,
    step: Arc<StepContext>,
    level: &Level,
) -> Result<Tensor, TchError> {
    let _scope = scope(name);
    let scope = current_scope(&step);
    let before = Before::new(named(name), inputs, Arc::clone(&step), scope).map_err(refused)?;
    // What a rerun saves was already counted when it was first saved.
    let counters = if matches!(level, Level::Rerun) { Arc::default() } else { Arc::clone(&step.counters) };
    let mut recorder = Recorder::new(name, inputs, &before, &step, counters, None);
    // What is run within another segment belongs to that one.
    let recorded = matches!(level, Level::Step(_)).then(|| Operations::record(&step, inputs, &before));
    let (operations, recording) = recorded.flatten().unzip();
    recorder.operations = operations;
    let recorder = Arc::new(recorder);
    let (output, reads) = recorder.first_run(Level::Segment, scope, &function, inputs)?;
    drop(recording);
    recorder.operations.iter().for_each(Operations::forget);
    recorder.conclude(before, function, &output, reads, Level::Rerun)?;
    Ok(output)
}

/// Runs `function` on `inputs` as a segment of `step` that is computed again for what the step does not want to keep and what no recorded
/// operation makes.
pub(super) fn offer(
    name: &str,
    inputs: &[&Tensor],
    function: Function,
    step: &Arc<StepContext>,
) -> Result<Tensor, TchError> {
    let _scope = scope(name);
    let scope = current_scope(step);
    let before = Before::without_inputs(named(name), inputs, Arc::clone(step), scope).map_err(refused)?;
    let offer = Offer::new(inputs, step, scope);
    let counters = Arc::clone(&step.counters);
    let recorder = Arc::new(Recorder::new(name, inputs, &before, step, counters, Some(offer)));
    let level = Level::Part(Arc::clone(&recorder) as Arc<dyn Part>);
    let (output, reads) = recorder.first_run(level, scope, &function, inputs)?;
    if let Some(offer) = &recorder.offer {
        offer.ends(step, reads.as_ref());
        let before = before.with(offer.take());
        // What runs within it again belongs to it.
        recorder.conclude(before, function, &output, reads, Level::Discard)?;
    }
    Ok(output)
}

fn named(name: &str) -> String {
    format!("segment \"{name}\"")
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
    /// `None` if everything is computed again.
    offer: Option<Offer>,
    /// What the function did, if that is recorded for its own sake.
    operations: Option<Operations>,
}

#[derive(Default)]
struct Order {
    facts: Vec<Fact>,
    /// The stream of each position that was taken.
    streams: Vec<Option<usize>>,
    /// Storages that were taken. Held weakly, so that a later storage at the same address is not mistaken for one of them.
    seen: HashMap<StorageId, Watch>,
    /// The latest position before which a storage had been written to since it was taken. A rerun must get there, so that what it finds
    /// has been written to as well.
    settled: usize,
    /// The state of the generators at the last position that was taken.
    by_stop: Option<RandomState>,
}

impl Recorder {
    fn new(
        name: &str,
        inputs: &[&Tensor],
        before: &Before,
        step: &Arc<StepContext>,
        counters: Arc<Counters>,
        offer: Option<Offer>,
    ) -> Recorder {
        Recorder {
            segment: Arc::new(Segment {
                name: name.to_owned(),
                cache: Arc::clone(&step.cache),
                slots: Mutex::default(),
                done: Mutex::new(None),
            }),
            inputs: inputs.iter().filter_map(|input| Some(Storage::of(input)?.id())).collect(),
            devices: before.devices().to_vec(),
            step: Arc::clone(step),
            counters,
            order: Mutex::default(),
            offer,
            operations: None,
        }
    }

    /// Runs the function, and says what it read.
    fn first_run(
        self: &Arc<Self>,
        level: Level,
        scope: ScopeId,
        function: &Function,
        inputs: &[&Tensor],
    ) -> Result<(Tensor, Option<Reads>), TchError> {
        let reading = Reads::begin().map_err(refused)?;
        let output = {
            let _active = torch::activate(Arc::clone(self) as Hooks);
            let _within = enter(Arc::clone(&self.step), level, scope);
            function(inputs)?
        };
        Ok((output, reading.end()))
    }

    /// The function has returned: if anything was taken, it can be computed again from here on, at this level.
    fn conclude(
        &self,
        before: Before,
        function: Function,
        output: &Tensor,
        reads: Option<Reads>,
        level: Level,
    ) -> Result<(), TchError> {
        let Order { facts, streams, seen, settled, by_stop } = std::mem::take(&mut *self.order.lock());
        let last = facts.iter().rposition(|fact| fact.taken);
        let Some((reads, last)) = reads.zip(last) else { return Ok(()) };
        // What the function did not create, the recipe checks.
        let is_made = |watch: &&Watch| watch.upgrade().is_none_or(|storage| !reads.contains(&storage));
        let is_settled = !seen.values().filter(is_made).any(Watch::is_written);
        // Nobody can write to storages that are gone already.
        let alive = seen.values().filter(is_made).filter_map(Watch::upgrade);
        let taken = alive.map(|storage| Watch::new(&storage)).collect();
        let recipe = before.recipe(function, output, reads, by_stop)?;
        if let Some(stands) = self.operations.as_ref().and_then(Operations::end) {
            self.segment.stand_in(stands);
            return Ok(());
        }
        let settled = if recipe.draws() { last } else { settled };
        let settled = (is_settled && !recipe.is_verified()).then_some(settled);
        let (facts, streams) = (facts.into(), streams.into());
        *self.segment.done.lock() = Some(Done { recipe, level, facts, streams, taken, settled });
        Ok(())
    }

    /// The next position, which the segment does not take.
    fn pass(&self, saved: &SavedTensor<'_>) -> Result<(), String> {
        let fact = Fact::of(saved, false, self.step.verify)?;
        {
            let mut order = self.order.lock();
            order.facts.push(fact);
            order.streams.push(None);
        }
        self.segment.slots.lock().push(Slot::Closed);
        Ok(())
    }

    /// The segment takes the latest position.
    fn take(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let fact = Fact::of(saved, true, self.step.verify)?;
        let by_stop = RandomState::of(&self.devices).map_err(|error| error.0)?;
        let storage = saved.storage();
        let mut order = self.order.lock();
        let Some((position, latest)) = order.facts.iter_mut().enumerate().next_back() else {
            return Err("internal error: nothing was saved in a segment".to_owned());
        };
        *latest = fact;
        if let Some(saved_on) = order.streams.last_mut() {
            *saved_on = storage.as_ref().and_then(|storage| self.step.cache.stream(storage));
        }
        order.by_stop = Some(by_stop);
        let before = storage.and_then(|storage| order.seen.insert(storage.id(), Watch::new(&storage)));
        if before.as_ref().is_some_and(Watch::is_written) {
            order.settled = position;
        }
        drop(order);
        if let Some(slot) = self.segment.slots.lock().get_mut(position) {
            *slot = Slot::Empty;
        }
        let is_known = before.is_some_and(|before| !before.is_written());
        let operations = self.operations.as_ref();
        if !operations.is_some_and(|operations| operations.take(position, saved)) {
            let counter = if is_known { &self.counters.deduplicated } else { &self.counters.recomputed };
            counter.add(saved.storage_bytes());
        }
        Ok(Packed::Handle(Box::new(SlotHandle { segment: Arc::clone(&self.segment), position })))
    }

    /// Whether the segment can make again what is being saved.
    fn makes(&self, saved: &SavedTensor<'_>) -> bool {
        let is_input = saved.storage_id().is_some_and(|id| self.inputs.contains(&id));
        !is_input && self.step.could_move(saved)
    }
}

impl SavedTensorHooks for Recorder {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        self.pass(saved)?;
        let is_taken = self.offer.is_none() && self.makes(saved);
        // The graph will not hold it.
        if !is_taken || saved.storage().is_some_and(|storage| !self.step.cache.in_use(&storage)) {
            return Ok(Packed::Pass);
        }
        self.counters.saved.add(saved.storage_bytes());
        self.take(saved)
    }
}

impl Part for Recorder {
    fn stand_for(&self, saved: &SavedTensor<'_>) -> Option<Packed> {
        let offer = self.offer.as_ref().filter(|_| self.makes(saved))?;
        if offer.keep_inputs(&self.step) { self.take(saved).ok() } else { None }
    }

    fn has_taken(&self, storage: StorageId) -> bool {
        let order = self.order.lock();
        order.seen.get(&storage).is_some_and(|taken| !taken.is_written())
    }

    fn timing(&self) -> Option<Arc<SegmentTiming>> {
        self.offer.as_ref()?.timing.clone()
    }
}
