//! Runs of pointwise operations that are run again as one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch::{Recorded, Storage};
use tch::Device;

use super::chains::{Chains, Way};
use super::node::{Key, Node, Source};
use super::rerun::Rerun;
use crate::device::{Arguments, Joined, Size};
use crate::fusion::{self, Bound, Member, Pointwise, Vertex};

/// The operations of a rerun in groups, each of which may run as one, in an order that they can run in.
pub(super) fn groups(order: &[Arc<Node>], chains: Option<&Chains>) -> Vec<Vec<Arc<Node>>> {
    let single = || order.iter().map(|node| vec![Arc::clone(node)]).collect();
    let Some(chains) = chains.filter(|chains| order.len() > 1 && chains.is_able()) else { return single() };
    let numbers: HashMap<usize, usize> =
        order.iter().enumerate().map(|(number, node)| (Arc::as_ptr(node).addr(), number)).collect();
    let vertices: Vec<Vertex> = order.iter().map(|node| vertex(node, &numbers, chains)).collect();
    let groups = fusion::groups(&vertices).into_iter();
    groups.map(|group| group.into_iter().map(|member| Arc::clone(&order[member])).collect()).collect()
}

fn vertex(node: &Node, numbers: &HashMap<usize, usize>, chains: &Chains) -> Vertex {
    let maker = |source: &Source| match source {
        Source::Node(node, _) => numbers.get(&Arc::as_ptr(node).addr()).copied(),
        Source::Leaf(_) => None,
    };
    let reads = node.sources.iter().filter_map(maker).collect();
    let Some(known) = pointwise(node, chains) else { return Vertex { reads, ..Vertex::default() } };
    let is_followed = |storage: usize| {
        let mut views = known.reads().filter(|read| read.storage == storage).peekable();
        views.peek().is_some() && views.all(fusion::Read::is_whole)
    };
    let sources = node.sources.iter().enumerate();
    let followed = sources.filter(|(storage, source)| {
        let Source::Node(before, _) = source else { return false };
        // The whole storage has to be the whole result, and divided among as many threads.
        let is_alike = before.operation.threads() == node.operation.threads();
        let is_whole = pointwise(before, chains).is_some_and(|before| {
            is_alike
                && before.count == known.count
                && known
                    .reads()
                    .filter(|read| read.storage == *storage)
                    .all(|read| read.element == before.element)
        });
        is_whole && is_followed(*storage)
    });
    let follows = followed.filter_map(|(_, source)| maker(source)).collect();
    Vertex { reads, count: Some(known.count), follows }
}

/// What the operation computes, if it may run as one with others on this device.
fn pointwise<'a>(node: &'a Node, chains: &Chains) -> Option<&'a Pointwise> {
    let known = node.pointwise.get_or_init(|| known(&node.operation));
    known.as_ref().filter(|(device, _)| *device == chains.device()).map(|(_, known)| known)
}

fn known(operation: &Recorded) -> Option<(Device, Pointwise)> {
    let known = Pointwise::of(&operation.call())?;
    let mut made = operation.made();
    let result = made.next().filter(|_| made.next().is_none())?;
    (result.bytes() == known.count * known.element.bytes()).then_some((result.device(), known))
}

/// The bytes that an operation reads and writes by itself, if running it as one with others spares that.
pub(super) fn traffic(operation: &Recorded, chains: &Chains) -> Option<u64> {
    let (device, known) = known(operation)?;
    if device == chains.device() { chains.traffic(&known, operation.threads()) } else { None }
}

/// Operations that may run as one.
struct Group<'a> {
    nodes: &'a [Arc<Node>],
    operations: Vec<(&'a Recorded, &'a Pointwise)>,
    bound: Bound<Key>,
    /// Where each of the chain's inputs comes from.
    sources: Vec<Source>,
    size: Size,
}

impl Group<'_> {
    fn arguments<'a>(&'a self, inputs: &'a [(Storage, u64)], outputs: &'a [Storage]) -> Arguments<'a> {
        let (numbers, operations) = (&self.bound.numbers[..], &self.operations[..]);
        Arguments { size: self.size, inputs, numbers, outputs, operations }
    }

    /// Whether no one has begun to change what was read.
    fn is_original(&self, inputs: &[(Storage, u64)]) -> bool {
        self.sources.iter().zip(inputs).all(|(source, (storage, _))| source.has_served(storage))
    }
}

