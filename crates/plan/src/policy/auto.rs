//! Planned steps: when to profile, what to plan for, and when a plan is no longer valid.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;

use super::attempts::{Attempts, FIRST_PROFILED};
use super::corrections::Corrections;
use super::cost::Weight;
use super::labels::Labels;
use super::planned::{Objective, Planned, TELLING_PACE};
use super::start::Start;
use super::watch::{Seen, Watch};
use super::weighing::Weighing;
use super::{
    Adherence, Headroom, Needs, Observation, Outset, Policy, PolicyReport, Resources, Room, SavedPlan, Saves,
    StepPlan,
};
use crate::step_profile::{COUNTED_ON, StepProfile};
use crate::{Budgets, Goal, Profile, Release, ScopeId};

/// Bytes that storages may occupy on the device in a profiled step if they are released when stored. If they leave as late as possible,
/// it is 0, because what stays shows no bandwidth.
const UNPLANNED_BYTES: u64 = 512 << 20;
/// Unplanned stalls of more than this share of the step justify another plan.
const TELLING_STALL: f64 = 0.002;
/// The times of at most this many steps are passed over because kernels were being made meanwhile.
const COMPILED: u32 = 256;
/// How often a profile is corrected without a baseline.
const CORRECTIONS: u32 = 4;
/// The share of the device's free memory that a step that keeps everything may take.
const FITTING: f64 = 0.9;

/// Chooses for each storage what serves the [`Goal`] best: keep it, move it to the host or the disk, or compute it again
/// if it has a recipe. This is the default policy, with the goal [`Goal::overhead(0.02)`](Goal::overhead): the lowest
/// activation peak for which steps are at most two percent longer.
///
/// The first two steps move everything, and the second is profiled, save by save. They are slow, especially the first
/// if it pins the host pool, but safe for models whose step would not fit with everything kept. The plan is followed
/// from the third step on. For a goal that is a time, steps that keep everything take turns with planned ones if they fit
/// the free memory, so that both can be compared. A plan whose steps exceed the goal is loosened until they meet it, at
/// worst to keeping everything. A goal that is a peak also applies, as far as possible, to steps that
/// are not planned. The report warns of a goal that is out of reach.
///
/// A plan is corrected when the disk's speed or the step times change. A step that saves something other than planned
/// keeps what fits from there on, and steps are profiled again at doubling intervals. Micro-batches of other shapes follow
/// the plan too; larger ones do unless the goal limits the peak. The cache's `plan` explains the plan, and the report of each step that followed it shows it
/// beside what was measured.
///
/// The plan sets budgets, how much is loaded ahead, and which of the last scopes stay.
#[derive(Clone, Debug)]
pub struct Auto {
    objective: Objective,
    start: Start,
    planned: Option<Planned>,
    watch: Watch,
    attempts: Attempts,
    weighing: Option<Weighing>,
    /// Steps have become smaller for good, so a profile of them replaces that of larger ones.
    smaller: bool,
    /// Bytes that may stay in a step without a plan, so that its peak meets the goal.
    headroom: u64,
    plans: u64,
    /// Steps in which kernels were being made.
    compiled: u32,
}

impl Default for Auto {
    fn default() -> Auto {
        Auto::new(Goal::overhead(0.02))
    }
}

impl Auto {
    /// Plans for `goal`.
    pub fn new(goal: Goal) -> Auto {
        Auto {
            objective: Objective { goal, resources: Resources::default(), written_per_day: None },
            start: Start::default(),
            planned: None,
            watch: Watch::default(),
            attempts: Attempts::new(),
            weighing: None,
            smaller: false,
            headroom: goal.peak.unwrap_or(u64::MAX) / 2,
            plans: 0,
            compiled: 0,
        }
    }

    /// Upper limit on the bytes that are written to the disk in a day of uninterrupted steps: its share of the SSD's
    /// endurance. Default: no limit.
    #[must_use]
    pub fn written_per_day(mut self, bytes: u64) -> Auto {
        self.objective.written_per_day = Some(bytes);
        self
    }

    /// Starts with a plan that another run has saved (`TensorCache::saved_plan`). The first step follows it, and none is
    /// profiled as long as steps do; a plan of the program with the same model, sizes and settings is meant.
    ///
    /// A plan for another goal, or for more host memory or disk than there is, is made anew from its profile before the
    /// first step. If a step saves something else, or the device or the path to the disk is of another kind, steps are
    /// profiled as without it. The first report warns of each of these.
    #[must_use]
    pub fn starting_with(mut self, saved: SavedPlan) -> Auto {
        self.start = Start::with(saved);
        self
    }

