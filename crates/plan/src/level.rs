//! What is held and what is recomputed, and the plans that go with it: one for each target of the peak.

use std::time::Duration;

use crate::goal::{Caps, Plan};
use crate::graph::Graph;
use crate::reruns::Reruns;
use crate::simulate::{Bounds, run_within};
use crate::{Activation, Budgets, Machine, Placement, Release, Workload};

/// A step of which it is known what is recomputed, but not yet where the rest is held.
#[derive(Clone, Debug)]
pub(crate) struct Level {
    reruns: Reruns,
    needs: Needs,
}

/// The most bytes needed at once besides what is held.
#[derive(Clone, Debug)]
struct Needs {
    /// In forward, with the one that is being saved.
    forward: u64,
    backward: u64,
    /// In backward, where what the reruns read may come back while what was saved later has not left yet.
    backward_behind: u64,
    /// While an activation is saved, without itself, or while backward uses it.
    each: Vec<u64>,
}

impl Level {
    pub(crate) fn new(work: &Workload, graph: &Graph, is_held: &[bool]) -> Level {
        Level::of(work, Reruns::new(&work.activations, graph, |index| is_held[index]))
    }

    /// The same, if the step takes no longer than `step` seconds where nothing waits.
    pub(crate) fn within(step: f64, work: &Workload, graph: &Graph, is_held: &[bool]) -> Option<Level> {
        let reruns = Reruns::new(&work.activations, graph, |index| is_held[index]);
        let shortest = work.computed() + reruns.time;
        (shortest.as_secs_f64() <= step).then(|| Level::of(work, reruns))
    }

    fn of(work: &Workload, reruns: Reruns) -> Level {
        Level { needs: Needs::new(work, &reruns), reruns }
    }

    /// The time of the step if nothing waits.
    pub(crate) fn shortest(&self, work: &Workload) -> Duration {
        work.computed() + self.reruns.time
    }

    /// The lowest target of the peak that there is any use in.
    pub(crate) fn lowest(&self) -> u64 {
        self.needs.forward.max(self.needs.backward)
    }

    /// The placement for a target of the peak: what fits stays, the newest first, and everything before it leaves. The
    /// oldest go to the disk if the host has no room for all. Where the bounds let what the program holds until forward
    /// ends stay, it leaves or stays, whichever gives the lower peak. Where the bounds are roomy, what leaves has as much room
    /// as the promised peak lets it have, or as the target, whichever makes the step quicker. `None` if the placement violates the bounds.
    pub(crate) fn realise(
        &self,
        target: u64,
        bounds: &Bounds,
        work: &Workload,
        machine: &Machine,
        caps: &Caps,
    ) -> Option<Plan> {
        let falls_behind = machine.release == Release::WhenStored;
        let backward = if falls_behind { self.needs.backward_behind } else { self.needs.backward };
        let budgets = |most: u64| Budgets {
            device_budget: most.saturating_sub(self.needs.forward),
            backward_budget: most.saturating_sub(backward),
            ..Budgets::default()
        };
        // What leaves only as fast as the disk takes it may be there longer than planned.
        let always = if falls_behind { self.needs.forward.max(backward) } else { 0 };
        let moving = |moved: &[usize], most| self.moving(moved, budgets(most), bounds, work, machine, caps);
        let moved = self.leaving(false, target, always, work);
        let plan = moving(&moved, target);
        if falls_behind && bounds.is_roomy {
            let quicker = |plan: &Plan| (plan.prediction.step, plan.prediction.peak());
            return plan.into_iter().chain(moving(&moved, bounds.promised)).min_by_key(quicker);
        }
        // Where storages leave only as fast as the disk takes them, what stays may come on top of what has yet to leave.
        let others = (bounds.may_stay && machine.release == Release::InStreamOrder)
            .then(|| self.leaving(true, target, always, work));
        let others = others.filter(|others| *others != moved).and_then(|others| moving(&others, target));
        let order = |plan: &Plan| (plan.prediction.peak(), plan.prediction.step);
        plan.into_iter().chain(others).min_by_key(order)
    }

