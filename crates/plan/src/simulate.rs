//! The simulation of one step: forward, save by save, and backward, request by request.

mod backward;
mod forward;
mod holders;

use std::collections::VecDeque;
use std::time::Duration;

use self::holders::Watch;
pub(super) use self::holders::{peak, samples};
use super::graph::Graph;
use super::links::{Disk, Link};
use super::reruns::Reruns;
use super::{Activation, Budgets, Machine, Placement, Prediction, Sample, Workload};

/// Rounding errors in sums of seconds are smaller than this.
pub(super) const ROUNDING: f64 = 1e-6;

/// Where an activation is at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum At {
    /// Nowhere: not saved yet, used up, or to be recomputed.
    #[default]
    Nowhere,
    Device,
    /// Only below the device.
    Below,
    /// On its way back to the device; it arrives at this time.
    Loading(f64),
}

/// The state of an activation on its way through the tiers.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    at: At,
    /// When its copy to the host ends or, without host memory, when it was written; `None` if it has no copy.
    copied: Option<f64>,
    /// Whether it occupies host memory.
    in_host: bool,
    /// When its read ends, if it is read ahead.
    read: Option<f64>,
    /// Whether it was loaded before backward asked for it.
    early: bool,
}

struct Run<'a> {
    activations: &'a [Activation],
    placements: &'a [Placement],
    reruns: &'a Reruns,
    machine: &'a Machine,
    budgets: &'a Budgets,
    /// The device's time, in seconds since the step began.
    now: f64,
    places: Vec<Place>,
    on_device: u64,
    /// The activation that forward has reached.
    saving: usize,
    /// Activations that are not included in `on_device`, but that the program may still hold.
    in_use: Vec<usize>,
    /// Activations that backward has asked for and still uses.
    used: Vec<usize>,
    /// The activation that backward asks for, and whether it has asked for any.
    asked: usize,
    has_begun: bool,
    /// The most bytes needed besides saved storages just before that.
    extra_before: u64,
    /// How many of the reruns are done, and how many of the activations that are released late are released.
    rerun: usize,
    released_late: usize,
    in_host: u64,
    early: u64,
    near: u64,
    copies_out: Link,
    copies_in: Link,
    disk: Disk,
    /// Copied, or being copied, and still on the device; oldest first.
    releasing: VecDeque<usize>,
    /// On the disk and still in host memory; oldest first.
    clean: VecDeque<usize>,
    /// All activations from this index on have been requested or considered, for loading and for reading.
    loading_from: usize,
    reading_from: usize,
    /// Seconds that the device has waited, or spent on recomputation, on moving and on what the program's thread does for the cache.
    lost: f64,
    prediction: Prediction,
    /// Set where it matters what is on the device at the peak.
    watch: Option<Watch>,
    /// Set where it matters what is on the device at each moment.
    samples: Option<Vec<Sample>>,
}

/// The limits within which a step is of interest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// The lowest peak of interest, in bytes (checked after the simulation), and the highest.
    pub(super) least: u64,
    pub(super) peak: u64,
    /// The highest peak that the plan may have even if the disk falls behind, in bytes.
    pub(super) promised: u64,
    /// The longest step, in seconds.
    pub(super) step: f64,
    /// Whether what the program holds until forward ends may stay on the device.
    pub(super) may_stay: bool,
    /// Whether the quickest plan is wanted: what leaves may have all the room that the promised peak leaves.
    pub(super) is_roomy: bool,
}

/// Why the device waits.
#[derive(Clone, Copy)]
enum StallCause {
    DeviceBudget,
    HostPool,
    Load,
}

impl Bounds {
    pub(super) const NONE: Bounds = Bounds {
        least: 0,
        peak: u64::MAX,
        promised: u64::MAX,
        step: f64::INFINITY,
        may_stay: false,
        is_roomy: false,
    };
}

/// Simulates the step.
pub(super) fn run(
    work: &Workload,
    graph: &Graph,
    placements: &[Placement],
    machine: &Machine,
    budgets: &Budgets,
) -> Prediction {
    let reruns = Reruns::of(&work.activations, graph, placements);
    let mut run = Run::new(work, placements, &reruns, machine, budgets);
    run.through(work, u64::MAX, f64::INFINITY);
    run.prediction
}

