//! Running operations again.

use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch::Storage;
use ssdtrain_store::sync::Mutex;

use super::chained::Group;
use super::chains::Chains;
use super::node::Node;
use super::rerun::Rerun;
use super::together::Together;
use crate::cache::Cache;
use crate::telemetry::Counters;
use crate::trace::{Name, Range};

/// The reruns of a step, which come one after another.
pub(super) struct Reruns {
    cache: Arc<Cache>,
    counters: Arc<Counters>,
    /// Makes runs of pointwise operations one.
    chains: Option<Arc<Chains>>,
    /// Locked during a rerun.
    turn: Mutex<()>,
}

impl Reruns {
    pub(super) fn new(cache: &Arc<Cache>, counters: &Arc<Counters>, chains: Option<&Arc<Chains>>) -> Reruns {
        Reruns {
            cache: Arc::clone(cache),
            counters: Arc::clone(counters),
            chains: chains.map(Arc::clone),
            turn: Mutex::default(),
        }
    }

    pub(super) fn chains(&self) -> Option<&Chains> {
        self.chains.as_deref()
    }

    /// Computes one of the results of `node` again, with whatever that needs, and what others of its part wait for.
    pub(super) fn run(
        &self,
        node: &Arc<Node>,
        made: usize,
        part: Option<&Together>,
    ) -> Result<Storage, String> {
        let _turn = self.turn.lock();
        // Another thread may have computed it meanwhile.
        if let Some(storage) = node.available(made) {
            return Ok(storage);
        }
        let within = self.cache.scopes.child(node.scope, "recompute");
        let _range = Range::open(self.cache.trace.clone(), Name::Scope(within), node.operation.name());
        let others = part.map(Together::missing).unwrap_or_default();
        let (start, mark) = (Instant::now(), self.cache.mark(&self.counters));
        // What another thread has changed comes from elsewhere the next time, so this ends.
        let rerun = loop {
            if let Some(rerun) = self.attempt(node, made, &others)? {
                break rerun;
            }
        };
        self.cache.reran(mark, &self.counters);
        self.counters.rerun(rerun.computed, start.elapsed());
        for bytes in rerun.fused {
            self.counters.fused.add(bytes);
        }
        rerun.result.ok_or_else(|| format!("internal error: {} has no result {made}", node.operation.name()))
    }

    /// `None` if another thread has changed something while it was read.
    fn attempt(
        &self,
        node: &Arc<Node>,
        made: usize,
        others: &[Arc<Node>],
    ) -> Result<Option<Rerun<'_>>, String> {
        let mut rerun = Rerun::new(node, made, others, &self.cache);
        let order = std::mem::take(&mut rerun.order);
        let chains = self.chains();
        for Group { nodes, is_chain } in rerun.groups(&order, chains) {
            let is_done = match chains.filter(|_| is_chain) {
                Some(chains) => rerun.chain(chains, &nodes)?,
                None => rerun.one_after_another(&nodes)?,
            };
            if !is_done {
                return Ok(None);
            }
        }
        Ok(Some(rerun))
    }
}
