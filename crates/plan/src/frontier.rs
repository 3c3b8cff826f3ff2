//! All placements worth considering, and the choice among them.

use std::cmp::Ordering;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use serde::Serialize;

use super::simulate::{Bounds, run_within};
use super::{Activation, Budgets, Machine, Placement, Prediction, Release, Workload};

/// The number of targets for the peak, spread from the lowest possible peak to that of keeping everything.
const TARGETS: u64 = 16;
/// Which shares of the recomputable bytes are tried for recomputation.
const RECOMPUTED: [f64; 3] = [0.0, 0.5, 1.0];
/// With a time limit, the boundary between the last target within the limit and the first one beyond it is located by
/// this many bisections.
const HALVINGS: u32 = 5;

/// What a plan may use besides the machine's host pool. By default there are no limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Caps {
    /// The most bytes on the disk at a time.
    pub disk: u64,
    /// The most bytes written to the disk in a step: what is left of a day's share of its endurance.
    pub written: u64,
}

/// What a plan has to achieve. With both limits, it is the lowest peak among the plans within the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Goal {
    /// The most bytes that the activation peak may have.
    pub peak: Option<u64>,
    /// The longest step, as a multiple of the step with everything kept.
    pub step: Option<f64>,
}

/// A placement for every activation, the settings that go with them, and the expected cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// One for each activation.
    pub placements: Vec<Placement>,
    /// The cache settings that go with the placements.
    pub budgets: Budgets,
    /// What the step is expected to do.
    pub prediction: Prediction,
}

/// No placement reaches the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OutOfReach {
    /// The lowest peak that any placement reaches, in bytes.
    pub peak: u64,
    /// The step time of that placement.
    pub step: Duration,
    /// The step time with everything kept.
    pub kept: Duration,
}

/// The placements worth considering for one workload on one machine.
#[derive(Clone, Debug)]
pub struct Frontier<'a> {
    work: &'a Workload,
    machine: &'a Machine,
    caps: Caps,
    /// Activations with a recipe, in increasing order of recomputation cost per byte.
    recipes: Vec<usize>,
    levels: Vec<Level>,
    /// In order of increasing target.
    points: Vec<Point>,
}

/// A choice of how many of the recipes are used.
#[derive(Clone, Debug)]
struct Level {
    /// The recomputed activations; all others are kept.
    placements: Vec<Placement>,
    /// The most bytes needed at once besides the saved storages: in forward, while something is being saved, and in
    /// backward.
    needs: [u64; 2],
}

/// A placement, described by the parameters that it is constructed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    level: usize,
    /// The target for the peak.
    target: u64,
}

impl Default for Caps {
    fn default() -> Caps {
        Caps { disk: u64::MAX, written: u64::MAX }
    }
}

impl Goal {
    /// The fastest step whose activation peak is at most this many bytes.
    pub fn budget(bytes: u64) -> Goal {
        Goal { peak: Some(bytes), step: None }
    }

    /// The lowest peak whose step is longer than the one with everything kept by at most this fraction: 0.01 is one
    /// percent.
    pub fn overhead(share: f64) -> Goal {
        Goal { peak: None, step: Some(1.0 + share) }
    }
}

impl Goal {
    /// The bounds that the goal sets if a step with everything kept takes this long.
    fn bounds(&self, kept: Duration) -> Bounds {
        let step = self.step.map_or(f64::INFINITY, |times| times * kept.as_secs_f64());
        let peak = self.peak.unwrap_or(u64::MAX);
        Bounds { peak, promised: peak, step, ..Bounds::NONE }
    }