    /// The plan in which these activations leave. `None` if it violates the bounds.
    fn moving(
        &self,
        moved: &[usize],
        budgets: Budgets,
        bounds: &Bounds,
        work: &Workload,
        machine: &Machine,
        caps: &Caps,
    ) -> Option<Plan> {
        let mut placements: Vec<Placement> = (0..work.activations.len())
            .map(|index| if self.reruns.is_held(index) { Placement::Keep } else { Placement::Recompute })
            .collect();
        send_below(moved, &mut placements, &work.activations, machine, caps);
        let as_disk_does = machine.release == Release::WhenStored && !moved.is_empty();
        if as_disk_does && self.highest_peak(&placements, &budgets, work) > bounds.promised {
            return None;
        }
        let prediction = run_within(bounds, work, &placements, &self.reruns, machine, &budgets)?;
        (prediction.peak() >= bounds.least).then_some(Plan { placements, budgets, prediction })
    }

    /// The activations that do not fit, newest first. At least `always` is needed all the time.
    fn leaving(&self, lets_stay: bool, target: u64, always: u64, work: &Workload) -> Vec<usize> {
        let held = |index: &usize| self.reruns.is_held(*index);
        let fixed = |index: &usize| {
            let one = &work.activations[*index];
            !one.is_movable() || lets_stay && stays_in_forward(one, work)
        };
        let bytes = |index: usize| work.activations[index].bytes;
        let count = work.activations.len();
        let mut fixed_before: u64 = (0..count).filter(held).filter(fixed).map(bytes).sum();
        // The most that is needed at once from the activation at hand on, with what stays.
        let mut most = always;
        let mut leaving = Vec::new();
        for index in (0..count).rev() {
            most = most.max(self.needs.each[index]);
            if !self.reruns.is_held(index) {
                continue;
            }
            let stays = if fixed(&index) {
                fixed_before -= bytes(index);
                true
            } else {
                leaving.is_empty() && most.saturating_add(fixed_before).saturating_add(bytes(index)) <= target
            };
            if stays {
                most = most.saturating_add(bytes(index));
            } else {
                leaving.push(index);
            }
        }
        leaving
    }

    /// The highest peak that a plan can have where storages leave only as fast as the disk takes them, however slow
    /// it turns out to be.
    fn highest_peak(&self, placements: &[Placement], budgets: &Budgets, work: &Workload) -> u64 {
        let activations = &work.activations;
        // What is kept, and the most that the budget lets be there, with what has left but is still used.
        let (mut kept, mut held, mut peak) = (0_u64, 0_u64, 0);
        let (mut recomputed, mut leaving) = (InUse::default(), InUse::default());
        for (index, (activation, placement)) in activations.iter().zip(placements).enumerate() {
            let Activation { bytes, forward_extra, .. } = *activation;
            recomputed.until(index, activations);
            leaving.until(index, activations);
            peak = peak.max(held.saturating_add(recomputed.bytes + bytes + forward_extra));
            let in_use = if activation.is_saved() { Some(index) } else { None };
            match placement {
                Placement::Recompute => {
                    recomputed.extend(in_use, activations);
                    continue;
                }
                Placement::Keep => kept += bytes,
                Placement::Host | Placement::Disk => leaving.extend(in_use, activations),
            }
            // Forward waits for what is beyond the budget, except for what stays there anyway, and for what it has just saved.
            let saved_last = if *placement == Placement::Keep || activation.is_saved() { 0 } else { bytes };
            let stays = kept.saturating_add(leaving.bytes).saturating_add(saved_last);
            held = budgets.device_budget.max(stays).min(held.saturating_add(bytes));
        }
        // So does backward.
        let in_backward = held.min(budgets.backward_budget.max(kept));
        peak.max(held.saturating_add(work.turn_extra))
            .max(in_backward.saturating_add(self.needs.backward_behind))
    }
}

/// Activations that the program still uses.
#[derive(Default)]
struct InUse {
    indices: Vec<usize>,
    bytes: u64,
}

impl InUse {
    fn extend(&mut self, index: Option<usize>, activations: &[Activation]) {
        self.bytes += index.map_or(0, |index| activations[index].bytes);
        self.indices.extend(index);
    }

