//! The activations of a workload by what they can be recomputed from. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use ssdtrain_plan::{Activation, Position, Recompute, Role};

use super::lineage::{Identity, Lineage, Read};

/// A workload's activations, with what autograd does not save between them.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Family {
    pub(super) activations: Vec<Activation>,
    /// Where each of the saved activations is now.
    pub(super) places: Vec<usize>,
    /// The name of the operator that makes each activation, if it is known.
    pub(super) operators: Vec<Option<&'static str>>,
    /// Those that only a segment makes again.
    pub(super) from_segments: Vec<usize>,
    /// Where the results of recorded operations are: when the operation ran, and which of its results.
    pub(super) results: HashMap<(Position, usize), usize>,
}

impl Family {
    /// Adds what `saved` can be recomputed from; `entries` are their entries.
    pub(super) fn of(lineage: &Lineage, saved: Vec<Activation>, entries: &[u64]) -> Family {
        let known = |(place, entry)| Some((*lineage.identities.get(entry)?, place));
        let identities: HashMap<Identity, usize> = entries.iter().enumerate().filter_map(known).collect();
        let mut results = HashMap::new();
        for identity in identities.keys().filter(|identity| !lineage.is_statistic(**identity)) {
            if let Identity::Result { operation, .. } = identity {
                *results.entry(*operation).or_default() += 1;
            }
        }
        let mut build = Build {
            lineage,
            saved: identities,
            results,
            makers: Vec::new(),
            items: Vec::new(),
            extra: HashMap::new(),
            runs: HashMap::new(),
        };
        entries.iter().for_each(|entry| build.add_saved(*entry));
        build.finish(saved, entries)
    }
}

/// What makes something again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Maker {
    Operation(u64),
    Segment(usize),
}

enum Item {
    /// A saved activation, by its place among them.
    Saved(usize),
    Extra {
        identity: Identity,
        bytes: u64,
        role: Role,
    },
    /// A run of something that makes several saved activations at once, which are read from it.
    Run(Maker),
}

struct Build<'a> {
    lineage: &'a Lineage,
    saved: HashMap<Identity, usize>,
    /// How many results of each operation are saved.
    results: HashMap<u64, usize>,
    /// What makes each of the saved activations again, if anything does.
    makers: Vec<Option<Maker>>,
    items: Vec<Item>,
    /// Where what is not saved is among `items`; `None` if it cannot be had again.
    extra: HashMap<Identity, Option<usize>>,
    /// Where runs are among `items`.
    runs: HashMap<Maker, usize>,
}

/// A result that is made by a run together with others is computed from at most this many of those before it, so that one run makes them
/// all.
const TOGETHER: usize = 16;

