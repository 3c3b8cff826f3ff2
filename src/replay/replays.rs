//! What of a step is computed again, and from what.

use std::collections::HashMap;
use std::sync::Arc;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{
    Recorded, RecordedStorage, Recording, SavedTensor, Storage, TorchError, Watch, WriteObserver,
};
use ssdtrain_plan::{Placement, Position};
use ssdtrain_store::sync::Mutex;

use super::chained;
use super::chains::Chains;
use super::leaf::{self, Leaf};
use super::node::{Node, Source};
use super::origins::Origins;
use super::reruns::Reruns;
use super::saving::{Given, Makers, Saving, Stays};
use super::stand::Stand;
use super::standing::Standing;
use crate::cache::{Cache, Subject};
use crate::fusion;
use crate::profile::{Operation, OperationClock, Origin, Read};
use crate::telemetry::Counters;

/// A result is computed from no more than this many operations in a row that were not asked for themselves.
const DEPTH: usize = 64;

/// The recorded operations of a step that can be run again.
pub(crate) struct Replays {
    pub(super) cache: Arc<Cache>,
    counters: Arc<Counters>,
    pub(super) recording: Arc<Recording>,
    origins: Origins,
    pub(super) standing: Arc<Standing>,
    reruns: Arc<Reruns>,
}

impl Replays {
    /// With nothing on record yet; with a `clock`, operations are timed.
    ///
    /// Fails if this process cannot record operations.
    pub(crate) fn new(
        cache: &Arc<Cache>,
        counters: &Arc<Counters>,
        clock: Option<Arc<OperationClock>>,
        chains: Option<&Arc<Chains>>,
    ) -> Result<Arc<Replays>, TorchError> {
        let recording = Recording::new(clock.map(|clock| clock as Arc<dyn torch::Clock>));
        let recording = recording.map(Arc::new)?;
        let replays = Arc::new(Replays {
            cache: Arc::clone(cache),
            counters: Arc::clone(counters),
            origins: Origins::new(&recording),
            recording,
            standing: Arc::default(),
            reruns: Arc::new(Reruns::new(cache, counters, chains)),
        });
        torch::observe_writes(Arc::downgrade(&replays.observer()))?;
        Ok(replays)
    }