impl Rerun<'_> {
    /// Runs a group of pointwise operations; false if another thread has changed something that they read.
    pub(super) fn chain(&mut self, chains: &Chains, nodes: &[Arc<Node>]) -> Result<bool, String> {
        let group = self.bind(chains, nodes);
        match chains.way(&group.bound.chain, group.size) {
            Way::Single => self.one_after_another(nodes),
            Way::Compared(joined) => self.compare(chains, &group, &*joined),
            Way::Joined(joined) => self.run_joined(chains, &group, &*joined),
        }
    }

    /// The chain of these operations, with what it is run on.
    fn bind<'a>(&self, chains: &Chains, nodes: &'a [Arc<Node>]) -> Group<'a> {
        let places: HashMap<usize, usize> =
            nodes.iter().enumerate().map(|(place, node)| (Arc::as_ptr(node).addr(), place)).collect();
        let mut sources = HashMap::new();
        let mut within: HashMap<Key, usize> = HashMap::new();
        for source in nodes.iter().flat_map(|node| &node.sources) {
            *within.entry(source.key()).or_default() += 1;
            sources.entry(source.key()).or_insert_with(|| source.clone());
        }
        let known = nodes.iter().filter_map(|node| Some((node, pointwise(node, chains)?)));
        let members: Vec<_> = known
            .clone()
            .map(|(node, operation)| {
                let made = (Arc::as_ptr(node).addr(), 0);
                let is_read =
                    self.reads.get(&made).copied().unwrap_or(0) > within.get(&made).copied().unwrap_or(0);
                Member {
                    operation,
                    makers: node.sources.iter().map(|source| places.get(&source.key().0).copied()).collect(),
                    keys: node.sources.iter().map(Source::key).collect(),
                    is_output: is_read || made == self.target || node.is_awaited(0),
                }
            })
            .collect();
        let bound = fusion::bind(&members);
        let threads = nodes.first().and_then(|node| node.operation.threads());
        Group {
            nodes,
            operations: known.map(|(node, operation)| (&node.operation, operation)).collect(),
            sources: bound.inputs.iter().filter_map(|(key, _)| sources.get(key).cloned()).collect(),
            size: Size { count: bound.count, threads },
            bound,
        }
    }

    /// Runs the operations one after another, and compares with their bits those that they have together.
    fn compare(&mut self, chains: &Chains, group: &Group<'_>, joined: &dyn Joined) -> Result<bool, String> {
        let inputs = self.inputs(group)?;
        let start = Instant::now();
        let mut outputs = Vec::with_capacity(group.bound.outputs.len());
        for (place, node) in group.nodes.iter().enumerate() {
            let Some(made) = self.single(node)? else { return Ok(false) };
            if group.bound.outputs.contains(&place) {
                outputs.extend(made);
            }
        }
        let single = start.elapsed();
        let differs = joined.differs(&group.arguments(&inputs, &outputs));
        let times = [single, start.elapsed() - single];
        match differs {
            // If another thread has begun to change what was read, this shows nothing.
            Ok(differs) if group.is_original(&inputs) => {
                chains.is_compared(&group.bound.chain, group.size, !differs, times);
            }
            Ok(_) => {}
            Err(error) => chains.refuse(&group.bound.chain, &error.to_string()),
        }
        Ok(true)
    }

    fn run_joined(
        &mut self,
        chains: &Chains,
        group: &Group<'_>,
        joined: &dyn Joined,
    ) -> Result<bool, String> {
        let inputs = self.inputs(group)?;
        let bytes = group.bound.chain.writes(group.bound.count);
        let made = bytes.iter().map(|bytes| joined.allocate(*bytes)).collect::<Result<Vec<_>, _>>();
        let ran = made.and_then(|outputs| joined.run(&group.arguments(&inputs, &outputs)).map(|()| outputs));
        let outputs = match ran {
            Ok(outputs) => outputs,
            Err(error) => {
                chains.refuse(&group.bound.chain, &error.to_string());
                return self.one_after_another(group.nodes);
            }
        };
        if !group.is_original(&inputs) {
            return Ok(false);
        }
        drop(inputs);
        for node in group.nodes {
            self.has_read(node);
        }
        for (place, output) in group.bound.outputs.iter().zip(outputs) {
            self.is_made(&group.nodes[*place], vec![output])?;
        }
        self.fused.push(bytes.iter().sum());
        Ok(true)
    }

    /// The storages of a chain's inputs, each with the place of its first element.
    fn inputs(&mut self, group: &Group<'_>) -> Result<Vec<(Storage, u64)>, String> {
        let offsets = group.bound.inputs.iter().map(|(_, offset)| *offset);
        group.sources.iter().zip(offsets).map(|(source, offset)| Ok((self.fetch(source)?, offset))).collect()
    }
}
