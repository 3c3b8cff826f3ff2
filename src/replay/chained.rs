//! Runs of pointwise operations that are run again as one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch::{Recorded, Storage};
use tch::Device;

use super::chains::{Chains, Way};
use super::node::{Key, Node, Source};
use super::rerun::Rerun;
use crate::cache::note_failure;
use crate::device::{Arguments, Joined, Size, is_unanswered};
use crate::fusion::{self, Bound, Member, Pointwise, Vertex};

/// Operations of a rerun that run in a row.
pub(super) struct Group {
    pub(super) nodes: Vec<Arc<Node>>,
    /// Whether one kernel may run them, and is worth it.
    pub(super) is_chain: bool,
}

impl Group {
    fn single(node: &Arc<Node>) -> Group {
        Group { nodes: vec![Arc::clone(node)], is_chain: false }
    }
}

impl Rerun<'_> {
    /// Its operations in groups, in an order that they can run in.
    pub(super) fn groups(&self, order: &[Arc<Node>], chains: Option<&Chains>) -> Vec<Group> {
        let Some(chains) = chains.filter(|chains| chains.is_able()) else {
            return order.iter().map(Group::single).collect();
        };
        let is_short = |node: &Node| pointwise(node, chains).is_some_and(|known| chains.is_shorter(known));
        if let [node] = order
            && !is_short(node)
        {
            return vec![Group::single(node)];
        }
        let numbers: HashMap<usize, usize> =
            order.iter().enumerate().map(|(number, node)| (Arc::as_ptr(node).addr(), number)).collect();
        let vertices: Vec<Vertex> = order.iter().map(|node| self.vertex(node, &numbers, chains)).collect();
        let group = |members: Vec<usize>| Group {
            is_chain: match members[..] {
                [member] => vertices[member].count.is_some() && is_short(&order[member]),
                _ => true,
            },
            nodes: members.into_iter().map(|member| Arc::clone(&order[member])).collect(),
        };
        fusion::groups(&vertices).into_iter().map(group).collect()
    }

    fn vertex(&self, node: &Node, numbers: &HashMap<usize, usize>, chains: &Chains) -> Vertex {
        let known = pointwise(node, chains).filter(|_| !self.needs_others(node));
        vertex(node, known, numbers, chains)
    }

    /// Whether any result of the operation is needed besides the first.
    fn needs_others(&self, node: &Node) -> bool {
        (1..node.operation.made().len()).any(|made| {
            let key = (std::ptr::from_ref(node).addr(), made);
            key == self.target
                || self.reads.get(&key).is_some_and(|reads| *reads > 0)
                || node.is_awaited(made)
        })
    }
}

