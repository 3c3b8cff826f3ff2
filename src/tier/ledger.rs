//! The ledger of the host tier: where each parcel is, which should be written to the disk, and which may be reclaimed. Pure: it moves
//! nothing itself.

use std::collections::{BTreeMap, BTreeSet};

use ssdtrain_store::PAGE;

use super::places::{At, Edge};

impl<T> Place<T> {
    /// Bytes of host memory it takes.
    fn padded(&self) -> u64 {
        self.bytes.next_multiple_of(PAGE as u64)
    }
}

/// The number of a parcel. Numbers rise with age and are never used again.
pub(super) type Serial = u64;

/// One parcel; `T` is what the mechanism keeps with it.
pub(super) struct Place<T> {
    pub(super) bytes: u64,
    at: At,
    /// Read ahead, and not asked for yet.
    near: bool,
    /// On the device as well, which keeps it for now.
    lent: bool,
    /// It cannot be written to the disk, and stays in host memory.
    stuck: bool,
    /// The entry is gone: no transfer begins any more.
    abandoned: bool,
    pub(super) held: T,
}

/// How the bytes of a parcel that is asked for reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Up {
    /// They are in host memory: a copy.
    Copy,
    /// They are on the disk: a read, and then a copy.
    Read,
    /// They are being read: a copy once that has ended.
    AfterRead,
    /// Not at all: they are nowhere below the device.
    Never,
    /// Not at all: the entry is gone.
    Unwanted,
}

/// What it takes to have a parcel in host memory before it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Near {
    /// Nothing; it is there, or cannot be brought.
    Already,
    Read,
    /// Waiting until fewer bytes are read ahead.
    Later,
}

/// Every parcel of a tier.
pub(super) struct Ledger<T> {
    places: BTreeMap<Serial, Place<T>>,
    next: Serial,
    /// Parcels at [`At::Host`] that can be written, those at [`At::Both`], and those at either that are on the device too.
    dirty: BTreeSet<Serial>,
    clean: BTreeSet<Serial>,
    lent: BTreeSet<Serial>,
    /// Bytes stored in total, on the disk or on their way to or from it, being written (with their number), and read ahead.
    stored: u64,
    below: u64,
    writing: (usize, u64),
    near: u64,
    /// The most bytes stored at a time in this step, and in the last step that stored any.
    peak: u64,
    expected: Option<u64>,
}

/// No further write begins while at least this many writes and bytes are in flight. Two writes keep the disk busy without a gap; of small
/// ones it takes enough bytes.
const WRITES: usize = 2;
const WRITE_BYTES: u64 = 512 << 20;

impl<T> Ledger<T> {
    pub(super) fn new() -> Ledger<T> {
        Ledger {
            places: BTreeMap::new(),
            next: 0,
            dirty: BTreeSet::new(),
            clean: BTreeSet::new(),
            lent: BTreeSet::new(),
            stored: 0,
            below: 0,
            writing: (0, 0),
            near: 0,
            peak: 0,
            expected: None,
        }
    }

    /// A parcel that is nowhere yet.
    pub(super) fn insert(&mut self, bytes: u64, held: T) -> Serial {
        self.next += 1;
        let place =
            Place { bytes, at: At::Nowhere, near: false, lent: false, stuck: false, abandoned: false, held };
        self.places.insert(self.next, place);
        self.next
    }

    pub(super) fn remove(&mut self, serial: Serial) -> Option<Place<T>> {
        self.not_near(serial);
        self.uncount(serial);
        self.places.remove(&serial)
    }

    pub(super) fn get(&mut self, serial: Serial) -> Option<&mut Place<T>> {
        self.places.get_mut(&serial)
    }

    pub(super) fn at(&self, serial: Serial) -> At {
        self.places.get(&serial).map_or(At::Nowhere, |place| place.at)
    }

    /// Takes an edge of the table of places. An edge that is not in the table is a bug of ours: the parcel is then nowhere, so that
    /// asking for it is an error and never returns somebody else's bytes.
    pub(super) fn advance(&mut self, serial: Serial, edge: Edge) {
        self.uncount(serial);
        if let Some(place) = self.places.get_mut(&serial) {
            let (at, lent) = (place.at, place.lent);
            let after = at.after(edge, lent);
            debug_assert!(after.is_some(), "{edge:?} at {at:?}, lent: {lent}");
            if after.is_none() {
                tracing::error!(
                    "internal error: {edge:?} of a parcel at {at:?}, lent: {lent}; its bytes are lost"
                );
            }
            place.at = after.unwrap_or(At::Nowhere);
            place.lent = after.is_some() && (lent || edge == Edge::Lent) && edge != Edge::TakenBack;
        }
        self.count(serial);
    }

