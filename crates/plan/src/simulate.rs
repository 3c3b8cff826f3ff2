//! The simulation of one step: forward, save by save, and backward, request by request.

mod backward;
mod forward;

use std::collections::VecDeque;
use std::time::Duration;

use super::links::{Disk, Link};
use super::{Activation, Budgets, Machine, Placement, Prediction, Workload};

/// Rounding errors in sums of seconds are smaller than this.
const ROUNDING: f64 = 1e-6;

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
    /// Seconds that the device has waited or spent on recomputation.
    lost: f64,
    prediction: Prediction,
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

/// Simulates the step.
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

/// The same, but `None` if the step exceeds the bounds. The simulation stops as soon as that is known.
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

    /// Simulates the whole step. Returns false as soon as its peak exceeds `peak` or more than `spare` seconds are
    /// lost.
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

/// Removes an activation from a queue, which is in the order of saving.
fn forget(queue: &mut VecDeque<usize>, index: usize) {
    if let Ok(place) = queue.binary_search(&index) {
        queue.remove(place);
    }
}

#[cfg(test)]
mod tests;