    /// How to run step `number`, on a device whose free memory is `free` bytes.
    fn next_step(&mut self, number: u64, free: &dyn Fn() -> u64) -> StepPlan {
        let profiled = self.attempts.is_due(number);
        if profiled || (number < FIRST_PROFILED && self.planned.is_none()) {
            return StepPlan { profiled, room: Room::Within(self.looking()), ..StepPlan::default() };
        }
        let headroom = self.objective.goal.peak.map_or(Headroom::Free, |_| Headroom::Bytes(self.headroom));
        let weighing = self.weighing.as_ref().filter(|weighing| weighing.wants_kept());
        if let (Some(Weighing { seen, .. }), Some(planned)) = (weighing, &self.planned) {
            let (seen, peak) = (*seen, planned.kept_peak() + planned.corrections.unforeseen.bytes());
            if peak <= self.objective.goal.peak.unwrap_or(u64::MAX) && peak as f64 <= FITTING * free() as f64
            {
                // For comparison with planned steps.
                return StepPlan { saves: Saves::Keep, ..StepPlan::default() };
            }
            self.weighing = None;
            self.correct(seen);
        }
        match &self.planned {
            Some(Planned { plan, schedule, .. }) => {
                let saves = Saves::Scheduled { schedule: Arc::clone(schedule), unplanned: headroom };
                StepPlan { saves, room: Room::Within(plan.budgets), ..StepPlan::default() }
            }
            None => StepPlan { room: Room::Fitting(headroom), ..StepPlan::default() },
        }
    }

    /// The budgets of a step in which everything moves.
    fn looking(&self) -> Budgets {
        let bytes = match self.objective.resources.release {
            Release::InStreamOrder | Release::OnceWritten => 0,
            Release::WhenStored => self.headroom.min(UNPLANNED_BYTES),
        };
        Budgets { device_budget: bytes, backward_budget: bytes, prefetch: bytes / 2, ..Budgets::default() }
    }

    /// Whether the next step is timed to its very end.
    fn settles(&self) -> bool {
        self.planned.is_some() && (self.watch.settles() || self.weighing.is_some())
    }

    /// Whether a step of `micro_batches` micro-batches is like the profiled one.
    fn is_whole(&self, micro_batches: u32) -> bool {
        self.planned.as_ref().is_some_and(|planned| planned.profile.micro_batches == micro_batches)
    }

    fn profiled(&mut self, profile: StepProfile) {
        let machine = profile.machine(&self.objective.resources);
        let planned = Planned::new(&self.objective, profile, machine, Corrections::default());
        let known = self.planned.as_ref().is_some_and(|before| before.schedule.covers(&planned.schedule));
        // A plan also serves smaller steps, as long as there are larger ones.
        if known && !std::mem::take(&mut self.smaller) {
            return;
        }
        self.weighing = None;
        self.plans += 1;
        self.watch.planned();
        self.planned = Some(planned);
    }

    /// A step that followed its plan has ended.
    fn stepped(&mut self, observed: &Observation) {
        let Some(Planned { machine, .. }) = &self.planned else { return };
        let rates = [(observed.written, machine.disk_write), (observed.read, machine.disk_read)];
        let known = rates.map(|(seen, counted_on)| {
            seen.filter(|_| counted_on.is_finite()).map(|seen| seen * COUNTED_ON / counted_on)
        });
        let (disk, plans) = (self.watch.disk(known), self.plans);
        self.peaked(Planned::peak, observed.peak);
        if let Some([written, read]) = disk {
            self.watch.disk_known();
            self.weighing = None;
            self.revise(|planned| {
                planned.machine.disk_write *= written;
                planned.machine.disk_read *= read;
                planned.corrections.forget_stalls();
            });
        } else if self.plans == plans {
            self.timed(observed.wall, observed.stall);
        }
    }

    /// A step of the present plan took `wall`, of which it waited `stall`.
    fn timed(&mut self, wall: Duration, stall: Duration) {
        if let Some(weighing) = &mut self.weighing {
            if let Some(weight) = weighing.planned(wall) {
                self.weigh(weight);
            }
        } else if let Some(seen) = self.watch.observe(wall, stall) {
            self.judge(seen);
        }
    }

    /// Takes note of a step's peak. If it exceeds the goal, plans from now on aim lower by as much as the peak exceeded the planned one,
    /// until no such excess has occurred for a while.
    fn peaked(&mut self, planned_peak: impl Fn(&Planned) -> u64, peak: u64) {
        let (Some(planned), Some(most)) = (&mut self.planned, self.objective.goal.peak) else { return };
        let expected = planned_peak(planned);
        if planned.corrections.unforeseen.saw(expected, peak, peak > most) {
            self.revise(|_| {});
        }
    }