impl Build<'_> {
    /// Adds the next saved activation, after everything that making it again may lead through and that is not there yet.
    fn add_saved(&mut self, entry: u64) {
        let lineage = self.lineage;
        let identity = lineage.identities.get(&entry).copied();
        if identity.is_some_and(|identity| lineage.is_statistic(identity)) {
            self.items.push(Item::Saved(self.makers.len()));
            return self.makers.push(None);
        }
        if let Some(Identity::Result { operation, .. }) = identity {
            self.add_ancestors(operation);
        }
        let within = lineage.within.get(&entry).copied();
        let operation = match identity {
            Some(identity @ Identity::Result { operation, .. }) if self.inputs(identity).is_some() => {
                Some(operation)
            }
            _ => None,
        };
        // What is computed from something that the segment has to make, it makes as well.
        let operation =
            operation.filter(|operation| !within.is_some_and(|number| self.leads_into(*operation, number)));
        let maker =
            operation.map(Maker::Operation).or_else(|| within.and_then(|number| self.segment(number)));
        if let Some(maker) = maker.filter(|maker| self.makes_several(*maker)) {
            self.runs.entry(maker).or_insert_with(|| {
                self.items.push(Item::Run(maker));
                self.items.len() - 1
            });
        }
        self.items.push(Item::Saved(self.makers.len()));
        self.makers.push(maker);
    }

    /// The segment of this number, if what it reads can be had again.
    fn segment(&mut self, number: usize) -> Option<Maker> {
        let segment = self.lineage.segments.get(&number)?;
        self.add_reads(&segment.reads);
        segment.reads.iter().all(|read| self.can_be_had(read)).then_some(Maker::Segment(number))
    }

    /// Whether running `operation` again may lead through something that this segment makes.
    fn leads_into(&self, operation: u64, segment: usize) -> bool {
        let (mut open, mut seen) = (vec![operation], HashSet::from([operation]));
        while let Some(number) = open.pop() {
            let Some((operation, _)) = self.lineage.operations.get(&number) else { continue };
            for read in &operation.reads {
                match (self.saved.get(&read.identity), read.identity) {
                    (Some(place), _) if self.makers.get(*place) == Some(&Some(Maker::Segment(segment))) => {
                        return true;
                    }
                    (None, Identity::Result { operation, .. }) if seen.insert(operation) => {
                        open.push(operation)
                    }
                    _ => {}
                }
            }
        }
        false
    }

    fn makes_several(&self, maker: Maker) -> bool {
        match maker {
            Maker::Operation(number) => self.results.get(&number).is_some_and(|results| *results > 1),
            Maker::Segment(_) => true,
        }
    }

    /// Adds everything that running `operation` again may lead through and that is not there yet.
    fn add_ancestors(&mut self, operation: u64) {
        if let Some((operation, _)) = self.lineage.operations.get(&operation) {
            self.add_reads(&operation.reads);
        }
    }

    /// The same for what reads these.
    fn add_reads(&mut self, reads: &[Read]) {
        // An operation reads only what those with lower numbers made: in the order of numbers, what is read comes first.
        let mut found: BTreeMap<(u64, usize), Read> = BTreeMap::new();
        let mut outside = Vec::new();
        let mut open = vec![reads];
        while let Some(reads) = open.pop() {
            for read in reads {
                if self.saved.contains_key(&read.identity) || self.extra.contains_key(&read.identity) {
                    continue;
                }
                match read.identity {
                    Identity::Outside(_) => outside.push(*read),
                    Identity::Result { operation, result } => {
                        if found.insert((operation, result), *read).is_none() {
                            open.extend(
                                self.lineage.operations.get(&operation).map(|(maker, _)| &maker.reads[..]),
                            );
                        }
                    }
                }
            }
        }
        for read in outside.into_iter().chain(found.into_values()) {
            let exists = read.exists;
            if !exists && self.inputs(read.identity).is_none() {
                self.extra.insert(read.identity, None);
            } else if !self.extra.contains_key(&read.identity) {
                self.extra.insert(read.identity, Some(self.items.len()));
                let role = if exists { Role::Spare } else { Role::Fleeting };
                self.items.push(Item::Extra { identity: read.identity, bytes: read.bytes, role });
            }
        }
    }

    fn can_be_had(&self, read: &Read) -> bool {
        self.saved.contains_key(&read.identity) || self.extra.get(&read.identity).is_some_and(Option::is_some)
    }

    /// What is read by the operation that made this, if all of it can be had again, and the operation's time.
    fn inputs(&self, identity: Identity) -> Option<(Duration, &[Read])> {
        let Identity::Result { operation, .. } = identity else { return None };
        let (operation, time) = self.lineage.operations.get(&operation)?;
        operation.reads.iter().all(|read| self.can_be_had(read)).then_some((*time, &operation.reads))
    }

    fn finish(self, saved: Vec<Activation>, entries: &[u64]) -> Family {
        let mut places = vec![0; saved.len()];
        for (index, item) in self.items.iter().enumerate() {
            if let Item::Saved(place) = item {
                places[*place] = index;
            }
        }
        let total = self.items.len();
        let moved = |place: usize| match place {
            usize::MAX => usize::MAX,
            _ => places.get(place).copied().unwrap_or(total),
        };
        let index = |read: &Read| {
            let saved = self.saved.get(&read.identity).map(|place| places[*place]);
            saved.or_else(|| *self.extra.get(&read.identity)?)
        };
        let reading = |(time, reads): (Duration, &[Read])| {
            Some(Recompute { time, inputs: reads.iter().map(index).collect::<Option<_>>()? })
        };
        let run = |maker: Maker| match maker {
            Maker::Operation(number) => {
                let (operation, time) = self.lineage.operations.get(&number)?;
                reading((*time, &operation.reads))
            }
            Maker::Segment(number) => {
                let segment = self.lineage.segments.get(&number)?;
                reading((segment.time, &segment.reads))
            }
        };
        // Of several results of one run, each is computed from those before it, so that one run makes them all.
        let recipe = |place: usize| {
            let maker = self.makers[place]?;
            let Some(at) = self.runs.get(&maker) else { return run(maker) };
            let before =
                self.makers[..place].iter().enumerate().rev().filter(|(_, other)| **other == Some(maker));
            let before = before.take(TOGETHER).map(|(other, _)| places[other]);
            Some(Recompute { time: Duration::ZERO, inputs: std::iter::once(*at).chain(before).collect() })
        };
        let runs_hold = |maker: Maker| match maker {
            Maker::Operation(_) => 0,
            Maker::Segment(number) => self.lineage.held_by(number, &saved, entries),
        };
        let held: HashMap<Maker, u64> = self.runs.keys().map(|maker| (*maker, runs_hold(*maker))).collect();
        let mut saved: Vec<Option<Activation>> = saved.into_iter().map(Some).collect();
        let mut family = Family { places: places.clone(), ..Family::default() };
        for (here, item) in self.items.iter().enumerate() {
            let identity = match item {
                Item::Saved(place) => self.lineage.identities.get(&entries[*place]).copied(),
                Item::Extra { identity, .. } => Some(*identity),
                Item::Run(_) => None,
            };
            if let Some(Identity::Result { operation, result }) = identity
                && let Some((operation, _)) = self.lineage.operations.get(&operation)
            {
                family.results.insert((operation.position, result), here);
            }
            let number = match (item, identity) {
                (Item::Run(Maker::Operation(number)), _) => Some(*number),
                (_, Some(Identity::Result { operation, .. })) => Some(operation),
                _ => None,
            };
            let operation = number.and_then(|number| self.lineage.operations.get(&number));
            let operation = operation.map(|(operation, _)| operation);
            let maker = match item {
                Item::Saved(place) => self.makers[*place],
                Item::Extra { .. } => None,
                Item::Run(maker) => Some(*maker),
            };
            if let (Item::Saved(_), Some(Maker::Segment(_))) = (item, maker) {
                family.from_segments.push(here);
            }
            family.operators.push(match maker {
                Some(Maker::Segment(_)) => Some("segment"),
                _ => operation.map(|operation| operation.name),
            });
            let mut activation = match item {
                Item::Saved(place) => {
                    let mut activation = saved[*place].take().unwrap_or_default();
                    let first = place.saturating_sub(activation.in_use_with);
                    activation.in_use_with = here - places[first];
                    activation.in_use_until = moved(activation.in_use_until);
                    // A recipe of the program's own reads saved ones.
                    activation
                        .recompute
                        .iter_mut()
                        .for_each(|own| own.inputs.iter_mut().for_each(|input| *input = places[*input]));
                    activation.recompute = activation.recompute.or_else(|| recipe(*place));
                    activation
                }
                Item::Extra { identity, bytes, role } => Activation {
                    role: *role,
                    bytes: *bytes,
                    recompute: self.inputs(*identity).and_then(reading),
                    in_use_until: here + 1,
                    ..Activation::default()
                },
                Item::Run(maker) => Activation {
                    role: Role::Fleeting,
                    bytes: held.get(maker).copied().unwrap_or_default(),
                    recompute: run(*maker),
                    in_use_until: here + 1,
                    ..Activation::default()
                },
            };
            activation.traffic = operation.and_then(|operation| operation.traffic);
            family.activations.push(activation);
        }
        family
    }
}

