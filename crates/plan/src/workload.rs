//! A step as it runs with everything kept.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::graph::Graph;
use crate::{Budgets, Machine, Prediction, simulate};

/// No step computes for longer.
const LONGEST: Duration = Duration::from_secs(1_000_000);

/// One micro-batch's step as the device computes it when nothing is moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// What autograd saves, in the order of saving, and between it what a plan may save instead or recompute through
    /// ([`Role`]). Backward asks for what is saved in the reverse order.
    pub activations: Vec<Activation>,
    /// Time between the last save and the first time that backward asks for something.
    pub turn: Duration,
    /// The most bytes on the device, besides saved storages, during that time.
    pub turn_extra: u64,
    /// Time after backward, usually for the optimizer.
    pub rest: Duration,
    /// What plans take of the program's own thread.
    #[serde(default)]
    pub handling: Handling,
}

/// What the cache's work takes of the thread that runs the program. The step is longer by the part of it that is [exposed](Machine::exposed).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handling {
    /// Looking after what is saved, in a step whose plan does not keep everything.
    pub saves: Duration,
    /// Recording operations, in a step that recomputes something.
    pub operations: Duration,
    /// Sending off one storage, and fetching it back.
    pub each_move: Duration,
}

/// One storage that an operation of forward made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activation {
    /// Whether autograd saves it.
    pub role: Role,
    /// The size in bytes.
    pub bytes: u64,
    /// Time computed since the previous activation, or since the step began.
    pub forward: Duration,
    /// Time computed from when backward asks for it to when it asks for the next one, or to the end of backward. It
    /// is needed for that long. Backward asks only for what is [saved](Role::Saved).
    pub backward: Duration,
    /// The most bytes on the device besides saved storages during `forward`, not counting this storage. What is
    /// [spare](Role::Spare) or [fleeting](Role::Fleeting) counts here for as long as the program holds it.
    pub forward_extra: u64,
    /// The same during `backward`.
    pub backward_extra: u64,
    /// How to recompute it; `None` if there is no recipe.
    pub recompute: Option<Recompute>,
    /// The last activation during whose `forward` the program still holds this one: until then it is on the device,
    /// whatever its placement. [`usize::MAX`] if the program still holds it when backward asks for it: such an
    /// activation is kept, since moving it would free nothing.
    pub in_use_until: usize,
    /// How far before it is the first activation that backward asks for while it still uses this one: an operation
    /// asks for everything it saved before it releases any of it.
    pub in_use_with: usize,
    /// If it can be computed again together with others in one pass over their elements: the bytes that its operation
    /// reads and writes by itself. What one operation of a pass hands to another is neither written nor read.
    #[serde(default)]
    pub traffic: Option<u64>,
}

/// What becomes of an activation when nothing is planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Autograd saves it, and backward asks for it.
    #[default]
    Saved,
    /// Autograd does not save it, but it exists when an activation that is computed from it is saved. A plan may save
    /// it in place of others that are recomputed from it, such as the input of a normalisation in place of a copy with
    /// more digits. Its place is right before the first saved activation whose recomputation needs it.
    Spare,
    /// A result that exists for a moment in forward. It cannot be saved, but recomputing others may lead through it.
    Fleeting,
}

impl Activation {
    /// Whether it can leave the device at all.
    pub(crate) fn is_movable(&self) -> bool {
        self.in_use_until < usize::MAX
    }

    /// Whether autograd saves it.
    pub(crate) fn is_saved(&self) -> bool {
        self.role == Role::Saved
    }

    /// Whether it can be saved, or saved in place of others.
    pub(crate) fn can_be_held(&self) -> bool {
        self.role != Role::Fleeting
    }

    /// Whether both are results of the same operation, as far as can be told, whatever their sizes and times.
    pub(crate) fn is_like(&self, other: &Activation) -> bool {
        let same_recipe = match (&self.recompute, &other.recompute) {
            (Some(one), Some(other)) => one.inputs == other.inputs,
            (one, other) => one.is_none() && other.is_none(),
        };
        self.role == other.role && same_recipe
    }