    /// Which of two allowed predictions is better; the better one is `Less`.
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
    /// Collects the placements worth considering. They are simulated only when a plan is asked for.
    pub fn new(work: &'a Workload, machine: &'a Machine, caps: Caps) -> Frontier<'a> {
        let price = |index: &usize| {
            let activation = work.activations[*index];
            activation.recompute.unwrap_or_default().time.as_secs_f64() / activation.bytes.max(1) as f64
        };
        let with_recipe = |index: &usize| {
            work.activations[*index].recompute.is_some() && work.activations[*index].is_movable()
        };
        let mut recipes: Vec<usize> = (0..work.activations.len()).filter(with_recipe).collect();
        recipes.sort_by(|left, right| price(left).total_cmp(&price(right)));
        let mut frontier = Frontier { work, machine, caps, recipes, levels: Vec::new(), points: Vec::new() };
        frontier.levels = frontier.recompute_levels().map(|recomputed| frontier.level(recomputed)).collect();
        let kept = work.simulate(&[], machine, &Budgets::default()).peak();
        for (level, Level { needs, .. }) in frontier.levels.iter().enumerate() {
            let lowest = needs[0].max(needs[1]);
            let step = kept.saturating_sub(lowest).div_ceil(TARGETS);
            let targets = (0..TARGETS).map(|nth| lowest.saturating_add(step.saturating_mul(nth)));
            frontier.points.extend(targets.chain([u64::MAX]).map(|target| Point { level, target }));
        }
        frontier.points.sort_by_key(|point| point.target);
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
        let Some((point, plan)) = self.best(goal, bounds) else {
            let lowest = self.lowest().prediction;
            return Err(OutOfReach { peak: lowest.peak(), step: lowest.step, kept });
        };
        let below = |other: &&Point| other.level == point.level && other.target < point.target;
        let below = self.points.iter().filter(below).map(|other| other.target).max();
        match below.filter(|_| goal.step.is_some()) {
            Some(below) => Ok(self.between(below, point, plan, bounds)),
            None => Ok(plan),
        }
    }

    /// The best of the points. The simulation of a point stops as soon as it turns out worse than the best so far, so
    /// the most promising come first: with a time limit the lowest targets, otherwise the highest.
    fn best(&self, goal: Goal, mut bounds: Bounds) -> Option<(Point, Plan)> {
        let mut points = self.points.clone();
        if goal.step.is_none() {
            points.reverse();
        }
        let mut best: Option<(Point, Plan)> = None;
        for point in points {
            let Some(plan) = self.realise(point, &bounds) else { continue };
            let better = best.as_ref().is_none_or(|(other, best)| {
                goal.order(&plan.prediction, &best.prediction).then(point.cmp(other)).is_lt()
            });
            if better {
                match goal.step {
                    Some(_) => bounds.peak = plan.prediction.peak(),
                    None => bounds.step = plan.prediction.step.as_secs_f64(),
                }
                best = Some((point, plan));
            }
        }
        best
    }

    /// Searches for the lowest acceptable placement, between a target that is not acceptable, or not lower, and one
    /// that is.
    fn between(&self, mut below: u64, best: Point, chosen: Plan, mut bounds: Bounds) -> Plan {
        let (mut above, mut lowest) = (best.target, chosen);
        for _ in 0..HALVINGS {
            bounds.peak = lowest.prediction.peak();
            let target = below + (above.min(2 * bounds.peak).max(below) - below) / 2;
            match self.realise(Point { target, ..best }, &bounds) {
                Some(tried) => (above, lowest) = (target, tried),
                None => below = target,
            }
        }
        lowest
    }

    /// The predictions that no other beats in both step time and peak, by increasing peak.
    pub fn efficient(&self) -> Vec<Prediction> {
        let simulated = self.points.iter().filter_map(|point| self.realise(*point, &Bounds::NONE));
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

    /// The lowest peak that is possible within the caps, whatever time it takes.
    #[expect(clippy::expect_used, reason = "there are points, and nothing is out of bounds")]
    pub fn lowest(&self) -> Plan {
        let lowest = Goal { peak: None, step: Some(f64::INFINITY) };
        self.best(lowest, Bounds::NONE).expect("the first point at least").1
    }

    /// How many recipes each level uses, from none to all, in even shares of their bytes.
    fn recompute_levels(&self) -> impl Iterator<Item = usize> {
        let bytes =
            |recipes: &[usize]| recipes.iter().map(|&index| self.work.activations[index].bytes).sum::<u64>();
        let all = bytes(&self.recipes) as f64;
        let count = |share: f64| {
            let mut sum = 0.0;
            let used = self.recipes.iter().take_while(|&&index| {
                sum += self.work.activations[index].bytes as f64;
                sum <= share * all
            });
            if share < 1.0 { used.count() } else { self.recipes.len() }
        };
        let mut levels: Vec<usize> = RECOMPUTED.into_iter().map(count).collect();
        levels.dedup();
        levels.into_iter()
    }

    /// Keeps everything except the activations of the first `recomputed` recipes.
    fn level(&self, recomputed: usize) -> Level {
        let Workload { activations, turn_extra, .. } = self.work;
        let mut placements = vec![Placement::Keep; activations.len()];
        for &index in &self.recipes[..recomputed] {
            placements[index] = Placement::Recompute;
        }
        let mut in_use: Vec<usize> = Vec::new();
        let forward = activations.iter().enumerate().map(|(index, activation)| {
            in_use.retain(|&other| activations[other].in_use_until >= index);
            let others: u64 = in_use.iter().map(|&other| activations[other].bytes).sum();
            in_use.extend((placements[index] == Placement::Recompute).then_some(index));
            others + activation.bytes + activation.forward_extra
        });
        let forward = forward.max();
        let backward = activations.iter().zip(&placements).map(|(activation, placement)| {
            // It is back on the device before the storages that it is computed from are freed.
            let again = if *placement == Placement::Recompute { activation.bytes } else { 0 };
            again + activation.backward_extra
        });
        let needs = [forward.unwrap_or(0).max(*turn_extra), backward.max().unwrap_or(0)];
        Level { placements, needs }
    }

    /// The placement for a target of the peak: what fits at the end of forward stays, and everything before it
    /// leaves. The oldest go to the disk if the host has no room for all. `None` if the placement violates the
    /// bounds.
    fn realise(&self, Point { level, target }: Point, bounds: &Bounds) -> Option<Plan> {
        let activations = &self.work.activations;
        let Level { mut placements, needs: [produced, used] } = self.levels[level].clone();
        let budgets = Budgets {
            device_budget: target.saturating_sub(produced),
            backward_budget: target.saturating_sub(used),
            ..Budgets::default()
        };
        let fixed: u64 = activations
            .iter()
            .filter(|activation| !activation.is_movable())
            .map(|activation| activation.bytes)
            .sum();
        let mut stays = budgets.device_budget.min(budgets.backward_budget).saturating_sub(fixed);
        let mut moved = Vec::new();
        for (index, placement) in placements.iter().enumerate().rev() {
            if *placement == Placement::Keep && activations[index].is_movable() {
                let bytes = activations[index].bytes;
                match stays.checked_sub(bytes).filter(|_| moved.is_empty()) {
                    Some(left) => stays = left,
                    None => moved.push(index),
                }
            }
        }
        self.send_below(&moved, &mut placements);
        let as_disk_does = self.machine.release == Release::WhenStored && !moved.is_empty();
        if as_disk_does && self.highest_peak(&placements, budgets.device_budget, used) > bounds.promised {
            return None;
        }
        let prediction = run_within(bounds, self.work, &placements, self.machine, &budgets)?;
        (prediction.peak() >= bounds.least).then_some(Plan { placements, budgets, prediction })
    }

    /// The highest peak that a plan can have where storages leave only as fast as the disk takes them, however slow
    /// it turns out to be. `used` is the most that backward needs besides them.
    fn highest_peak(&self, placements: &[Placement], device_budget: u64, used: u64) -> u64 {
        let activations = &self.work.activations;
        let (mut kept, mut held, mut peak) = (0_u64, 0_u64, 0);
        let mut in_use: Vec<usize> = Vec::new();
        for (index, (activation, placement)) in activations.iter().zip(placements).enumerate() {
            let Activation { bytes, forward_extra, .. } = *activation;
            // What was saved last is either still held, or has left and nothing is in its place yet.
            let besides = |other: &&usize| placements[**other] == Placement::Recompute || **other + 1 < index;
            in_use.retain(|&other| activations[other].in_use_until >= index);
            let others: u64 = in_use.iter().filter(besides).map(|&other| activations[other].bytes).sum();
            peak = peak.max(held.saturating_add(others + bytes + forward_extra));
            if *placement != Placement::Keep {
                in_use.push(index);
            }
            if *placement != Placement::Recompute {
                // A storage that is larger than the budget is held all the same.
                held = device_budget.max(kept + bytes).min(held + bytes);
            }
            if *placement == Placement::Keep {
                kept += bytes;
            }
        }
        peak.max(held.saturating_add(used.max(self.work.turn_extra)))
    }

    /// Places the activations that are to leave, which are given newest first.
    fn send_below(&self, moved: &[usize], placements: &mut [Placement]) {
        let activations = &self.work.activations;
        let host_pool = match self.machine.release {
            Release::InStreamOrder => self.machine.host_pool,
            Release::WhenStored | Release::OnceWritten => 0,
        };
        let all: u64 = moved.iter().map(|&index| activations[index].bytes).sum();
        let (mut to_disk, mut in_host) = (all.saturating_sub(host_pool), 0_u64);
        let mut disk = self.caps.disk.min(self.caps.written);
        for &index in moved.iter().rev() {
            let bytes = activations[index].bytes;
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
            ByteSize(self.peak),
        )
    }
}