    /// The device wants to release the parcel; false if it must not, because nobody else has the bytes.
    pub(super) fn take_back(&mut self, serial: Serial) -> bool {
        self.advance(serial, Edge::TakenBack);
        self.at(serial).is_below()
    }

    /// The disk has no room for the parcel, or cannot write it. No further attempt is made.
    pub(super) fn stuck(&mut self, serial: Serial) {
        self.uncount(serial);
        if let Some(place) = self.places.get_mut(&serial) {
            place.stuck = true;
        }
        self.count(serial);
    }

    /// The entry is gone: no transfer begins any more.
    pub(super) fn abandon(&mut self, serial: Serial) {
        if let Some(place) = self.places.get_mut(&serial) {
            place.abandoned = true;
        }
    }

    /// Whether anyone may still ask for the parcel.
    pub(super) fn is_wanted(&self, serial: Serial) -> bool {
        self.places.get(&serial).is_some_and(|place| !place.abandoned)
    }

    /// Whether a copy out of the parcel is about to be queued, or to fail. A thread that needs the outcome waits for that.
    pub(super) fn begins_soon(&self, serial: Serial) -> bool {
        self.at(serial) == At::Reserved && self.is_wanted(serial)
    }

    fn count(&mut self, serial: Serial) {
        let Some(place) = self.places.get(&serial) else { return };
        let bytes = place.padded();
        if place.at.is_below() {
            self.stored += bytes;
        }
        if matches!(place.at, At::Writing | At::Both | At::Disk | At::Reading) {
            self.below += bytes;
        }
        match place.at {
            At::Host | At::Both if place.lent => _ = self.lent.insert(serial),
            At::Host if !place.stuck => _ = self.dirty.insert(serial),
            At::Both => _ = self.clean.insert(serial),
            At::Writing => self.writing = (self.writing.0 + 1, self.writing.1 + bytes),
            _ => {}
        }
        self.peak = self.peak.max(self.stored);
    }

    fn uncount(&mut self, serial: Serial) {
        let Some(place) = self.places.get(&serial) else { return };
        let bytes = place.padded();
        if place.at.is_below() {
            self.stored -= bytes;
        }
        if matches!(place.at, At::Writing | At::Both | At::Disk | At::Reading) {
            self.below -= bytes;
        }
        if place.at == At::Writing {
            self.writing = (self.writing.0 - 1, self.writing.1 - bytes);
        }
        self.dirty.remove(&serial);
        self.clean.remove(&serial);
        self.lent.remove(&serial);
    }

    /// A step begins: it is expected to need as much as the ones before.
    pub(super) fn begin_step(&mut self) {
        if self.peak > 0 {
            self.expected = Some(self.peak);
        }
        self.peak = self.stored;
    }

    /// The parcel to write next, oldest first. As many bytes are written as the step will need beyond `capacity` bytes of host memory.
    /// Until a first step has shown how many that is, everything is written once the memory is half full.
    pub(super) fn next_to_write(&self, capacity: u64) -> Option<Serial> {
        let wanted = match self.expected {
            Some(expected) => expected.saturating_sub(capacity),
            None if self.stored > capacity / 2 => u64::MAX,
            None => 0,
        };
        if self.below < wanted { self.next_to_write_at_once() } else { None }
    }

    /// The oldest parcel that can be written, for room that is needed immediately; `None` while the disk is busy.
    pub(super) fn next_to_write_at_once(&self) -> Option<Serial> {
        let (writes, bytes) = self.writing;
        let busy = writes >= WRITES && bytes >= WRITE_BYTES;
        if busy { None } else { self.dirty.first().copied() }
    }

    /// Whether a write is in flight.
    pub(super) fn is_writing(&self) -> bool {
        self.writing.0 > 0
    }

