//! Plans improved change by change, in steps small enough to try many.

use std::collections::BTreeMap;

use super::Frontier;
use crate::Role;
use crate::goal::Plan;
use crate::level::Level;
use crate::simulate::Bounds;

/// The target for the peak is lowered by one part in this many at first, and by half as much after each failure.
const FIRST: u64 = 64;
/// The least by which it is lowered.
const LAST: u64 = 512;

/// Looks for what else could be held or recomputed, so that the peak is lower within the same time.
pub(super) struct Refinement<'a> {
    frontier: &'a Frontier<'a>,
    bounds: Bounds,
    /// How many more plans may be tried.
    left: usize,
    changes: Vec<Change>,
    /// The one that is next to be tried.
    next: usize,
}

/// Activations that are held from here on, or are recomputed: the same ones of neighbouring layers.
struct Change {
    of: Vec<usize>,
    are_held: bool,
}

impl<'a> Refinement<'a> {
    /// At most `left` plans are tried.
    pub(super) fn new(frontier: &'a Frontier<'a>, bounds: Bounds, left: usize) -> Refinement<'a> {
        let changes = if left > 0 { changes(frontier) } else { Vec::new() };
        Refinement { frontier, bounds, left, changes, next: 0 }
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

    /// A plan for a target that is within the bounds, after changes that each make the step quicker.
    fn within(&mut self, held: &mut [bool], target: u64) -> Option<Plan> {
        let most = self.bounds.step;
        let mut quickest = self.plan(held, target, f64::INFINITY)?;
        let changes = std::mem::take(&mut self.changes);
        let mut since = 0;
        for change in changes.iter().cycle().skip(self.next) {
            let step = quickest.prediction.step;
            if step.as_secs_f64() <= most || since == changes.len() || self.left == 0 {
                break;
            }
            since += 1;
            self.next = (self.next + 1) % changes.len();
            let switched: Vec<usize> =
                change.of.iter().copied().filter(|index| held[*index] != change.are_held).collect();
            if switched.is_empty() {
                continue;
            }
            switched.iter().for_each(|&index| held[index] = change.are_held);
            let found = self.plan(held, target, step.as_secs_f64());
            if let Some(quicker) = found.filter(|found| found.prediction.step < step) {
                quickest = quicker;
                since = 0;
            } else {
                switched.iter().for_each(|&index| held[index] = !change.are_held);
            }
        }
        self.changes = changes;
        (quickest.prediction.step.as_secs_f64() <= most).then_some(quickest)
    }

    /// The plan for what is held and a target, if the step takes no longer than `step` seconds.
    fn plan(&mut self, held: &[bool], target: u64, step: f64) -> Option<Plan> {
        let Frontier { work, graph, .. } = self.frontier;
        self.left = self.left.saturating_sub(1);
        let level = Level::new(work, graph, held);
        if level.shortest(work).as_secs_f64() > step {
            return None;
        }
        self.frontier.realise(&level, target, &Bounds { peak: target, step, ..self.bounds })
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
