//! Runs of pointwise operations that are run again as one kernel.

use std::collections::HashMap;
use std::sync::Arc;

use ssdtrain_libtorch::{Recorded, Storage};
use tch::Device;

use super::chains::{Chains, Way};
use super::node::{Key, Node, Source};
use super::rerun::Rerun;
use crate::device::{Arguments, Kernel};
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
        // A norm by itself is worth a kernel, which spares a pass for its statistics.
        let is_short =
            |node: &Node| pointwise(node, chains).is_some_and(|known| !known.statistics.is_empty());
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
        // The whole storage has to be the whole result.
        let is_whole = pointwise(before, chains).is_some_and(|before| {
            before.count == known.count
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

/// What the operation computes, if a kernel of this device can.
fn pointwise<'a>(node: &'a Node, chains: &Chains) -> Option<&'a Pointwise> {
    let known = node.pointwise.get_or_init(|| known(&node.operation));
    let known = known.as_ref().filter(|(device, _)| *device == Device::Cuda(chains.device()));
    // The statistics may not have been there any more.
    known.map(|(_, known)| known).filter(|known| known.reads().all(|read| read.storage < node.sources.len()))
}

fn known(operation: &Recorded) -> Option<(Device, Pointwise)> {
    let known = Pointwise::of(&operation.call())?;
    let result = operation.made().next()?;
    let is_alone = operation.made().len() == 1 + known.statistics.len();
    (is_alone && result.bytes() == known.count * known.element.bytes()).then_some((result.device(), known))
}

/// What a kernel makes of an operation.
pub(super) struct Pass {
    /// The bytes that it reads and writes if it runs by itself.
    pub(super) traffic: u64,
    /// Which of the operation's own results it reads.
    pub(super) statistics: Vec<usize>,
}

/// What a kernel makes of an operation, if one can run it, maybe with others, while its statistics are there.
pub(super) fn pass(operation: &Recorded, chains: &Chains) -> Option<Pass> {
    let (device, known) = known(operation).filter(|_| chains.is_able())?;
    let are_there = known
        .statistics
        .iter()
        .all(|made| operation.made().nth(*made).is_some_and(|statistic| statistic.unwritten().is_some()));
    (are_there && device == Device::Cuda(chains.device()))
        .then(|| Pass { traffic: known.traffic(), statistics: known.statistics })
}

impl Rerun<'_> {
    /// Runs a group of pointwise operations; false if another thread has changed something that they read.
    pub(super) fn chain(&mut self, chains: &Chains, nodes: &[Arc<Node>]) -> Result<bool, String> {
        let (mut bound, sources) = self.bind(chains, nodes);
        loop {
            return match chains.way(&bound.chain, bound.count) {
                Way::Refused if let Some(other) = bound.chain.alternative() => {
                    bound.chain = other;
                    continue;
                }
                Way::Single | Way::Refused => self.one_after_another(nodes),
                Way::Compared(kernel) => self.compare(chains, nodes, &bound, &sources, &kernel),
                Way::Kernel(kernel) => self.run_kernel(chains, nodes, &bound, &sources, &kernel),
            };
        }
    }

    /// The chain of these operations, and where each of its inputs comes from.
    fn bind(&self, chains: &Chains, nodes: &[Arc<Node>]) -> (Bound<Key>, Vec<Source>) {
        let places: HashMap<usize, usize> =
            nodes.iter().enumerate().map(|(place, node)| (Arc::as_ptr(node).addr(), place)).collect();
        let mut sources = HashMap::new();
        let mut within: HashMap<Key, usize> = HashMap::new();
        for source in nodes.iter().flat_map(|node| &node.sources) {
            *within.entry(source.key()).or_default() += 1;
            sources.entry(source.key()).or_insert_with(|| source.clone());
        }
        let members: Vec<_> = nodes
            .iter()
            .filter_map(|node| {
                let made = (Arc::as_ptr(node).addr(), 0);
                let is_read =
                    self.reads.get(&made).copied().unwrap_or(0) > within.get(&made).copied().unwrap_or(0);
                Some(Member {
                    operation: pointwise(node, chains)?,
                    makers: node.sources.iter().map(|source| places.get(&source.key().0).copied()).collect(),
                    keys: node.sources.iter().map(Source::key).collect(),
                    is_output: is_read || made == self.target || node.is_awaited(0),
                })
            })
            .collect();
        let bound = fusion::bind(&members);
        let sources = bound.inputs.iter().filter_map(|(key, _)| sources.get(key).cloned()).collect();
        (bound, sources)
    }

    /// Runs the operations one after another, and compares the kernel's bits with theirs.
    fn compare(
        &mut self,
        chains: &Chains,
        nodes: &[Arc<Node>],
        bound: &Bound<Key>,
        sources: &[Source],
        kernel: &Kernel,
    ) -> Result<bool, String> {
        let inputs = self.inputs(bound, sources)?;
        let mut outputs = Vec::with_capacity(bound.outputs.len());
        for (place, node) in nodes.iter().enumerate() {
            let Some(made) = self.single(node)? else { return Ok(false) };
            if bound.outputs.contains(&place) {
                outputs.extend(made.into_iter().next());
            }
        }
        let arguments =
            Arguments { inputs: &inputs, numbers: &bound.numbers, outputs: &outputs, count: bound.count };
        match kernel.differs(&arguments) {
            // If another thread has begun to change what was read, this shows nothing.
            Ok(differs) if are_original(sources, &inputs) => {
                chains.is_compared(&bound.chain, bound.count, !differs);
            }
            Ok(_) => {}
            Err(error) => chains.refuse(&bound.chain, &error.to_string()),
        }
        Ok(true)
    }

    fn run_kernel(
        &mut self,
        chains: &Chains,
        nodes: &[Arc<Node>],
        bound: &Bound<Key>,
        sources: &[Source],
        kernel: &Kernel,
    ) -> Result<bool, String> {
        let inputs = self.inputs(bound, sources)?;
        let bytes = bound.chain.writes(bound.count);
        let made = bytes.iter().map(|bytes| kernel.allocate(*bytes)).collect::<Result<Vec<_>, _>>();
        let launched = made.and_then(|outputs| {
            let arguments =
                Arguments { inputs: &inputs, numbers: &bound.numbers, outputs: &outputs, count: bound.count };
            kernel.run(&arguments).map(|()| outputs)
        });
        let outputs = match launched {
            Ok(outputs) => outputs,
            Err(error) => {
                chains.refuse(&bound.chain, &error.to_string());
                return self.one_after_another(nodes);
            }
        };
        if !are_original(sources, &inputs) {
            return Ok(false);
        }
        drop(inputs);
        for node in nodes {
            self.has_read(node);
        }
        for (place, output) in bound.outputs.iter().zip(outputs) {
            self.is_made(&nodes[*place], vec![output])?;
        }
        self.fused.push(bytes.iter().sum());
        Ok(true)
    }

    /// The storages of a chain's inputs, each with the place of its first element.
    fn inputs(&mut self, bound: &Bound<Key>, sources: &[Source]) -> Result<Vec<(Storage, u64)>, String> {
        let offsets = bound.inputs.iter().map(|(_, offset)| *offset);
        sources.iter().zip(offsets).map(|(source, offset)| Ok((self.fetch(source)?, offset))).collect()
    }
}

fn are_original(sources: &[Source], inputs: &[(Storage, u64)]) -> bool {
    sources.iter().zip(inputs).all(|(source, (storage, _))| source.has_served(storage))
}