#[cfg(test)]
mod tests {
    use ssdtrain_libtorch::Storage;

    use super::*;
    use crate::profile::lineage::{Operation, Segment};

    const MS: Duration = Duration::from_millis(1);
    const NAMES: [&str; 5] = ["", "one", "two", "three", "four"];

    fn result(operation: u64) -> Identity {
        Identity::Result { operation, result: 0 }
    }

    /// That of an operation with this number.
    fn at(number: u64, made: usize) -> (Position, usize) {
        (Position { strand: 0, index: number }, made)
    }

    /// Operation `number` with one result of 100 bytes, which takes `number` milliseconds, and reads what those operations made that
    /// still exist, or are gone.
    fn operation(number: u64, existing: &[u64], gone: &[u64]) -> (u64, (Operation, Duration)) {
        let read = |exists| move |maker: &u64| Read { identity: result(*maker), bytes: 10 * maker, exists };
        let reads = existing.iter().map(read(true)).chain(gone.iter().map(read(false))).collect();
        (
            number,
            (
                Operation {
                    number,
                    position: Position { strand: 0, index: number },
                    name: NAMES[number as usize],
                    stamps: (0, 0),
                    reads,
                    traffic: None,
                    is_shorter: false,
                },
                u32::try_from(number).unwrap() * MS,
            ),
        )
    }