    /// The parcel whose host memory is reclaimed next: one that the device has back, or else the oldest clean one, which backward asks
    /// for last.
    pub(super) fn next_to_reclaim(&self) -> Option<Serial> {
        self.lent.last().or_else(|| self.clean.first()).copied()
    }

    /// Reclaims the parcel's host memory.
    pub(super) fn reclaim(&mut self, serial: Serial) {
        let on_disk = self.at(serial) == At::Both;
        self.advance(serial, if on_disk { Edge::Reclaimed } else { Edge::LeftToDevice });
    }

    /// How the parcel's bytes reach the device.
    pub(super) fn way_up(&self, serial: Serial) -> Up {
        match self.at(serial) {
            // Its last handle was released after the load was issued.
            _ if !self.is_wanted(serial) => Up::Unwanted,
            At::Host | At::Writing | At::Both => Up::Copy,
            At::Disk => Up::Read,
            At::Reading => Up::AfterRead,
            At::Nowhere | At::Reserved | At::Device => Up::Never,
        }
    }

    /// Whether to read a parcel ahead; at most `read_ahead` bytes are, or one parcel.
    pub(super) fn way_near(&self, serial: Serial, read_ahead: u64) -> Near {
        match self.places.get(&serial) {
            Some(place) if place.at == At::Disk => {
                let fits = self.near == 0 || self.near + place.bytes <= read_ahead;
                if fits { Near::Read } else { Near::Later }
            }
            _ => Near::Already,
        }
    }

    /// Counts the parcel as read ahead.
    pub(super) fn bring_near(&mut self, serial: Serial) {
        if let Some(place) = self.places.get_mut(&serial).filter(|place| !place.near) {
            place.near = true;
            self.near += place.bytes;
        }
    }

    /// The parcel is asked for, and no longer counts as read ahead.
    pub(super) fn not_near(&mut self, serial: Serial) {
        if let Some(place) = self.places.get_mut(&serial).filter(|place| place.near) {
            place.near = false;
            self.near -= place.bytes;
        }
    }
}

