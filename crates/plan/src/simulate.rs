//! One step, from save to save and from ask to ask.

use std::collections::VecDeque;
use std::time::Duration;

use super::lanes::{Disk, Lane};
use super::{Entry, Leaving, Limits, Machine, Placement, Prediction, Recompute, Workload};

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

    // ---- forward ----

    fn save(&mut self, index: usize) {
        let Entry { bytes, forward, forward_extra, .. } = self.entries[index];
        self.saving = index;
        self.note_written();
        // Its memory is taken before it is computed.
        let entries = self.entries;
        self.in_use.retain(|&other| entries[other].in_use_until >= index);
        let in_use: u64 = self.in_use.iter().map(|&other| entries[other].bytes).sum();
        self.told.forward_peak = self.told.forward_peak.max(self.on_device + in_use + bytes + forward_extra);
        self.compute(forward);
        self.note_written();
        if self.placement(index) == Placement::Recompute {
            self.in_use.push(index);
            return;
        }
        while self.on_device + bytes > self.limits.device_budget && self.let_go() {}
        self.on_device += bytes;
        self.places[index].at = At::Device;
        if self.placement(index) == Placement::Keep {
            return;
        }
        match self.machine.leaving {
            Leaving::WhenStored | Leaving::OnceWritten => {
                self.leaving.push_back(index);
                self.disk.write(index, bytes, self.now);
            }
            Leaving::InStreamOrder => {
                if self.make_room(bytes) {
                    self.copy_out(index);
                }
            }
        }
    }

    fn copy_out(&mut self, index: usize) {
        let bytes = self.entries[index].bytes;
        self.take_host(index);
        let ends = self.copies_out.transfer(bytes, self.now);
        self.places[index].copied = Some(ends);
        self.leaving.push_back(index);
        self.told.copied_out += bytes;
        if self.placement(index) == Placement::Disk {
            self.disk.write(index, bytes, ends);
        }
    }

    /// Waits until the oldest that is leaving may go; false if nothing is.
    fn let_go(&mut self) -> bool {
        if self.machine.leaving == Leaving::WhenStored {
            let Some(written) = self.disk.next_written() else { return false };
            self.wait_until(written, Cause::DeviceBudget);
            self.note_written();
            return true;
        }
        let Some(oldest) = self.leaving.front().copied() else { return false };
        while self.machine.leaving == Leaving::OnceWritten && self.places[oldest].copied.is_none() {
            let Some(written) = self.disk.next_written() else { return false };
            self.wait_until(written, Cause::DeviceBudget);
            self.note_written();
        }
        self.leaving.pop_front();
        let copied = self.places[oldest].copied.unwrap_or(self.now);
        self.wait_until(copied, Cause::DeviceBudget);
        self.leave(oldest);
        true
    }

    fn leave(&mut self, index: usize) {
        if self.entries[index].in_use_until >= self.saving {
            self.in_use.push(index);
        }
        self.places[index].at = At::Below;
        self.on_device -= self.entries[index].bytes;
    }

    /// Waits until host memory has room; false if none will appear by waiting.
    fn make_room(&mut self, bytes: u64) -> bool {
        loop {
            self.note_written();
            while !self.fits_host(bytes) {
                let Some(oldest) = self.clean.pop_front() else { break };
                self.give_host(oldest);
            }
            if self.fits_host(bytes) {
                return true;
            }
            let Some(written) = self.disk.next_written() else { return false };
            self.wait_until(written, Cause::HostPool);
        }
    }

    /// One that is larger than all of it goes through it alone.
    fn fits_host(&self, bytes: u64) -> bool {
        self.in_host == 0 || self.in_host.saturating_add(bytes) <= self.machine.host_pool
    }

    fn note_written(&mut self) {
        while let Some(index) = self.disk.written_by(self.now) {
            self.told.written += self.entries[index].bytes;
            if self.places[index].in_host {
                self.clean.push_back(index);
            }
            match self.machine.leaving {
                Leaving::WhenStored if self.places[index].at == At::Device => {
                    forget(&mut self.leaving, index);
                    self.leave(index);
                }
                Leaving::OnceWritten => self.places[index].copied = Some(self.now),
                Leaving::WhenStored | Leaving::InStreamOrder => {}
            }
        }
    }

    fn take_host(&mut self, index: usize) {
        self.places[index].in_host = true;
        self.in_host += self.entries[index].bytes;
        self.told.host_peak = self.told.host_peak.max(self.in_host);
    }

    fn give_host(&mut self, index: usize) {
        if std::mem::take(&mut self.places[index].in_host) {
            self.in_host -= self.entries[index].bytes;
        }
    }

    // ---- backward ----

    /// From the last save to the first that backward asks for.
    fn turn(&mut self, time: Duration, extra: u64) {
        self.told.backward_peak = self.told.backward_peak.max(self.on_device + extra);
        self.compute(time);
    }

    /// Backward asks for an entry, uses it, and lets go of it.
    fn use_again(&mut self, index: usize) {
        let Entry { bytes, backward, backward_extra, recompute, .. } = self.entries[index];
        self.note_written();
        self.bring(index);
        if let (At::Nowhere, Some(Recompute { time, since })) = (self.places[index].at, recompute) {
            (since..index).rev().for_each(|input| self.bring(input));
            self.on_device += bytes;
            self.compute(time);
            self.told.recomputed += time;
            self.lost += time.as_secs_f64();
        }
        self.told.backward_peak = self.told.backward_peak.max(self.on_device + backward_extra);
        self.not_early(index);
        self.compute(backward);
        self.use_up(index);
    }

    /// Waits until an entry is on the device, if it is anywhere, and looks ahead of it.
    fn bring(&mut self, index: usize) {
        let wanted = if self.places[index].at == At::Below { self.entries[index].bytes } else { 0 };
        while self.machine.leaving != Leaving::WhenStored
            && self.on_device + wanted > self.limits.backward_budget
            && self.leaving.front().is_some_and(|oldest| *oldest != index)
            && self.let_go()
        {}
        if self.places[index].at == At::Below {
            self.load(index, false);
        }
        // A copy that is queued counts as done where the device itself waits for it.
        let done = self.machine.leaving == Leaving::InStreamOrder
            || !matches!(self.places[index].at, At::Loading(there) if there > self.now);
        if done {
            self.not_early(index);
        }
        self.look_ahead(index);
        if let At::Loading(there) = self.places[index].at {
            self.wait_until(there, Cause::Load);
        }
    }

    fn not_early(&mut self, index: usize) {
        if std::mem::take(&mut self.places[index].early) {
            self.early -= self.entries[index].bytes;
        }
    }

    fn use_up(&mut self, index: usize) {
        self.places[index].at = At::Nowhere;
        // All that was saved after it is gone.
        self.leaving.pop_back_if(|last| *last == index);
        self.disk.cancel(index);
        self.give_host(index);
        // It leaves the device with the last that it is used with.
        self.used.push(index);
        let entries = self.entries;
        let over =
            self.used.extract_if(.., |other| other.saturating_sub(entries[*other].in_use_with) >= index);
        self.on_device -= over.map(|other| entries[other].bytes).sum::<u64>();
    }

    fn look_ahead(&mut self, asked: usize) {
        self.loading_from = self.loading_from.min(asked);
        self.reading_from = self.reading_from.min(asked);
        while let Some(next) = self.loading_from.checked_sub(1) {
            let bytes = self.entries[next].bytes;
            if self.places[next].at == At::Below {
                let alone = self.early == 0 && self.limits.prefetch > 0;
                let ahead = alone || self.early.saturating_add(bytes) <= self.limits.prefetch;
                if !ahead || self.on_device.saturating_add(bytes) > self.limits.backward_budget {
                    break;
                }
                self.load(next, true);
            }
            self.loading_from = next;
        }
        while let Some(next) = self.reading_from.min(self.loading_from).checked_sub(1) {
            if !self.read_ahead(next) {
                break;
            }
            self.reading_from = next;
        }
    }

    /// Begins to bring an entry back, from where it is.
    fn load(&mut self, index: usize, early: bool) {
        let bytes = self.entries[index].bytes;
        self.note_written();
        let Place { copied, in_host, read, .. } = self.places[index];
        let ready = match read {
            Some(read) => {
                self.near -= bytes;
                read
            }
            None if in_host => copied.unwrap_or(self.now),
            None => self.read(index),
        };
        self.disk.cancel(index);
        self.give_host(index);
        let there = match self.machine.leaving {
            Leaving::WhenStored | Leaving::OnceWritten => ready,
            Leaving::InStreamOrder => {
                self.told.copied_in += bytes;
                self.copies_in.transfer(bytes, ready.max(self.now))
            }
        };
        self.on_device += bytes;
        self.early += if early { bytes } else { 0 };
        self.places[index] = Place { at: At::Loading(there), early, ..Place::default() };
    }

    fn read(&mut self, index: usize) -> f64 {
        let bytes = self.entries[index].bytes;
        self.told.read += bytes;
        self.disk.read(bytes, self.now)
    }

    /// Reads what is on the disk only; false if there is no room for it yet.
    fn read_ahead(&mut self, index: usize) -> bool {
        let (Place { at, in_host, read, .. }, bytes) = (self.places[index], self.entries[index].bytes);
        if at != At::Below || in_host || read.is_some() || self.machine.leaving != Leaving::InStreamOrder {
            return true;
        }
        let ahead = self.near == 0 || self.near.saturating_add(bytes) <= self.limits.read_ahead;
        if !ahead || !self.fits_host(bytes) {
            return false;
        }
        self.take_host(index);
        let ends = self.read(index);
        self.places[index].read = Some(ends);
        self.near += bytes;
        true
    }

    // ---- time ----

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
