//! What of a step is computed again, and from what.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use ssdtrain_libtorch::{
    Packed, Recorded, RecordedStorage, Recording, SavedTensor, Storage, StorageId, Watch, WriteObserver,
};
use ssdtrain_plan::Placement;
use tch::Device;

use super::chained;
use super::chains::Chains;
use super::leaf::{self, Leaf};
use super::node::{Node, Source};
use crate::cache::{By, Cache, Subject};
use crate::profile::{Identity, Operation, Origin, Read};
use crate::telemetry::Counters;

/// A result is computed from no more than this many operations in a row that were not asked for themselves.
const DEPTH: usize = 64;

/// The recorded operations of a step that can be run again.
pub(crate) struct Replays {
    pub(super) cache: Arc<Cache>,
    pub(super) counters: Arc<Counters>,
    recording: Arc<Recording>,
    /// Makes runs of pointwise operations one kernel.
    chains: Option<Arc<Chains>>,
    standing: Mutex<Standing>,
    /// The numbers of the operations that origins were told with.
    told: Mutex<HashSet<u64>>,
    /// Locked during a rerun.
    turn: Mutex<()>,
}

#[derive(Default)]
struct Standing {
    /// By the operation.
    nodes: HashMap<usize, Weak<Node>>,
    leaves: HashMap<StorageId, Weak<Leaf>>,
    /// What the graph has handles to: the node and the number of the result.
    results: HashMap<StorageId, (Weak<Node>, usize)>,
}

/// What is known where a tensor is saved.
pub(crate) struct Saving<'a> {
    pub(crate) by: By<'a>,
    /// The device whose storages the cache moves.
    pub(crate) device: Device,
    pub(crate) min_bytes: u64,
    /// Whether reruns are compared with first runs.
    pub(crate) verify: bool,
    pub(crate) parameters: &'a HashSet<StorageId>,
    /// Storages that the program holds besides the graph.
    pub(crate) held: &'a HashSet<StorageId>,
    /// The planned placement of an operation's result: the operation's number, and which of its results it is.
    pub(crate) planned: &'a dyn Fn(u64, usize) -> Option<Placement>,
}

impl Saving<'_> {
    /// Whether a storage stays on its device in any case.
    fn stays(&self, id: StorageId, bytes: u64) -> bool {
        bytes < self.min_bytes || self.parameters.contains(&id) || self.held.contains(&id)
    }
}

impl Replays {
    pub(crate) fn new(
        cache: &Arc<Cache>,
        counters: &Arc<Counters>,
        recording: Recording,
        chains: Option<&Arc<Chains>>,
    ) -> Arc<Replays> {
        Arc::new(Replays {
            cache: Arc::clone(cache),
            counters: Arc::clone(counters),
            recording: Arc::new(recording),
            chains: chains.map(Arc::clone),
            standing: Mutex::default(),
            told: Mutex::default(),
            turn: Mutex::default(),
        })
    }

