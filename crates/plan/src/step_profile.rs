//! What one profiled step has shown, save by save.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::machine::MOST_MOVING;
use crate::schedule::{PlannedSave, Schedule, is_in_proportion};
use crate::{Machine, Placement, Position, Release, Resources, Role, ScopeId, Workload};

/// The share of a disk's measured bandwidth that plans rely on, and of that of a GPU's copies, which vary little.
pub(crate) const COUNTED_ON: f64 = 0.9;
const COPIES_COUNTED_ON: f64 = 0.97;
/// A disk that no step has used yet writes and reads this many bytes per second until steps show what it does.
pub(crate) const UNKNOWN_DISK: f64 = 1e9;
/// What copies take of the program's own time, as a share of theirs: they use a part of the device's memory bandwidth and power. A first
/// guess, which comparisons correct: what steps of a Llama took beside reruns and waits was 0 to 1.7 % of it, with a median of 0.9 %.
const COPIES_COST: f64 = 0.009;

/// What one profiled step has shown. Its first micro-batch stands for the others.
#[derive(Clone, Debug, Default)]
pub struct StepProfile {
    /// One micro-batch, and its share of the rest of the step.
    pub work: Workload,
    /// What could be moved, in the order of saving, each with the index of its activation. A storage that is saved
    /// several times has one activation.
    pub saves: Vec<(Save, usize)>,
    /// The activations of the results of recorded operations: the operation, and which of its results.
    pub results: HashMap<(Position, usize), usize>,
    /// The name of the operator that makes each activation, if it is known.
    pub operators: Vec<Option<Cow<'static, str>>>,
    /// The activations that no recorded operation makes again, but a segment of the program.
    pub from_segments: Vec<usize>,
    /// Smaller storages are not moved, and not among `saves`.
    pub min_bytes: u64,
    /// How many micro-batches the step had.
    pub micro_batches: u32,
    /// How fast bytes moved.
    pub rates: Rates,
    /// How many bytes left the device or came back in the whole step.
    pub moved: u64,
    /// Those of `saves` whose size goes with no other's, as other profiled steps have shown that saved at the same points of the program.
    /// In their order.
    pub varying: Vec<usize>,
}

/// One save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Save {
    /// The storage's number in the cache. A storage that is saved again has the same one.
    pub entry: u64,
    /// The bytes of the storage.
    pub bytes: u64,
    /// The scope that saved it.
    pub scope: ScopeId,
    /// When it was saved.
    pub position: Position,
}

/// Bytes per second while any were in transit; `None` where none were.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Copies off the device.
    pub out: Option<f64>,
    /// Copies back to it.
    pub back: Option<f64>,
    /// Writes to the disk.
    pub written: Option<f64>,
    /// Reads from the disk.
    pub read: Option<f64>,
}

impl StepProfile {
    /// The bytes of all that autograd saved in the step's micro-batches, each storage counted once.
    pub(crate) fn saved_bytes(&self) -> u64 {
        let saved = self.work.activations.iter().filter(|activation| activation.role == Role::Saved);
        let bytes = saved.map(|activation| activation.bytes);
        bytes.sum::<u64>().saturating_mul(u64::from(self.micro_batches.max(1)))
    }

    /// Those of `saves` whose size goes with no other's, as far as is known of both, if `other` saved at the same points of the program.
    pub(crate) fn varying_beside(&self, other: &StepProfile) -> Option<Vec<usize>> {
        let points = |profile: &StepProfile| -> Vec<_> {
            profile.saves.iter().map(|(save, _)| (save.scope, save.position)).collect()
        };
        let (one, same) = (points(self), points(other));
        // Where nothing was recorded, all have the same position.
        let is_told = one.first().map(|(_, position)| position) != one.last().map(|(_, position)| position);
        if one != same || !is_told {
            return None;
        }
        let mut firsts: HashMap<u32, f64> = HashMap::new();
        let mut varies = |number: usize| {
            let [(planned, _), (save, _)] = [self.saves[number], other.saves[number]];
            let seen = save.bytes as f64 / planned.bytes.max(1) as f64;
            let times = *firsts.entry(planned.position.strand).or_insert(seen);
            !is_in_proportion(save.bytes, planned.bytes, times)
        };
        let is_known = |number: usize| self.varies(number) || other.varies(number);
        Some((0..self.saves.len()).filter(|number| varies(*number) || is_known(*number)).collect())
    }

