//! The life of one entry as a table of edges: pure, so that it can be read, documented and model-checked by itself.

/// Where the bytes of an entry are, as the device sees it. What lies below the device is its tier's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Only on the device; a store is queued.
    Device,
    /// On the device; a store is under way.
    Storing,
    /// Only in the tier below.
    Away,
    /// Below; a load is under way.
    Loading,
    /// On the device again, with a good copy below.
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
    /// There is no room below, or stores are off.
    StoreRefused,
    /// Backward asked before the store began.
    Cancelled,
    Stored,
    /// The store is done, but backward asked meanwhile and still uses the device copy.
    StoredInUse,
    StoreFailed,
    LoadIssued,
    /// There is no memory for it now, and nobody waits for it.
    LoadPostponed,
    Loaded,
    LoadFailed,
    /// Every handle has been served: the device copy goes, the one below stays for a second backward.
    Evicted,
    /// An operation writes to the storage: what is below is not what it holds any more.
    Written,
}

/// Who takes an edge. All of them hold the cache's lock while they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    /// The thread that moves the store queue on: the one that saves a tensor, or the I/O thread that just finished a store.
    Pump,
    /// Whoever completes the transfer: the I/O thread, or where storages leave in stream order the thread that queues the wait.
    Io,
    /// The thread that unpacks: autograd's.
    Backward,
    /// Whoever writes to a storage that was saved: any thread of the program.
    Writer,
}

/// Every edge there is: from, what happens, to, and who takes it.
pub(crate) const EDGES: [(State, Edge, State, Owner); 16] = [
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
        // While a transfer is under way only the thread that completes it may move the entry on, or who writes to the storage: of
        // one that is being loaded nobody has a tensor. A load that is postponed has not begun.
        for (from, by, _, owner) in EDGES {
            let of_transfer = matches!(from, State::Storing | State::Loading)
                && !matches!(by, Edge::Written | Edge::LoadPostponed);
            assert_eq!(of_transfer, owner == Owner::Io);
            assert_eq!(by == Edge::Written, owner == Owner::Writer);
            assert!(by != Edge::Written || from != State::Loading);
        }
    }
}