impl Error for OutOfReach {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Recompute;
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Layers of 100 bytes without a recipe and 100 bytes that are cheap to recompute.
    fn layers(count: usize) -> Workload {
        let activation = |recompute: Option<Recompute>| Activation {
            bytes: 100,
            forward: 10 * MS,
            backward: 20 * MS,
            recompute,
            ..Activation::default()
        };
        let recipe = |since| Some(Recompute { time: MS, since });
        let activations =
            (0..count).flat_map(|layer| [activation(None), activation(recipe(2 * layer))]).collect();
        Workload { activations, turn: MS, rest: MS, turn_extra: 0 }
    }

    fn copies(bytes_per_s: f64) -> Machine {
        Machine { copy_out: bytes_per_s, copy_in: bytes_per_s, ..Machine::default() }
    }

    fn count(plan: &Plan, placement: Placement) -> usize {
        plan.placements.iter().filter(|found| **found == placement).count()
    }

    #[test]
    fn what_fits_is_kept() {
        let (work, machine) = (layers(8), copies(1e9));
        let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(1600)).unwrap();
        assert_eq!((count(&plan, Placement::Keep), plan.prediction.peak()), (16, 1600));
    }

    #[test]
    fn copies_come_before_computing_again_where_they_are_free() {
        let (work, machine) = (layers(8), copies(1e9));
        let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(600)).unwrap();
        assert_eq!((count(&plan, Placement::Recompute), plan.prediction.step), (0, work.computed()));
        assert!(plan.prediction.peak() <= 600 && count(&plan, Placement::Host) > 0);
    }

    #[test]
    fn computing_again_comes_first_where_copies_are_slow() {
        let (work, machine) = (layers(8), copies(100.0));
        let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(900)).unwrap();
        assert_eq!((count(&plan, Placement::Recompute), count(&plan, Placement::Host)), (8, 0));
        assert_eq!(plan.prediction.step, work.computed() + 8 * MS);
    }

    #[test]
    fn an_overhead_buys_the_lowest_peak_there_is_for_it() {
        let (work, machine) = (layers(8), copies(4e3));
        let frontier = Frontier::new(&work, &machine, Caps::default());
        let peak = |share| frontier.plan(Goal::overhead(share)).unwrap().prediction.peak();
        let peaks = [0.0, 0.02, 1.0].map(peak);
        assert!(peaks.is_sorted_by(|more, less| more > less), "{peaks:?}");
    }

    #[test]
    fn what_exceeds_the_host_goes_to_the_disk_oldest_first() {
        let (work, machine) = (layers(8), Machine { host_pool: 500, ..copies(1e9) });
        let plan = Frontier::new(&work, &machine, Caps::default())
            .plan(Goal { peak: Some(400), step: None })
            .unwrap();
        let last_on_disk =
            plan.placements.iter().rposition(|placement| *placement == Placement::Disk).unwrap();
        let first_in_host =
            plan.placements.iter().position(|placement| *placement == Placement::Host).unwrap();
        assert!(last_on_disk < first_in_host, "{plan:?}");
    }

    #[test]
    fn a_goal_out_of_reach_is_told_with_what_is_in_reach() {
        let (work, machine) = (layers(2), copies(1e9));
        let refused = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(50)).unwrap_err();
        assert!((100..400).contains(&refused.peak), "{refused:?}");
        assert!(refused.to_string().contains("lowest activation peak"), "{refused}");
    }

    #[test]
    fn no_efficient_point_beats_another() {
        let (work, machine) = (layers(8), copies(5e3));
        let points = Frontier::new(&work, &machine, Caps::default()).efficient();
        assert!(points.len() > 2);
        assert!(points.windows(2).all(|pair| pair[0].peak() < pair[1].peak() && pair[0].step > pair[1].step));
    }

    #[test]
    fn nothing_saved_is_nothing_to_plan() {
        let (work, machine) = (Workload::default(), Machine::default());
        let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(0)).unwrap();
        assert!(plan.placements.is_empty());
    }

    /// The device holds a storage that is larger than the device budget until it is on the disk.
    #[test]
    fn a_slow_disk_and_a_storage_larger_than_the_device_budget_break_no_goal() {
        let large = Activation { bytes: 600, forward: MS, backward: MS, ..Activation::default() };
        let again = Activation { bytes: 100, recompute: Some(Recompute { time: MS, since: 0 }), ..large };
        let roomy = Activation { bytes: 100, forward_extra: 700, ..large };
        let work = Workload { activations: vec![large, again, roomy], turn: MS, rest: MS, turn_extra: 0 };
        let machine =
            Machine { release: Release::WhenStored, disk_write: 1e9, disk_read: 1e9, ..copies(1e9) };
        let behind = Machine { disk_write: 1.0, ..machine };
        for budget in [800, 1000, 1200, 1400] {
            let Ok(plan) = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(budget)) else {
                continue;
            };
            let peak = work.simulate(&plan.placements, &behind, &plan.budgets).peak();
            assert!(peak <= budget, "{peak} with a budget of {budget}: {plan:?}");
        }
    }

    fn workload() -> impl Strategy<Value = Workload> {
        let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
        let recompute = prop::option::of(millis(30));
        let activation = (1_u64..1000, millis(50), millis(100), recompute, 0_u64..500, 0_u64..500);
        (prop::collection::vec(activation, 1..25), 0_u64..500).prop_map(|(activations, turn_extra)| {
            let activation = |(
                index,
                (bytes, forward, backward, recompute, forward_extra, backward_extra),
            ): (usize, _)| {
                let recompute =
                    Option::map(recompute, |time| Recompute { time, since: index.saturating_sub(2) });
                Activation {
                    bytes,
                    forward,
                    backward,
                    forward_extra,
                    backward_extra,
                    recompute,
                    in_use_until: if bytes % 8 == 0 { usize::MAX } else { index + (bytes / 8) as usize % 6 },
                    in_use_with: bytes as usize % 3,
                }
            };
            let activations = activations.into_iter().enumerate().map(activation).collect();
            Workload { activations, turn: MS, rest: MS, turn_extra }
        })
    }

    fn machine() -> impl Strategy<Value = Machine> {
        let speed = || 1e3..1e6;
        (speed(), speed(), speed(), speed(), 0_u64..20_000).prop_map(
            |(copy_out, copy_in, disk_write, disk_read, host_pool)| Machine {
                copy_out,
                copy_in,
                disk_write,
                disk_read,
                host_pool,
                ..Machine::default()
            },
        )
    }

    proptest! {
        #[test]
        fn no_disk_that_falls_behind_breaks_a_budget(
            work in workload(), machine in machine(), budget in 0_u64..20_000, slower in 0.001..1.0
        ) {
            let machine = Machine { release: Release::WhenStored, ..machine };
            if let Ok(plan) = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(budget)) {
                let behind = Machine { disk_write: slower * machine.disk_write, ..machine };
                let prediction = work.simulate(&plan.placements, &behind, &plan.budgets);
                prop_assert!(prediction.peak() <= budget, "{prediction:?} instead of {:?}", plan.prediction);
            }
        }

        #[test]
        fn more_budget_never_predicts_a_slower_step(work in workload(), machine in machine(), less: u16, more: u16) {
            let frontier = Frontier::new(&work, &machine, Caps::default());
            let step = |budget: u64| frontier.plan(Goal::budget(budget)).map(|plan| plan.prediction.step);
            if let Ok(tight) = step(less.into()) {
                prop_assert!(step(u64::from(less) + u64::from(more)).unwrap() <= tight);
            }
        }

        #[test]
        fn no_plan_breaks_its_goal_or_a_cap(
            work in workload(), machine in machine(), budget in 0_u64..20_000, share in 0.0..1.0, disk in 0_u64..5000, written in 0_u64..5000
        ) {
            let caps = Caps { disk, written };
            let frontier = Frontier::new(&work, &machine, caps);
            for goal in [Goal::budget(budget), Goal::overhead(share), Goal { peak: Some(budget), step: Some(1.0 + share) }] {
                let Ok(plan) = frontier.plan(goal) else { continue };
                let bytes = |placement| -> u64 {
                    let chosen = work.activations.iter().zip(&plan.placements).filter(|(_, found)| **found == placement);
                    chosen.map(|(activation, _)| activation.bytes).sum()
                };
                let prediction = work.simulate(&plan.placements, &machine, &plan.budgets);
                prop_assert_eq!(prediction, plan.prediction);
                prop_assert!(prediction.peak() <= goal.peak.unwrap_or(u64::MAX));
                let longest = goal.step.map_or(f64::INFINITY, |times| times * work.computed().as_secs_f64());
                prop_assert!(prediction.step.as_secs_f64() <= longest);
                prop_assert!(bytes(Placement::Disk) <= disk.min(written) && prediction.written <= written);
                prop_assert!(bytes(Placement::Host) <= machine.host_pool);
            }
        }
    }
}
