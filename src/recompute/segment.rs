//! Segments: each tensor that autograd saves within one is a position in the order of saving, and a rerun fills the positions. It ends at
//! the last one that is wanted.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{
    Handle, Hooks, Packed, RandomState, Reads, SavedTensor, SavedTensorHooks, Storage, StorageId, Watch,
};
use tch::{Device, TchError, Tensor};

use super::recipe::{Before, Discarded, Function, Recipe};
use super::{refused, stop};
use crate::digest::Digest;
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

/// One run of a segment, held by its handles in the graph.
struct Segment {
    name: String,
    slots: Mutex<Vec<Slot>>,
    /// `None` until the function has returned. Locked during a rerun, so that only one thread runs it.
    done: Mutex<Option<Done>>,
}

struct Done {
    recipe: Recipe,
    facts: Arc<[Fact]>,
    /// The storages taken that the function created and that outlived it, in the state in which it left them.
    taken: Vec<Watch>,
    /// The first position at which a rerun may end. `None` if it must not end before the function does, because all of it is verified or
    /// because the function writes to what has been saved.
    settled: Option<usize>,
}

/// A position in the order of saving.
enum Slot {
    /// The bytes are not there.
    Empty,
    /// A rerun has filled it, and backward has not asked for it yet.
    Filled(Storage),
    /// The segment did not take it, or the graph has released it.
    Closed,
}

/// What was saved at a position. A rerun must save the same there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fact {
    /// Whether the segment took it.
    taken: bool,
    storage_bytes: u64,
    layout: Option<u64>,
    /// Its digest, if it was taken and is verified.
    digest: Option<Digest>,
}

impl Fact {
    fn of(saved: &SavedTensor<'_>, taken: bool, verify: bool) -> Result<Fact, String> {
        let tensor = if taken && verify { saved.tensor() } else { None };
        let digest = tensor.map_or(Ok(None), |tensor| Digest::of(&tensor));
        let digest = digest.map_err(|error| error.to_string())?;
        Ok(Fact { taken, storage_bytes: saved.storage_bytes(), layout: saved.layout(), digest })
    }

    /// A description of how it differs from `other`.
    fn told_from(&self, other: &Fact) -> String {
        let bytes = format!("{} bytes", self.storage_bytes);
        match self {
            _ if self.storage_bytes != other.storage_bytes => bytes,
            _ if self.layout != other.layout => format!("{bytes} of another kind or shape"),
            _ => format!("{bytes} of another value, which verify(true) has shown,"),
        }
    }
}

impl Segment {
    /// Serves a position once: from then on the graph holds the bytes, or asks for another rerun.
    fn serve(&self, position: usize) -> Result<Storage, String> {
        if let Some(storage) = self.take(position) {
            return Ok(storage);
        }
        let done = self.done.lock();
        // Another thread may have run it in the meantime.
        if let Some(storage) = self.take(position) {
            return Ok(storage);
        }
        let Some(done) = &*done else {
            return Err(format!(
                "backward ran within segment \"{}\" of ssdtrain, which is not possible. Run it outside",
                self.name
            ));
        };
        if done.taken.iter().any(Watch::is_written) {
            return Err(format!(
                "a tensor that segment \"{}\" of ssdtrain saved for backward was changed in place after it. Change it within the \
                 segment, or a copy of it",
                self.name
            ));
        }
        self.rerun(done)?;
        self.take(position)
            .ok_or_else(|| format!("internal error: segment \"{}\" has no position {position}", self.name))
    }

    fn take(&self, position: usize) -> Option<Storage> {
        let mut slots = self.slots.lock();
        let slot = slots.get_mut(position).filter(|slot| matches!(slot, Slot::Filled(_)))?;
        match std::mem::replace(slot, Slot::Empty) {
            Slot::Filled(storage) => Some(storage),
            Slot::Empty | Slot::Closed => None,
        }
    }

