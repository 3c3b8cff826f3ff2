//! An operation that can be run again, and its results.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use ssdtrain_libtorch::{Recorded, Storage, Watch, WeakStorage};
use ssdtrain_store::sync::Mutex;
use tch::Device;

use super::demand::Demand;
use super::leaf::Leaf;
use crate::digest::Digest;
use crate::fusion::Pointwise;
use crate::profile::{ComputedAgain, OnDevice, Probe};
use crate::telemetry::ScopeId;

/// A recorded operation, and where what it reads comes from.
pub(super) struct Node {
    pub(super) operation: Recorded,
    /// Of what it reads, and then of the statistics that it made itself, if a kernel can compute its result from them.
    pub(super) sources: Vec<Source>,
    pub(super) scope: ScopeId,
    /// What it computes and where, if that is pointwise, once someone has looked.
    pub(super) pointwise: OnceLock<Option<(Device, Pointwise)>>,
    /// How many of its handles, and of the operations that read its results, still wait for their first backward.
    demand: Demand,
    results: Mutex<Vec<Made>>,
}

/// Where a storage that an operation reads comes from.
#[derive(Clone)]
pub(super) enum Source {
    Leaf(Arc<Leaf>),
    /// One of the storages that another operation makes.
    Node(Arc<Node>, usize),
}

/// A handle's part in a result.
pub(super) struct Share {
    pub(super) made: usize,
    /// In which round it was served last.
    round: AtomicU64,
    /// Whether it has not been served yet.
    waits: AtomicBool,
}

/// Identifies a storage in a rerun: an address that lives as long as the rerun, and a number.
pub(super) type Key = (usize, usize);

impl Source {
    pub(super) fn key(&self) -> Key {
        match self {
            Source::Leaf(leaf) => (Arc::as_ptr(leaf).addr(), usize::MAX),
            Source::Node(node, made) => (Arc::as_ptr(node).addr(), *made),
        }
    }

    /// Whether what was fetched from here has had the bytes until now. Writers say so before they begin.
    pub(super) fn has_served(&self, fetched: &Storage) -> bool {
        match self {
            Source::Leaf(leaf) => leaf.has_served(fetched),
            Source::Node(node, made) => node.has_served(*made, fetched),
        }
    }
}

/// A storage that the operation makes.
#[derive(Default)]
struct Made {
    /// The one that it made first, once the graph has a handle to it.
    watch: Option<Watch>,
    /// The digest of its bytes, if reruns are verified.
    digest: Option<Digest>,
    /// That one, if the program has changed it since: the graph serves what it holds now, as without a cache.
    changed: Option<Storage>,
    /// The latest, while handles wait for it.
    again: Option<Storage>,
    handles: usize,
    /// How many handles were served in this round. Once all were, the next round begins.
    served: usize,
    round: u64,
    /// What a profile knows of it.
    profiled: Option<(u64, Arc<Profiled>)>,
}

impl Node {
    pub(super) fn new(operation: Recorded, sources: Vec<Source>, scope: ScopeId) -> Arc<Node> {
        let results = operation.made().map(|_| Made::default()).collect();
        Arc::new(Node {
            operation,
            sources,
            scope,
            pointwise: OnceLock::new(),
            demand: Demand::default(),
            results: Mutex::new(results),
        })
    }

    /// Where the storages that the operation reads come from.
    pub(super) fn own_sources(&self) -> &[Source] {
        &self.sources[..self.operation.read().len()]
    }