#[cfg(test)]
impl<T> Ledger<T> {
    /// Checks the sums and sets against the places themselves.
    pub(super) fn audit(&self) {
        let sum = |counts: &dyn Fn(&Place<T>) -> bool| -> u64 {
            self.places.values().filter(|place| counts(place)).map(Place::padded).sum()
        };
        let names = |counts: &dyn Fn(&Place<T>) -> bool| -> BTreeSet<Serial> {
            self.places.iter().filter(|(_, place)| counts(place)).map(|(serial, _)| *serial).collect()
        };
        assert_eq!(self.stored, sum(&|place| place.at.is_below()));
        assert_eq!(self.below, sum(&|place| place.at.is_below() && place.at != At::Host));
        assert_eq!(self.writing.1, sum(&|place| place.at == At::Writing));
        assert_eq!(self.writing.0, names(&|place| place.at == At::Writing).len());
        assert_eq!(self.dirty, names(&|place| place.at == At::Host && !place.lent && !place.stuck));
        assert_eq!(self.clean, names(&|place| place.at == At::Both && !place.lent));
        assert_eq!(self.lent, names(&|place| matches!(place.at, At::Host | At::Both) && place.lent));
        let near: u64 = self.places.values().filter(|place| place.near).map(|place| place.bytes).sum();
        assert_eq!(self.near, near);
        assert!(self.peak >= self.stored);
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::places::EDGES;
    use super::*;

    const P: u64 = PAGE as u64;

    const IN_HOST: [Edge; 2] = [Edge::RoomTaken, Edge::CopiedOut];

    /// The edges that take a parcel from nowhere to `at`.
    fn way_to(at: At) -> Vec<Edge> {
        let further: &[Edge] = match at {
            At::Host => &[],
            At::Writing => &[Edge::WriteIssued],
            At::Both => &[Edge::WriteIssued, Edge::Written],
            At::Disk => &[Edge::WriteIssued, Edge::Written, Edge::Reclaimed],
            _ => panic!("no test needs one at {at:?}"),
        };
        [&IN_HOST, further].concat()
    }

    fn ledger_of(places: &[(u64, At)]) -> (Ledger<()>, Vec<Serial>) {
        let mut ledger = Ledger::new();
        let serials = places
            .iter()
            .map(|&(bytes, at)| {
                let serial = ledger.insert(bytes, ());
                way_to(at).into_iter().for_each(|edge| ledger.advance(serial, edge));
                assert_eq!(ledger.at(serial), at);
                serial
            })
            .collect();
        (ledger, serials)
    }

    #[test]
    fn the_oldest_goes_down_first_and_the_oldest_clean_one_is_reclaimed_first() {
        let (ledger, serials) =
            ledger_of(&[(1, At::Disk), (1, At::Both), (1, At::Both), (1, At::Host), (1, At::Host)]);
        assert_eq!(ledger.next_to_reclaim(), Some(serials[1]));
        assert_eq!(ledger.next_to_write_at_once(), Some(serials[3]));
    }

    #[test]
    fn nothing_is_written_that_the_memory_holds() {
        let (mut ledger, _) = ledger_of(&[(P, At::Host); 8]);
        ledger.begin_step();
        assert_eq!(ledger.next_to_write(8 * P), None);
        assert!(ledger.next_to_write(7 * P).is_some());
    }

    #[test]
    fn only_what_exceeds_the_memory_is_written() {
        let (mut ledger, serials) = ledger_of(&[(P - 1, At::Host); 10]);
        ledger.begin_step();
        for &serial in &serials[..4] {
            assert_eq!(ledger.next_to_write(6 * P), Some(serial));
            ledger.advance(serial, Edge::WriteIssued);
            ledger.advance(serial, Edge::Written);
        }
        assert_eq!(ledger.next_to_write(6 * P), None);
    }

    #[test]
    fn the_first_step_begins_to_write_when_the_memory_is_half_full() {
        let (ledger, _) = ledger_of(&[(P, At::Host); 5]);
        assert_eq!(ledger.next_to_write(10 * P), None);
        let (ledger, _) = ledger_of(&[(P, At::Host); 6]);
        assert!(ledger.next_to_write(10 * P).is_some());
    }

    #[test]
    fn what_the_device_has_back_is_reclaimed_first_and_then_only_the_device_has_it() {
        let (mut ledger, serials) = ledger_of(&[(1, At::Both), (1, At::Host), (1, At::Both)]);
        ledger.advance(serials[1], Edge::Lent);
        assert_eq!(ledger.next_to_write_at_once(), None, "what the device has need not be written");
        assert_eq!(ledger.next_to_reclaim(), Some(serials[1]));
        ledger.reclaim(serials[1]);
        assert!(!ledger.take_back(serials[1]), "nobody else has it");
        ledger.advance(serials[2], Edge::Lent);
        ledger.reclaim(serials[2]);
        assert!(ledger.take_back(serials[2]), "the disk has it");
    }

    #[test]
    fn what_could_not_be_written_is_not_tried_again() {
        let (mut ledger, serials) = ledger_of(&[(10, At::Writing)]);
        ledger.stuck(serials[0]);
        ledger.advance(serials[0], Edge::WriteFailed);
        assert_eq!(ledger.next_to_write_at_once(), None);
    }

    #[test]
    fn an_edge_that_is_not_in_the_table_is_an_error_of_ours_and_the_parcel_nowhere() {
        let outcome = std::panic::catch_unwind(|| {
            let (mut ledger, serials) = ledger_of(&[(1, At::Host)]);
            ledger.reclaim(serials[0]);
            ledger.at(serials[0])
        });
        // With debug assertions it panics.
        assert!(outcome.is_err() || outcome.is_ok_and(|at| at == At::Nowhere), "nobody else has it");
    }

    proptest! {
        #[test]
        fn the_sums_are_those_of_the_places(steps in prop::collection::vec((0usize..8, 0..EDGES.len(), 1u64..200_000, any::<bool>(), any::<bool>()), 1..200)) {
            let mut ledger: Ledger<()> = Ledger::new();
            let mut serials = Vec::new();
            for (index, edge, bytes, remove, near) in steps {
                if serials.len() <= index { serials.push(ledger.insert(bytes, ())); }
                let index = index.min(serials.len() - 1);
                let (_, edge, ..) = EDGES[edge];
                let place = &ledger.places[&serials[index]];
                if place.at.after(edge, place.lent).is_some() {
                    ledger.advance(serials[index], edge);
                } else if remove {
                    ledger.remove(serials.swap_remove(index));
                } else if near {
                    ledger.bring_near(serials[index]);
                }
                ledger.audit();
            }
        }
    }
}
