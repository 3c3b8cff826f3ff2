//! The life of one entry as a table of edges. Pure, so that it can be read, documented and model-checked on its own.

/// Where an entry's bytes are, seen from the device. What happens below the device is up to its tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Only on the device; a store is queued.
    Device,
    /// On the device; a store is in flight.
    Storing,
    /// Only in the tier below.
    Away,
    /// Below; a load is in flight.
    Loading,
    /// On the device again, with a valid copy below.
    Loaded,
    /// Only on the device, where it will stay.
    Kept,
    /// A load failed permanently: asking for the bytes is an error.
    Lost,
}

/// What happens to an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Edge {
    StoreIssued,
    /// There is no room below, or stores are off.
    StoreRefused,
    /// Backward asked before the store began.
    Cancelled,
    Stored,
    /// The store is done, but backward asked meanwhile and still uses the device copy.
    StoredInUse,
    StoreFailed,
    LoadIssued,
    /// There is no memory for it at present, and nobody waits for it.
    LoadPostponed,
    Loaded,
    LoadFailed,
    /// Every handle has been served: the device copy is released, and the one below stays for a second backward.
    Evicted,
    /// An operation writes to the storage: the copy below no longer holds its contents.
    Written,
    /// The device has no memory left: what can go, goes.
    Pressed,
}

/// Who takes an edge, always while holding the cache's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    /// The thread that advances the store queue: one that saves a tensor, or the I/O thread that has just finished a store.
    Pump,
    /// The thread that completes the transfer: the I/O thread, or the one that queues the wait if storages leave in stream order.
    Io,
    /// The thread that unpacks, which is autograd's.
    Backward,
    /// The thread that writes to a saved storage: any thread of the program.
    Writer,
    /// The thread whose allocation found no memory.
    Short,
}

/// All edges: from, what happens, to, and who takes it.
pub(crate) const EDGES: [(State, Edge, State, Owner); 18] = [
    (State::Device, Edge::StoreIssued, State::Storing, Owner::Pump),
    (State::Device, Edge::StoreRefused, State::Kept, Owner::Pump),
    (State::Device, Edge::Cancelled, State::Kept, Owner::Backward),
    (State::Storing, Edge::Stored, State::Away, Owner::Io),
    (State::Storing, Edge::StoredInUse, State::Loaded, Owner::Io),
    (State::Storing, Edge::StoreFailed, State::Kept, Owner::Io),
    (State::Away, Edge::LoadIssued, State::Loading, Owner::Backward),
    (State::Away, Edge::LoadFailed, State::Lost, Owner::Backward),
    (State::Loading, Edge::LoadPostponed, State::Away, Owner::Backward),
    (State::Loading, Edge::Loaded, State::Loaded, Owner::Io),
    (State::Loading, Edge::LoadFailed, State::Lost, Owner::Io),
    (State::Loaded, Edge::Evicted, State::Away, Owner::Backward),
    (State::Device, Edge::Written, State::Kept, Owner::Writer),
    (State::Storing, Edge::Written, State::Kept, Owner::Writer),
    (State::Away, Edge::Written, State::Kept, Owner::Writer),
    (State::Loaded, Edge::Written, State::Kept, Owner::Writer),
    (State::Kept, Edge::Pressed, State::Device, Owner::Short),
    (State::Loaded, Edge::Pressed, State::Away, Owner::Short),
];

impl State {
    /// The state after `edge`, or `None` if the table has no such edge.
    pub(crate) fn after(self, edge: Edge) -> Option<State> {
        EDGES.iter().find(|(from, by, _, _)| (*from, *by) == (self, edge)).map(|(_, _, to, _)| *to)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    const ALL: [State; 7] =
        [State::Device, State::Storing, State::Away, State::Loading, State::Loaded, State::Kept, State::Lost];

    #[test]
    fn no_two_edges_leave_a_state_for_the_same_reason() {
        let distinct: HashSet<_> = EDGES.iter().map(|(from, by, _, _)| (from, by)).collect();
        assert_eq!(distinct.len(), EDGES.len());
    }

    #[test]
    fn every_state_is_reached_from_the_device() {
        let mut reached = HashSet::from([State::Device]);
        while let Some((_, _, to, _)) =
            EDGES.iter().find(|(from, _, to, _)| reached.contains(from) && !reached.contains(to))
        {
            reached.insert(*to);
        }
        assert_eq!(reached, HashSet::from(ALL));
    }

    #[test]
    fn the_design_document_has_this_table() {
        let document = include_str!("../../docs/design.md");
        for (from, by, to, owner) in EDGES {
            let row = format!("| {from:?} | {by:?} | {to:?} | {owner:?} |");
            assert!(document.contains(&row), "docs/design.md lacks {row}");
        }
    }

    #[test]
    fn each_edge_has_one_owner_for_each_state_it_leaves() {
        let mut owners: HashMap<(State, Edge), Owner> = HashMap::new();
        for (from, by, _, owner) in EDGES {
            assert_eq!(*owners.entry((from, by)).or_insert(owner), owner);
        }
        // While a transfer is in flight, only the thread that completes it may advance the entry, or one that writes to the storage.
        // Nobody has a tensor of a storage that is being loaded, so nobody can write to it. A load that is postponed has not begun.
        for (from, by, _, owner) in EDGES {
            let of_transfer = matches!(from, State::Storing | State::Loading)
                && !matches!(by, Edge::Written | Edge::LoadPostponed);
            assert_eq!(of_transfer, owner == Owner::Io);
            assert_eq!(by == Edge::Written, owner == Owner::Writer);
            assert_eq!(by == Edge::Pressed, owner == Owner::Short);
            assert!(by != Edge::Written || from != State::Loading);
        }
    }
}
