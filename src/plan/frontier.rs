//! Every placement worth considering, and which of them to take.

use std::cmp::Ordering;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use super::simulate::{Bounds, run_within};
use super::{Leaving, Limits, Machine, Placement, Prediction, Workload};
use crate::bytes::Bytes;

/// Targets for the peak, from the lowest that could be to that of keeping everything.
const TARGETS: u64 = 32;
/// Shares of the bytes that could be computed again that are.
const RECOMPUTED: [f64; 3] = [0.0, 0.5, 1.0];
/// Where a time is given, the last target within it is told from the first that is not this finely: in halves of halves.
const HALVINGS: u32 = 4;

/// What a plan may take beside the machine's host pool. By default all there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Bytes on the disk at a time.
    pub disk: u64,
    /// Bytes written to the disk in a step: what is left of a day's share of its endurance.
    pub written: u64,
}

/// What a plan is to reach. With both limits, the lowest peak of those within the time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Goal {
    /// Most bytes of the activation peak.
    pub peak: Option<u64>,
    /// Longest step, as a multiple of that with everything kept.
    pub step: Option<f64>,
}

/// Where everything goes, with which settings, and what that is expected to cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// One for each entry.
    pub placements: Vec<Placement>,
    /// The cache's settings that go with them.
    pub limits: Limits,
    /// What the step will do.
    pub prediction: Prediction,
}

/// No placement reaches the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfReach {
    /// The lowest peak there is, in bytes.
    pub peak: u64,
    /// The step that goes with it.
    pub step: Duration,
    /// The step with everything kept.
    pub kept: Duration,
}

/// The placements worth considering for one workload on one machine.
#[derive(Clone, Debug)]
pub struct Frontier<'a> {
    work: &'a Workload,
    machine: &'a Machine,
    caps: Caps,
    /// Entries with a recipe, those first whose bytes cost least to compute again.
    recipes: Vec<usize>,
    levels: Vec<Level>,
}

/// The placements with one share of the recipes used.
#[derive(Clone, Debug)]
struct Level {
    /// What is computed again; all else is kept.
    placements: Vec<Placement>,
    /// Most bytes needed at once beside what is there: in forward, where something is saved, and in backward.
    most: [u64; 2],
    /// For each entry, the least peak there is if it and all after it stay. Falling.
    staying: Vec<u64>,
    /// For the peak, rising.
    targets: Vec<u64>,
}

impl Default for Caps {
    fn default() -> Caps {
        Caps { disk: u64::MAX, written: u64::MAX }
    }
}

impl Goal {
    /// The quickest step whose activation peak is at most so many bytes.
    pub fn budget(bytes: u64) -> Goal {
        Goal { peak: Some(bytes), step: None }
    }

    /// The lowest peak whose step is longer than that with everything kept by at most this share of it: 0.01 is one percent.
    pub fn overhead(share: f64) -> Goal {
        Goal { peak: None, step: Some(1.0 + share) }
    }
}

impl Goal {
    /// What it allows where a step with everything kept takes so long.
    fn bounds(&self, kept: Duration) -> Bounds {
        let kept = kept.as_secs_f64();
        let step = self.step.map_or(f64::INFINITY, |times| times * kept);
        Bounds { peak: self.peak.unwrap_or(u64::MAX), step, kept }
    }

    /// Which of two that it allows is better: less.
    fn order(&self, left: &Prediction, right: &Prediction) -> Ordering {
        let quicker = left.step.cmp(&right.step);
        let lower = left.peak().cmp(&right.peak());
        let moves_less = (left.copied_out + left.written).cmp(&(right.copied_out + right.written));
        if self.step.is_some() {
            lower.then(quicker).then(moves_less)
        } else {
            quicker.then(moves_less).then(lower)
        }
    }
}

