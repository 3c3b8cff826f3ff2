//! The life of one entry as a table of edges: pure, so that it can be read, documented and model-checked by itself.

/// Where the bytes of an entry are. On CPU tensors device and host are one, so four of the design's states fall together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Only on the device; a store is queued.
    Device,
    /// On the device; a store is under way.
    Writing,
    /// Only on the disk.
    Disk,
    /// On the disk; a load is under way.
    Reading,
    /// On the device again, with a good copy on the disk.
    Loaded,
    /// Only on the device, and to stay there.
    Kept,
    /// A load failed for good: asking for the bytes is an error.
    Lost,
}

/// What happens to an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Edge {
    StoreIssued,
    /// There is no room on the disk, or stores are off.
    StoreRefused,
    /// Backward asked before the store began.
    Cancelled,
    Stored,
    /// The store is done, but backward asked meanwhile and still uses the device copy.
    StoredInUse,
    StoreFailed,
    LoadIssued,
    Loaded,
    LoadFailed,
    /// Every handle has been served: the device copy goes, the disk copy stays for a second backward.
    Evicted,
}

/// Who takes an edge. All of them hold the cache's lock while they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    /// The thread that moves the store queue on: the one that saves a tensor, or the I/O thread that just finished a store.
    Pump,
    /// The I/O thread on which the transfer completes.
    Io,
    /// The thread that unpacks: autograd's.
    Backward,
}

/// Every edge there is: from, what happens, to, and who takes it.
pub(crate) const EDGES: [(State, Edge, State, Owner); 11] = [
    (State::Device, Edge::StoreIssued, State::Writing, Owner::Pump),
    (State::Device, Edge::StoreRefused, State::Kept, Owner::Pump),
    (State::Device, Edge::Cancelled, State::Kept, Owner::Backward),
    (State::Writing, Edge::Stored, State::Disk, Owner::Io),
    (State::Writing, Edge::StoredInUse, State::Loaded, Owner::Io),
    (State::Writing, Edge::StoreFailed, State::Kept, Owner::Io),
    (State::Disk, Edge::LoadIssued, State::Reading, Owner::Backward),
    (State::Disk, Edge::LoadFailed, State::Lost, Owner::Backward),
    (State::Reading, Edge::Loaded, State::Loaded, Owner::Io),
    (State::Reading, Edge::LoadFailed, State::Lost, Owner::Io),
    (State::Loaded, Edge::Evicted, State::Disk, Owner::Backward),
];

impl State {
    /// The state after `edge`, or none where the table has no such edge.
    pub(crate) fn after(self, edge: Edge) -> Option<State> {
        EDGES.iter().find(|(from, by, _, _)| (*from, *by) == (self, edge)).map(|(_, _, to, _)| *to)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    const ALL: [State; 7] =
        [State::Device, State::Writing, State::Disk, State::Reading, State::Loaded, State::Kept, State::Lost];

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
        // While a transfer is under way only the thread that completes it may move the entry on.
        for (from, _, _, owner) in EDGES {
            assert_eq!(matches!(from, State::Writing | State::Reading), owner == Owner::Io);
        }
    }
}