    /// One more handle to one of the results, which is `storage` now; with `verify`, reruns have to make the same bytes. The second
    /// value says whether it is the first.
    pub(super) fn add_handle(&self, made: usize, storage: &Storage, verify: bool) -> Option<(Share, bool)> {
        let digest = if verify { Some(digest_of(storage).ok()??) } else { None };
        let mut results = self.results.lock();
        let result = results.get_mut(made)?;
        let is_first = result.watch.is_none();
        result.digest = digest;
        result.watch.get_or_insert_with(|| Watch::new(storage));
        // Looked at again now that writes are reported.
        self.operation.made().nth(made)?.unwritten()?;
        result.handles += 1;
        let round = AtomicU64::new(result.round.wrapping_sub(1));
        drop(results);
        self.count(Demand::begins, |_| ());
        Some((Share { made, round, waits: AtomicBool::new(true) }, is_first))
    }

    /// A handle was served.
    pub(super) fn serve(&self, share: &Share) {
        self.end_round(share, |result| {
            if share.round.swap(result.round, Ordering::AcqRel) != result.round {
                result.served += 1;
            }
        });
        self.waits_no_more(share);
    }

    fn waits_no_more(&self, share: &Share) {
        if share.waits.swap(false, Ordering::AcqRel) {
            self.count(Demand::ends, Leaf::is_done);
        }
    }

    /// Counts a result that begins or ends to wait: here, and where that makes a difference, at what the operation reads. Nodes may form
    /// long chains, so this goes from one to the next.
    fn count(&self, demand: fn(&Demand) -> bool, at_leaf: fn(&Leaf)) {
        let mut nodes = vec![self];
        while let Some(node) = nodes.pop() {
            if !demand(&node.demand) {
                continue;
            }
            for source in &node.sources {
                match source {
                    Source::Node(node, _) => nodes.push(node),
                    Source::Leaf(leaf) if demand(&leaf.demand) => at_leaf(leaf),
                    Source::Leaf(_) => {}
                }
            }
        }
    }

    /// A handle is gone.
    pub(super) fn drop_handle(&self, share: &Share) {
        self.end_round(share, |result| {
            result.handles -= 1;
            if share.round.load(Ordering::Acquire) == result.round {
                result.served -= 1;
            }
        });
        self.waits_no_more(share);
    }

    /// Counts a handle, and begins the next round if all were served in this one.
    fn end_round(&self, share: &Share, count: impl FnOnce(&mut Made)) {
        let gone = {
            let mut results = self.results.lock();
            results.get_mut(share.made).and_then(|result| {
                count(result);
                result.end_round()
            })
        };
        // Memory is given back without the lock.
        drop(gone);
    }

    /// The program is about to write to one of the results, or has written to it.
    pub(super) fn is_written(&self, made: usize) {
        let mut results = self.results.lock();
        let Some(result) = results.get_mut(made) else { return };
        if result.changed.is_none() {
            result.changed = result.watch.as_ref().and_then(Watch::upgrade);
        }
    }

    /// The result as the operation made it, if it is there.
    pub(super) fn available(&self, made: usize) -> Option<Storage> {
        let results = self.results.lock();
        let result = results.get(made)?;
        let first = || self.operation.made().nth(made)?.unwritten();
        result.again.clone().filter(|_| self.operation.is_on_stream()).or_else(first)
    }

    /// Whether what was available has had the bytes until now: no one has begun to change it.
    pub(super) fn has_served(&self, made: usize, available: &Storage) -> bool {
        self.operation
            .made()
            .nth(made)
            .is_none_or(|first| first.id() != Some(available.id()) || first.unwritten().is_some())
    }

    /// The result's storage, if the program has changed it since the graph has a handle to it.
    pub(super) fn changed(&self, made: usize) -> Option<Storage> {
        self.results.lock().get(made)?.changed.clone()
    }

    /// Whether the result computed again has the bytes of the first one, as far as that is verified.
    pub(super) fn is_same(&self, made: usize, storage: &Storage) -> Result<bool, String> {
        let Some(digest) = self.results.lock().get(made).and_then(|result| result.digest) else {
            return Ok(true);
        };
        Ok(digest_of(storage)? == Some(digest))
    }