impl<'a> Frontier<'a> {
    /// What is worth considering. It is simulated when a plan is asked for.
    pub fn new(work: &'a Workload, machine: &'a Machine, caps: Caps) -> Frontier<'a> {
        let price = |index: &usize| {
            let entry = work.entries[*index];
            entry.recompute.unwrap_or_default().time.as_secs_f64() / entry.bytes.max(1) as f64
        };
        let with_recipe =
            |index: &usize| work.entries[*index].recompute.is_some() && work.entries[*index].is_movable();
        let mut recipes: Vec<usize> = (0..work.entries.len()).filter(with_recipe).collect();
        recipes.sort_by(|left, right| price(left).total_cmp(&price(right)));
        let mut frontier = Frontier { work, machine, caps, recipes, levels: Vec::new() };
        let kept = work.simulate(&[], machine, &Limits::default()).peak();
        let levels = frontier.recompute_levels().into_iter();
        frontier.levels = levels.map(|recomputed| frontier.level(recomputed, kept)).collect();
        frontier
    }

    /// The best placement there is for the goal. Where several take the same time, the one that moves least.
    pub fn plan(&self, goal: Goal) -> Result<Plan, OutOfReach> {
        let kept = self.work.computed();
        self.best(goal, goal.bounds(kept)).ok_or_else(|| {
            let lowest = self.lowest().prediction;
            OutOfReach { peak: lowest.peak(), step: lowest.step, kept }
        })
    }

    /// The best of all levels. Where a time is given, each is searched to its lowest: the level that is lowest at its targets need
    /// not be lowest between them.
    fn best(&self, goal: Goal, mut bounds: Bounds) -> Option<Plan> {
        let mut best: Option<Plan> = None;
        for level in &self.levels {
            let found = match goal.step {
                Some(_) => self.lowest_of(level, goal, bounds),
                None => self.quickest_of(level, goal, bounds),
            };
            let better = |plan: &Plan| {
                best.as_ref().is_none_or(|best| goal.order(&plan.prediction, &best.prediction).is_lt())
            };
            if let Some(plan) = found.filter(better) {
                if goal.step.is_none() {
                    bounds.step = plan.prediction.step.as_secs_f64();
                }
                best = Some(plan);
            }
        }
        best
    }

    /// The quickest of a level. The highest targets promise most: what takes longer than the best so far is not simulated to its end.
    fn quickest_of(&self, level: &Level, goal: Goal, mut bounds: Bounds) -> Option<Plan> {
        let mut best: Option<Plan> = None;
        for &target in level.targets.iter().rev() {
            let Some(plan) = self.realise(level, target, &bounds) else { continue };
            if best.as_ref().is_none_or(|best| goal.order(&plan.prediction, &best.prediction).is_le()) {
                bounds.step = plan.prediction.step.as_secs_f64();
                best = Some(plan);
            }
        }
        best
    }

    /// The lowest of a level, from its lowest target on: what is higher than the best so far is not simulated to its end.
    fn lowest_of(&self, level: &Level, goal: Goal, mut bounds: Bounds) -> Option<Plan> {
        let mut best: Option<(usize, Plan)> = None;
        for (nth, &target) in level.targets.iter().enumerate() {
            let Some(plan) = self.realise(level, target, &bounds) else { continue };
            if best.as_ref().is_none_or(|(_, best)| goal.order(&plan.prediction, &best.prediction).is_lt()) {
                bounds.peak = plan.prediction.peak();
                best = Some((nth, plan));
            }
        }
        let (nth, lowest) = best?;
        let Some(below) = nth.checked_sub(1) else { return Some(lowest) };
        Some(self.between([level.targets[below], level.targets[nth]], level, lowest, bounds))
    }

    /// The lowest placement that is fine between a target that is not, or is no lower, and one that is.
    fn between(
        &self,
        [mut below, mut above]: [u64; 2],
        level: &Level,
        chosen: Plan,
        mut bounds: Bounds,
    ) -> Plan {
        let mut lowest = chosen;
        for _ in 0..HALVINGS {
            bounds.peak = lowest.prediction.peak();
            let target = below + (above.min(2 * bounds.peak).max(below) - below) / 2;
            match self.realise(level, target, &bounds) {
                Some(tried) => (above, lowest) = (target, tried),
                None => below = target,
            }
        }
        lowest
    }

    /// The predictions that no other beats in both step and peak, by rising peak.
    pub fn efficient(&self) -> Vec<Prediction> {
        let all = self.levels.iter().flat_map(|level| {
            level.targets.iter().filter_map(|target| self.realise(level, *target, &Bounds::NONE))
        });
        let mut all: Vec<Prediction> = all.map(|plan| plan.prediction).collect();
        all.sort_by(|left, right| left.peak().cmp(&right.peak()).then(left.step.cmp(&right.step)));
        let mut quickest = Duration::MAX;
        all.retain(|point| {
            let better = point.step < quickest;
            quickest = quickest.min(point.step);
            better
        });
        all
    }

    /// The lowest peak there is, whatever it takes, within the caps.
    #[expect(clippy::expect_used, reason = "there are targets, and nothing is out of bounds")]
    pub fn lowest(&self) -> Plan {
        let lowest = Goal { peak: None, step: Some(f64::INFINITY) };
        self.best(lowest, Bounds::NONE).expect("the first target at least")
    }

    /// How many recipes are used, from none to all, in even shares of their bytes.
    fn recompute_levels(&self) -> Vec<usize> {
        let bytes =
            |recipes: &[usize]| recipes.iter().map(|&index| self.work.entries[index].bytes).sum::<u64>();
        let all = bytes(&self.recipes) as f64;
        let count = |share: f64| {
            let mut sum = 0.0;
            let used = self.recipes.iter().take_while(|&&index| {
                sum += self.work.entries[index].bytes as f64;
                sum <= share * all
            });
            if share < 1.0 { used.count() } else { self.recipes.len() }
        };
        let mut levels: Vec<usize> = RECOMPUTED.into_iter().map(count).collect();
        levels.dedup();
        levels
    }

    /// Everything kept but the first so many of the recipes, and the targets up to the peak of keeping all.
    fn level(&self, recomputed: usize, kept: u64) -> Level {
        let entries = &self.work.entries;
        let mut placements = vec![Placement::Keep; entries.len()];
        for &index in &self.recipes[..recomputed] {
            placements[index] = Placement::Recompute;
        }
        let mut in_use: Vec<usize> = Vec::new();
        let produced = entries.iter().enumerate().map(|(index, entry)| {
            in_use.retain(|&other| entries[other].in_use_until >= index);
            let others: u64 = in_use.iter().map(|&other| entries[other].bytes).sum();
            in_use.extend((placements[index] == Placement::Recompute).then_some(index));
            others + entry.bytes + entry.forward_extra
        });
        let produced: Vec<u64> = produced.collect();
        let used = entries.iter().zip(&placements).map(|(entry, placement)| {
            // It comes before what it is computed from goes.
            let again = if *placement == Placement::Recompute { entry.bytes } else { 0 };
            again + entry.backward_extra
        });
        let used: Vec<u64> = used.collect();
        let staying = self.staying(&placements, &produced, &used);
        let most = |needed: Vec<u64>| needed.into_iter().max().unwrap_or(0);
        let most = [most(produced).max(self.work.turn_extra), most(used)];
        let lowest = most[0].max(most[1]);
        let step = kept.saturating_sub(lowest).div_ceil(TARGETS);
        let targets = (0..TARGETS).map(|nth| lowest.saturating_add(step.saturating_mul(nth)));
        Level { placements, most, staying, targets: targets.chain([u64::MAX]).collect() }
    }

    /// For each entry the peak that it, all after it and what cannot leave have by themselves. What stays counts at the moments at
    /// which it is there: as much as backward needs at its end, when most is gone, is no reason to move it.
    fn staying(&self, placements: &[Placement], produced: &[u64], used: &[u64]) -> Vec<u64> {
        let entries = &self.work.entries;
        let fixed = entries.iter().filter(|entry| !entry.is_movable()).map(|entry| entry.bytes);
        let mut before: u64 = fixed.sum();
        // The most from an entry on, without what was there before it.
        let (mut forward, mut backward) = (self.work.turn_extra, 0);
        let mut staying = vec![0; entries.len()];
        for (index, entry) in entries.iter().enumerate().rev() {
            let stays = if placements[index] == Placement::Recompute { 0 } else { entry.bytes };
            forward = produced[index].max(stays + forward);
            backward = stays + used[index].max(backward);
            before -= if entry.is_movable() { 0 } else { entry.bytes };
            staying[index] = before + forward.max(backward);
        }
        staying
    }

    /// The placement for a target of the peak: of what was saved last as much stays as fits, everything before it leaves, the oldest
    /// for the disk as far as the host has no room. None if it does not keep to the bounds.
    fn realise(&self, level: &Level, target: u64, bounds: &Bounds) -> Option<Plan> {
        let entries = &self.work.entries;
        let first = level.staying.partition_point(|peak| *peak > target);
        if level.staying.get(first).is_some_and(|peak| *peak > bounds.peak) {
            return None;
        }
        let [produced, used] = level.most;
        let limits = Limits {
            device_budget: target.saturating_sub(produced),
            backward_budget: target.saturating_sub(used),
            ..Limits::default()
        };
        let mut placements = level.placements.clone();
        let leaves = |index: &usize| placements[*index] == Placement::Keep && entries[*index].is_movable();
        let moved: Vec<usize> = (0..first).rev().filter(leaves).collect();
        self.send_below(&moved, &mut placements);
        let prediction = run_within(bounds, self.work, &placements, self.machine, &limits)?;
        Some(Plan { placements, limits, prediction })
    }

    /// Places what is to leave, given newest first.
    fn send_below(&self, moved: &[usize], placements: &mut [Placement]) {
        let entries = &self.work.entries;
        let host_pool = match self.machine.leaving {
            Leaving::InStreamOrder => self.machine.host_pool,
            Leaving::WhenStored | Leaving::OnceWritten => 0,
        };
        let all: u64 = moved.iter().map(|&index| entries[index].bytes).sum();
        let (mut to_disk, mut in_host) = (all.saturating_sub(host_pool), 0_u64);
        let mut disk = self.caps.disk.min(self.caps.written);
        for &index in moved.iter().rev() {
            let bytes = entries[index].bytes;
            placements[index] = if to_disk > 0 && bytes <= disk {
                to_disk = to_disk.saturating_sub(bytes);
                disk -= bytes;
                Placement::Disk
            } else if in_host.saturating_add(bytes) <= host_pool {
                in_host += bytes;
                Placement::Host
            } else {
                Placement::Keep
            };
        }
    }
}

impl fmt::Display for OutOfReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longer = self.step.as_secs_f64() / self.kept.as_secs_f64().max(f64::MIN_POSITIVE);
        write!(
            f,
            "no placement reaches it: the lowest activation peak is {}, with steps {longer:.2} times as long as with everything kept",
            Bytes(self.peak),
        )
    }
}

impl Error for OutOfReach {}

#[cfg(test)]
mod tests;
