//! How saved storages were made: by recorded operations, or within segments of the program. Pure.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use ssdtrain_libtorch::StorageId;
use ssdtrain_plan::{Activation, Position};

/// Operations that read and write less show nothing of the rate: they take as long as their launch.
const TELLING: u64 = 4 << 20;

/// A storage of a step, as it was when an operation made or read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    /// One of the storages that a recorded operation made.
    Result { operation: u64, result: usize },
    /// No recorded operation made it.
    Outside(StorageId),
}

/// A recorded operation, with its number.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) number: u64,
    /// When it ran.
    pub(crate) position: Position,
    /// The operator's name.
    pub(crate) name: &'static str,
    /// What the clock said before and after it ran.
    pub(crate) stamps: (u64, u64),
    /// What it read, besides what stays on the device in any case.
    pub(crate) reads: Vec<Read>,
    /// If it may run as one kernel with others: the bytes that it reads and writes by itself.
    pub(crate) traffic: Option<u64>,
    /// Whether that kernel takes less time than the operation did: of a norm, it does not compute the statistics, and others look results up.
    pub(crate) is_shorter: bool,
}

/// A storage that an operation read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    pub(crate) identity: Identity,
    pub(crate) bytes: u64,
    /// Whether it existed when something that is made from it was first saved, so that it could have been saved instead.
    pub(crate) exists: bool,
}

/// How a saved storage was made.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) identity: Identity,
    /// The operations that it was made by, without those that were told before.
    pub(crate) operations: Vec<Operation>,
}

/// A part of the program that can be run again for anything that was saved within it.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    /// Distinguishes the step's segments.
    pub(crate) number: usize,
    /// What it reads, besides what stays on the device in any case.
    pub(crate) reads: Vec<Read>,
    /// The operations that its inputs were made by, without those that were told before.
    pub(crate) operations: Vec<Operation>,
    pub(crate) time: Duration,
    /// The bytes besides saved storages that were on the device when it began.
    pub(crate) beside: u64,
}

/// What is known of a step's operations.
#[derive(Debug, Default)]
pub(crate) struct Lineage {
    /// What each saved entry is.
    pub(super) identities: HashMap<u64, Identity>,
    /// The recorded operations that saved storages were made by, and how long they took.
    pub(super) operations: BTreeMap<u64, (Operation, Duration)>,
    /// The segment in which each entry was first saved, by its number.
    pub(super) within: HashMap<u64, usize>,
    pub(super) segments: HashMap<usize, Segment>,
}

impl Lineage {
    /// Adds what was told about entry number `entry`; `took` says how long an operation took.
    pub(super) fn add(&mut self, entry: u64, origin: Origin, took: impl Fn(&Operation) -> Option<Duration>) {
        self.identities.entry(entry).or_insert(origin.identity);
        self.tell(origin.operations, took);
    }

    /// Adds that entry number `entry` was saved within `segment`; `took` says how long an operation took.
    pub(super) fn add_within(
        &mut self,
        entry: u64,
        mut segment: Segment,
        took: impl Fn(&Operation) -> Option<Duration>,
    ) {
        self.within.entry(entry).or_insert(segment.number);
        self.tell(std::mem::take(&mut segment.operations), took);
        self.segments.entry(segment.number).or_insert(segment);
    }

    fn tell(&mut self, operations: Vec<Operation>, took: impl Fn(&Operation) -> Option<Duration>) {
        for operation in operations {
            if let Some(time) = took(&operation) {
                self.operations.insert(operation.number, (operation, time));
            }
        }
    }

    /// Whether this is what a kernel reads that computes the operation's first result again. It is not computed again itself.
    pub(super) fn is_statistic(&self, identity: Identity) -> bool {
        let Identity::Result { operation, result } = identity else { return false };
        result > 0 && self.operations.get(&operation).is_some_and(|(operation, _)| operation.is_shorter)
    }

    /// Gives operations that are shorter as a kernel the time of what they read and write then, at the rate of the others.
    pub(super) fn shorten(&mut self) {
        let pace = |(operation, time): &(Operation, Duration)| {
            let traffic = operation.traffic.filter(|traffic| *traffic >= TELLING && !operation.is_shorter)?;
            Some(time.as_secs_f64() / traffic as f64)
        };
        let mut paces: Vec<f64> = self.operations.values().filter_map(pace).collect();
        paces.sort_unstable_by(f64::total_cmp);
        let Some(pace) = paces.get(paces.len() / 2) else { return };
        for (operation, time) in self.operations.values_mut().filter(|(operation, _)| operation.is_shorter) {
            let bytes = operation.traffic.unwrap_or(u64::MAX);
            *time = Duration::try_from_secs_f64(pace * bytes as f64).map_or(*time, |short| short.min(*time));
        }
    }

    /// The most bytes that a segment holds at once while it runs again: as many as in forward besides what is saved, and what it saved
    /// and still used.
    pub(super) fn held_by(&self, number: usize, saved: &[Activation], entries: &[u64]) -> u64 {
        let Some(segment) = self.segments.get(&number) else { return 0 };
        let is_within = |place: &usize| self.within.get(&entries[*place]) == Some(&number);
        let mut most = 0;
        let mut before: Vec<usize> = Vec::new();
        for place in (0..saved.len()).filter(is_within) {
            before.retain(|other| saved[*other].in_use_until >= place);
            let in_use: u64 = before.iter().map(|other| saved[*other].bytes).sum();
            most = most.max(saved[place].forward_extra + saved[place].bytes + in_use);
            before.push(place);
        }
        most.saturating_sub(segment.beside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn operation(number: u64, megabytes: u64, is_shorter: bool) -> Operation {
        let traffic = Some(megabytes << 20);
        let position = Position { strand: 0, index: number };
        Operation { number, position, name: "", stamps: (0, 0), reads: Vec::new(), traffic, is_shorter }
    }

    #[test]
    fn a_norm_takes_no_longer_than_its_bytes_do() {
        let mut lineage = Lineage::default();
        let times = [
            (100, false, 10),
            (300, false, 30),
            (100, false, 15),
            (1, false, 9),
            (200, true, 60),
            (900, true, 60),
        ];
        for (number, (megabytes, is_shorter, millis)) in (0..).zip(times) {
            lineage.operations.insert(number, (operation(number, megabytes, is_shorter), millis * MS));
        }
        lineage.shorten();
        let times: Vec<Duration> = lineage.operations.values().map(|(_, time)| *time).collect();
        assert_eq!(times, [10 * MS, 30 * MS, 15 * MS, 9 * MS, 20 * MS, 60 * MS]);
    }
}
