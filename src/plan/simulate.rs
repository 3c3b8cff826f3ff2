//! One step, from save to save and from ask to ask.

use std::collections::VecDeque;
use std::time::Duration;

use super::lanes::{Disk, Lane};
use super::{Entry, Leaving, Limits, Machine, Placement, Prediction, Workload};

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
    /// When its copy to the host ends; none if it has none.
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
    told: Prediction,
}

/// Why the device waits.
#[derive(Clone, Copy)]
enum Cause {
    DeviceBudget,
    HostPool,
    Load,
}

pub(super) fn run(
    work: &Workload,
    placements: &[Placement],
    machine: &Machine,
    limits: &Limits,
) -> Prediction {
    let entries = &work.entries[..];
    let mut run = Run {
        entries,
        placements,
        machine,
        limits,
        now: 0.0,
        places: vec![Place::default(); entries.len()],
        on_device: 0,
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
        told: Prediction::default(),
    };
    (0..entries.len()).for_each(|entry| run.save(entry));
    run.compute(work.turn);
    (0..entries.len()).rev().for_each(|entry| run.use_again(entry));
    run.compute(work.rest);
    run.told.step = Duration::from_secs_f64(run.now);
    run.told
}

impl Run<'_> {
    // ---- forward ----

    fn save(&mut self, index: usize) {
        let Entry { bytes, forward, forward_extra, .. } = self.entries[index];
        self.leave_early();
        // Its memory is taken before it is computed.
        self.told.forward_peak = self.told.forward_peak.max(self.on_device + bytes + forward_extra);
        self.compute(forward);
        self.leave_early();
        if self.placement(index) == Placement::Recompute {
            return;
        }
        while self.on_device + bytes > self.limits.device_budget && self.let_go() {}
        self.on_device += bytes;
        self.places[index].at = At::Device;
        if self.placement(index) != Placement::Keep && self.make_room(bytes) {
            self.copy_out(index);
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
        let Some(oldest) = self.leaving.pop_front() else { return false };
        let copied = self.places[oldest].copied.unwrap_or(self.now);
        self.wait_until(copied, Cause::DeviceBudget);
        self.leave(oldest);
        true
    }

    /// What was copied goes, where it need not be waited for.
    fn leave_early(&mut self) {
        if self.limits.leaving == Leaving::Late {
            return;
        }
        while let Some(&oldest) = self.leaving.front()
            && self.places[oldest].copied.is_some_and(|copied| copied <= self.now)
        {
            self.leaving.pop_front();
            self.leave(oldest);
        }
    }

    fn leave(&mut self, index: usize) {
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

    /// Backward asks for an entry, uses it, and lets go of it.
    fn use_again(&mut self, index: usize) {
        let Entry { bytes, backward, backward_extra, recompute, .. } = self.entries[index];
        self.leave_early();
        let wanted = if self.places[index].at == At::Below { bytes } else { 0 };
        while self.on_device + wanted > self.limits.backward_budget
            && self.leaving.front().is_some_and(|oldest| *oldest != index)
            && self.let_go()
        {}
        if self.places[index].at == At::Below {
            self.load(index, false);
        }
        // A copy that is queued counts as done where the device itself waits for it.
        let done = self.limits.leaving == Leaving::Late
            || !matches!(self.places[index].at, At::Loading(there) if there > self.now);
        if done {
            self.not_early(index);
        }
        self.look_ahead(index);
        match (self.places[index].at, recompute) {
            (At::Loading(there), _) => self.wait_until(there, Cause::Load),
            (At::Nowhere, Some(again)) => {
                self.on_device += bytes;
                self.compute(again);
                self.told.recomputed += again;
            }
            _ => {}
        }
        self.told.backward_peak = self.told.backward_peak.max(self.on_device + backward_extra);
        self.not_early(index);
        self.compute(backward);
        self.release(index);
    }

    fn not_early(&mut self, index: usize) {
        if std::mem::take(&mut self.places[index].early) {
            self.early -= self.entries[index].bytes;
        }
    }

    fn release(&mut self, index: usize) {
        self.on_device -= self.entries[index].bytes;
        self.places[index].at = At::Nowhere;
        forget(&mut self.leaving, index);
        self.disk.cancel(index);
        forget(&mut self.clean, index);
        self.give_host(index);
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
        let there = self.copies_in.transfer(bytes, ready.max(self.now));
        self.on_device += bytes;
        self.early += if early { bytes } else { 0 };
        self.told.copied_in += bytes;
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
        if at != At::Below || in_host || read.is_some() {
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
        self.now = moment;
    }

    fn placement(&self, index: usize) -> Placement {
        match self.placements.get(index).copied().unwrap_or_default() {
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// As many entries of 10 bytes, each 1 s of forward and 2 s of backward.
    fn work(entries: usize) -> Workload {
        let entry = Entry { bytes: 10, forward: S, backward: 2 * S, ..Entry::default() };
        Workload { entries: vec![entry; entries], turn: Duration::ZERO, rest: Duration::ZERO }
    }

    fn copies(bytes_per_s: f64) -> Machine {
        Machine { copy_out: bytes_per_s, copy_in: bytes_per_s, ..Machine::default() }
    }

    fn budget(bytes: u64) -> Limits {
        Limits { device_budget: bytes, backward_budget: bytes, ..Limits::default() }
    }

    #[test]
    fn what_is_kept_costs_nothing_but_memory() {
        let told = work(4).simulate(&[], &copies(1.0), &budget(1));
        assert_eq!((told.step, told.forward_peak, told.backward_peak), (12 * S, 40, 40));
        assert_eq!(told.stall.total() + told.recomputed, Duration::ZERO);
    }

    #[test]
    fn copies_as_fast_as_forward_hide_behind_it() {
        // Each is copied while the next is computed; two fit the budget.
        let told = work(4).simulate(&[Placement::Host; 4], &copies(10.0), &budget(20));
        assert_eq!((told.step, told.stall.total()), (12 * S, Duration::ZERO));
        assert_eq!((told.forward_peak, told.backward_peak), (30, 20));
        assert_eq!((told.copied_out, told.copied_in), (40, 20), "the last two are still there");
    }

    #[test]
    fn a_budget_that_is_too_small_waits_for_the_copies() {
        // A copy takes two seconds. The second save waits for the first copy (3 s), the third for the second (5 s), the fourth for the
        // third (7 s), each a second after the save before it.
        let told = work(4).simulate(&[Placement::Host; 4], &copies(5.0), &budget(10));
        assert_eq!(told.stall.device_budget, 3 * S);
        // Only the fourth is there; each of the others is asked for when the one before it is done, and takes two seconds.
        assert_eq!((told.stall.load, told.step), (6 * S, 7 * S + 8 * S + 6 * S));
    }

    #[test]
    fn loads_look_ahead_by_the_prefetch() {
        let all = [Placement::Host; 4];
        let limits =
            |prefetch| Limits { device_budget: 10, backward_budget: 20, prefetch, ..Limits::default() };
        // A load takes as long as the backward it hides behind.
        let ahead = work(4).simulate(&all, &copies(5.0), &limits(10)).stall.load;
        let late = work(4).simulate(&all, &copies(5.0), &limits(0)).stall.load;
        assert!(ahead < late && late == 6 * S, "{ahead:?} {late:?}");
    }

    #[test]
    fn what_the_host_has_no_room_for_waits_for_the_disk() {
        let machine = Machine { host_pool: 10, disk_write: 5.0, disk_read: 5.0, ..Machine::default() };
        let told = work(3).simulate(&[Placement::Disk; 3], &machine, &budget(10));
        // The first is written from 1 s to 3 s; the second wants its room at 2 s, the third at 4 s, when the second is written to 5 s.
        assert_eq!(told.stall.host_pool, 2 * S);
        assert_eq!((told.host_peak, told.written), (10, 20));
        assert_eq!(told.read, 20, "the third is on the device, and the others have left the host");
    }

    #[test]
    fn without_room_and_without_a_disk_it_stays() {
        let machine = Machine { host_pool: 20, ..Machine::default() };
        let told = work(4).simulate(&[Placement::Host; 4], &machine, &budget(10));
        assert_eq!((told.copied_out, told.backward_peak), (20, 20));
    }

    #[test]
    fn what_is_computed_again_takes_its_time_and_no_memory_before() {
        let mut work = work(4);
        work.entries.iter_mut().for_each(|entry| entry.recompute = Some(S));
        let told = work.simulate(&[Placement::Recompute; 4], &copies(1.0), &Limits::default());
        assert_eq!((told.step, told.recomputed, told.peak()), (16 * S, 4 * S, 10));
    }

    #[test]
    fn what_has_no_recipe_is_kept() {
        let told = work(2).simulate(&[Placement::Recompute; 2], &copies(1.0), &Limits::default());
        assert_eq!((told.step, told.peak()), (6 * S, 20));
    }

    #[test]
    fn what_leaves_early_needs_no_budget() {
        let limits = Limits { leaving: Leaving::Early, prefetch: 10, ..Limits::default() };
        let told = work(8).simulate(&[Placement::Host; 8], &copies(10.0), &limits);
        assert_eq!((told.forward_peak, told.stall.total()), (20, Duration::ZERO));
    }

    #[test]
    fn what_else_is_needed_counts_where_it_is_needed() {
        let mut work = work(3);
        work.entries[0].forward_extra = 100;
        work.entries[2].backward_extra = 50;
        let told = work.simulate(&[], &Machine::default(), &Limits::default());
        assert_eq!((told.forward_peak, told.backward_peak), (110, 80));
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
        (1_u64..1000, millis(50), millis(100), prop::option::of(millis(30))).prop_map(
            |(bytes, forward, backward, recompute)| Entry {
                bytes,
                forward,
                backward,
                recompute,
                ..Entry::default()
            },
        )
    }

    fn placement() -> impl Strategy<Value = Placement> {
        use Placement::{Disk, Host, Keep, Recompute};
        prop::sample::select(vec![Keep, Host, Disk, Recompute])
    }

    fn case() -> impl Strategy<Value = (Workload, Vec<Placement>)> {
        prop::collection::vec((entry(), placement()), 1..40).prop_map(|pairs| {
            let (entries, placements) = pairs.into_iter().unzip();
            (Workload { entries, turn: Duration::from_millis(7), rest: Duration::from_millis(3) }, placements)
        })
    }

    fn machine() -> impl Strategy<Value = Machine> {
        let speed = || 1e3..1e6;
        (speed(), speed(), speed(), speed(), 0_u64..20_000).prop_map(
            |(copy_out, copy_in, disk_write, disk_read, host_pool)| Machine {
                copy_out,
                copy_in,
                disk_write,
                disk_read,
                host_pool,
            },
        )
    }

    fn limits() -> impl Strategy<Value = Limits> {
        let leaving = prop::sample::select(vec![Leaving::Late, Leaving::Early]);
        (1_u64..20_000, 1_u64..20_000, 0_u64..5_000, 0_u64..5_000, leaving).prop_map(
            |(device_budget, backward_budget, prefetch, read_ahead, leaving)| Limits {
                device_budget,
                backward_budget,
                prefetch,
                read_ahead,
                leaving,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn time_is_computed_or_waited((work, placements) in case(), machine in machine(), limits in limits()) {
            let told = work.simulate(&placements, &machine, &limits);
            let sum = work.computed() + told.recomputed + told.stall.total();
            prop_assert!(told.step.abs_diff(sum) < Duration::from_micros(1), "{told:?}");
        }

        #[test]
        fn bytes_come_back_as_often_as_they_leave((work, placements) in case(), machine in machine(), limits in limits()) {
            let told = work.simulate(&placements, &machine, &limits);
            let moved = |wanted: &[Placement]| -> u64 {
                let chosen = work.entries.iter().zip(&placements).filter(|(_, placement)| wanted.contains(placement));
                chosen.map(|(entry, _)| entry.bytes).sum()
            };
            prop_assert!(told.copied_out <= moved(&[Placement::Host, Placement::Disk]));
            prop_assert!(told.copied_in <= told.copied_out && told.read <= told.written);
            prop_assert!(told.written <= moved(&[Placement::Disk]));
        }

        #[test]
        fn the_host_keeps_to_its_pool((work, placements) in case(), machine in machine(), limits in limits()) {
            let told = work.simulate(&placements, &machine, &limits);
            let largest = work.entries.iter().map(|entry| entry.bytes).max().unwrap_or(0);
            prop_assert!(told.host_peak <= machine.host_pool.max(largest));
        }

        #[test]
        fn a_budget_is_kept_where_all_can_leave((work, _) in case(), mut machine in machine(), limits in limits()) {
            machine.host_pool = u64::MAX;
            let all = vec![Placement::Host; work.entries.len()];
            let told = work.simulate(&all, &machine, &limits);
            let largest = work.entries.iter().map(|entry| entry.bytes).max().unwrap_or(0);
            prop_assert!(told.forward_peak <= limits.device_budget.max(largest) + largest);
            prop_assert!(told.backward_peak <= limits.backward_budget.max(2 * largest).max(limits.device_budget));
        }
    }
}