    fn rerun(&self, Done { recipe, facts, settled, .. }: &Done) -> Result<(), String> {
        let start = Instant::now();
        let wanted: Vec<bool> = self.slots.lock().iter().map(|slot| !matches!(slot, Slot::Closed)).collect();
        let last = settled.zip(wanted.iter().rposition(|wanted| *wanted)).filter(|_| stop::is_possible());
        let last = last.map(|(settled, wanted)| wanted.max(settled));
        let collector = Arc::new(Collector {
            name: self.name.clone(),
            verify: recipe.is_verified(),
            facts: Arc::clone(facts),
            wanted,
            last,
            devices: recipe.devices().to_vec(),
            found: Mutex::default(),
        });
        let result = recipe.run(Arc::clone(&collector) as Hooks, Level::Rerun, last.is_some())?;
        let found = std::mem::take(&mut *collector.found.lock());
        if result.is_some() && found.len() != facts.len() {
            return Err(collector.differs(&format!("{} tensors", found.len()), &format!("{}", facts.len())));
        }
        let bytes = bytes_of(&found);
        let mut replaced = Vec::new();
        {
            let mut slots = self.slots.lock();
            for (slot, storage) in slots.iter_mut().zip(found) {
                // A position that was closed in the meantime stays closed.
                if let (Some(storage), Slot::Empty | Slot::Filled(_)) = (storage, &*slot) {
                    replaced.push(std::mem::replace(slot, Slot::Filled(storage)));
                }
            }
        }
        // Storages are freed without the lock.
        drop(replaced);
        recipe.ran(bytes, start);
        Ok(())
    }
}

/// Bytes of the distinct storages among them.
fn bytes_of(found: &[Option<Storage>]) -> u64 {
    let distinct: HashMap<StorageId, u64> =
        found.iter().flatten().map(|storage| (storage.id(), storage.bytes())).collect();
    distinct.values().sum()
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

/// The graph's handle to one tensor that a segment took.
struct SlotHandle {
    segment: Arc<Segment>,
    position: usize,
}

impl Handle for SlotHandle {
    fn unpack(&self) -> Result<Storage, String> {
        self.segment.serve(self.position)
    }
}

impl Drop for SlotHandle {
    fn drop(&mut self) {
        let closed = {
            let mut slots = self.segment.slots.lock();
            slots.get_mut(self.position).map(|slot| std::mem::replace(slot, Slot::Closed))
        };
        drop(closed);
    }
}

/// Hooks of a segment's rerun: they take what is saved at the positions that are wanted, and check all positions up to the one at which
/// they stop it.
struct Collector {
    name: String,
    verify: bool,
    facts: Arc<[Fact]>,
    wanted: Vec<bool>,
    /// The last position that is needed, if the function may be stopped there.
    last: Option<usize>,
    /// Where random numbers may be drawn.
    devices: Vec<Device>,
    found: Mutex<Vec<Option<Storage>>>,
}

impl Collector {
    fn differs(&self, now: &str, then: &str) -> String {
        format!(
            "segment \"{}\" of ssdtrain saved {now} when it was computed again, and {then} before. Its function must do the \
             same each time",
            self.name
        )
    }

    fn stop(&self) -> Result<Packed, String> {
        stop::stop(|| RandomState::of(&self.devices)).map_err(|error| error.0)
    }
}

impl SavedTensorHooks for Collector {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let mut found = self.found.lock();
        let position = found.len();
        if self.last.is_some_and(|last| position > last) {
            // The function has gone on in spite of the error.
            return self.stop();
        }
        let Some(then) = self.facts.get(position) else {
            return Err(self.differs("more tensors", &position.to_string()));
        };
        let now = Fact::of(saved, then.taken, self.verify)?;
        if now != *then {
            let (now, then) = (now.told_from(then), format!("{} bytes", then.storage_bytes));
            return Err(self.differs(&format!("{now} as tensor {position}"), &then));
        }
        let wanted = then.taken && self.wanted.get(position).is_some_and(|wanted| *wanted);
        found.push(if wanted { saved.storage() } else { None });
        if self.last == Some(position) { self.stop() } else { Ok(Discarded::packed()) }
    }
}
