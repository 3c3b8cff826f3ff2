//! The books of the host tier: which parcel is where, what should go down to the disk, and what may be reclaimed. Pure: it
//! moves nothing itself.

use std::collections::{BTreeMap, BTreeSet};

/// Where the good bytes of a parcel are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum At {
    /// Nowhere below the device yet.
    Nowhere,
    /// In host memory only.
    Host,
    /// In host memory, and being written to the disk.
    Writing,
    /// In host memory and on the disk: clean.
    Both,
    /// On the disk only.
    Disk,
    /// On the disk, and being read into host memory.
    Reading,
}

/// A parcel by its number. Numbers rise with age and are never used again.
pub(super) type Serial = u64;

/// One parcel; `T` is what the mechanism keeps with it.
pub(super) struct Place<T> {
    pub(super) bytes: u64,
    at: At,
    /// Read before anyone asked for it, and not asked for yet.
    near: bool,
    /// A write of it has failed: it stays in host memory.
    pub(super) stuck: bool,
    pub(super) held: T,
}

/// Every parcel of a tier.
pub(super) struct Shelf<T> {
    places: BTreeMap<Serial, Place<T>>,
    next: Serial,
    /// Parcels at [`At::Host`] that can be written, and those at [`At::Both`].
    dirty: BTreeSet<Serial>,
    clean: BTreeSet<Serial>,
    /// Bytes stored, on the disk or on their way there, being written, and brought near.
    stored: u64,
    below: u64,
    writing: (usize, u64),
    near: u64,
    /// Highest `stored` and largest parcel of this step and of the one before.
    now: Needs,
    before: Option<Needs>,
}

/// What a step asked of the tier, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    pub(super) peak: u64,
    pub(super) largest: u64,
}

/// Writes under way: at least two, so that the disk goes from one to the next, and enough bytes of small ones.
const WRITES: usize = 2;
const WRITE_BYTES: u64 = 128 << 20;

impl<T> Shelf<T> {
    pub(super) fn new() -> Shelf<T> {
        Shelf {
            places: BTreeMap::new(),
            next: 0,
            dirty: BTreeSet::new(),
            clean: BTreeSet::new(),
            stored: 0,
            below: 0,
            writing: (0, 0),
            near: 0,
            now: Needs::default(),
            before: None,
        }
    }