    /// Whether the size of this one of `saves` goes with no other's.
    fn varies(&self, number: usize) -> bool {
        self.varying.binary_search(&number).is_ok()
    }

    /// The machine as the step has shown it. Plans rely on 0.97 of the measured bandwidth of copies, and on 0.9 of that of the disk.
    pub fn machine(&self, resources: &Resources) -> Machine {
        let Rates { out, back, written, read } = self.rates;
        let counted_on = |rate: Option<f64>, share: f64| rate.map_or(f64::INFINITY, |rate| share * rate);
        let copies = out.unwrap_or(f64::INFINITY).min(back.unwrap_or(f64::INFINITY));
        // A device that copies to the host may have moved nothing, or nothing further.
        let unknown = (copies.is_finite() && resources.disk > 0).then_some(UNKNOWN_DISK);
        let written = written.or(unknown);
        Machine {
            copy_out: counted_on(out, COPIES_COUNTED_ON),
            copy_in: counted_on(back, COPIES_COUNTED_ON),
            disk_write: counted_on(written, COUNTED_ON),
            disk_read: counted_on(read.or(written), COUNTED_ON),
            host_pool: resources.host_pool,
            release: resources.release,
            moving: (COPIES_COST / copies).min(MOST_MOVING),
            exposed: if resources.release == Release::WhenStored { 1.0 } else { 0.0 },
        }
    }

    /// What the saves of a step look up if each activation has its placement in `placements`. Panics if there are fewer placements than
    /// activations.
    pub fn schedule(&self, placements: &[Placement]) -> Schedule {
        let line = |(number, (save, activation)): (usize, &(Save, usize))| PlannedSave {
            bytes: save.bytes,
            scope: save.scope,
            placement: placements[*activation],
            position: save.position,
            varies: self.varies(number),
        };
        let results = self.results.iter().map(|(result, activation)| (*result, placements[*activation]));
        let saves = self.saves.iter().enumerate().map(line).collect();
        // What reruns read may stay without being saved.
        let saved = self.saves.iter().map(|(save, activation)| (*activation, save.bytes));
        let bytes = |activation: usize| self.work.activations.get(activation).map_or(0, |one| one.bytes);
        let spare = self.results.values().map(|activation| (*activation, bytes(*activation)));
        let mut kept: HashMap<usize, u64> = spare.chain(saved).collect();
        kept.retain(|activation, _| placements[*activation] == Placement::Keep);
        let schedule = Schedule::new(saves, results.collect(), self.min_bytes).keeping(kept.values().sum());
        let is_run = |activation: &usize| placements[*activation] == Placement::Recompute;
        if self.from_segments.iter().any(is_run) { schedule } else { schedule.without_segments() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;

    #[test]
    fn what_stays_is_counted_once_and_spares_are_among_it() {
        let save =
            |entry, bytes| Save { entry, bytes, scope: ScopeId::default(), position: Position::default() };
        let saves = vec![(save(1, 10), 0), (save(2, 20), 1), (save(1, 10), 0), (save(3, 40), 2)];
        let activations = [10, 20, 40, 80, 160].map(|bytes| Activation { bytes, ..Activation::default() });
        let results =
            (0..5).map(|activation| ((Position { strand: 0, index: activation as u64 }, 0), activation));
        let work = Workload { activations: activations.to_vec(), ..Workload::default() };
        let profile = StepProfile { work, saves, results: results.collect(), ..StepProfile::default() };
        let (keep, disk, again) = (Placement::Keep, Placement::Disk, Placement::Recompute);
        let schedule = profile.schedule(&[keep, disk, keep, keep, again]);
        assert_eq!((schedule.bytes(), schedule.kept_bytes()), (80, 130));
    }
}
