//! A step as it runs with everything kept.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Budgets, Machine, Prediction, simulate};

/// One micro-batch's step as the device computes it when nothing is moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// What autograd saves, in the order of saving. Backward asks for it in the reverse order.
    pub activations: Vec<Activation>,
    /// Time between the last save and the first time that backward asks for something.
    pub turn: Duration,
    /// The most bytes on the device, besides saved storages, during that time.
    pub turn_extra: u64,
    /// Time after backward, usually for the optimizer.
    pub rest: Duration,
}

/// One storage that autograd saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activation {
    /// The size in bytes.
    pub bytes: u64,
    /// Time computed since the previous save, or since the step began.
    pub forward: Duration,
    /// Time computed from when backward asks for it to when it asks for the next one, or to the end of backward. It
    /// is needed for that long.
    pub backward: Duration,
    /// The most bytes on the device besides saved storages during `forward`, not counting this storage.
    pub forward_extra: u64,
    /// The same during `backward`.
    pub backward_extra: u64,
    /// How to recompute it; `None` if there is no recipe.
    pub recompute: Option<Recompute>,
    /// The last activation during whose `forward` the program still holds this one: until then it is on the device,
    /// whatever its placement. [`usize::MAX`] if the program still holds it when backward asks for it: such an
    /// activation is kept, since moving it would free nothing.
    pub in_use_until: usize,
    /// How many of the activations before it backward asks for while it still uses this one: an operation asks for
    /// everything it saved before it releases any of it.
    pub in_use_with: usize,
}

impl Activation {
    /// Whether it can leave the device at all.
    pub(crate) fn is_movable(&self) -> bool {
        self.in_use_until < usize::MAX
    }
}

/// What recomputing an activation takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recompute {
    /// The time to compute it, not counting the time for what it is computed from.
    pub time: Duration,
    /// The first of the activations that it is computed from. All activations from there to this one must be on the
    /// device.
    pub since: usize,
}

/// Where an activation is kept between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the device.
    #[default]
    Keep,
    /// In pinned host memory.
    Host,
    /// On the disk, through host memory.
    Disk,
    /// Nowhere: it is recomputed. An activation without a recipe is kept.
    Recompute,
}

impl Workload {
    /// The time of the step when nothing is moved and nothing waits.
    pub fn computed(&self) -> Duration {
        let activations: Duration =
            self.activations.iter().map(|activation| activation.forward + activation.backward).sum();
        activations + self.turn + self.rest
    }

    /// Multiplies all computation times by `times`.
    pub fn pace(&mut self, times: f64) {
        let all = self.activations.iter_mut().flat_map(|activation| {
            let recompute = activation.recompute.iter_mut().map(|recompute| &mut recompute.time);
            [&mut activation.forward, &mut activation.backward].into_iter().chain(recompute)
        });
        all.chain([&mut self.turn, &mut self.rest]).for_each(|time| *time = time.mul_f64(times));
    }

    /// Simulates the step with one placement per activation. Activations without a placement are kept.
    pub fn simulate(&self, placements: &[Placement], machine: &Machine, budgets: &Budgets) -> Prediction {
        simulate::run(self, placements, machine, budgets)
    }
}
