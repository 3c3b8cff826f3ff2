//! One rerun: what a result needs, in order, and nothing for longer than needed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ssdtrain_libtorch::Storage;

use super::node::{Key, Node, Source};
use crate::cache::Cache;

pub(super) struct Rerun<'a> {
    cache: &'a Cache,
    /// The result that was asked for.
    pub(super) target: Key,
    pub(super) result: Option<Storage>,
    /// Bytes that were made.
    pub(super) computed: u64,
    /// Those of them that several operations made as one, for each time they did.
    pub(super) fused: Vec<u64>,
    /// The operations to run, each after those whose results it reads.
    pub(super) order: Vec<Arc<Node>>,
    /// How often what is in `storages` will still be read, and that of what is not there yet.
    pub(super) reads: HashMap<Key, usize>,
    storages: HashMap<Key, Storage>,
    /// The operations that were looked at, by their addresses.
    found: HashSet<usize>,
}

impl<'a> Rerun<'a> {
    /// What computing one of the results of `target` takes, and the results that others wait for.
    pub(super) fn new(target: &Arc<Node>, made: usize, others: &[Arc<Node>], cache: &'a Cache) -> Rerun<'a> {
        let mut rerun = Rerun {
            cache,
            target: Source::Node(Arc::clone(target), made).key(),
            result: None,
            computed: 0,
            fused: Vec::new(),
            order: Vec::new(),
            reads: HashMap::new(),
            storages: HashMap::new(),
            found: HashSet::new(),
        };
        rerun.need(target);
        others.iter().for_each(|other| rerun.need(other));
        rerun
    }

    fn need(&mut self, target: &Arc<Node>) {
        if !self.found.insert(Arc::as_ptr(target).addr()) {
            return;
        }
        // The nodes on the way, each with the number of its sources that were looked at.
        let mut path = vec![(Arc::clone(target), 0)];
        while let Some((node, looked_at)) = path.last_mut() {
            let Some(source) = node.sources.get(*looked_at).cloned() else {
                self.order.extend(path.pop().map(|(node, _)| node));
                continue;
            };
            *looked_at += 1;
            let read = source.key();
            *self.reads.entry(read).or_default() += 1;
            let Source::Node(node, made) = source else { continue };
            if self.storages.contains_key(&read) || self.found.contains(&Arc::as_ptr(&node).addr()) {
                continue;
            }
            match node.available(made).filter(|storage| self.cache.may_use(storage)) {
                Some(storage) => {
                    self.cache.reads_late(&storage);
                    self.storages.insert(read, storage);
                }
                None => {
                    self.found.insert(Arc::as_ptr(&node).addr());
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
            let scope = self.cache.scopes.name(node.scope);
            format!("ssdtrain cannot run {} of scope \"{scope}\" again: {failure}", node.operation.name())
        })?;
        let Some(storages) = repeated else { return Ok(None) };
        self.is_made(node, storages.clone())?;
        Ok(Some(storages))
    }

    fn repeat(&mut self, node: &Node) -> Result<Option<Vec<Storage>>, String> {
        let read = node.own_sources().iter().map(|source| self.fetch(source));
        let read = read.collect::<Result<Vec<_>, String>>()?;
        let made = node.operation.repeat(&read).map_err(|error| error.0)?;
        if !node.own_sources().iter().zip(&read).all(|(source, storage)| source.has_served(storage)) {
            return Ok(None);
        }
        self.has_read(node);
        Ok(Some(made))
    }

    /// A storage that is to be read.
    pub(super) fn fetch(&mut self, source: &Source) -> Result<Storage, String> {
        match (self.storages.get(&source.key()), source) {
            (Some(storage), _) => Ok(storage.clone()),
            (None, Source::Leaf(leaf)) => {
                let storage = leaf.fetch()?;
                // It may belong to another stream, and nobody else need hold it until this one has read it.
                self.cache.in_use_again(&storage)?;
                self.cache.reads_late(&storage);
                self.storages.insert(source.key(), storage.clone());
                Ok(storage)
            }
            (None, Source::Node(..)) => Err("internal error: what it reads is not there".to_owned()),
        }
    }

    /// An operation has read its sources. What nobody reads any more is let go.
    pub(super) fn has_read(&mut self, node: &Node) {
        for source in &node.sources {
            let key = source.key();
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
                    "ssdtrain: {} gave another result than before when it was run again, which verify(Verify::Full) has shown. Something has \
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
