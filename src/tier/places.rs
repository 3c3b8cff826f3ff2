//! The life of one parcel of the host tier as a table of edges. Pure, so that it can be read, documented and model-checked on its own.

/// Where the valid bytes of a parcel are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum At {
    /// Nowhere below the device.
    Nowhere,
    /// Nowhere below the device yet, but there is room for them.
    Reserved,
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
    /// Back on the device, and no longer anywhere below it.
    Device,
}

/// What happens to a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Edge {
    RoomTaken,
    CopiedOut,
    /// The copy out did not begin, or nobody wants it any more.
    CopyFailed,
    WriteIssued,
    Written,
    WriteFailed,
    ReadIssued,
    Read,
    ReadFailed,
    /// A copy in was queued: the device has the bytes too, and keeps them until they are taken back.
    Lent,
    /// The device wants to release it.
    TakenBack,
    /// Its host memory is reclaimed; the disk has the bytes.
    Reclaimed,
    /// Its host memory is reclaimed; the device has the bytes, and nobody else.
    LeftToDevice,
}

/// Who takes an edge. All of them hold the tier's lock while they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// The thread that advances the cache's store queue: it asks for room, and submits the store.
    Pump,
    /// A thread that finds that more should be on the disk: one that has queued a copy out, ended a write, or found no room.
    Drain,
    /// The thread that completes the transfer with the disk, or drops it.
    Io,
    /// The thread that asks for the bytes, or prefetches: autograd's.
    Backward,
    /// The thread that queues the copy in: one that asks for the bytes, or that ends the read they waited for.
    Copier,
    /// A thread that needs host memory: for a copy out, or to read into.
    Taker,
}

/// All edges: from, what happens, to, and who takes it.
pub(super) const EDGES: [(At, Edge, At, Owner); 19] = [
    (At::Nowhere, Edge::RoomTaken, At::Reserved, Owner::Pump),
    (At::Reserved, Edge::CopiedOut, At::Host, Owner::Pump),
    (At::Reserved, Edge::CopyFailed, At::Nowhere, Owner::Pump),
    (At::Host, Edge::WriteIssued, At::Writing, Owner::Drain),
    (At::Writing, Edge::Written, At::Both, Owner::Io),
    (At::Writing, Edge::WriteFailed, At::Host, Owner::Io),
    (At::Disk, Edge::ReadIssued, At::Reading, Owner::Backward),
    (At::Reading, Edge::Read, At::Both, Owner::Io),
    (At::Reading, Edge::ReadFailed, At::Disk, Owner::Io),
    (At::Host, Edge::Lent, At::Host, Owner::Copier),
    (At::Writing, Edge::Lent, At::Writing, Owner::Copier),
    (At::Both, Edge::Lent, At::Both, Owner::Copier),
    (At::Host, Edge::TakenBack, At::Host, Owner::Backward),
    (At::Writing, Edge::TakenBack, At::Writing, Owner::Backward),
    (At::Both, Edge::TakenBack, At::Both, Owner::Backward),
    (At::Disk, Edge::TakenBack, At::Disk, Owner::Backward),
    (At::Device, Edge::TakenBack, At::Device, Owner::Backward),
    (At::Both, Edge::Reclaimed, At::Disk, Owner::Taker),
    (At::Host, Edge::LeftToDevice, At::Device, Owner::Taker),
];

impl At {
    /// The place after `edge`, or `None` if the table has no such edge. Bytes can be left to the device only if it has them, which `lent`
    /// says.
    pub(super) fn after(self, edge: Edge, lent: bool) -> Option<At> {
        let edges = EDGES.iter().filter(|_| edge != Edge::LeftToDevice || lent);
        edges.filter(|(from, by, ..)| (*from, *by) == (self, edge)).map(|(_, _, to, _)| *to).next()
    }

    /// Whether the bytes can be loaded from here.
    pub(super) fn is_below(self) -> bool {
        matches!(self, At::Host | At::Writing | At::Both | At::Disk | At::Reading)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const ALL: [At; 8] =
        [At::Nowhere, At::Reserved, At::Host, At::Writing, At::Both, At::Disk, At::Reading, At::Device];

    #[test]
    fn no_two_edges_leave_a_place_for_the_same_reason() {
        let distinct: HashSet<_> = EDGES.iter().map(|(from, by, _, _)| (from, by)).collect();
        assert_eq!(distinct.len(), EDGES.len());
    }

    #[test]
    fn every_place_is_reached_from_nowhere() {
        let mut reached = HashSet::from([At::Nowhere]);
        while let Some((_, _, to, _)) =
            EDGES.iter().find(|(from, _, to, _)| reached.contains(from) && !reached.contains(to))
        {
            reached.insert(*to);
        }
        assert_eq!(reached, HashSet::from(ALL));
    }

    #[test]
    fn the_design_document_has_this_table_and_no_other_edge() {
        let document = include_str!("../../docs/design.md");
        let section = document.split("\n## ").find(|section| section.starts_with("The host tier\n")).unwrap();
        let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| ")).collect();
        let head = rows.iter().position(|row| *row == "| from | edge | to | owner |").unwrap();
        let edges = EDGES.map(|(from, by, to, owner)| format!("| {from:?} | {by:?} | {to:?} | {owner:?} |"));
        assert_eq!(rows[head + 1..], edges);
        for at in ALL {
            assert!(rows[..head].iter().any(|row| row.starts_with(&format!("| {at:?} | "))), "{at:?}");
        }
    }

    #[test]
    fn each_edge_is_its_owners() {
        for (from, by, to, owner) in EDGES {
            let edge = format!("{from:?} {by:?} {to:?}");
            // While a transfer with the disk is in flight, only the thread that completes it moves the parcel on.
            let of_transfer = matches!(from, At::Writing | At::Reading) && from != to;
            assert_eq!(of_transfer, owner == Owner::Io, "{edge}");
            // Memory is reclaimed only if the bytes are elsewhere too and no transfer is using it.
            let goes = matches!(from, At::Host | At::Writing | At::Both)
                && !matches!(to, At::Host | At::Writing | At::Both);
            assert_eq!(goes, owner == Owner::Taker, "{edge}");
            assert!(!goes || from == At::Both || by == Edge::LeftToDevice, "{edge}");
            // Bytes are copied in only from where they are.
            assert!(owner != Owner::Copier || (from == to && from != At::Disk && from.is_below()), "{edge}");
        }
    }

    #[test]
    fn only_what_the_device_has_is_left_to_it() {
        assert_eq!(At::Host.after(Edge::LeftToDevice, false), None);
        assert_eq!(At::Host.after(Edge::LeftToDevice, true), Some(At::Device));
        assert_eq!(At::Both.after(Edge::Reclaimed, false), Some(At::Disk));
    }
}
