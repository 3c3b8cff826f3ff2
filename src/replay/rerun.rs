//! Running operations again: what a result needs, in order, and nothing for longer than needed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch::Storage;

use super::chained;
use super::node::{Node, Source};
use crate::trace::{Name, Range};

/// Identifies a storage in a rerun: an address that lives as long as the rerun, and a number.
pub(super) type Key = (usize, usize);

pub(super) fn key(source: &Source) -> Key {
    match source {
        Source::Leaf(leaf) => (Arc::as_ptr(leaf).addr(), usize::MAX),
        Source::Node(node, made) => (Arc::as_ptr(node).addr(), *made),
    }
}

/// Computes one of the results of `node` again, with whatever that needs.
pub(super) fn run(node: &Arc<Node>, made: usize) -> Result<Storage, String> {
    let replays = &node.replays;
    let _turn = replays.turn();
    // Another thread may have computed it meanwhile.
    if let Some(storage) = node.available(made) {
        return Ok(storage);
    }
    let cache = &replays.cache;
    let within = cache.scopes.child(node.scope, "recompute");
    let _range = Range::open(cache.trace.clone(), Name::Scope(within), node.operation.name());
    let start = Instant::now();
    let mut computed = 0;
    // What another thread has changed comes from elsewhere the next time, so this ends.
    let result = loop {
        if let Some(result) = attempt(node, made, &mut computed)? {
            break result;
        }
    };
    replays.counters.rerun(computed, start.elapsed());
    Ok(result)
}

/// `None` if another thread has changed something while it was read.
fn attempt(node: &Arc<Node>, made: usize, computed: &mut u64) -> Result<Option<Storage>, String> {
    let mut rerun = Rerun { target: key(&Source::Node(Arc::clone(node), made)), ..Rerun::default() };
    rerun.need(node);
    let order = std::mem::take(&mut rerun.order);
    let chains = node.replays.chains();
    for group in chained::groups(&order, chains) {
        let is_done = match (chains, &group[..]) {
            (Some(chains), [_, _, ..]) => rerun.chain(chains, &group)?,
            _ => rerun.one_after_another(&group)?,
        };
        if !is_done {
            return Ok(None);
        }
    }
    *computed += rerun.computed;
    let result = rerun.result.take();
    result.map(Some).ok_or_else(|| format!("internal error: {} has no result {made}", node.operation.name()))
}

#[derive(Default)]
pub(super) struct Rerun {
    /// The result that was asked for.
    pub(super) target: Key,
    result: Option<Storage>,
    /// Bytes that were made.
    computed: u64,
    /// The operations to run, each after those whose results it reads.
    order: Vec<Arc<Node>>,
    /// How often what is in `storages` will still be read, and that of what is not there yet.
    pub(super) reads: HashMap<Key, usize>,
    storages: HashMap<Key, Storage>,
}

impl Rerun {
    /// Collects what computing `target` takes.
    fn need(&mut self, target: &Arc<Node>) {
        // The nodes on the way, each with the number of its sources that were looked at.
        let mut path = vec![(Arc::clone(target), 0)];
        let mut found: HashMap<usize, ()> = HashMap::from([(Arc::as_ptr(target).addr(), ())]);
        while let Some((node, looked_at)) = path.last_mut() {
            let Some(source) = node.sources.get(*looked_at).cloned() else {
                self.order.extend(path.pop().map(|(node, _)| node));
                continue;
            };
            *looked_at += 1;
            let read = key(&source);
            *self.reads.entry(read).or_default() += 1;
            let Source::Node(node, made) = source else { continue };
            if self.storages.contains_key(&read) || found.contains_key(&Arc::as_ptr(&node).addr()) {
                continue;
            }
            match node.available(made) {
                Some(storage) => drop(self.storages.insert(read, storage)),
                None => {
                    found.insert(Arc::as_ptr(&node).addr(), ());
                    path.push((node, 0));
                }
            }
        }
    }

    /// Runs operations; false if another thread has changed what one of them read.
    pub(super) fn one_after_another(&mut self, nodes: &[Arc<Node>]) -> Result<bool, String> {
        for node in nodes {
            if self.single(node)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Runs one operation whose sources are there, and returns what it made; `None` if another thread has changed one of them since.
    pub(super) fn single(&mut self, node: &Arc<Node>) -> Result<Option<Vec<Storage>>, String> {
        let repeated = self.repeat(node).map_err(|failure| {
            let scope = node.replays.cache.scopes.name(node.scope);
            format!("ssdtrain cannot run {} of scope \"{scope}\" again: {failure}", node.operation.name())
        })?;
        let Some(storages) = repeated else { return Ok(None) };
        self.is_made(node, storages.clone())?;
        Ok(Some(storages))
    }

    fn repeat(&mut self, node: &Node) -> Result<Option<Vec<Storage>>, String> {
        let read = node.sources.iter().map(|source| self.fetch(source));
        let read = read.collect::<Result<Vec<_>, String>>()?;
        let made = node.operation.repeat(&read).map_err(|error| error.0)?;
        if !node.sources.iter().zip(&read).all(|(source, storage)| has_served(source, storage)) {
            return Ok(None);
        }
        self.has_read(node);
        Ok(Some(made))
    }

    /// A storage that is to be read.
    pub(super) fn fetch(&mut self, source: &Source) -> Result<Storage, String> {
        match (self.storages.get(&key(source)), source) {
            (Some(storage), _) => Ok(storage.clone()),
            (None, Source::Leaf(leaf)) => {
                let storage = leaf.fetch()?;
                self.storages.insert(key(source), storage.clone());
                Ok(storage)
            }
            (None, Source::Node(..)) => Err("internal error: what it reads is not there".to_owned()),
        }
    }

    /// An operation has read its sources. What nobody reads any more is let go.
    pub(super) fn has_read(&mut self, node: &Node) {
        for source in &node.sources {
            let key = key(source);
            if let Some(reads) = self.reads.get_mut(&key) {
                *reads -= 1;
                if *reads == 0 {
                    self.storages.remove(&key);
                }
            }
        }
    }

    /// An operation has made these storages: those that others will read, or that handles wait for, are kept.
    pub(super) fn is_made(&mut self, node: &Arc<Node>, storages: Vec<Storage>) -> Result<(), String> {
        self.computed += storages.iter().map(Storage::bytes).sum::<u64>();
        for (made, storage) in storages.iter().enumerate() {
            if !node.is_same(made, storage)? {
                return Err(format!(
                    "ssdtrain: {} gave another result than before when it was run again, which verify(true) has shown. Something has \
                     written to what it reads through its address",
                    node.operation.name()
                ));
            }
        }
        node.is_made(&storages);
        for (made, storage) in storages.into_iter().enumerate() {
            let key = (Arc::as_ptr(node).addr(), made);
            if key == self.target {
                self.result = Some(storage.clone());
            }
            if self.reads.get(&key).is_some_and(|reads| *reads > 0) {
                self.storages.insert(key, storage);
            }
        }
        Ok(())
    }
}

/// Whether what was fetched has had the bytes until now. Writers say so before they begin.
pub(super) fn has_served(source: &Source, storage: &Storage) -> bool {
    match source {
        Source::Leaf(leaf) => leaf.has_served(storage),
        Source::Node(node, made) => node.has_served(*made, storage),
    }
}
