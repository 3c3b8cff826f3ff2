//! One step, from save to save and from ask to ask.

mod backward;
mod forward;

use std::collections::VecDeque;
use std::time::Duration;

use super::links::{Disk, Link};
use super::{Activation, Budgets, Machine, Placement, Prediction, Workload};

/// Sums of seconds differ by less.
const ROUNDING: f64 = 1e-6;

/// Where an activation is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum At {
    /// Nowhere: not saved yet, used up, or to be computed again.
    #[default]
    Nowhere,
    Device,
    /// Below the device only.
    Below,
    /// On its way back, there at this moment.
    Loading(f64),
}

/// What is known of an activation on its way.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    at: At,
    /// When its copy to the host ends, or without host memory when it was written; none if it has none.
    copied: Option<f64>,
    /// It has host memory.
    in_host: bool,
    /// Where it was read ahead: when that ends.
    read: Option<f64>,
    /// Loaded before it was asked for.
    early: bool,
}

struct Run<'a> {
    activations: &'a [Activation],
    placements: &'a [Placement],
    machine: &'a Machine,
    budgets: &'a Budgets,
    /// Seconds since the step began, as the device computes.
    now: f64,
    places: Vec<Place>,
    on_device: u64,
    /// The activation that forward is at.
    saving: usize,
    /// Entries that are not counted there, but that the program may still hold.
    in_use: Vec<usize>,
    /// Entries that backward has asked for and still uses.
    used: Vec<usize>,
    in_host: u64,
    early: u64,
    near: u64,
    copies_out: Link,
    copies_in: Link,
    disk: Disk,
    /// Copied or being copied and still on the device, oldest first.
    releasing: VecDeque<usize>,
    /// On the disk and in host memory, oldest first.
    clean: VecDeque<usize>,
    /// All from here on was asked for or looked at, for loading and for reading.
    loading_from: usize,
    reading_from: usize,
    /// Seconds that the device waited or computed something again.
    lost: f64,
    prediction: Prediction,
}

/// What a step may take for it to be of interest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Most bytes, and the fewest, which are looked at once the simulation is over.
    pub(super) least: u64,
    pub(super) peak: u64,
    /// Most bytes whatever the disk does.
    pub(super) promised: u64,
    /// In seconds.
    pub(super) step: f64,
}

/// Why the device waits.
#[derive(Clone, Copy)]
enum StallCause {
    DeviceBudget,
    HostPool,
    Load,
}

impl Bounds {
    pub(super) const NONE: Bounds =
        Bounds { least: 0, peak: u64::MAX, promised: u64::MAX, step: f64::INFINITY };
}

/// What the step does.
pub(super) fn run(
    work: &Workload,
    placements: &[Placement],
    machine: &Machine,
    budgets: &Budgets,
) -> Prediction {
    let mut run = Run::new(work, placements, machine, budgets);
    run.through(work, u64::MAX, f64::INFINITY);
    run.prediction
}

/// The same if it keeps to the bounds. Where it does not, it is given up as soon as that shows.
pub(super) fn run_within(
    bounds: &Bounds,
    work: &Workload,
    placements: &[Placement],
    machine: &Machine,
    budgets: &Budgets,
) -> Option<Prediction> {
    let spare = bounds.step - work.computed().as_secs_f64() + ROUNDING;
    let mut run = Run::new(work, placements, machine, budgets);
    let within = run.through(work, bounds.peak, spare)
        && run.prediction.peak() <= bounds.peak
        && run.prediction.step.as_secs_f64() <= bounds.step;
    within.then_some(run.prediction)
}

impl<'a> Run<'a> {
    fn new(
        work: &'a Workload,
        placements: &'a [Placement],
        machine: &'a Machine,
        budgets: &'a Budgets,
    ) -> Run<'a> {
        let activations = &work.activations[..];
        Run {
            activations,
            placements,
            machine,
            budgets,
            now: 0.0,
            places: vec![Place::default(); activations.len()],
            on_device: 0,
            saving: 0,
            in_use: Vec::new(),
            used: Vec::new(),
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
        }
    }

    /// All of the step, unless its peak exceeds `peak` or more than `spare` seconds are lost: then false.
    fn through(&mut self, work: &Workload, peak: u64, spare: f64) -> bool {
        for index in 0..self.activations.len() {
            self.save(index);
            if self.prediction.forward_peak > peak || self.lost > spare {
                return false;
            }
        }
        self.turn(work.turn, work.turn_extra);
        for index in (0..self.activations.len()).rev() {
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
        match self.placements.get(index).copied().unwrap_or_default() {
            _ if !self.activations[index].is_movable() => Placement::Keep,
            Placement::Recompute if self.activations[index].recompute.is_none() => Placement::Keep,
            placement => placement,
        }
    }
}

/// Takes an activation out of a queue, in which they stand in the order of saving.
fn forget(queue: &mut VecDeque<usize>, index: usize) {
    if let Ok(place) = queue.binary_search(&index) {
        queue.remove(place);
    }
}

#[cfg(test)]
mod tests;
