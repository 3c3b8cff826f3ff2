//! Plans improved change by change, in steps small enough to try many.

use std::collections::BTreeMap;

use super::Frontier;
use crate::Role;
use crate::goal::Plan;
use crate::level::Level;
use crate::parallel;
use crate::simulate::Bounds;

/// The target for the peak is lowered by one part in this many at first, and by half as much after each failure.
const FIRST: u64 = 64;
/// The least by which it is lowered.
const LAST: u64 = 512;
/// Several threads try changes at once, before it is known which of them is an improvement: at least so many each, as it takes a thread as
/// long to begin as to try one, and at most so many.
const WORTH_A_THREAD: usize = 4;
const MOST_AT_ONCE: usize = 16;

/// Looks for what else could be held or recomputed, so that the peak is lower within the same time.
pub(super) struct Refinement<'a> {
    frontier: &'a Frontier<'a>,
    bounds: Bounds,
    /// How many more plans may be tried.
    left: usize,
    changes: Vec<Change>,
    /// The one that is next to be tried.
    next: usize,
    threads: usize,
}

/// Activations that are held from here on, or are recomputed: the same ones of neighbouring layers.
struct Change {
    of: Vec<usize>,
    are_held: bool,
}

/// Changes that are tried at once.
struct Batch {
    trials: Vec<Trial>,
    /// How many changes these are, with those that change nothing.
    passed: usize,
}

struct Trial {
    /// What is held if it was not, or no longer if it was.
    switched: Vec<usize>,
    /// How many changes of the batch these are up to here.
    passed: usize,
}

impl<'a> Refinement<'a> {
    /// At most `left` plans are tried, by so many threads.
    pub(super) fn new(
        frontier: &'a Frontier<'a>,
        bounds: Bounds,
        left: usize,
        threads: usize,
    ) -> Refinement<'a> {
        let changes = if left > 0 { changes(frontier) } else { Vec::new() };
        Refinement { frontier, bounds, left, changes, next: 0, threads }
    }

    /// The lowest plan within the bounds that is found. It begins with a plan for a target of the peak, and with what is
    /// held there.
    pub(super) fn lower(&mut self, mut held: Vec<bool>, mut plan: Plan, target: u64) -> Plan {
        let mut target = target.min(plan.prediction.peak());
        let (mut less, least) = (target / FIRST, target / LAST);
        while less > least && self.left > 0 {
            let mut tried = held.clone();
            if let Some(found) = self.within(&mut tried, target - less) {
                target = found.prediction.peak();
                (held, plan) = (tried, found);
            } else {
                less /= 2;
            }
        }
        plan
    }

    /// The quickest plan for a target, and no peak above it, that is found, beginning with what is held there.
    pub(super) fn quicken(&mut self, mut held: Vec<bool>, target: u64) -> Option<Plan> {
        self.next = 0;
        self.changed(&mut held, target, 0.0)
    }

    /// A plan for a target, and no peak above it, that is within the bounds.
    fn within(&mut self, held: &mut [bool], target: u64) -> Option<Plan> {
        let most = self.bounds.step;
        self.changed(held, target, most).filter(|plan| plan.prediction.step.as_secs_f64() <= most)
    }

    /// A plan for a target, after changes that each make the step quicker, until it takes at most `most` seconds.
    fn changed(&mut self, held: &mut [bool], target: u64, most: f64) -> Option<Plan> {
        self.left = self.left.checked_sub(1)?;
        let mut quickest = self.plan(held, target, f64::INFINITY)?;
        let (mut since, mut at_once) = (0, 1);
        let most_at_once = if self.threads > 1 { self.threads * MOST_AT_ONCE } else { 1 };
        while quickest.prediction.step.as_secs_f64() > most && since < self.changes.len() && self.left > 0 {
            let Batch { trials, passed } =
                self.batch(held, at_once.min(self.left), self.changes.len() - since);
            let step = quickest.prediction.step;
            let plans = parallel::map(&trials, self.threads.min(trials.len() / WORTH_A_THREAD), |trial| {
                self.plan(&trial.applied(held), target, step.as_secs_f64())
            });
            let quicker = |plan: &Plan| plan.prediction.step < step;
            let found = plans
                .into_iter()
                .zip(&trials)
                .enumerate()
                .find_map(|(nth, (plan, trial))| plan.filter(quicker).map(|plan| (nth + 1, plan, trial)));
            let passed = match found {
                Some((tried, plan, trial)) => {
                    trial.switch(held);
                    (quickest, since, at_once) = (plan, 0, 1);
                    self.left -= tried;
                    trial.passed
                }
                None => {
                    since += passed;
                    at_once = (2 * at_once).min(most_at_once);
                    self.left -= trials.len();
                    passed
                }
            };
            self.next = (self.next + passed) % self.changes.len();
        }
        Some(quickest)
    }

    /// The next changes that change what is held: `count` of them, unless there are fewer among the next `most`.
    fn batch(&self, held: &[bool], count: usize, most: usize) -> Batch {
        let mut batch = Batch { trials: Vec::new(), passed: 0 };
        for Change { of, are_held } in self.changes.iter().cycle().skip(self.next).take(most) {
            if batch.trials.len() == count {
                break;
            }
            batch.passed += 1;
            let switched: Vec<usize> = of.iter().copied().filter(|index| held[*index] != *are_held).collect();
            if !switched.is_empty() {
                batch.trials.push(Trial { switched, passed: batch.passed });
            }
        }
        batch
    }

    /// The plan for what is held and a target, if its peak is no higher and the step takes no longer than `step` seconds.
    fn plan(&self, held: &[bool], target: u64, step: f64) -> Option<Plan> {
        let Frontier { work, graph, .. } = self.frontier;
        let level = Level::within(step, work, graph, held)?;
        self.frontier.realise(&level, target, &Bounds { peak: target, step, ..self.bounds })
    }
}