    fn lineage(
        saved: &[(u64, u64)],
        operations: impl IntoIterator<Item = (u64, (Operation, Duration))>,
    ) -> Lineage {
        Lineage {
            identities: saved.iter().map(|(entry, operation)| (*entry, result(*operation))).collect(),
            operations: operations.into_iter().collect(),
            ..Lineage::default()
        }
    }

    fn activations(count: usize) -> Vec<Activation> {
        (0..count)
            .map(|place| Activation { bytes: 100, in_use_until: place + 1, ..Activation::default() })
            .collect()
    }

    fn inputs(activation: &Activation) -> Option<(Duration, Vec<usize>)> {
        activation.recompute.as_ref().map(|recompute| (recompute.time, recompute.inputs.clone()))
    }

    #[test]
    fn what_is_not_saved_comes_right_before_what_is_made_from_it() {
        // 1 is saved, 2 is gone, 3 exists, and 4, which is saved, reads both.
        let operations = [
            operation(1, &[], &[]),
            operation(2, &[1], &[]),
            operation(3, &[], &[2]),
            operation(4, &[3], &[2]),
        ];
        let Family { activations, places, results, operators, .. } =
            Family::of(&lineage(&[(70, 1), (71, 4)], operations), activations(2), &[70, 71]);
        assert_eq!(
            activations.iter().map(|one| one.role).collect::<Vec<_>>(),
            [Role::Saved, Role::Fleeting, Role::Spare, Role::Saved]
        );
        assert_eq!(places, [0, 3]);
        assert_eq!(
            activations.iter().map(inputs).collect::<Vec<_>>(),
            [
                Some((MS, vec![])),
                Some((2 * MS, vec![0])),
                Some((3 * MS, vec![1])),
                Some((4 * MS, vec![2, 1])),
            ]
        );
        assert_eq!((activations[0].in_use_until, activations[3].in_use_until), (3, 4));
        assert_eq!(operators, ["one", "two", "three", "four"].map(Some));
        assert_eq!(results, HashMap::from([(at(1, 0), 0), (at(2, 0), 1), (at(3, 0), 2), (at(4, 0), 3)]));
    }

    #[test]
    fn what_is_saved_later_may_be_read() {
        let operations = [operation(1, &[], &[]), operation(2, &[1], &[])];
        let family = Family::of(&lineage(&[(70, 2), (71, 1)], operations), activations(2), &[70, 71]);
        assert_eq!(inputs(&family.activations[0]), Some((2 * MS, vec![1])));
    }

    #[test]
    fn statistics_of_a_norm_are_not_computed_again() {
        let (number, (norm, time)) = operation(2, &[1], &[]);
        let operations = [operation(1, &[], &[]), (number, (Operation { is_shorter: true, ..norm }, time))];
        let mut lineage = lineage(&[(70, 1), (71, 2), (72, 2)], operations);
        lineage.identities.insert(71, Identity::Result { operation: 2, result: 1 });
        let family = Family::of(&lineage, activations(3), &[70, 71, 72]);
        let recipes: Vec<_> = family.activations.iter().map(inputs).collect();
        assert_eq!(recipes, [Some((MS, vec![])), None, Some((2 * MS, vec![0]))]);
    }

    #[test]
    fn what_needs_something_that_is_gone_for_good_has_no_recipe() {
        // Nothing is known of operation 1.
        let operations = [operation(2, &[], &[1]), operation(3, &[], &[2])];
        let family = Family::of(&lineage(&[(70, 3)], operations), activations(1), &[70]);
        assert_eq!((family.activations.len(), inputs(&family.activations[0])), (1, None));
    }

