//! A step as it runs with everything kept.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Budgets, Machine, Prediction, simulate};

/// One micro-batch's step as the device computes it when nothing is moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// What autograd saves, in the order of saving. Backward asks for it in the reverse order.
    pub activations: Vec<Activation>,
    /// Between the last save and the first time that backward asks for something.
    pub turn: Duration,
    /// Most bytes on the device beside saved storages meanwhile.
    pub turn_extra: u64,
    /// After backward: the optimizer, as a rule.
    pub rest: Duration,
}

/// One storage that autograd saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activation {
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
    /// The last activation during whose `forward` the program still holds it: until then it is on the device, wherever it is placed.
    /// [`usize::MAX`] if the program holds it when backward asks for it: such an activation is kept, since moving it frees nothing.
    pub in_use_until: usize,
    /// How many of the activations before it backward asks for while it still uses this one: an operation asks for all it saved before it lets
    /// go of any.
    pub in_use_with: usize,
}

impl Activation {
    /// Whether it can leave the device at all.
    pub(crate) fn is_movable(&self) -> bool {
        self.in_use_until < usize::MAX
    }
}

/// What it takes to compute an activation again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recompute {
    /// Its time, without that of what it is computed from.
    pub time: Duration,
    /// The first of the activations that it is computed from. Those from there to the activation itself have to be on the device.
    pub since: usize,
}

/// Where an activation is between forward and backward.
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
    /// Nowhere: computed again. An activation without a recipe is kept.
    Recompute,
}

impl Workload {
    /// Time computed when nothing is moved and nothing waits.
    pub fn computed(&self) -> Duration {
        let activations: Duration =
            self.activations.iter().map(|activation| activation.forward + activation.backward).sum();
        activations + self.turn + self.rest
    }

    /// Has everything take so many times as long to compute.
    pub fn pace(&mut self, times: f64) {
        let all = self.activations.iter_mut().flat_map(|activation| {
            let recompute = activation.recompute.iter_mut().map(|recompute| &mut recompute.time);
            [&mut activation.forward, &mut activation.backward].into_iter().chain(recompute)
        });
        all.chain([&mut self.turn, &mut self.rest]).for_each(|time| *time = time.mul_f64(times));
    }

    /// What the step does under one placement per activation. Activations without one are kept.
    pub fn simulate(&self, placements: &[Placement], machine: &Machine, budgets: &Budgets) -> Prediction {
        simulate::run(self, placements, machine, budgets)
    }
}
