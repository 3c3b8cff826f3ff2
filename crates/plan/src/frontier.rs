//! All placements worth considering, and the choice among them.

mod refinement;

use std::cmp::Ordering;
use std::time::Duration;

use self::refinement::Refinement;
use crate::choices::{Choices, Order};
use crate::goal::{Caps, Goal, OutOfReach, Plan};
use crate::graph::Graph;
use crate::level::Level;
use crate::parallel;
use crate::simulate::{self, Bounds, ROUNDING};
use crate::{Budgets, Machine, Prediction, Release, Workload};

/// Where processors compute, planning a shorter step with all that may be tried takes as long as several of them.
const SHORT: Duration = Duration::from_millis(100);
/// A step with fewer activations is planned sooner than threads begin.
const WORTH_THREADS: usize = 16;
/// Plans for a limit of the peak leave one part in so many of it to steps that need more than the profiled one, if that is no reason
/// for a slower step.
const ROOM: u64 = 64;
/// From how many levels changes begin where the peak is limited, and how far apart these are among those that are quick for it.
const STARTS: usize = 3;
const STARTS_APART: usize = 3;
/// A plan that leaves more than the rest of the time it may take has no use for it: no plan has a lower peak. It is tried so many times
/// whether less time leads as low.
const MOST_USED: f64 = 0.9;
const LESS_TIME: u32 = 4;
/// So small a share of the step is not worth it.
const LITTLE: f64 = 0.002;

/// The placements worth considering for one workload on one machine.
#[derive(Clone, Debug)]
pub struct Frontier<'a> {
    work: &'a Workload,
    machine: &'a Machine,
    caps: Caps,
    graph: Graph,
    choices: Vec<Choices>,
    /// The peak with everything kept.
    kept: u64,
    /// In order of their shortest times.
    levels: Vec<(Place, Level)>,
    effort: Effort,
}

/// How much is tried. It is less for larger steps, since simulating them takes longer, and for short ones of processors, which plan, too.
#[derive(Clone, Copy, Debug)]
struct Effort {
    /// Sequences of choices.
    sequences: &'static [Order],
    /// Levels of each sequence.
    levels: usize,
    /// Targets for the peak of each level, from the lowest useful one to that of keeping everything.
    targets: u64,
    /// With a time limit: how often the distance between a target that keeps to it and one that does not is halved.
    halvings: u32,
    /// The same for the distance between the best level and those beside it.
    rounds: u32,
    /// How many changes of the best plan are tried.
    trials: usize,
}

/// A level's place in a sequence of choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    sequence: usize,
    changes: usize,
}

/// The best plan of a sequence so far, and what it was made from.
struct Best {
    changes: usize,
    target: u64,
    plan: Plan,
}