    #[test]
    fn what_the_program_gave_may_be_saved_instead() {
        let mut first = operation(1, &[], &[]);
        let given = Storage::allocate(8).unwrap();
        first.1.0.reads.push(Read { identity: Identity::Outside(given.id()), bytes: 7, exists: true });
        let family = Family::of(&lineage(&[(70, 1)], [first]), activations(1), &[70]);
        assert_eq!((family.activations[0].role, family.activations[0].bytes), (Role::Spare, 7));
        assert_eq!(family.operators, [None, Some("one")]);
        assert_eq!(family.activations.iter().map(inputs).collect::<Vec<_>>(), [None, Some((MS, vec![0]))]);
    }

    #[test]
    fn results_of_one_operation_are_made_by_one_run() {
        let mut lineage = lineage(&[], [operation(1, &[], &[])]);
        let of = |result| Identity::Result { operation: 1, result };
        lineage.identities = HashMap::from([(70, of(0)), (71, of(1))]);
        let Family { activations, places, results, operators, .. } =
            Family::of(&lineage, activations(2), &[70, 71]);
        assert_eq!(places, [1, 2]);
        assert_eq!((activations[0].role, activations[0].bytes), (Role::Fleeting, 0));
        assert_eq!(
            activations.iter().map(inputs).collect::<Vec<_>>(),
            [Some((MS, vec![])), Some((Duration::ZERO, vec![0])), Some((Duration::ZERO, vec![0, 1]))]
        );
        assert_eq!(results, HashMap::from([(at(1, 0), 1), (at(1, 1), 2)]));
        assert_eq!(operators, [Some("one"); 3]);
    }

    #[test]
    fn what_no_operation_makes_again_its_segment_makes() {
        // 1 goes in. Within the segment, something unknown is saved, then 2, which is computed from 1, and 3, which is computed from what is
        // not known.
        let read = Read { identity: result(1), bytes: 10, exists: true };
        let (mut third, unknown) = (operation(3, &[2], &[]), Storage::allocate(8).unwrap());
        third.1.0.reads[0].identity = Identity::Outside(unknown.id());
        let mut lineage =
            lineage(&[(71, 2), (72, 3)], [operation(1, &[], &[]), operation(2, &[1], &[]), third]);
        lineage.identities.insert(70, Identity::Outside(unknown.id()));
        for entry in 70..73 {
            let segment =
                Segment { number: 0, reads: vec![read], operations: Vec::new(), time: 9 * MS, beside: 5 };
            lineage.add_within(entry, segment, |_| None);
        }
        let Family { activations, operators, from_segments, .. } =
            Family::of(&lineage, activations(3), &[70, 71, 72]);
        assert_eq!(from_segments, [2, 4]);
        assert_eq!(operators, [Some("one"), Some("segment"), Some("segment"), Some("two"), Some("segment")]);
        assert_eq!(
            activations.iter().map(inputs).collect::<Vec<_>>(),
            [
                Some((MS, vec![])),
                Some((9 * MS, vec![0])),
                Some((Duration::ZERO, vec![1])),
                Some((2 * MS, vec![0])),
                Some((Duration::ZERO, vec![1, 2])),
            ]
        );
    }

    #[test]
    fn a_segment_whose_input_is_gone_makes_nothing_again() {
        let mut lineage = lineage(&[], []);
        let gone = Read { identity: result(7), bytes: 10, exists: false };
        let segment = Segment { number: 0, reads: vec![gone], operations: Vec::new(), time: MS, beside: 0 };
        lineage.add_within(70, segment, |_| None);
        let family = Family::of(&lineage, activations(1), &[70]);
        assert_eq!(family.activations.iter().map(inputs).collect::<Vec<_>>(), [None]);
    }

    #[test]
    fn the_programs_own_recipes_stay() {
        let mut saved = activations(3);
        saved[2].recompute = Some(Recompute { time: MS, inputs: vec![1] });
        saved[2].in_use_with = 1;
        let operations = [operation(1, &[], &[]), operation(2, &[], &[1]), operation(3, &[], &[2])];
        let family = Family::of(&lineage(&[(71, 2), (72, 3)], operations), saved, &[70, 71, 72]);
        assert_eq!(family.places, [0, 2, 3]);
        assert_eq!(inputs(&family.activations[3]), Some((MS, vec![2])));
        assert_eq!(family.activations[3].in_use_with, 1);
    }
}