    /// What the step's threads record into.
    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.recording
    }

    /// What the graph holds for a saved tensor instead of its bytes; `None` if it cannot be computed again.
    pub(crate) fn stand_for(
        self: &Arc<Self>,
        saved: &SavedTensor<'_>,
        saving: &Saving<'_>,
    ) -> Option<Packed> {
        let storage = saved.storage()?;
        let (operation, made) = self.recording.maker(&storage)?;
        let node = self.node(operation, saving, 0)?;
        self.standing.lock().results.insert(storage.id(), (Arc::downgrade(&node), made));
        let (handle, is_first) = node.handle(made, &storage, saving.verify)?;
        let counter = if is_first { &self.counters.recomputed } else { &self.counters.deduplicated };
        counter.add(storage.bytes());
        Some(Packed::Handle(Box::new(handle)))
    }

    /// How a saved tensor was made, as far as that was not told before.
    pub(crate) fn origin(&self, saved: &SavedTensor<'_>, saving: &Saving<'_>) -> Option<Origin> {
        let storage = saved.storage()?;
        let Some((operation, result)) = self.recording.maker(&storage) else {
            return Some(Origin { identity: Identity::Outside(storage.id()), operations: Vec::new() });
        };
        let identity = Identity::Result { operation: operation.number(), result };
        let (mut told, mut operations, mut open) = (self.told.lock(), Vec::new(), vec![operation]);
        while let Some(operation) = open.pop() {
            if !told.insert(operation.number()) {
                continue;
            }
            let mut reads = Vec::new();
            for (index, read) in operation.read().enumerate() {
                let Some(id) = read.id() else { continue };
                let exists = read.unwritten().is_some();
                if exists && saving.stays(id, read.bytes()) {
                    continue;
                }
                let identity = match operation.maker(index, &self.recording) {
                    Some((maker, result)) => {
                        let operation = maker.number();
                        open.push(maker);
                        Identity::Result { operation, result }
                    }
                    None => Identity::Outside(id),
                };
                let exists = exists && read.device() == saving.device;
                reads.push(Read { identity, bytes: read.bytes(), exists });
            }
            operations.push(Operation {
                number: operation.number(),
                name: operation.name(),
                stamps: operation.stamps(),
                traffic: self.chains().and_then(|chains| chained::traffic(&operation, chains)),
                reads,
            });
        }
        Some(Origin { identity, operations })
    }

    /// What is saved from now on belongs to another micro-batch.
    pub(crate) fn micro_batch_ends(&self) {
        let mut told = self.told.lock();
        self.recording.clear();
        told.clear();
    }

    /// The node of an operation, with everything that running it again takes.
    fn node(self: &Arc<Self>, operation: Recorded, saving: &Saving<'_>, depth: usize) -> Option<Arc<Node>> {
        if let Some(node) = self.standing_node(&operation) {
            return Some(node);
        }
        let sources = operation
            .read()
            .enumerate()
            .map(|(index, read)| self.source(&operation, index, &read, saving, depth))
            .collect::<Option<Vec<_>>>()?;
        let id = operation.id();
        let node = Node::new(Arc::clone(self), operation, sources, saving.by.scope);
        let mut standing = self.standing.lock();
        // Another thread may have come first. Only the one that stands is told about writes.
        if let Some(known) = standing.nodes.get(&id).and_then(Weak::upgrade) {
            drop(standing);
            return Some(known);
        }
        standing.nodes.insert(id, Arc::downgrade(&node));
        Some(node)
    }

    fn standing_node(&self, operation: &Recorded) -> Option<Arc<Node>> {
        self.standing.lock().nodes.get(&operation.id())?.upgrade()
    }

    /// Where the storage number `index` of those that `operation` reads will come from.
    fn source(
        self: &Arc<Self>,
        operation: &Recorded,
        index: usize,
        read: &RecordedStorage<'_>,
        saving: &Saving<'_>,
        depth: usize,
    ) -> Option<Source> {
        let id = read.id()?;
        let maker = operation.maker(index, &self.recording);
        if let Some((maker, made)) = &maker
            && let Some(node) = self.standing_node(maker)
        {
            return Some(Source::Node(node, *made));
        }
        let alive = read.unwritten();
        if saving.stays(id, read.bytes())
            && let Some(storage) = &alive
        {
            return self.leaf(operation, index, saving, |_| Some(leaf::Source::Held(storage.clone())));
        }
        let planned = maker.as_ref().and_then(|(maker, made)| (saving.planned)(maker.number(), *made));
        let is_through = match planned {
            Some(planned) => planned == Placement::Recompute,
            None => alive.is_none() || !self.cache.has(id),
        };
        if let Some((maker, made)) = maker.filter(|_| is_through && depth < DEPTH)
            && let Some(node) = self.node(maker, saving, depth + 1)
        {
            return Some(Source::Node(node, made));
        }
        let storage = alive.filter(|_| read.device() == saving.device)?;
        let keep = planned == Some(Placement::Keep);
        self.leaf(operation, index, saving, |saving| {
            let subject = Subject::whole(storage.clone(), read.version());
            saving.by.record.add(saving.by.scope, storage.bytes(), keep);
            self.cache.save(subject, keep, saving.by).map(leaf::Source::Entry)
        })
    }

    /// The leaf of the storage number `index` of those that `operation` reads, with the bytes that `source` takes care of.
    fn leaf(
        self: &Arc<Self>,
        operation: &Recorded,
        index: usize,
        saving: &Saving<'_>,
        source: impl FnOnce(&Saving<'_>) -> Option<leaf::Source>,
    ) -> Option<Source> {
        let unwritten = || operation.read().nth(index)?.unwritten();
        let storage = unwritten()?;
        let leaf = if let Some(leaf) = self.standing_leaf(storage.id()) {
            leaf
        } else {
            let watch = Watch::new(&storage);
            let made = Arc::new(Leaf::new(Arc::clone(self), watch, source(saving)?));
            self.insert_leaf(made)
        };
        // Looked at again now that writes are reported.
        unwritten().map(|_: Storage| Source::Leaf(leaf))
    }

    fn standing_leaf(&self, id: StorageId) -> Option<Arc<Leaf>> {
        let known = self.standing.lock().leaves.get(&id).and_then(Weak::upgrade);
        known.filter(|leaf| leaf.is_original())
    }

    /// The leaf that is told about writes from now on: this one, unless another thread came first.
    fn insert_leaf(&self, made: Arc<Leaf>) -> Arc<Leaf> {
        let mut standing = self.standing.lock();
        let known = standing.leaves.get(&made.id()).and_then(Weak::upgrade);
        let known = match known {
            Some(known) if known.is_original() => known,
            replaced => {
                standing.leaves.insert(made.id(), Arc::downgrade(&made));
                // Leaves are dropped without the lock, which they take.
                drop(standing);
                drop(replaced);
                return made;
            }
        };
        drop(standing);
        known
    }

    /// The node of this operation is gone.
    pub(super) fn forget(&self, operation: &Recorded) {
        let mut standing = self.standing.lock();
        let id = operation.id();
        // Another thread may have made a new one meanwhile.
        if standing.nodes.get(&id).is_some_and(|node| node.strong_count() == 0) {
            standing.nodes.remove(&id);
        }
        for made in operation.made() {
            let Some(id) = made.id() else { continue };
            if standing.results.get(&id).is_some_and(|(node, _)| node.strong_count() == 0) {
                standing.results.remove(&id);
            }
        }
    }

    /// The leaf of this storage is gone.
    pub(super) fn forget_leaf(&self, id: StorageId) {
        let mut standing = self.standing.lock();
        if standing.leaves.get(&id).is_some_and(|leaf| leaf.strong_count() == 0) {
            standing.leaves.remove(&id);
        }
    }

    pub(super) fn chains(&self) -> Option<&Chains> {
        self.chains.as_deref()
    }

    /// Reruns of a step come one after another.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }
}

impl WriteObserver for Replays {
    fn written(&self, storage: StorageId) {
        let (leaf, result) = {
            let standing = self.standing.lock();
            let leaf = standing.leaves.get(&storage).and_then(Weak::upgrade);
            let result =
                standing.results.get(&storage).and_then(|(node, made)| Some((node.upgrade()?, *made)));
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