/// The same with the reruns that go with the placements, but `None` if the step exceeds the bounds. The simulation
/// stops as soon as that is known.
pub(super) fn run_within(
    bounds: &Bounds,
    work: &Workload,
    placements: &[Placement],
    reruns: &Reruns,
    machine: &Machine,
    budgets: &Budgets,
) -> Option<Prediction> {
    let spare = bounds.step - work.computed().as_secs_f64() + ROUNDING;
    let mut run = Run::new(work, placements, reruns, machine, budgets);
    let within = run.through(work, bounds.peak, spare)
        && run.prediction.peak() <= bounds.peak
        && run.prediction.step.as_secs_f64() <= bounds.step;
    within.then_some(run.prediction)
}

impl<'a> Run<'a> {
    fn new(
        work: &'a Workload,
        placements: &'a [Placement],
        reruns: &'a Reruns,
        machine: &'a Machine,
        budgets: &'a Budgets,
    ) -> Run<'a> {
        let activations = &work.activations[..];
        Run {
            activations,
            placements,
            reruns,
            machine,
            budgets,
            now: 0.0,
            places: vec![Place::default(); activations.len()],
            on_device: 0,
            saving: 0,
            in_use: Vec::new(),
            used: Vec::new(),
            asked: activations.len(),
            has_begun: false,
            extra_before: work.turn_extra,
            rerun: 0,
            released_late: 0,
            in_host: 0,
            early: 0,
            near: 0,
            copies_out: Link::new(machine.copy_out),
            copies_in: Link::new(machine.copy_in),
            disk: Disk::new(machine.disk_write, machine.disk_read),
            releasing: VecDeque::new(),
            clean: VecDeque::new(),
            loading_from: activations.len(),
            reading_from: activations.len(),
            lost: 0.0,
            prediction: Prediction::default(),
            watch: None,
            samples: None,
        }
    }

    /// Simulates the whole step. Returns false as soon as its peak exceeds `peak` or more than `spare` seconds are
    /// lost.
    fn through(&mut self, work: &Workload, peak: u64, spare: f64) -> bool {
        self.handle(work);
        for index in 0..self.activations.len() {
            self.save(index);
            if self.prediction.forward_peak > peak || self.lost > spare {
                return false;
            }
        }
        self.turn(work.turn, work.turn_extra);
        for index in (0..self.activations.len()).rev() {
            if !self.activations[index].is_saved() {
                continue;
            }
            self.use_again(index);
            if self.prediction.backward_peak > peak || self.lost > spare {
                return false;
            }
        }
        self.compute(work.rest);
        self.prediction.step = Duration::from_secs_f64(self.now);
        true
    }

    fn compute(&mut self, time: Duration) {
        self.now += time.as_secs_f64();
    }

    /// The program's own thread works for the cache.
    fn handle(&mut self, work: &Workload) {
        let below = |index: &usize| matches!(self.placement(*index), Placement::Host | Placement::Disk);
        let moved = (0..self.activations.len()).filter(below).count();
        let handled = work.handled(moved, !self.reruns.runs().is_empty(), self.machine);
        self.prediction.handled = handled;
        self.lost += handled.as_secs_f64();
        self.compute(handled);
    }

    /// The program's own work takes longer because so many bytes move.
    fn move_bytes(&mut self, bytes: u64) {
        let takes = bytes as f64 * self.machine.moving;
        self.now += takes;
        self.lost += takes;
        self.prediction.moving += Duration::from_secs_f64(takes);
    }

    fn wait_until(&mut self, moment: f64, cause: StallCause) {
        if moment <= self.now {
            return;
        }
        let stall = &mut self.prediction.stall;
        let clock = match cause {
            StallCause::DeviceBudget => &mut stall.device_budget,
            StallCause::HostPool => &mut stall.host_pool,
            StallCause::Load => &mut stall.load,
        };
        *clock += Duration::from_secs_f64(moment - self.now);
        self.lost += moment - self.now;
        self.now = moment;
    }

    fn placement(&self, index: usize) -> Placement {
        match self.placements.get(index) {
            _ if !self.reruns.is_held(index) => Placement::Recompute,
            Some(below @ (Placement::Host | Placement::Disk)) if self.activations[index].is_movable() => {
                *below
            }
            _ => Placement::Keep,
        }
    }
}

/// Removes an activation from a queue, which is in the order of saving.
fn forget(queue: &mut VecDeque<usize>, index: usize) {
    // Usually everything in the queue was saved before it.
    if queue.back().is_none_or(|last| *last < index) {
        return;
    }
    if let Ok(place) = queue.binary_search(&index) {
        queue.remove(place);
    }
}

#[cfg(test)]
mod reruns;
#[cfg(test)]
mod tests;