    /// What becomes of it when nothing is planned.
    pub(crate) fn unplanned(&self) -> Placement {
        match self.role {
            Role::Saved => Placement::Keep,
            Role::Spare | Role::Fleeting => Placement::Recompute,
        }
    }
}

/// The operation that computes an activation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recompute {
    /// The time of this one operation.
    pub time: Duration,
    /// The activations that it reads, by index. What is always on the device, such as parameters and small constants,
    /// is not among them. An input may be saved later than the result, but nothing may depend on itself. A recipe that
    /// depends on itself, or that reads an index that does not exist, counts as none.
    pub inputs: Vec<usize>,
}

/// Where an activation is kept between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the device.
    #[default]
    Keep,
    /// In pinned host memory.
    Host,
    /// On the disk, through host memory.
    Disk,
    /// Nowhere: it is recomputed when it is needed. A saved activation that cannot be recomputed is kept. For one that
    /// autograd does not save, this means that it is not saved, and costs nothing unless something is recomputed from
    /// it.
    Recompute,
}

impl Placement {
    /// Whether the bytes of a storage stay on the device. `None` if it is to be recomputed: nothing is planned for them then.
    pub fn keeps_bytes(self) -> Option<bool> {
        match self {
            Placement::Keep => Some(true),
            Placement::Host | Placement::Disk => Some(false),
            Placement::Recompute => None,
        }
    }
}

impl Workload {
    /// The time of the step when nothing is moved and nothing waits.
    pub fn computed(&self) -> Duration {
        let activations: Duration =
            self.activations.iter().map(|activation| activation.forward + activation.backward).sum();
        activations + self.turn + self.rest
    }

    /// Multiplies the times of the step by `times`, and those of operations that are recomputed by `of_reruns`, but makes
    /// none of them longer than a million seconds.
    pub fn pace(&mut self, times: f64, of_reruns: f64) {
        let pace = |time: &mut Duration, times: f64| {
            let paced = (time.as_secs_f64() * times).min(LONGEST.as_secs_f64());
            *time = Duration::try_from_secs_f64(paced).unwrap_or(LONGEST);
        };
        for activation in &mut self.activations {
            pace(&mut activation.forward, times);
            pace(&mut activation.backward, times);
            activation.recompute.iter_mut().for_each(|recompute| pace(&mut recompute.time, of_reruns));
        }
        pace(&mut self.turn, times);
        pace(&mut self.rest, times);
    }

    /// By how much a step is longer because the cache takes the program's thread.
    pub(crate) fn handled(&self, moved: usize, is_recomputed: bool, machine: &Machine) -> Duration {
        if moved == 0 && !is_recomputed {
            return Duration::ZERO;
        }
        let each = self.handling.each_move.mul_f64(moved as f64);
        self.handled_anyway(is_recomputed, machine) + each.mul_f64(machine.exposed.clamp(0.0, 1.0))
    }

    /// The part of it that any step has that does not keep everything, or any that recomputes something.
    pub(crate) fn handled_anyway(&self, is_recomputed: bool, machine: &Machine) -> Duration {
        let Handling { saves, operations, .. } = self.handling;
        let takes = if is_recomputed { saves + operations } else { saves };
        takes.mul_f64(machine.exposed.clamp(0.0, 1.0))
    }

    /// Whether anything can be computed again.
    pub(crate) fn may_recompute(&self) -> bool {
        self.activations.iter().any(|activation| activation.recompute.is_some())
    }

    /// The placements of a step without a plan: everything that autograd saves stays on the device, and nothing else is
    /// saved.
    pub fn unplanned(&self) -> Vec<Placement> {
        self.activations.iter().map(Activation::unplanned).collect()
    }

    /// Simulates the step with one placement per activation. Those without a placement stay as they are in a step
    /// without a plan. An activation that is saved in place of others, but that nothing is recomputed from, is not
    /// saved after all.
    pub fn simulate(&self, placements: &[Placement], machine: &Machine, budgets: &Budgets) -> Prediction {
        let graph = Graph::new(&self.activations);
        simulate::run(self, &graph, placements, machine, budgets)
    }
}
