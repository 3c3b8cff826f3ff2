//! What a few operations in a row make of what is there: of parameters, of what is small, and of what the cache has and the device still
//! holds. It is looked for before anything is taken for it.

use std::collections::HashMap;

use ssdtrain_libtorch::{Recorded, Storage, StorageId};

use super::chained;
use super::node::{Node, Source};
use super::replays::{Replays, position};
use super::saving::Saving;

/// At most so many operations are in a row: of any kind, and if all are pointwise. What lies between may all be on the device at once.
const MOST: usize = 12;
const MOST_POINTWISE: usize = 4;

/// The operations in a row that make a result.
pub(super) struct Row {
    /// Each operation, and how many come after it at most.
    operations: HashMap<usize, usize>,
    length: usize,
    are_pointwise: bool,
    /// The bytes that the cache has of what they read.
    read: HashMap<StorageId, u64>,
    /// What is there has to be there until the result stands.
    _there: Vec<Storage>,
    /// The bytes of results among them that the graph waits for as well: all of them are made at once.
    between: u64,
}

impl Row {
    /// Whether a result of so many bytes is worth it, where more than pointwise operations may make it, as long as so many bytes are made at
    /// once: then it spares more than what it is made of.
    pub(super) fn is_worth(&self, bytes: u64, others: Option<u64>) -> bool {
        let is_cheap = self.are_pointwise && self.length <= MOST_POINTWISE;
        let has_room = others.is_some_and(|most| self.between.saturating_add(bytes) <= most);
        is_cheap || (has_room && self.read.values().sum::<u64>() < bytes)
    }
}

impl Replays {
    /// The row that makes the first result of an operation; `None` if there is none.
    pub(super) fn row(&self, operation: &Recorded, saving: &Saving<'_>) -> Option<Row> {
        let mut row = Row {
            operations: HashMap::new(),
            length: 0,
            are_pointwise: true,
            read: HashMap::new(),
            _there: Vec::new(),
            between: 0,
        };
        self.extend(&mut row, operation, saving, 0).then_some(row)
    }

    /// Puts an operation, `after` which so many come, and all before it into the row; false if they cannot be. Goes where what is computed
    /// again without a plan is looked for.
    fn extend(&self, row: &mut Row, operation: &Recorded, saving: &Saving<'_>, after: usize) -> bool {
        let known = row.operations.get(&operation.id()).copied();
        if known.is_some_and(|known| known >= after) {
            return true;
        }
        if after >= MOST {
            return false;
        }
        row.operations.insert(operation.id(), after);
        row.length = row.length.max(after + 1);
        if let Some(node) = self.standing.node(operation) {
            return self.extend_with(row, &node, known.is_none(), saving, after);
        }
        row.are_pointwise &= chained::is_pointwise(operation, saving.stays.device);
        operation.read().enumerate().all(|(index, read)| {
            let Some(id) = read.id() else { return false };
            let maker = operation.maker(index, &self.recording);
            let maker = maker.filter(|(maker, _)| saving.goes_through(position(maker)));
            let stands = maker.as_ref().is_some_and(|(maker, _)| self.standing.node(maker).is_some());
            if let Some(there) = read.unwritten().filter(|_| !stands) {
                if saving.is_left(id, read.bytes()) {
                    return true;
                }
                if self.cache.has(id) {
                    row.read.insert(id, read.bytes());
                    row._there.push(there);
                    return true;
                }
            }
            maker.is_some_and(|(maker, made)| made == 0 && self.extend(row, &maker, saving, after + 1))
        })
    }

    /// The same of an operation whose results are computed again anyway.
    fn extend_with(
        &self,
        row: &mut Row,
        node: &Node,
        is_new: bool,
        saving: &Saving<'_>,
        after: usize,
    ) -> bool {
        let Node { operation, .. } = node;
        if is_new {
            row.are_pointwise &= chained::is_pointwise(operation, saving.stays.device);
            let first = operation.made().next().filter(|_| node.has_handles(0));
            row.between += first.map_or(0, |first| first.bytes());
        }
        node.own_sources().iter().zip(operation.read()).all(|(source, read)| match source {
            Source::Leaf(leaf) => {
                if leaf.is_in_cache() {
                    row.read.insert(leaf.id(), read.bytes());
                }
                true
            }
            Source::Node(node, made) => *made == 0 && self.extend(row, &node.operation, saving, after + 1),
        })
    }
}
