//! The nodes and leaves that stand: those that a handle of the graph needs.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use ssdtrain_libtorch::{Recorded, Storage, StorageId, WriteObserver};
use ssdtrain_store::sync::Mutex;

use super::leaf::Leaf;
use super::node::Node;

/// Finds nodes and leaves, and tells them about writes. Each storage and operation has one at a time.
#[derive(Default)]
pub(super) struct Standing(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// By the operation.
    nodes: HashMap<usize, Weak<Node>>,
    leaves: HashMap<StorageId, Weak<Leaf>>,
    /// What the graph has handles to: the node and the number of the result.
    results: HashMap<StorageId, (Weak<Node>, usize)>,
    /// With how many entries those that are gone are looked for next.
    full_at: usize,
}

impl Standing {
    pub(super) fn node(&self, operation: &Recorded) -> Option<Arc<Node>> {
        self.0.lock().nodes.get(&operation.id())?.upgrade()
    }

    pub(super) fn leaf(&self, id: StorageId) -> Option<Arc<Leaf>> {
        let known = self.0.lock().leaves.get(&id).and_then(Weak::upgrade);
        known.filter(|leaf| leaf.is_original())
    }

    /// The node that stands for its operation: this one, unless another thread came first.
    pub(super) fn insert_node(&self, made: Arc<Node>) -> Arc<Node> {
        let mut known = self.0.lock();
        known.make_room();
        let id = made.operation.id();
        let first = known.nodes.get(&id).and_then(Weak::upgrade);
        if first.is_none() {
            known.nodes.insert(id, Arc::downgrade(&made));
        }
        // Nodes are dropped without the lock.
        drop(known);
        first.unwrap_or(made)
    }

    /// The leaf that is told about writes from now on: this one, unless another thread came first.
    pub(super) fn insert_leaf(&self, made: Arc<Leaf>) -> Arc<Leaf> {
        let mut known = self.0.lock();
        known.make_room();
        let before = known.leaves.get(&made.id()).and_then(Weak::upgrade);
        let first = before.as_ref().filter(|leaf| leaf.is_original()).cloned();
        if first.is_none() {
            known.leaves.insert(made.id(), Arc::downgrade(&made));
        }
        // Leaves are dropped without the lock.
        drop(known);
        drop(before);
        first.unwrap_or(made)
    }

    /// The graph gets handles to one of the results of `node`.
    pub(super) fn insert_result(&self, storage: &Storage, node: &Arc<Node>, made: usize) {
        let mut known = self.0.lock();
        known.make_room();
        known.results.insert(storage.id(), (Arc::downgrade(node), made));
    }
}

impl Known {
    /// Forgets what is gone, seldom enough that it costs little.
    fn make_room(&mut self) {
        if self.len() < self.full_at {
            return;
        }
        self.nodes.retain(|_, node| node.strong_count() > 0);
        self.leaves.retain(|_, leaf| leaf.strong_count() > 0);
        self.results.retain(|_, (node, _)| node.strong_count() > 0);
        self.full_at = 2 * self.len() + 256;
    }

    fn len(&self) -> usize {
        self.nodes.len() + self.leaves.len() + self.results.len()
    }
}

impl WriteObserver for Standing {
    fn written(&self, storage: StorageId) {
        let (leaf, result) = {
            let known = self.0.lock();
            let leaf = known.leaves.get(&storage).and_then(Weak::upgrade);
            let result = known.results.get(&storage).and_then(|(node, made)| Some((node.upgrade()?, *made)));
            (leaf, result)
        };
        if let Some(leaf) = leaf {
            leaf.is_written();
        }
        if let Some((node, made)) = result {
            node.is_written(made);
        }
    }
}