    /// Judges a plan by the times of its steps. If the goal is a time, its first ones are compared with steps that keep everything, because
    /// a plan may cost more than its compute time shows, and later ones again if they are not what that has shown.
    fn judge(&mut self, seen: Seen) {
        let Some(planned) = &mut self.planned else { return };
        let is_paced = (planned.pace(seen) - 1.0).abs() <= TELLING_PACE;
        let kept = planned.kept_step();
        match self.objective.goal.step {
            Some(_) if planned.keeps_all() && is_paced => {}
            Some(_) if planned.keeps_all() => {
                planned.keeps_in(seen.wall);
                self.revise(|_| {});
            }
            Some(_) => {
                let is_unclear = planned.corrections.cost.is_none_or(|cost| {
                    let usual = kept.mul_f64(1.0 + cost.expected(planned.extra()));
                    seen.is_news() || seen.is_beyond(usual, cost.telling_change())
                });
                let known = planned.corrections.cost.filter(|_| !seen.is_strange);
                self.weighing = is_unclear.then(|| Weighing::new(seen, known.unwrap_or_default()));
            }
            None if seen.is_news() => self.correct(seen),
            None => {}
        }
    }

    /// Steps of the plan are being compared with steps that keep everything, so the time of computing is known now, and what the plan
    /// costs. If that is clear, a plan that exceeds the goal is loosened, and one that leaves time is tightened.
    fn weigh(&mut self, weight: Weight) {
        let (Some(planned), Some(most)) = (&mut self.planned, self.objective.goal.step) else { return };
        let Some(weighing) = self.weighing.take() else { return };
        let is_paced = !planned.keeps_in(weight.kept);
        let (cost, extra) = weighing.cost.weighed(planned.extra(), most - 1.0, weight);
        planned.corrections.cost = Some(cost);
        let is_done = weighing.is_long() || extra.is_clear();
        let is_over = extra.is_over();
        let may_tighten = planned.corrections.may_tighten(extra);
        let plans = self.plans;
        if !is_paced || (is_done && (is_over || may_tighten)) {
            self.revise(|planned| match () {
                () if is_over => planned.corrections.loosen(&planned.plan, extra),
                () if may_tighten => planned.corrections.tighten(extra),
                () => {}
            });
        }
        if !is_done && self.plans == plans {
            self.weighing = Some(weighing);
        }
    }

    /// Corrects the profile by the times of the plan's steps, when nothing else shows how long a step with everything kept would take.
    fn correct(&mut self, seen: Seen) {
        let Some(planned) = &mut self.planned else { return };
        let Planned { profile, plan, corrections, .. } = planned;
        if seen.is_strange {
            corrections.count = 0;
        }
        if corrections.count == CORRECTIONS {
            return;
        }
        let [wall, stall] = [seen.wall, seen.stall].map(|time| time / profile.micro_batches.max(1));
        let beyond = stall.saturating_sub(plan.prediction.stall.total());
        let pace = planned.pace(seen);
        let kept = planned.profile.work.computed().mul_f64(pace);
        let extra = self.objective.goal.step.map(|most| planned.measured(most, wall, kept));
        let over = extra
            .filter(|extra| beyond.as_secs_f64() > TELLING_STALL * kept.as_secs_f64() && extra.is_over());
        let paced = (pace - 1.0).abs() <= TELLING_PACE;
        if paced && over.is_none() {
            return;
        }
        self.revise(|planned| {
            planned.corrections.count += 1;
            match over {
                Some(extra) if paced => planned.corrections.loosen(&planned.plan, extra),
                // With corrected times, the stalls may differ too.
                _ => planned.profile.work.pace(pace),
            }
        });
    }

    /// Plans again after `change`. If steps will go as before, the result does not count as another plan.
    fn revise(&mut self, change: impl FnOnce(&mut Planned)) {
        let Some(mut planned) = self.planned.take() else { return };
        change(&mut planned);
        let Planned { profile, machine, plan, schedule, corrections, .. } = planned;
        let revised = Planned::new(&self.objective, profile, machine, corrections);
        if (revised.plan.budgets, &revised.schedule) != (plan.budgets, &schedule) {
            self.plans += 1;
            self.watch.planned();
            self.weighing = None;
        }
        self.planned = Some(revised);
    }
}

