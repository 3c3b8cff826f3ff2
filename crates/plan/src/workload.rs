//! A step as it runs with everything kept.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Limits, Machine, Prediction, simulate};

/// One micro-batch's step as the device computes it when nothing is moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// What autograd saves, in the order of saving. Backward asks for it in the reverse order.
    pub entries: Vec<Entry>,
    /// Between the last save and the first time that backward asks for something.
    pub turn: Duration,
    /// Most bytes on the device beside saved storages meanwhile.
    pub turn_extra: u64,
    /// After backward: the optimizer, as a rule.
    pub rest: Duration,
}

/// One storage that autograd saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its size.
    pub bytes: u64,
    /// Time computed since the save before it, or since the step began.
    pub forward: Duration,
    /// Time computed from when backward asks for it to when it asks for the next, or to the end of backward. It is needed for that long.
    pub backward: Duration,
    /// Most bytes on the device beside saved storages during `forward`, this storage not counted.
    pub forward_extra: u64,
    /// The same during `backward`.
    pub backward_extra: u64,
    /// How to compute it again; none if there is no recipe for it.
    pub recompute: Option<Recompute>,
    /// The last entry during whose `forward` the program still holds it: until then it is on the device, wherever it is placed.
    /// [`usize::MAX`] if the program holds it when backward asks for it: such an entry is kept, since moving it frees nothing.
    pub in_use_until: usize,
    /// How many of the entries before it backward asks for while it still uses this one: an operation asks for all it saved before it lets
    /// go of any.
    pub in_use_with: usize,
}

impl Entry {
    /// Whether it can leave the device at all.
    pub(crate) fn is_movable(&self) -> bool {
        self.in_use_until < usize::MAX
    }
}

/// What it takes to compute an entry again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recompute {
    /// Its time, without that of what it is computed from.
    pub time: Duration,
    /// The first of the entries that it is computed from. Those from there to the entry itself have to be on the device.
    pub since: usize,
}

/// Where an entry is between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the device.
    #[default]
    Keep,
    /// In pinned host memory.
    Host,
    /// On the disk, by way of host memory.
    Disk,
    /// Nowhere: computed again. An entry without a recipe is kept.
    Recompute,
}

impl Workload {
    /// Time computed when nothing is moved and nothing waits.
    pub fn computed(&self) -> Duration {
        let entries: Duration = self.entries.iter().map(|entry| entry.forward + entry.backward).sum();
        entries + self.turn + self.rest
    }

    /// Has everything take so many times as long to compute.
    pub fn pace(&mut self, times: f64) {
        let all = self.entries.iter_mut().flat_map(|entry| {
            let recompute = entry.recompute.iter_mut().map(|recompute| &mut recompute.time);
            [&mut entry.forward, &mut entry.backward].into_iter().chain(recompute)
        });
        all.chain([&mut self.turn, &mut self.rest]).for_each(|time| *time = time.mul_f64(times));
    }

    /// What the step does under one placement per entry. Entries without one are kept.
    pub fn simulate(&self, placements: &[Placement], machine: &Machine, limits: &Limits) -> Prediction {
        simulate::run(self, placements, machine, limits)
    }
}
