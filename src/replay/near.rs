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
/// Pointwise operations read at most so many times as much as they make.
const MOST_READ: u64 = 4;

/// The operations in a row that make a result.
pub(super) struct Row {
    /// Each operation, and how many come after it at most.
    operations: HashMap<usize, usize>,
    may_be_any: bool,
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
        let read: u64 = self.read.values().sum();
        let is_short = self.are_pointwise && self.length <= MOST_POINTWISE;
        let has_room = others.is_some_and(|most| self.between.saturating_add(bytes) <= most);
        (is_short && read <= MOST_READ.saturating_mul(bytes)) || (has_room && read < bytes)
    }
}

impl Replays {
    /// The row that makes the first result of an operation, of pointwise ones or any; `None` if there is none.
    pub(super) fn row(&self, operation: &Recorded, saving: &Saving<'_>, may_be_any: bool) -> Option<Row> {
        let mut row = Row {
            operations: HashMap::new(),
            may_be_any,
            length: 0,
            are_pointwise: true,
            read: HashMap::new(),
            _there: Vec::new(),
            between: 0,
        };
        self.extend(&mut row, operation, saving, 0).then_some(row)
    }

    /// Puts an operation, `after` which so many come, and all before it into the row; false if they cannot be. What is accepted here is what
    /// [`source`](Replays::source) finds then.
    fn extend(&self, row: &mut Row, operation: &Recorded, saving: &Saving<'_>, after: usize) -> bool {
        let known = row.operations.get(&operation.id()).copied();
        if known.is_some_and(|known| known >= after) {
            return true;
        }
        if after >= if row.may_be_any { MOST } else { MOST_POINTWISE } {
            return false;
        }
        row.operations.insert(operation.id(), after);
        row.length = row.length.max(after + 1);
        if known.is_none() {
            row.are_pointwise &= chained::is_pointwise(operation, saving.stays.device);
        }
        if !row.are_pointwise && !row.may_be_any {
            return false;
        }
        if let Some(node) = self.standing.node(operation) {
            return self.extend_with(row, &node, known.is_none(), saving, after);
        }
        operation.read().enumerate().all(|(index, read)| {
            let Some(id) = read.id() else { return false };
            let maker = operation.maker(index, &self.recording);
            let maker = maker.filter(|(maker, _)| saving.goes_through(position(maker)));
            let stands = maker.as_ref().is_some_and(|(maker, _)| self.standing.node(maker).is_some());
            if let Some(there) = read.unwritten().filter(|_| !stands) {
                if saving.is_left(id, read.bytes()) {
                    return true;
                }
                if self.cache.has(id) && !(saving.is_taken)(id) {
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