fn vertex(
    node: &Node,
    known: Option<&Pointwise>,
    numbers: &HashMap<usize, usize>,
    chains: &Chains,
) -> Vertex {
    let maker = |source: &Source| match source {
        Source::Node(node, _) => numbers.get(&Arc::as_ptr(node).addr()).copied(),
        Source::Leaf(_) => None,
    };
    let reads = node.sources.iter().filter_map(maker).collect();
    let Some(known) = known else { return Vertex { reads, ..Vertex::default() } };
    let is_followed = |storage: usize| {
        let mut views = known.reads().filter(|read| read.storage == storage).peekable();
        views.peek().is_some() && views.all(fusion::Read::is_whole)
    };
    let sources = node.sources.iter().enumerate();
    let followed = sources.filter(|(storage, source)| {
        let Source::Node(before, 0) = source else { return false };
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
    let known = known.as_ref().filter(|(device, _)| *device == chains.device());
    // The statistics may not have been there any more.
    known.map(|(_, known)| known).filter(|known| known.reads().all(|read| read.storage < node.sources.len()))
}

fn known(operation: &Recorded) -> Option<(Device, Pointwise)> {
    let known = Pointwise::of(&operation.call())?;
    let result = operation.made().next()?;
    let is_alone = operation.made().len() == 1 + known.statistics.len();
    (is_alone && result.bytes() == known.count * known.element.bytes()).then_some((result.device(), known))
}

/// Whether an operation is pointwise, or a norm, and known on this device.
pub(super) fn is_pointwise(operation: &Recorded, device: Device) -> bool {
    known(operation).is_some_and(|(known, _)| known == device)
}

/// What becomes of an operation that runs as one with others, or alone without a part of its work.
pub(super) struct Pass {
    /// The bytes that it reads and writes if it runs by itself, if running it with others spares that.
    pub(super) traffic: Option<u64>,
    /// Whether it takes less time than the operation even by itself.
    pub(super) is_shorter: bool,
    /// Which of the operation's own results it reads.
    pub(super) statistics: Vec<usize>,
}

/// What becomes of an operation that may run so, while its statistics are there.
pub(super) fn pass(operation: &Recorded, chains: &Chains) -> Option<Pass> {
    let (_, known) = known(operation).filter(|(device, _)| *device == chains.device())?;
    let are_there = known
        .statistics
        .iter()
        .all(|made| operation.made().nth(*made).is_some_and(|statistic| statistic.unwritten().is_some()));
    are_there.then(|| Pass {
        traffic: chains.traffic(&known, operation.threads()),
        is_shorter: chains.is_shorter(&known),
        statistics: known.statistics,
    })
}

/// Operations that may run as one.
struct Run<'a> {
    nodes: &'a [Arc<Node>],
    operations: Vec<(&'a Recorded, &'a Pointwise)>,
    bound: Bound<Key>,
    /// Where each of the chain's inputs comes from.
    sources: Vec<Source>,
    size: Size,
}

impl Run<'_> {
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
        let mut run = self.bind(chains, nodes);
        loop {
            return match chains.way(&run.bound.chain, run.size) {
                Way::Refused if let Some(other) = run.bound.chain.alternative() => {
                    run.bound.chain = other;
                    continue;
                }
                Way::Single | Way::Refused => self.one_after_another(nodes),
                Way::Compared(joined) => self.compare(chains, &run, &*joined),
                Way::Joined(joined) => self.run_joined(chains, &run, &*joined),
            };
        }
    }

    /// The chain of these operations, with what it is run on.
    fn bind<'a>(&self, chains: &Chains, nodes: &'a [Arc<Node>]) -> Run<'a> {
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
        Run {
            nodes,
            operations: known.map(|(node, operation)| (&node.operation, operation)).collect(),
            sources: bound.inputs.iter().filter_map(|(key, _)| sources.get(key).cloned()).collect(),
            size: Size { count: bound.count, threads },
            bound,
        }
    }

    /// Runs the operations one after another, and compares with their bits those that they have together.
    fn compare(&mut self, chains: &Chains, run: &Run<'_>, joined: &dyn Joined) -> Result<bool, String> {
        let inputs = self.inputs(run)?;
        let start = Instant::now();
        let mut outputs = Vec::with_capacity(run.bound.outputs.len());
        for (place, node) in run.nodes.iter().enumerate() {
            let Some(made) = self.single(node)? else { return Ok(false) };
            if run.bound.outputs.contains(&place) {
                outputs.extend(made.into_iter().next());
            }
        }
        let single = start.elapsed();
        let differs = joined.differs(&run.arguments(&inputs, &outputs), chains.limit());
        let times = [single, start.elapsed() - single];
        match differs {
            // If another thread has begun to change what was read, this shows nothing.
            Ok(differs) if run.is_original(&inputs) => {
                chains.is_compared(&run.bound.chain, run.size, !differs, times);
            }
            Ok(_) => {}
            Err(error) if is_unanswered(&error) => {
                note_failure(&error);
                return Err(error.to_string());
            }
            Err(error) => chains.refuse(&run.bound.chain, &error.to_string()),
        }
        Ok(true)
    }

    fn run_joined(&mut self, chains: &Chains, run: &Run<'_>, joined: &dyn Joined) -> Result<bool, String> {
        let inputs = self.inputs(run)?;
        let bytes = run.bound.chain.writes(run.bound.count);
        let made = bytes.iter().map(|bytes| joined.allocate(*bytes)).collect::<Result<Vec<_>, _>>();
        let ran = made.and_then(|outputs| joined.run(&run.arguments(&inputs, &outputs)).map(|()| outputs));
        let outputs = match ran {
            Ok(outputs) => outputs,
            Err(error) => {
                chains.refuse(&run.bound.chain, &error.to_string());
                return self.one_after_another(run.nodes);
            }
        };
        if !run.is_original(&inputs) {
            return Ok(false);
        }
        drop(inputs);
        for node in run.nodes {
            self.has_read(node);
        }
        for (place, output) in run.bound.outputs.iter().zip(outputs) {
            self.is_made(&run.nodes[*place], vec![output])?;
        }
        self.fused.push(bytes.iter().sum());
        Ok(true)
    }

    /// The storages of a chain's inputs, each with the place of its first element.
    fn inputs(&mut self, run: &Run<'_>) -> Result<Vec<(Storage, u64)>, String> {
        let offsets = run.bound.inputs.iter().map(|(_, offset)| *offset);
        run.sources.iter().zip(offsets).map(|(source, offset)| Ok((self.fetch(source)?, offset))).collect()
    }
}