    /// Those that are still used when the activation at `index` is saved.
    fn until(&mut self, index: usize, activations: &[Activation]) {
        let over = self.indices.extract_if(.., |other| activations[*other].in_use_until < index);
        self.bytes -= over.map(|other| activations[other].bytes).sum::<u64>();
    }
}

/// Whether the program holds an activation until forward ends. Until then, moving it frees nothing.
fn stays_in_forward(one: &Activation, work: &Workload) -> bool {
    one.is_saved() && one.is_movable() && one.in_use_until + 1 >= work.activations.len()
}

impl Needs {
    fn new(work: &Workload, reruns: &Reruns) -> Needs {
        let Workload { activations, turn_extra, .. } = work;
        let mut needs =
            Needs { forward: *turn_extra, backward: 0, backward_behind: 0, each: vec![0; activations.len()] };
        if let Some(last) = needs.each.last_mut() {
            *last = *turn_extra;
        }
        needs.of_forward(activations, reruns);
        needs.of_backward(work, reruns);
        needs
    }

    fn of_forward(&mut self, activations: &[Activation], reruns: &Reruns) {
        let mut in_use: Vec<usize> = Vec::new();
        for (index, activation) in activations.iter().enumerate() {
            in_use.retain(|&other| activations[other].in_use_until >= index);
            let others: u64 = in_use.iter().map(|&other| activations[other].bytes).sum();
            let beside = others + activation.forward_extra;
            self.forward = self.forward.max(beside + activation.bytes);
            let is_held = reruns.is_held(index);
            self.each[index] = self.each[index].max(if is_held { beside } else { beside + activation.bytes });
            in_use.extend((activation.is_saved() && !is_held).then_some(index));
        }
    }

    fn of_backward(&mut self, work: &Workload, reruns: &Reruns) {
        let activations = &work.activations;
        let (mut runs, mut late) = (reruns.runs().iter().peekable(), reruns.late().iter().peekable());
        // What was recomputed and is there, and those of it that are still used.
        let (mut recomputed, mut used) = (0, Vec::new());
        // Held activations that come back before their turn, or stay after it.
        let (mut early, mut is_early) = (0, vec![false; activations.len()]);
        let mut extra_before = work.turn_extra;
        for (index, activation) in activations.iter().enumerate().rev().filter(|(_, one)| one.is_saved()) {
            let mut need = 0;
            if let Some(run) = runs.next_if(|run| run.of == index) {
                need = recomputed + run.peak + extra_before.min(activation.backward_extra);
                recomputed += run.stays;
                for &leaf in reruns.leaves(run) {
                    if !std::mem::replace(&mut is_early[leaf], true) {
                        early += activations[leaf].bytes;
                    }
                }
            }
            if reruns.is_late(index) && !std::mem::replace(&mut is_early[index], true) {
                early += activation.bytes;
            }
            need = need.max(recomputed + activation.backward_extra);
            extra_before = activation.backward_extra;
            self.each[index] = self.each[index].max(need);
            self.backward = self.backward.max(need);
            self.backward_behind = self.backward_behind.max(need + early);
            let mut over = |index: usize| early -= if is_early[index] { activations[index].bytes } else { 0 };
            if !reruns.is_late(index) {
                over(index);
            }
            while let Some((_, late)) = late.next_if(|(turn, _)| *turn == index) {
                over(*late);
            }
            if !reruns.is_held(index) {
                used.push(index);
            }
            let over = used.extract_if(.., |other: &mut usize| {
                other.saturating_sub(activations[*other].in_use_with) >= index
            });
            recomputed -= over.map(|other| activations[other].bytes).sum::<u64>();
        }
    }
}

/// Places the activations that are to leave, which are given newest first.
fn send_below(
    moved: &[usize],
    placements: &mut [Placement],
    activations: &[Activation],
    machine: &Machine,
    caps: &Caps,
) {
    let host_pool = match machine.release {
        Release::InStreamOrder => machine.host_pool,
        Release::WhenStored | Release::OnceWritten => 0,
    };
    let all: u64 = moved.iter().map(|&index| activations[index].bytes).sum();
    let (mut to_disk, mut in_host) = (all.saturating_sub(host_pool), 0_u64);
    let mut disk = caps.disk.min(caps.written);
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
