//! One step, from save to save and from ask to ask.

mod backward;
mod forward;

use std::collections::VecDeque;
use std::time::Duration;

use super::lanes::{Disk, Lane};
use super::{Entry, Limits, Machine, Placement, Prediction, Workload};

/// Sums of seconds differ by less.
const ROUNDING: f64 = 1e-6;

/// Where an entry is.
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

/// What is known of an entry on its way.
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
    entries: &'a [Entry],
    placements: &'a [Placement],
    machine: &'a Machine,
    limits: &'a Limits,
    /// Seconds since the step began, as the device computes.
    now: f64,
    places: Vec<Place>,
    on_device: u64,
    /// The entry that forward is at.
    saving: usize,
    /// Entries that are not counted there, but that the program may still hold.
    in_use: Vec<usize>,
    /// Entries that backward has asked for and still uses.
    used: Vec<usize>,
    in_host: u64,
    early: u64,
    near: u64,
    copies_out: Lane,
    copies_in: Lane,
    disk: Disk,
    /// Copied or being copied and still on the device, oldest first.
    leaving: VecDeque<usize>,
    /// On the disk and in host memory, oldest first.
    clean: VecDeque<usize>,
    /// All from here on was asked for or looked at, for loading and for reading.
    loading_from: usize,
    reading_from: usize,
    /// Seconds that the device waited or computed something again.
    lost: f64,
    told: Prediction,
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
enum Cause {
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
    limits: &Limits,
) -> Prediction {
    let mut run = Run::new(work, placements, machine, limits);
    run.through(work, u64::MAX, f64::INFINITY);
    run.told
}

/// The same if it keeps to the bounds. Where it does not, it is given up as soon as that shows.
pub(super) fn run_within(
    bounds: &Bounds,
    work: &Workload,
    placements: &[Placement],
    machine: &Machine,
    limits: &Limits,
) -> Option<Prediction> {
    let spare = bounds.step - work.computed().as_secs_f64() + ROUNDING;
    let mut run = Run::new(work, placements, machine, limits);
    let within = run.through(work, bounds.peak, spare)
        && run.told.peak() <= bounds.peak
        && run.told.step.as_secs_f64() <= bounds.step;
    within.then_some(run.told)
}

impl<'a> Run<'a> {
    fn new(
        work: &'a Workload,
        placements: &'a [Placement],
        machine: &'a Machine,
        limits: &'a Limits,
    ) -> Run<'a> {
        let entries = &work.entries[..];
        Run {
            entries,
            placements,
            machine,
            limits,
            now: 0.0,
            places: vec![Place::default(); entries.len()],
            on_device: 0,
            saving: 0,
            in_use: Vec::new(),
            used: Vec::new(),
            in_host: 0,
            early: 0,
            near: 0,
            copies_out: Lane::new(machine.copy_out),
            copies_in: Lane::new(machine.copy_in),
            disk: Disk::new(machine.disk_write, machine.disk_read),
            leaving: VecDeque::new(),
            clean: VecDeque::new(),
            loading_from: entries.len(),
            reading_from: entries.len(),
            lost: 0.0,
            told: Prediction::default(),
        }
    }

    /// All of the step, unless its peak exceeds `peak` or more than `spare` seconds are lost: then false.
    fn through(&mut self, work: &Workload, peak: u64, spare: f64) -> bool {
        for index in 0..self.entries.len() {
            self.save(index);
            if self.told.forward_peak > peak || self.lost > spare {
                return false;
            }
        }
        self.turn(work.turn, work.turn_extra);
        for index in (0..self.entries.len()).rev() {
            self.use_again(index);
            if self.told.backward_peak > peak || self.lost > spare {
                return false;
            }
        }
        self.compute(work.rest);
        self.told.step = Duration::from_secs_f64(self.now);
        true
    }

    fn compute(&mut self, time: Duration) {
        self.now += time.as_secs_f64();
    }

    fn wait_until(&mut self, moment: f64, cause: Cause) {
        if moment <= self.now {
            return;
        }
        let stall = &mut self.told.stall;
        let clock = match cause {
            Cause::DeviceBudget => &mut stall.device_budget,
            Cause::HostPool => &mut stall.host_pool,
            Cause::Load => &mut stall.load,
        };
        *clock += Duration::from_secs_f64(moment - self.now);
        self.lost += moment - self.now;
        self.now = moment;
    }

    fn placement(&self, index: usize) -> Placement {
        match self.placements.get(index).copied().unwrap_or_default() {
            _ if !self.entries[index].is_movable() => Placement::Keep,
            Placement::Recompute if self.entries[index].recompute.is_none() => Placement::Keep,
            placement => placement,
        }
    }
}

/// Takes an entry out of a queue, in which they stand in the order of saving.
fn forget(queue: &mut VecDeque<usize>, index: usize) {
    if let Ok(place) = queue.binary_search(&index) {
        queue.remove(place);
    }
}

#[cfg(test)]
mod tests;