impl Policy for Auto {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        self.objective.resources = outset.resources;
        if let Some(planned) = self.start.plan(&self.objective, outset.scope) {
            self.attempts.spare();
            self.planned = Some(planned);
            self.plans += 1;
        }
        let plan = self.next_step(outset.step, outset.free);
        StepPlan { timed: self.settles(), ..plan }
    }

    fn end(&mut self, plan: &StepPlan, observed: Observation) {
        let Observation { step, peak, .. } = observed;
        let excess = self.objective.goal.peak.map_or(0, |most| peak.saturating_sub(most));
        self.compiled += u32::from(observed.compiled);
        let is_timed = !observed.compiled || self.compiled > COMPILED;
        self.start.ended(&observed);
        match observed.followed {
            _ if plan.profiled => {
                self.headroom = self.headroom.saturating_sub(excess);
                self.attempts.made(step, observed.profile.is_some());
                if let Some(profile) = observed.profile {
                    self.profiled(*profile);
                }
            }
            None if plan.saves == Saves::Keep => {
                self.peaked(Planned::kept_peak, peak);
                if let Some(weighing) = self.weighing.as_mut().filter(|_| is_timed) {
                    weighing.kept(observed.wall);
                }
            }
            None => self.headroom = self.headroom.saturating_sub(excess),
            Some(Adherence::Lost) => {
                self.weighing = None;
                self.headroom = self.headroom.saturating_sub(excess);
                self.attempts.want(step);
            }
            // It shows nothing of the plan's own steps, but a plan for steps like it also serves those.
            Some(Adherence::Larger) => {
                self.weighing = None;
                self.attempts.want(step);
            }
            // It does work that later ones need not repeat, and makes the gradients that those find.
            Some(Adherence::Whole(_)) if step < FIRST_PROFILED => self.attempts.followed(),
            Some(Adherence::Whole(micro_batches)) if self.is_whole(micro_batches) => {
                self.attempts.followed();
                if is_timed {
                    self.stepped(&observed);
                } else {
                    self.peaked(Planned::peak, peak);
                }
            }
            Some(Adherence::Whole(_) | Adherence::Part) => {
                self.attempts.followed();
                // Those that keep everything may be of this kind as well.
                self.weighing = None;
                self.peaked(Planned::peak, peak);
                if self.watch.partial() {
                    self.smaller = true;
                    self.attempts.want(step);
                }
            }
        }
    }

    fn needs(&self) -> Needs {
        Needs { one_path: true, ..Needs::default() }
    }

    fn check(&self) -> Result<(), String> {
        let Goal { peak, step } = self.objective.goal;
        if peak == Some(0) {
            return Err("Goal::budget(0), in Auto: no step has an activation peak of 0 bytes; give the bytes that it may have, or \
                        Goal::overhead(f64::INFINITY) for the lowest there is"
                .to_owned());
        }
        match step {
            Some(times) if times.is_nan() || times < 1.0 => Err(format!(
                "Goal::overhead({}), in Auto: the share by which steps may become longer is 0 or more; 0.02 is two percent",
                (times - 1.0) as f32
            )),
            _ => Ok(()),
        }
    }

    /// Whether there is a plan that was followed long enough to be corrected, if necessary.
    fn is_settled(&self) -> bool {
        self.planned.is_some() && self.watch.has_settled() && self.weighing.is_none()
    }

    fn warnings(&self, _plan: &StepPlan, observed: &Observation) -> Vec<String> {
        let followed = observed.followed.is_some_and(|followed| followed != Adherence::Lost);
        let planned = self.planned.as_ref().filter(|_| followed);
        let mut warnings = self.start.warnings(observed);
        if planned.is_some_and(|planned| !planned.in_reach) {
            warnings
                .push("the goal of Auto is out of reach: the plan is what comes closest to it".to_owned());
        } else if self.objective.goal.step.is_some() && planned.is_some_and(Planned::keeps_all) {
            warnings.push(
                "Auto moves nothing: whatever left the device would make steps longer than the goal allows"
                    .to_owned(),
            );
        }
        if let Some(most) = self.objective.goal.peak.filter(|most| observed.peak > *most) {
            let (peak, most) = (ByteSize(observed.peak), ByteSize(most));
            warnings.push(format!("the activation peak, {peak}, is beyond the goal of Auto, {most}"));
        }
        warnings
    }

    /// The report of the current plan, if there is one.
    fn report(&mut self, name: &dyn Fn(ScopeId) -> String) -> Option<PolicyReport> {
        self.planned.as_mut().map(|planned| PolicyReport::Plan(planned.report(self.plans, name)))
    }

    /// The profile that the plan was made from, if there is one.
    fn profile(&self, name: &dyn Fn(ScopeId) -> String) -> Option<Profile> {
        let Planned { profile, machine, .. } = self.planned.as_ref()?;
        let micro_batches = NonZero::new(profile.micro_batches).unwrap_or(NonZero::<u32>::MIN);
        let names = Labels::new(profile, name).names();
        Some(Profile { workload: profile.work.clone(), micro_batches, machine: *machine, names })
    }

    fn saved_plan(&self, name: &dyn Fn(ScopeId) -> String) -> Option<SavedPlan> {
        self.planned.as_ref().map(|planned| SavedPlan::of(planned, &self.objective, name))
    }
}

#[cfg(test)]
mod tests;
