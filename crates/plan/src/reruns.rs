//! What backward computes again, and when.
//!
//! When backward asks for a saved activation that is recomputed, everything it is computed from that is not on the
//! device is computed first, down to what is held: each after its inputs, which are taken in the order in which the
//! recipe lists them. What backward will ask for later stays until it has been used; the rest is freed as soon as the
//! last operation that reads it has run.

use std::time::Duration;

use crate::graph::Graph;
use crate::{Activation, Placement};

/// The reruns of a step, given which activations are held and which are recomputed. Where those that are held wait,
/// on the device or below it, makes no difference.
#[derive(Clone, Debug)]
pub(crate) struct Reruns {
    is_held: Vec<bool>,
    /// In the order in which backward comes to them.
    runs: Vec<Rerun>,
    /// What the reruns read of what is held.
    leaves: Vec<usize>,
    /// Held activations that are released at another activation's turn than their own: that turn, and which. In the
    /// order in which backward comes to them.
    late: Vec<(usize, usize)>,
    is_late: Vec<bool>,
    /// The time of all reruns.
    pub(crate) time: Duration,
}

/// What is computed when backward asks for one activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rerun {
    /// The one that is asked for.
    pub(crate) of: usize,
    pub(crate) time: Duration,
    /// The part of it in which memory-bound operations run.
    pub(crate) memory_bound: Duration,
    /// The most bytes that all this takes at once, beside the held ones.
    pub(crate) peak: u64,
    /// The bytes of it that stay until backward has used them.
    pub(crate) stays: u64,
    leaves: (usize, usize),
}

impl Reruns {
    /// `wants_held`: what is not to be recomputed, or is to be saved in place of others. What cannot be recomputed is
    /// held as well, if autograd saves it, and what nothing is recomputed from is not saved in place of others.
    pub(crate) fn new(
        activations: &[Activation],
        graph: &Graph,
        wants_held: impl Fn(usize) -> bool,
    ) -> Reruns {
        let mut is_held: Vec<bool> = (0..activations.len()).map(wants_held).collect();
        let mut is_there = is_held.clone();
        for &index in graph.order() {
            if !is_held[index] {
                let computable =
                    graph.has_recipe(index) && graph.inputs(index).iter().all(|&input| is_there[input]);
                is_held[index] = !computable && activations[index].is_saved();
                is_there[index] = computable || is_held[index];
            }
        }
        // The last turn in backward for which an activation is needed.
        let mut last: Vec<usize> = vec![usize::MAX; activations.len()];
        for &index in graph.order().iter().rev() {
            let users = graph.users(index).iter().filter(|user| !is_held[**user]).map(|user| last[*user]);
            let own = if activations[index].is_saved() { index } else { usize::MAX };
            last[index] = users.fold(own, usize::min);
        }
        let mut late = Vec::new();
        for (index, held) in is_held.iter_mut().enumerate().filter(|(_, held)| **held) {
            *held = last[index] < usize::MAX;
            if *held && last[index] != index {
                late.push((last[index], index));
            }
        }
        let mut is_late = vec![false; activations.len()];
        late.iter().for_each(|&(_, index)| is_late[index] = true);
        late.sort_unstable_by(|left, right| right.cmp(left));
        let (runs, leaves) = (Vec::new(), Vec::new());
        let mut reruns = Reruns { is_held, runs, leaves, late, is_late, time: Duration::ZERO };
        reruns.walk(activations, graph);
        reruns
    }

    /// For the placements of a plan, as far as they are given.
    pub(crate) fn of(activations: &[Activation], graph: &Graph, placements: &[Placement]) -> Reruns {
        Reruns::new(activations, graph, |index| {
            let activation = &activations[index];
            let placement = placements.get(index).copied().unwrap_or_else(|| activation.unplanned());
            match placement {
                _ if !activation.can_be_held() => false,
                Placement::Recompute => activation.is_saved() && !activation.is_movable(),
                Placement::Keep | Placement::Host | Placement::Disk => true,
            }
        })
    }

    /// Whether an activation is on the device or below it from forward to backward.
    pub(crate) fn is_held(&self, index: usize) -> bool {
        self.is_held[index]
    }