    /// Whether handles wait for the result.
    pub(super) fn is_awaited(&self, made: usize) -> bool {
        let results = self.results.lock();
        results.get(made).is_some_and(|result| result.served < result.handles && result.changed.is_none())
    }

    /// Whether the graph has handles to the result.
    pub(super) fn has_handles(&self, made: usize) -> bool {
        self.results.lock().get(made).is_some_and(|result| result.handles > 0)
    }

    /// How `probe`, which takes notes of the step, knows one of the results.
    pub(super) fn profiled_by(node: &Arc<Node>, made: usize, probe: &Probe) -> Option<(u64, Arc<Profiled>)> {
        let mut results = node.results.lock();
        let result = results.get_mut(made)?;
        let (number, profiled) = result.profiled.get_or_insert_with(|| {
            let profiled = Arc::new(Profiled {
                node: Arc::downgrade(node),
                made,
                served: Mutex::default(),
                first_is_gone: AtomicBool::new(false),
            });
            (probe.computes_again(Arc::clone(&profiled) as Arc<dyn ComputedAgain>), profiled)
        });
        Some((*number, Arc::clone(profiled)))
    }

    /// The results were computed again: those that handles wait for are kept until these were served. These ask on the stream that the
    /// operation ran on first, which does not wait for what was computed on another.
    pub(super) fn is_made(&self, storages: &[Storage]) {
        if !self.operation.is_on_stream() {
            return;
        }
        let mut results = self.results.lock();
        let mut replaced = Vec::new();
        for (result, storage) in results.iter_mut().zip(storages) {
            if result.served < result.handles && result.changed.is_none() {
                replaced.push(result.again.replace(storage.clone()));
            }
        }
        // Memory is given back without the lock.
        drop(results);
    }
}

/// One of the results of an operation, as a profile sees it.
pub(super) struct Profiled {
    node: Weak<Node>,
    made: usize,
    /// The storage that it was served as last.
    served: Mutex<Option<WeakStorage>>,
    /// The one that was made first does not come back.
    first_is_gone: AtomicBool,
}

impl Profiled {
    pub(super) fn is_served(&self, storage: &Storage) {
        *self.served.lock() = Some(storage.downgrade());
    }
}

impl ComputedAgain for Profiled {
    fn on_device(&self) -> Option<OnDevice> {
        let served = self.served.lock().as_ref().and_then(WeakStorage::upgrade);
        let node = self.node.upgrade();
        let again = node.as_ref().and_then(|node| node.results.lock().get(self.made)?.again.clone());
        let first = || {
            let may_be = !self.first_is_gone.load(Ordering::Relaxed);
            let first = node.as_ref().filter(|_| may_be)?.operation.made().nth(self.made)?.unwritten();
            self.first_is_gone.store(first.is_none(), Ordering::Relaxed);
            first
        };
        let is_new = again.is_none() && served.is_none();
        // This one counts as well.
        let ours = 1 + u64::from(again.is_some());
        let storage = again.or(served).or_else(first)?;
        Some(OnDevice { is_in_use: storage.owners() > ours, is_new, storage })
    }
}

fn digest_of(storage: &Storage) -> Result<Option<Digest>, String> {
    let elements = storage.elements().map_err(|error| error.0)?;
    Digest::of(&elements).map_err(|error| error.to_string())
}

impl Made {
    /// If all handles were served, the next round begins. Returns what is to be freed.
    fn end_round(&mut self) -> Option<Storage> {
        if self.served < self.handles {
            return None;
        }
        self.served = 0;
        self.round += 1;
        self.again.take()
    }
}

impl Drop for Node {
    /// Nodes may form long chains: they are dropped one after another, not one within another.
    fn drop(&mut self) {
        let mut gone = std::mem::take(&mut self.sources);
        while let Some(source) = gone.pop() {
            if let Source::Node(node, _) = source
                && let Some(mut node) = Arc::into_inner(node)
            {
                gone.append(&mut node.sources);
            }
        }
    }
}