    /// A parcel that is nowhere yet.
    pub(super) fn insert(&mut self, bytes: u64, held: T) -> Serial {
        self.next += 1;
        let place = Place { bytes, at: At::Nowhere, near: false, stuck: false, held };
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

    /// Moves a parcel on in the books.
    pub(super) fn set(&mut self, serial: Serial, at: At) {
        self.uncount(serial);
        let Some(place) = self.places.get_mut(&serial) else { return };
        place.at = at;
        let bytes = place.bytes;
        if at != At::Nowhere {
            self.stored += bytes;
        }
        if matches!(at, At::Writing | At::Both | At::Disk | At::Reading) {
            self.below += bytes;
        }
        match at {
            At::Host if !place.stuck => _ = self.dirty.insert(serial),
            At::Both => _ = self.clean.insert(serial),
            At::Writing => self.writing = (self.writing.0 + 1, self.writing.1 + bytes),
            _ => {}
        }
        self.now.peak = self.now.peak.max(self.stored);
        self.now.largest = self.now.largest.max(bytes);
    }

    fn uncount(&mut self, serial: Serial) {
        let Some(place) = self.places.get(&serial) else { return };
        let bytes = place.bytes;
        if place.at != At::Nowhere {
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
    }

    /// A step begins: what the ones before asked for is what it is expected to ask for.
    pub(super) fn begin_step(&mut self) {
        if self.now.peak > 0 {
            self.before = Some(self.now);
        }
        self.now = Needs { peak: self.stored, largest: 0 };
    }

    /// What the last step that stored anything asked for.
    pub(super) fn learned(&self) -> Option<Needs> {
        self.before
    }

    /// The parcel to write next, oldest first: as many go down as the step will ask for beyond `capacity` bytes of
    /// host memory. Before the first step has shown how many that is, all go once the memory is half full.
    pub(super) fn next_to_write(&self, capacity: u64) -> Option<Serial> {
        let wanted = match self.before {
            // Two parcels' room stays free, so that the next one finds its place while another is written.
            Some(Needs { peak, largest }) => {
                peak.saturating_sub(capacity.saturating_sub((2 * largest).min(capacity / 2)))
            }
            None if self.stored > capacity / 2 => u64::MAX,
            None => 0,
        };
        if self.below < wanted { self.next_to_write_at_once() } else { None }
    }

    /// The same, for room that is needed now.
    pub(super) fn next_to_write_at_once(&self) -> Option<Serial> {
        let (writes, bytes) = self.writing;
        let busy = writes >= WRITES && bytes >= WRITE_BYTES;
        if busy { None } else { self.dirty.first().copied() }
    }

    /// Whether a write is under way.
    pub(super) fn is_writing(&self) -> bool {
        self.writing.0 > 0
    }

    /// The clean parcel whose host memory goes next: the oldest, which backward asks for last.
    pub(super) fn next_to_reclaim(&self) -> Option<Serial> {
        self.clean.first().copied()
    }

    /// Bytes brought near and not asked for yet.
    pub(super) fn near(&self) -> u64 {
        self.near
    }

    /// The parcel is read before it is asked for.
    pub(super) fn bring_near(&mut self, serial: Serial) {
        if let Some(place) = self.places.get_mut(&serial).filter(|place| !place.near) {
            place.near = true;
            self.near += place.bytes;
        }
    }

    /// The parcel is asked for.
    pub(super) fn not_near(&mut self, serial: Serial) {
        if let Some(place) = self.places.get_mut(&serial).filter(|place| place.near) {
            place.near = false;
            self.near -= place.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [At; 6] = [At::Nowhere, At::Host, At::Writing, At::Both, At::Disk, At::Reading];

    fn shelf_of(places: &[(u64, At)]) -> (Shelf<()>, Vec<Serial>) {
        let mut shelf = Shelf::new();
        let serials = places
            .iter()
            .map(|&(bytes, at)| {
                let serial = shelf.insert(bytes, ());
                shelf.set(serial, at);
                serial
            })
            .collect();
        (shelf, serials)
    }

    #[test]
    fn the_oldest_goes_down_first_and_the_oldest_clean_one_is_reclaimed_first() {
        let (shelf, serials) =
            shelf_of(&[(1, At::Disk), (1, At::Both), (1, At::Both), (1, At::Host), (1, At::Host)]);
        assert_eq!(shelf.next_to_reclaim(), Some(serials[1]));
        assert_eq!(shelf.next_to_write_at_once(), Some(serials[3]));
    }

    #[test]
    fn nothing_is_written_that_the_memory_holds() {
        let (mut shelf, _) = shelf_of(&[(10, At::Host); 8]);
        shelf.begin_step();
        assert_eq!(shelf.next_to_write(1000), None);
        assert!(shelf.next_to_write(60).is_some());
    }

    #[test]
    fn only_what_exceeds_the_memory_is_written() {
        let (mut shelf, serials) = shelf_of(&[(10, At::Host); 10]);
        shelf.begin_step();
        // 100 bytes in 80, of which 20 stay free: 40 go down.
        for &serial in &serials[..4] {
            assert_eq!(shelf.next_to_write(80), Some(serial));
            shelf.set(serial, At::Both);
        }
        assert_eq!(shelf.next_to_write(80), None);
    }

    #[test]
    fn the_first_step_begins_to_write_when_the_memory_is_half_full() {
        let (shelf, _) = shelf_of(&[(10, At::Host); 5]);
        assert_eq!(shelf.next_to_write(100), None);
        let (shelf, _) = shelf_of(&[(10, At::Host); 6]);
        assert!(shelf.next_to_write(100).is_some());
    }

    #[test]
    fn what_could_not_be_written_is_not_tried_again() {
        let (mut shelf, serials) = shelf_of(&[(10, At::Writing)]);
        shelf.get(serials[0]).unwrap().stuck = true;
        shelf.set(serials[0], At::Host);
        assert_eq!(shelf.next_to_write_at_once(), None);
    }

    proptest! {
        #[test]
        fn the_sums_are_those_of_the_places(steps in prop::collection::vec((0usize..8, 0usize..6, 1u64..50, any::<bool>()), 1..200)) {
            let mut shelf: Shelf<()> = Shelf::new();
            let mut serials = Vec::new();
            for (index, at, bytes, remove) in steps {
                if serials.len() <= index { serials.push(shelf.insert(bytes, ())); }
                let index = index.min(serials.len() - 1);
                if remove {
                    shelf.remove(serials.swap_remove(index));
                } else {
                    shelf.bring_near(serials[index]);
                    shelf.set(serials[index], ALL[at]);
                }
                let sum = |of: &[At]| -> u64 {
                    shelf.places.values().filter(|place| of.contains(&place.at)).map(|place| place.bytes).sum()
                };
                prop_assert_eq!(shelf.stored, sum(&ALL[1..]));
                prop_assert_eq!(shelf.below, sum(&ALL[2..]));
                prop_assert_eq!(shelf.writing.1, sum(&[At::Writing]));
                let near: u64 = shelf.places.values().filter(|place| place.near).map(|place| place.bytes).sum();
                prop_assert_eq!(shelf.near, near);
                prop_assert!(shelf.now.peak >= shelf.stored);
            }
        }
    }
}