impl Trial {
    /// What is held with it.
    fn applied(&self, held: &[bool]) -> Vec<bool> {
        let mut held = held.to_vec();
        self.switch(&mut held);
        held
    }

    fn switch(&self, held: &mut [bool]) {
        self.switched.iter().for_each(|&index| held[index] = !held[index]);
    }
}

/// The changes to try: for each kind of operation, all layers together, then each half of them, and so on.
fn changes(frontier: &Frontier<'_>) -> Vec<Change> {
    let activations = &frontier.work.activations;
    let can_change = |index: &usize| {
        let activation = &activations[*index];
        activation.can_be_held() && activation.is_movable() && frontier.graph.has_recipe(*index)
    };
    let mut kinds: BTreeMap<(u64, bool, Vec<isize>), Vec<usize>> = BTreeMap::new();
    for index in (0..activations.len()).filter(can_change) {
        let before = frontier.graph.inputs(index).iter().map(|&input| index as isize - input as isize);
        let saved = activations[index].role == Role::Saved;
        kinds.entry((activations[index].bytes, saved, before.collect())).or_default().push(index);
    }
    // What is small makes no difference.
    let largest = kinds.keys().map(|(bytes, ..)| *bytes).max().unwrap_or(0);
    let kinds: Vec<Vec<usize>> =
        kinds.into_iter().rev().filter(|((bytes, ..), _)| *bytes > largest / 64).map(|(_, of)| of).collect();
    let mut together = kinds.iter().map(Vec::len).max().unwrap_or(0);
    let mut changes = Vec::new();
    while together > 0 {
        for of in kinds.iter().filter(|of| together == 1 || of.len() > together / 2) {
            for of in of.chunks(together) {
                changes.extend([true, false].map(|are_held| Change { of: of.to_vec(), are_held }));
            }
        }
        together /= 2;
    }
    changes
}