    /// What the step's threads record into.
    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.recording
    }

    /// What has to be told about writes.
    pub(crate) fn observer(&self) -> Arc<dyn WriteObserver> {
        Arc::clone(&self.standing) as Arc<dyn WriteObserver>
    }

    /// What the graph holds for a saved tensor instead of its bytes; `None` if it cannot be computed again.
    pub(crate) fn stand_for(&self, saved: &SavedTensor<'_>, saving: &Saving<'_>) -> Option<Stand> {
        let storage = saved.storage()?;
        let (operation, made) = self.recording.maker(&storage)?;
        // Each storage is in one place: what the cache has is not computed again, and the other way round.
        let standing = self.standing.node(&operation).filter(|node| node.has_handles(made));
        // What is there has to be there until the result stands.
        let _row = match saving.makers {
            Makers::Near(others) if standing.is_none() => {
                let is_main = made == 0 && !self.cache.has(storage.id());
                let row = is_main.then(|| self.row(&operation, saving, others.is_some())).flatten()?;
                Some(row.is_worth(storage.bytes(), others).then_some(row)?)
            }
            Makers::Near(_) | Makers::Any => None,
        };
        let mut search = Search { saving, refused: HashMap::new() };
        let node = match standing {
            Some(node) => node,
            None => self.node(operation, &mut search, 0).ok()?,
        };
        self.standing.insert_result(&storage, &node, made);
        let (share, is_first) = node.add_handle(made, &storage, saving.verify)?;
        let together = saving.bounds.as_ref().map(|bounds| Arc::clone(bounds.together));
        together.iter().for_each(|together| together.add(&node, made));
        let counter = if is_first { &self.counters.recomputed } else { &self.counters.deduplicated };
        counter.add(storage.bytes());
        let strand = self.recording.position().strand;
        let tape = saving.by.tape;
        let place = (tape, self.cache.place_in(tape));
        let (cache, recording, reruns, standing) = (
            Arc::clone(&self.cache),
            Arc::clone(&self.recording),
            Arc::clone(&self.reruns),
            Arc::clone(&self.standing),
        );
        let profiled = None;
        Some(Stand {
            cache,
            recording,
            reruns,
            _standing: standing,
            node,
            share,
            together,
            strand,
            place,
            profiled,
        })
    }

    /// Whether the graph has a handle that stands for what this saved tensor holds.
    pub(crate) fn stands_for(&self, saved: &SavedTensor<'_>) -> bool {
        let maker = saved.storage().and_then(|storage| self.recording.maker(&storage));
        maker.is_some_and(|(operation, made)| {
            self.standing.node(&operation).is_some_and(|node| node.has_handles(made))
        })
    }

    /// How a saved tensor was made, as far as that was not told before.
    pub(crate) fn origin(&self, saved: &SavedTensor<'_>, stays: &Stays<'_>) -> Option<Origin> {
        self.origins.of(saved, stays, self.reruns.chains())
    }

    /// What these storages of the cache's device are, without those that stay there, and how they were made, as far as that was not told
    /// before.
    pub(crate) fn origin_of_all(
        &self,
        storages: &[Storage],
        stays: &Stays<'_>,
    ) -> (Vec<Read>, Vec<Operation>) {
        self.origins.of_all(storages, stays, self.reruns.chains())
    }

    /// The planned placement of a storage, if a recorded operation made it and its placement is planned.
    pub(crate) fn planned(&self, storage: &Storage, saving: &Saving<'_>) -> Option<Placement> {
        let (operation, made) = self.recording.maker(storage)?;
        (saving.planned)(position(&operation), made)
    }

    /// What is saved from now on, on the thread with this number or on all of them, is not computed from what was recorded before: it
    /// belongs to another micro-batch, or to another part of the program.
    pub(crate) fn forget(&self, strand: Option<u32>) {
        self.recording.clear(strand);
    }

    /// The node of an operation, with everything that running it again takes.
    fn node(&self, operation: Recorded, search: &mut Search<'_>, depth: usize) -> Result<Arc<Node>, Missing> {
        if let Some(node) = self.standing.node(&operation) {
            return Ok(node);
        }
        if let Some(missing) = search.refused.get(&operation.id()) {
            return Err(*missing);
        }
        let sources = operation
            .read()
            .enumerate()
            .map(|(index, read)| self.source(&operation, index, &read, search, depth))
            .collect::<Result<Vec<_>, Missing>>();
        match sources {
            Ok(mut sources) => {
                sources.extend(self.statistics(&operation, search.saving));
                Ok(self.standing.insert_node(Node::new(operation, sources, search.saving.by.scope)))
            }
            Err(missing) => {
                search.refused.insert(operation.id(), missing);
                Err(missing)
            }
        }
    }

    /// Where the storage number `index` of those that `operation` reads will come from.
    fn source(
        &self,
        operation: &Recorded,
        index: usize,
        read: &RecordedStorage<'_>,
        search: &mut Search<'_>,
        depth: usize,
    ) -> Result<Source, Missing> {
        let saving = search.saving;
        let id = read.id().ok_or(Missing::Bytes)?;
        let maker =
            operation.maker(index, &self.recording).filter(|(maker, _)| saving.goes_through(position(maker)));
        if let Some((maker, made)) = &maker
            && let Some(node) = self.standing.node(maker)
        {
            return Ok(Source::Node(node, *made));
        }
        let alive = read.unwritten();
        let unwritten = || operation.read().nth(index)?.unwritten();
        if saving.is_left(id, read.bytes())
            && let Some(storage) = &alive
        {
            let leaf = self.leaf(unwritten, |_| Some(leaf::Source::Held(storage.clone())));
            return leaf.ok_or(Missing::Bytes);
        }
        let planned = maker.as_ref().and_then(|(maker, made)| (saving.planned)(position(maker), *made));
        let is_through = match planned {
            Some(planned) => planned == Placement::Recompute,
            None => alive.is_none() || !self.cache.has(id),
        };
        let is_main = |made: usize| saving.makers == Makers::Any || made == 0;
        if let Some((maker, made)) = maker.filter(|(_, made)| is_through && depth < DEPTH && is_main(*made)) {
            match self.node(maker, search, depth + 1) {
                Ok(node) => return Ok(Source::Node(node, made)),
                Err(Missing::Taken) => return Err(Missing::Taken),
                Err(Missing::Bytes) => {}
            }
        }
        if (saving.is_taken)(id) {
            return Err(Missing::Taken);
        }
        if saving.makers != Makers::Any && !self.cache.has(id) {
            return Err(Missing::Bytes);
        }
        let storage = alive.filter(|_| read.device() == saving.stays.device).ok_or(Missing::Bytes)?;
        let keep = planned.and_then(Placement::keeps_bytes).unwrap_or(saving.keeps_unplanned);
        let leaf = self.leaf(unwritten, |_| {
            match saving.given(id) {
                Some(Given::Saved(_)) => return Some(leaf::Source::Saved(Mutex::default())),
                Some(Given::Held) => return Some(leaf::Source::Held(storage.clone())),
                None => {}
            }
            let subject = Subject::whole(storage.clone(), read.version());
            // What the cache has was counted when it came there.
            if !self.cache.has(id) {
                saving.by.record.add(saving.by.scope, storage.bytes(), keep);
            }
            self.cache.save(subject, keep, saving.by).map(leaf::Source::Entry)
        });
        if let (Some(Source::Leaf(leaf)), Some(Given::Saved(saved))) = (&leaf, saving.given(id)) {
            leaf.is_saved(saved);
        }
        leaf.ok_or(Missing::Bytes)
    }

    /// The statistics that an operation has made itself and that a kernel needs to compute its result, unless one is to be computed again.
    fn statistics(&self, operation: &Recorded, saving: &Saving<'_>) -> Vec<Source> {
        let chains = self.reruns.chains().filter(|_| fusion::is_norm(operation.name()));
        let Some(pass) = chains.and_then(|chains| chained::pass(operation, chains)) else {
            return Vec::new();
        };
        let leaf = |made: &usize| {
            let made = *made;
            let unwritten = || operation.made().nth(made)?.unwritten();
            self.leaf(unwritten, |storage| {
                if saving.stays.has(storage.id(), storage.bytes()) {
                    return Some(leaf::Source::Held(storage.clone()));
                }
                let planned = (saving.planned)(position(operation), made);
                let planned = planned.filter(|planned| *planned != Placement::Recompute)?;
                let subject = Subject::whole(storage.clone(), operation.made().nth(made)?.version());
                self.cache.save(subject, planned == Placement::Keep, saving.by).map(leaf::Source::Entry)
            })
        };
        pass.statistics.iter().map(leaf).collect::<Option<_>>().unwrap_or_default()
    }

    /// The leaf of a storage that has its bytes still, of which `source` takes care.
    fn leaf(
        &self,
        unwritten: impl Fn() -> Option<Storage>,
        source: impl FnOnce(&Storage) -> Option<leaf::Source>,
    ) -> Option<Source> {
        let storage = unwritten()?;
        let leaf = if let Some(leaf) = self.standing.leaf(storage.id()) {
            leaf
        } else {
            let watch = Watch::new(&storage);
            let made = Arc::new(Leaf::new(watch, source(&storage)?));
            self.standing.insert_leaf(made)
        };
        // Looked at again now that writes are reported.
        unwritten().map(|_: Storage| Source::Leaf(leaf))
    }
}

/// When an operation ran.
pub(super) fn position(operation: &Recorded) -> Position {
    let torch::Position { strand, index } = operation.position();
    Position { strand, index }
}

/// The search for what one result is computed from.
struct Search<'a> {
    saving: &'a Saving<'a>,
    /// Operations that cannot be run again. Many results may have been made from theirs, each of which would lead here.
    refused: HashMap<usize, Missing>,
}

/// Why something cannot be computed again by recorded operations.
#[derive(Clone, Copy)]
enum Missing {
    /// Something that it is computed from is not to be had.
    Bytes,
    /// The part of the program that is running makes something that it is computed from, and makes both in the same run.
    Taken,
}