    /// All reruns, in the order in which backward comes to them.
    pub(crate) fn runs(&self) -> &[Rerun] {
        &self.runs
    }

    /// What a rerun reads of what is held.
    pub(crate) fn leaves(&self, run: &Rerun) -> &[usize] {
        &self.leaves[run.leaves.0..run.leaves.1]
    }

    /// Held activations that are released at another activation's turn than their own, after it: that turn, and
    /// which. In the order in which backward comes to them.
    pub(crate) fn late(&self) -> &[(usize, usize)] {
        &self.late
    }

    /// Whether a held activation is released at another turn than its own.
    pub(crate) fn is_late(&self, index: usize) -> bool {
        self.is_late[index]
    }

    /// How often each activation is computed again.
    pub(crate) fn counts(&self, activations: &[Activation], graph: &Graph) -> Vec<u32> {
        let (mut counts, mut walk) = (vec![0; activations.len()], Walk::new(activations.len()));
        for run in &self.runs {
            self.repeat(run, &mut walk, activations, graph, |change| {
                if let Change::Made(index) = change {
                    counts[index] += 1;
                }
            });
        }
        counts
    }

    /// What has been computed again, besides `asked` itself, and is on the device when backward uses `asked`.
    pub(crate) fn here(&self, activations: &[Activation], graph: &Graph, asked: usize) -> Vec<usize> {
        let mut walk = Walk::new(activations.len());
        for run in self.runs.iter().take_while(|run| run.of >= asked) {
            self.repeat(run, &mut walk, activations, graph, |_| ());
        }
        walk.here(asked).collect()
    }

    /// The same while `asked` is computed again, at the moment when that takes the most bytes.
    pub(crate) fn widest(&self, activations: &[Activation], graph: &Graph, asked: usize) -> Vec<usize> {
        let mut walk = Walk::new(activations.len());
        let (mut before, mut made, mut widest) = (Vec::new(), Vec::new(), Vec::new());
        let (mut bytes, mut most) = (0, 0);
        for run in self.runs.iter().take_while(|run| run.of >= asked) {
            if run.of > asked {
                self.repeat(run, &mut walk, activations, graph, |_| ());
                continue;
            }
            before.extend(walk.here(asked));
            self.repeat(run, &mut walk, activations, graph, |change| match change {
                Change::Made(index) => {
                    made.push(index);
                    bytes += activations[index].bytes;
                    if bytes > most {
                        most = bytes;
                        widest.clone_from(&made);
                    }
                }
                Change::Freed(index) => {
                    made.retain(|other| *other != index);
                    bytes -= activations[index].bytes;
                }
            });
        }
        before.into_iter().chain(widest).collect()
    }

    /// Walks through one of the reruns after all those before it.
    fn repeat(
        &self,
        run: &Rerun,
        walk: &mut Walk,
        activations: &[Activation],
        graph: &Graph,
        changed: impl FnMut(Change),
    ) {
        // Backward has used up what it asked for before.
        walk.is_here[run.of..].fill(false);
        walk.collect(run.of, graph, &self.is_held, &mut Vec::new());
        walk.run(run.of, activations, graph, &self.is_held, changed);
    }

    /// Walks through backward.
    fn walk(&mut self, activations: &[Activation], graph: &Graph) {
        let mut walk = Walk::new(activations.len());
        for asked in (0..activations.len()).rev() {
            if self.is_held[asked] || !activations[asked].is_saved() {
                continue;
            }
            if std::mem::take(&mut walk.is_here[asked]) {
                continue;
            }
            let first = self.leaves.len();
            walk.collect(asked, graph, &self.is_held, &mut self.leaves);
            let run = walk.run(asked, activations, graph, &self.is_held, |_| ());
            self.time += run.time;
            self.runs.push(Rerun { leaves: (first, self.leaves.len()), ..run });
        }
    }
}

/// A change of what a rerun has on the device.
#[derive(Clone, Copy, Debug)]
enum Change {
    Made(usize),
    Freed(usize),
}

/// The state of a walk through backward.
struct Walk {
    /// The activation that was asked for when this one was last needed.
    seen: Vec<usize>,
    /// How many operations of the rerun still have to read it.
    reads: Vec<usize>,
    /// Recomputed, and not used up by backward yet.
    is_here: Vec<bool>,
    /// The rerun's operations, each after its inputs.
    order: Vec<usize>,
    /// Activations whose inputs are being visited, and how many of them have been.
    stack: Vec<(usize, usize)>,
}

