//! What is still needed for results that backward has not asked for yet.

use std::sync::atomic::{AtomicIsize, Ordering};

use super::leaf::Leaf;
use super::node::{Node, Source};

/// How many need something: results that wait for their first backward, and operations that read it and are needed themselves.
///
/// The first one makes everything needed that this is computed from, and the last one ends that. Several threads may do both at once: what
/// one of them passes on may arrive after what another does, so that the count may be negative for a moment.
#[derive(Default)]
pub(super) struct Demand(AtomicIsize);

impl Demand {
    pub(super) fn is_some(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    /// Returns whether it is the first.
    fn begins(&self) -> bool {
        self.0.fetch_add(1, Ordering::AcqRel) == 0
    }

    /// Returns whether it was the last.
    fn ends(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

/// One more result of `node` waits for backward.
pub(super) fn begins(node: &Node) {
    pass_on(node, Demand::begins, |_| ());
}

/// One of the results of `node` waits no more.
pub(super) fn ends(node: &Node) {
    pass_on(node, Demand::ends, Leaf::is_done);
}

/// Counts at `node`, and where that makes a difference, at what it reads. Nodes may form long chains, so this goes from one to the next.
fn pass_on(node: &Node, count: fn(&Demand) -> bool, at_leaf: fn(&Leaf)) {
    let mut nodes = vec![node];
    while let Some(node) = nodes.pop() {
        if !count(&node.demand) {
            continue;
        }
        for source in &node.sources {
            match source {
                Source::Node(node, _) => nodes.push(node),
                Source::Leaf(leaf) if count(&leaf.demand) => at_leaf(leaf),
                Source::Leaf(_) => {}
            }
        }
    }
}