impl<'a> Frontier<'a> {
    /// Collects the placements worth considering. They are simulated only when a plan is asked for.
    pub fn new(work: &'a Workload, machine: &'a Machine, caps: Caps) -> Frontier<'a> {
        Frontier::with(work, machine, caps, Effort::of(work, machine))
    }

    /// The same with less effort, for a plan that is soon replaced: no changes of the best one are tried.
    pub(crate) fn rough(work: &'a Workload, machine: &'a Machine, caps: Caps) -> Frontier<'a> {
        Frontier::with(work, machine, caps, Effort { trials: 0, ..Effort::of(work, machine) })
    }

    fn with(work: &'a Workload, machine: &'a Machine, caps: Caps, effort: Effort) -> Frontier<'a> {
        let graph = Graph::new(&work.activations);
        let extras = work.activations.iter().map(|one| one.bytes + one.forward_extra.max(one.backward_extra));
        let need = extras.max().unwrap_or(0).max(work.turn_extra);
        let choices = effort.sequences.iter().map(|order| Choices::new(work, &graph, need, *order)).collect();
        let kept = simulate::run(work, &graph, &[], machine, &Budgets::default()).peak();
        let mut frontier = Frontier { work, machine, caps, graph, choices, kept, levels: Vec::new(), effort };
        for sequence in 0..frontier.choices.len() {
            let counts = frontier.choices[sequence].spread(effort.levels, work.computed());
            // All sequences begin alike.
            let counts = counts.into_iter().filter(|&changes| sequence == 0 || changes > 0);
            let places: Vec<Place> = counts.map(|changes| Place { sequence, changes }).collect();
            for place in places {
                frontier.levels.push((place, frontier.level(place)));
            }
        }
        frontier.levels.sort_by_key(|(place, level)| (level.shortest(work), *place));
        frontier
    }

    /// The best placement for the goal. If several take the same time, it is the one that moves the fewest bytes.
    pub fn plan(&self, goal: Goal) -> Result<Plan, OutOfReach> {
        self.plan_above(goal, 0)
    }

    /// Like [`plan`](Frontier::plan), but only among placements whose peak is at least `least` bytes: for callers
    /// that have seen lower ones fail to keep their promise.
    pub fn plan_above(&self, goal: Goal, least: u64) -> Result<Plan, OutOfReach> {
        let kept = self.work.computed();
        let bounds = Bounds { least, ..goal.bounds(kept) };
        let best = match goal.step {
            Some(_) => self.lowest_within(goal, bounds),
            None => self.quickest_within(goal, bounds),
        };
        best.ok_or_else(|| {
            let lowest = self.lowest().prediction;
            OutOfReach { peak: lowest.peak(), step: lowest.step, kept }
        })
    }

    /// The predictions that no other beats in both step time and peak, by increasing peak.
    pub fn efficient(&self) -> Vec<Prediction> {
        let simulated = self.levels.iter().flat_map(|(_, level)| {
            let targets = self.targets(level).chain([u64::MAX]);
            targets.filter_map(|target| self.realise(level, target, &Bounds::NONE))
        });
        let mut all: Vec<Prediction> = simulated.map(|plan| plan.prediction).collect();
        all.sort_by(|left, right| left.peak().cmp(&right.peak()).then(left.step.cmp(&right.step)));
        let mut quickest = Duration::MAX;
        all.retain(|point| {
            let better = point.step < quickest;
            quickest = quickest.min(point.step);
            better
        });
        all
    }

    /// The lowest peak that is possible within the caps, whatever time it takes. Among plans with this peak, it is the
    /// one with the smallest budgets: a step that needs more than the profiled one then exceeds the peak by least.
    #[expect(
        clippy::expect_used,
        reason = "there is a level that recomputes nothing, and nothing is out of bounds"
    )]
    pub fn lowest(&self) -> Plan {
        let order = |plan: &Plan| (plan.prediction.peak(), plan.budgets.device_budget, plan.prediction.step);
        let mut bounds = Bounds::NONE;
        let mut best: Option<Plan> = None;
        for (_, level) in &self.levels {
            for target in self.targets(level).chain([u64::MAX]) {
                let Some(plan) = self.realise(level, target, &bounds) else { continue };
                if best.as_ref().is_none_or(|best| order(&plan) < order(best)) {
                    bounds.peak = plan.prediction.peak();
                    best = Some(plan);
                }
            }
        }
        best.expect("keeping everything at least")
    }

    /// The quickest plan within a limit of the peak. As with a time limit, each sequence is followed by itself.
    fn quickest_within(&self, goal: Goal, bounds: Bounds) -> Option<Plan> {
        let bounds = Bounds { is_roomy: bounds.promised < u64::MAX, ..bounds };
        self.best_of_sequences(goal, |sequence, threads| self.quickest_along(sequence, goal, bounds, threads))
    }

    /// The quickest plan of a sequence: the best of its levels and their targets, and then with changes of what that level holds.
    fn quickest_along(&self, sequence: usize, goal: Goal, bounds: Bounds, threads: usize) -> Option<Plan> {
        let Best { changes, plan, .. } = self.quickest_level(sequence, goal, bounds)?;
        if self.effort.trials == 0 || plan.prediction.step <= self.work.computed() {
            return Some(plan);
        }
        let target = bounds.peak - bounds.peak / ROOM;
        let mut refinement = Refinement::new(self, bounds, self.effort.trials, threads);
        let refined = self
            .starts(sequence, changes, target, bounds)
            .into_iter()
            .filter_map(|changes| refinement.quicken(self.choices[sequence].held(changes), target));
        let order = |left: &Plan, right: &Plan| goal.order(&left.prediction, &right.prediction);
        refined.chain([plan]).min_by(order)
    }

    /// Where changes begin: with the level that has `best` changes, and with others that are quick for the target. Of levels that are much
    /// alike, changes lead to much the same plan.
    fn starts(&self, sequence: usize, best: usize, target: u64, bounds: Bounds) -> Vec<usize> {
        let bounds = Bounds { peak: target, ..bounds };
        let others = self.levels_of(sequence).filter(|(place, _)| place.changes != best);
        let mut others: Vec<(Duration, usize)> = others
            .filter_map(|(place, level)| {
                let plan = self.realise(level, target, &bounds)?;
                Some((plan.prediction.step, place.changes))
            })
            .collect();
        others.sort_unstable();
        let others = others.into_iter().step_by(STARTS_APART).take(STARTS - 1);
        [best].into_iter().chain(others.map(|(_, changes)| changes)).collect()
    }

    /// The quickest plan among the levels of a sequence and their targets. A simulation stops as soon as it turns out worse than the best so far.
    fn quickest_level(&self, sequence: usize, goal: Goal, mut bounds: Bounds) -> Option<Best> {
        let mut best: Option<Best> = None;
        for (place, level) in self.levels_of(sequence) {
            let shortest = level.shortest(self.work);
            if shortest.as_secs_f64() > bounds.step + ROUNDING {
                break;
            }
            let targets: Vec<u64> = self.targets(level).filter(|target| *target <= bounds.peak).collect();
            for target in [u64::MAX].into_iter().chain(targets.into_iter().rev()) {
                let Some(plan) = self.realise(level, target, &bounds) else { continue };
                let waits = plan.prediction.stall.total();
                let order = |other: &Best| goal.order(&plan.prediction, &other.plan.prediction);
                if best.as_ref().is_none_or(|best| order(best).is_lt()) {
                    bounds.step = plan.prediction.step.as_secs_f64();
                    best = Some(Best { changes: place.changes, target, plan });
                }
                // Lower targets move more, in no less time.
                if waits.is_zero() {
                    break;
                }
            }
        }
        best
    }

    /// The levels of a sequence, in order of their shortest times. All sequences begin alike.
    fn levels_of(&self, sequence: usize) -> impl DoubleEndedIterator<Item = &(Place, Level)> + Clone {
        self.levels.iter().filter(move |(place, _)| place.sequence == sequence || place.changes == 0)
    }

    /// The best of the plans that `along` finds for each sequence with so many threads.
    fn best_of_sequences(
        &self,
        goal: Goal,
        along: impl Fn(usize, usize) -> Option<Plan> + Sync,
    ) -> Option<Plan> {
        let sequences: Vec<usize> = (0..self.choices.len()).collect();
        let is_short = self.work.activations.len() < WORTH_THREADS;
        let processors = if is_short { 1 } else { parallel::processors() };
        let threads = processors.div_ceil(sequences.len().max(1));
        let order = |left: &Plan, right: &Plan| goal.order(&left.prediction, &right.prediction);
        let found = parallel::map(&sequences, processors, |sequence| along(*sequence, threads));
        found.into_iter().flatten().min_by(order)
    }

    /// The lowest plan within a time limit. A limit of the peak does not change it, unless it is one for a disk that falls behind.
    fn lowest_within(&self, goal: Goal, bounds: Bounds) -> Option<Plan> {
        let falls_behind = self.machine.release == Release::WhenStored;
        let promised = if falls_behind { bounds.promised } else { u64::MAX };
        let lowest = self.lowest_for(goal, Bounds { peak: u64::MAX, promised, ..bounds });
        let is_within = |plan: &Plan| plan.prediction.peak() <= bounds.peak;
        lowest.filter(is_within).or_else(|| self.quickest_within(Goal::budget(bounds.peak), bounds))
    }

    /// The lowest plan for a time. Where no more time leads lower, it is a quick one of its peak.
    fn lowest_for(&self, goal: Goal, bounds: Bounds) -> Option<Plan> {
        let lowest = self.lowest_of_sequences(goal, bounds)?;
        let computed = self.work.computed().as_secs_f64();
        let takes = |plan: &Plan| plan.prediction.step.as_secs_f64() - computed;
        if takes(&lowest) > MOST_USED * (bounds.step - computed) {
            return Some(lowest);
        }
        let order = |left: &Plan, right: &Plan| goal.order(&left.prediction, &right.prediction);
        let peak = lowest.prediction.peak();
        let quicker = self.quickest_within(Goal::budget(peak), Bounds { peak, ..bounds });
        let mut best = quicker.into_iter().chain([lowest]).min_by(order)?;
        let (mut too_little, mut enough) = (0.0, takes(&best));
        for _ in 0..LESS_TIME {
            if enough - too_little < LITTLE * computed {
                break;
            }
            let most = (too_little + enough) / 2.0;
            let found = self.lowest_of_sequences(goal, Bounds { step: computed + most, ..bounds });
            match found.filter(|found| found.prediction.peak() <= peak) {
                Some(found) => {
                    enough = takes(&found);
                    best = found;
                }
                None => too_little = most,
            }
        }
        Some(best)
    }

    /// The lowest plan of all sequences. Each is followed by itself, since only its end shows how low it leads.
    fn lowest_of_sequences(&self, goal: Goal, bounds: Bounds) -> Option<Plan> {
        self.best_of_sequences(goal, |sequence, threads| self.lowest_along(sequence, goal, bounds, threads))
    }

    /// The lowest plan of a sequence within a time limit: for each level, the lowest target that keeps to it, then the same between the best
    /// level and those beside it, and last with changes of what that level holds, which `threads` try.
    fn lowest_along(&self, sequence: usize, goal: Goal, mut bounds: Bounds, threads: usize) -> Option<Plan> {
        let levels = self.levels_of(sequence);
        let mut best: Option<Best> = None;
        for (place, level) in levels.clone().rev() {
            if level.shortest(self.work).as_secs_f64() <= bounds.step {
                self.descend(place.changes, level, goal, &mut bounds, &mut best);
            }
        }
        let mut found = best?;
        let beside = levels.map(|(place, _)| place.changes.abs_diff(found.changes));
        let mut apart = beside.filter(|apart| *apart > 0).min().unwrap_or(0);
        let most = self.choices[sequence].len();
        for _ in 0..self.effort.rounds {
            apart = apart.div_ceil(2);
            let before = found.changes;
            for changes in [before + apart, before.saturating_sub(apart)].map(|changes| changes.min(most)) {
                let level = self.level(Place { sequence, changes });
                if changes == before || level.shortest(self.work).as_secs_f64() > bounds.step {
                    continue;
                }
                let mut best = Some(found);
                self.descend(changes, &level, goal, &mut bounds, &mut best);
                found = best?;
                if found.changes == changes {
                    break;
                }
            }
        }
        let Best { changes, target, plan } = found;
        let held = self.choices[sequence].held(changes);
        Some(Refinement::new(self, bounds, self.effort.trials, threads).lower(held, plan, target))
    }

    /// Looks for the lowest target of a level whose plan is within the bounds, if there is one that is better than
    /// the best so far.
    fn descend(
        &self,
        changes: usize,
        level: &Level,
        goal: Goal,
        bounds: &mut Bounds,
        best: &mut Option<Best>,
    ) {
        let promised = bounds.promised;
        let mut try_target = |target: u64, best: &mut Option<Best>| {
            let Some(plan) = self.realise(level, target, bounds) else { return false };
            let order = |other: &Best| goal.order(&plan.prediction, &other.plan.prediction);
            if best.as_ref().is_none_or(|other| order(other) == Ordering::Less) {
                bounds.peak = plan.prediction.peak();
                *best = Some(Best { changes, target, plan });
            }
            true
        };
        let mut below = level.lowest();
        let mut above = match best {
            Some(best) => best.target.min(best.plan.prediction.peak()),
            None => promised,
        };
        if above < below || !try_target(above, best) {
            return;
        }
        above = above.min(self.kept);
        // What runs again may need more than keeping everything does.
        if above <= below || try_target(below, best) {
            return;
        }
        for _ in 0..self.effort.halvings {
            let target = below + (above - below) / 2;
            if try_target(target, best) { above = target } else { below = target }
        }
    }

    fn level(&self, place: Place) -> Level {
        Level::new(self.work, &self.graph, &self.choices[place.sequence].held(place.changes))
    }

    /// The targets of a level, from the lowest, where they are closest together.
    fn targets(&self, level: &Level) -> impl Iterator<Item = u64> {
        let lowest = level.lowest();
        let range = self.kept.saturating_sub(lowest);
        let targets = self.effort.targets;
        (0..targets).map(move |nth| {
            let share = nth as f64 / targets as f64;
            lowest.saturating_add((range as f64 * share * share) as u64)
        })
    }

    fn realise(&self, level: &Level, target: u64, bounds: &Bounds) -> Option<Plan> {
        level.realise(target, bounds, self.work, self.machine, &self.caps)
    }
}

impl Effort {
    fn of(work: &Workload, machine: &Machine) -> Effort {
        let all = &[Order::Newest, Order::Oldest, Order::FewestBytes];
        let is_short = machine.release == Release::WhenStored && work.computed() < SHORT;
        let trials = if is_short { 500 } else { 2000 };
        match work.activations.len() {
            0..1000 => Effort { sequences: all, levels: 24, targets: 32, halvings: 8, rounds: 5, trials },
            1000..5000 => {
                Effort { sequences: all, levels: 12, targets: 24, halvings: 6, rounds: 4, trials: 200 }
            }
            _ => Effort {
                sequences: &[Order::Newest],
                levels: 10,
                targets: 16,
                halvings: 4,
                rounds: 3,
                trials: 0,
            },
        }
    }
}

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests;