impl Walk {
    fn new(activations: usize) -> Walk {
        Walk {
            seen: vec![usize::MAX; activations],
            reads: vec![0; activations],
            is_here: vec![false; activations],
            order: Vec::new(),
            stack: Vec::new(),
        }
    }

    /// What has been computed again for the uses after that of `asked`.
    fn here(&self, asked: usize) -> impl Iterator<Item = usize> {
        (0..asked).filter(|index| self.is_here[*index])
    }

    /// Collects what has to be computed for `asked`, and what that reads of what is held.
    fn collect(&mut self, asked: usize, graph: &Graph, is_held: &[bool], leaves: &mut Vec<usize>) {
        self.order.clear();
        self.seen[asked] = asked;
        self.reads[asked] = 0;
        self.stack.push((asked, 0));
        while let Some((index, visited)) = self.stack.last_mut() {
            let Some(&input) = graph.inputs(*index).get(*visited) else {
                self.order.push(*index);
                self.stack.pop();
                continue;
            };
            *visited += 1;
            if self.is_here[input] {
                continue;
            }
            let is_new = std::mem::replace(&mut self.seen[input], asked) != asked;
            if is_held[input] {
                leaves.extend(is_new.then_some(input));
            } else if is_new {
                self.reads[input] = 1;
                self.stack.push((input, 0));
            } else {
                self.reads[input] += 1;
            }
        }
    }

    /// The time of one operation of the rerun: its own, less the share for bytes that it need not read or write,
    /// since operations of the same pass hand them over.
    fn time(
        &self,
        index: usize,
        asked: usize,
        activations: &[Activation],
        graph: &Graph,
        is_held: &[bool],
        stays: bool,
    ) -> Duration {
        let activation = &activations[index];
        let time = activation.recompute.as_ref().map_or(Duration::ZERO, |recompute| recompute.time);
        let Some(traffic) = activation.traffic.filter(|traffic| *traffic > 0) else { return time };
        let joins = |other: usize| {
            self.seen[other] == asked
                && !is_held[other]
                && !self.is_here[other]
                && activations[other].traffic.is_some()
        };
        let runs = |other: &&usize| self.seen[**other] == asked && !is_held[**other];
        let read: u64 = graph
            .inputs(index)
            .iter()
            .filter(|input| joins(**input))
            .map(|&input| activations[input].bytes)
            .sum();
        let is_handed_over =
            index != asked && !stays && graph.users(index).iter().filter(runs).all(|&user| joins(user));
        let written = if is_handed_over { activation.bytes } else { 0 };
        let spared = (read as f64 + written as f64) / traffic as f64;
        time.mul_f64((1.0 - spared).max(0.0))
    }

    /// Runs what was collected, and tells what comes and goes.
    fn run(
        &mut self,
        asked: usize,
        activations: &[Activation],
        graph: &Graph,
        is_held: &[bool],
        mut changed: impl FnMut(Change),
    ) -> Rerun {
        // Backward has not used up what comes before the one that it asks for.
        let stays = |index: usize| activations[index].is_saved() && index <= asked;
        let mut run = Rerun { of: asked, ..Rerun::default() };
        let mut bytes = 0;
        for &index in &self.order {
            let activation = &activations[index];
            bytes += activation.bytes;
            changed(Change::Made(index));
            run.peak = run.peak.max(bytes);
            let time = self.time(index, asked, activations, graph, is_held, stays(index));
            run.time += time;
            if graph.is_memory_bound(index) {
                run.memory_bound += time;
            }
            run.stays += if stays(index) { activation.bytes } else { 0 };
            for &input in graph.inputs(index) {
                if is_held[input] || self.is_here[input] {
                    continue;
                }
                self.reads[input] -= 1;
                if self.reads[input] == 0 && !stays(input) {
                    bytes -= activations[input].bytes;
                    changed(Change::Freed(input));
                }
            }
        }
        self.order.iter().filter(|index| stays(**index)).for_each(|&index| self.is_here[index] = true);
        self.is_here[asked] = false;
        run
    }
}
