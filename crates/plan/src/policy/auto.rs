//! Planned steps: when to profile, what to plan for, and when a plan is no longer valid.

use std::num::NonZero;

use bytesize::ByteSize;

use super::attempts::{Attempts, FIRST_PROFILED};
use super::daily::DailyLimit;
use super::decisions::Decision;
use super::fitting::Fitting;
use super::free_memory::{FreeMemory, Look};
use super::kind::Kind;
use super::kinds::Kinds;
use super::labels::Labels;
use super::objective::Objective;
use super::planned::Planned;
use super::planning::Planning;
use super::scarcity::Scarcity;
use super::start::Start;
use super::unseen::Unseen;
use super::{
    Adherence, Course, Followed, Headroom, Needs, Observation, Outset, Policy, PolicyReport, Recomputed,
    Resources, Room, SavedPlan, Saves, StepPlan,
};
use crate::{Budgets, Goal, Profile, Release, ScopeId};

/// Bytes that storages may occupy on the device in a profiled step if they are released when stored, unless half of what is free is less. On
/// the direct path to a disk it is 0, because what stays shows no bandwidth.
const UNPLANNED_BYTES: u64 = 512 << 20;
/// In a step that shows what else is needed, one part in so many of what may stay in others without a plan does.
const LOOKING: u64 = 4;
/// The times of at most this many steps are passed over because kernels were being made meanwhile.
const COMPILED: u32 = 256;
/// The times of at most so many steps in a row are passed over because the device's driver was asked for memory, or memory was short: where
/// that is so in every step, it is what steps take.
const WANTING: u32 = 8;
/// No step after this one keeps everything to be compared with planned ones, unless these have become strange: from then on peaks are what
/// plans say.
const COMPARED: u64 = 20;
/// Steps that save more than so many times what is planned may be worth a plan of their own.
const LARGER: f64 = 2.0;
/// A plan that the device had no memory for is replaced by one whose peak is lower by what had to go, but by no less and no more than one
/// part in so many.
const LACKING: [u64; 2] = [20, 4];
/// Steps that follow their plan this often in a row have settled, though no two are alike.
const STEADY: u32 = 5;

/// Chooses for each storage what serves the [`Goal`] best: keep it, move it to the host or the disk, or compute it again
/// if it has a recipe. This is the default policy, with the goal [`Goal::overhead(0.02)`](Goal::overhead): the lowest
/// activation peak for which steps are at most two percent longer.
///
/// The second step is profiled, save by save. On a GPU, the first two steps keep what fits, under a goal for the peak at first half of
/// it, and later ones keep everything while host memory is pinned for the plan. On a CPU, on the direct path to a disk, and without a
/// [`host_pool`](Resources::host_pool), the first two steps move everything: that shows what moving costs and is safe for models whose step
/// would not fit with everything kept, but slow. The plan is followed from the third step on. For a goal that is a time, steps that keep
/// everything come before planned ones and take turns
/// with them, if they fit the free memory, so that both can be compared; none of these comes after the twentieth step unless
/// steps have become much longer or shorter. A plan whose steps exceed the goal is loosened
/// until they meet it, at worst to keeping everything. On a CPU, whose processors also do the cache's work, plans aim at half of what the
/// goal allows. A goal that is a peak also applies to steps that are not planned, or go on beyond their plan: what
/// can go leaves before an allocation exceeds it ([`StepPlan::most_peak`]), which takes long, and the next plans get
/// lower. Such steps compute again what a few operations make of what is there, instead of moving it ([`StepPlan::recomputed`]). Where the
/// peak alone is a goal, steps move nothing while host memory is pinned for their plan, if they keep to the goal so. The report warns of a
/// goal that is out of reach.
///
/// A plan is corrected when the disk's speed or the step times change. Up to four kinds of steps have plans of their own,
/// told by what they save first. A step that leaves out or repeats something goes on with its plan where it can; one that
/// saves something else keeps what fits from there on. Then steps are profiled again, at doubling intervals. Micro-batches
/// of other shapes follow the plan too; larger ones do unless the goal limits the peak. The cache's `plan` explains the plan
/// of the last step, and the report of each step that followed it shows it beside what was measured.
///
/// If the device has no memory for what a plan keeps, storages go at once (`pressed` in the report), and plans of the next 64 steps have a
/// lower peak. Then it is tried whether there is enough again, at doubling intervals.
///
/// The plan sets budgets, how much is loaded ahead, and which of the last scopes stay.
#[derive(Clone, Debug)]
pub struct Auto {
    objective: Objective,
    start: Start,
    kinds: Kinds,
    attempts: Attempts,
    memory: FreeMemory,
    scarcity: Scarcity,
    /// Bytes that may stay in a step without a plan, so that its peak meets the goal.
    headroom: u64,
    /// Steps in which kernels were being made.
    compiled: u32,
    /// Steps in a row that [wanted memory](wanted_memory).
    wanting: u32,
    /// Steps in a row that followed a plan, since the last one was made, and how many plans there were when the last step ended.
    steady: u32,
    plans: u64,
    unseen: Unseen,
    fitting: Fitting,
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
            objective: Objective {
                goal,
                resources: Resources::default(),
                daily: None,
                compares: true,
                room: u64::MAX,
                free: u64::MAX,
            },
            start: Start::default(),
            kinds: Kinds::default(),
            attempts: Attempts::new(),
            memory: FreeMemory::default(),
            scarcity: Scarcity::new(),
            headroom: first_headroom(goal),
            compiled: 0,
            wanting: 0,
            steady: 0,
            plans: 0,
            unseen: Unseen::new(),
            fitting: Fitting::new(),
        }
    }

    /// Upper limit on the bytes that are written in a day (of UTC) to the disks that the cache spills to, all of them and all runs taken
    /// together: their share of the SSDs' endurance. What other runs have written is known where they share a history of the disks, which
    /// is kept by default with this limit (`TensorCacheBuilder::disk_history`).
    ///
    /// Plans write evenly over the day. Once the limit is reached, storages stay on the device or are computed again, and reports warn of
    /// it. Processes that run at the same time learn of each other once a minute, and may exceed the limit by what they write meanwhile.
    /// Default: no limit.
    #[must_use]
    pub fn written_per_day(mut self, bytes: u64) -> Auto {
        self.objective.daily = Some(DailyLimit::new(bytes));
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

    /// How to run the step that begins.
    fn next_step(&mut self, outset: &Outset<'_>) -> StepPlan {
        let number = outset.step;
        self.unseen.begins();
        let profiled = self.attempts.is_due(number);
        if profiled || (number < FIRST_PROFILED && self.kinds.is_empty()) {
            let (room, recomputed) = (self.looking(outset.free), self.recomputed(number));
            return StepPlan { profiled, room, recomputed, ..StepPlan::default() };
        }
        let timed = self.kinds.settle(number);
        let memory = self.memory.look(outset.free);
        let headroom = self.headroom(&memory);
        self.fit(number, &memory);
        let mut courses = self.kinds.courses(number, &self.objective, outset.provide, &memory);
        // A comparison may have ended with another plan.
        if self.fit(number, &memory) {
            courses = self.kinds.courses(number, &self.objective, outset.provide, &memory);
        }
        self.memory.looked(&memory);
        if self.unseen.is_next(|| self.kinds.are_unseen(&self.objective, &courses)) {
            return StepPlan { saves: Saves::Leave, ..StepPlan::default() };
        }
        // What fits stays.
        let recomputed = match self.objective.goal.peak {
            Some(_) => Recomputed::PointwiseWithoutRoom,
            None => Recomputed::Nothing,
        };
        match courses.first() {
            Some(Course { budgets, .. }) => {
                let room = Room::Within(*budgets);
                // Recording takes time. What leaves its plan under a goal for the peak needs it.
                let unrecorded =
                    self.objective.goal.peak.is_none() && !self.kinds.recompute(number, &courses);
                let saves = Saves::Scheduled { courses, unplanned: headroom };
                StepPlan { saves, room, timed, recomputed, unrecorded, ..StepPlan::default() }
            }
            None => StepPlan { room: Room::Fitting(headroom), recomputed, ..StepPlan::default() },
        }
    }

    /// What is recomputed in step `number`, in which it is looked how steps go. Where a peak has a limit, as much less has to move; and to
    /// pin the host memory for it in the first steps takes longer than to make all of it again.
    fn recomputed(&self, number: u64) -> Recomputed {
        let Resources { release, host_pool, .. } = self.objective.resources;
        let is_to_pin = release == Release::InStreamOrder && host_pool > 0 && number <= FIRST_PROFILED;
        match self.objective.goal.peak {
            None => Recomputed::Nothing,
            Some(_) if is_to_pin => Recomputed::Everything,
            Some(_) => Recomputed::Pointwise,
        }
    }

    /// What may stay in a step without a plan, or of what a step saves that has no place in its plan.
    fn headroom(&self, memory: &Look<'_>) -> Headroom {
        match (self.objective.goal.peak, self.objective.resources.release) {
            (None, _) => Headroom::Free,
            (Some(_), Release::WhenStored) => Headroom::Bytes(self.headroom.min(memory.lately() / 2)),
            (Some(_), Release::InStreamOrder | Release::OnceWritten) => Headroom::Bytes(self.headroom),
        }
    }

    /// Holds plans to the memory that is free. Returns whether there are others now.
    fn fit(&mut self, number: u64, memory: &Look<'_>) -> bool {
        let is_held = self.objective.resources.release == Release::WhenStored && !self.kinds.is_empty();
        let plans = self.kinds.plans();
        if !is_held || !self.fitting.is_due(number, plans) {
            return false;
        }
        let limit = self.fitting.limit(number, self.objective.free, memory.now(), &self.kinds);
        if let Some(most) = limit {
            self.objective.free = most;
            self.kinds.fit(&self.objective);
        }
        self.fitting.looked(number, self.kinds.plans());
        self.kinds.plans() != plans
    }

    /// The room of a step in which it is looked how steps go. A device that copies to host memory shows that while it keeps what fits: how
    /// fast copies are can be tried out. Of a goal's peak, half is for that at first, and what turns out to be too much leaves in time. What
    /// writing to a disk costs shows only in a step in which everything moves.
    fn looking(&self, free: &dyn Fn() -> u64) -> Room {
        let Resources { release, host_pool, .. } = self.objective.resources;
        let bytes = match (release, self.objective.goal.peak) {
            (Release::InStreamOrder, None) if host_pool > 0 => return Room::Fitting(Headroom::Free),
            (Release::InStreamOrder, Some(_)) if host_pool > 0 => {
                return Room::Fitting(Headroom::Bytes(self.headroom.min(free() / 2)));
            }
            (Release::InStreamOrder | Release::OnceWritten, _) => 0,
            (Release::WhenStored, _) => (self.headroom / LOOKING).min(UNPLANNED_BYTES).min(free() / 2),
        };
        let budgets = Budgets {
            device_budget: bytes,
            backward_budget: bytes,
            prefetch: bytes / 2,
            ..Budgets::default()
        };
        Room::Within(budgets)
    }

    /// A step that followed its plan found no memory for part of it, so for a time plans have to do with less.
    fn pressed(&mut self, observed: &Observation) {
        self.scarcity.shown(observed.step);
        let [least, most] = LACKING.map(|parts| observed.peak / parts);
        let room = observed.peak.saturating_sub(observed.pressed.clamp(least, most));
        // Where it is not what plans keep that is too much, no other plan helps.
        if room >= self.objective.room {
            return;
        }
        self.objective.room = room;
        self.kinds.revise(&self.objective, Decision::Memory);
    }

    /// By how much a step's peak would have been higher, had it not let go of something for the goal's: in each micro-batch of as much. 0
    /// unless that is beyond the goal: then it was something else that had too little memory, if anything had.
    fn averted(&self, observed: &Observation) -> u64 {
        let &Observation { peak, pressed, at_ceiling, followed, ref profile, .. } = observed;
        let profiled = profile.as_ref().map_or(1.0, |profile| f64::from(profile.micro_batches.max(1)));
        let micro_batches = followed.map_or(profiled, |followed| followed.micro_batches.max(1.0));
        let averted = ((pressed as f64 / micro_batches) as u64).min(peak / LACKING[1]);
        let is_averted = at_ceiling && self.objective.goal.peak.is_some_and(|most| peak + averted > most);
        if is_averted { averted } else { 0 }
    }

    /// Whether a step did work that later ones need not repeat, so that its time says little.
    fn is_warming_up(&self, observed: &Observation) -> bool {
        let Observation { compiled, pinned, .. } = *observed;
        (compiled && self.compiled <= COMPILED)
            || (wanted_memory(observed) && self.wanting <= WANTING)
            || pinned
    }

    /// A step followed one of its courses; it gives a reason for a profile or not.
    fn followed(&mut self, course: &Course, is_timed: bool, followed: Followed, observed: &Observation) {
        let may_have_more = !self.kinds.is_full();
        let Some((kind, others)) = self.kinds.was_of(followed.course) else { return };
        let objective = &self.objective;
        let &Observation { step, peak, .. } = observed;
        let is_kept = course.is_baseline;
        // A plan for a peak is for steps of its size.
        let most_larger = if objective.goal.peak.is_some() { 0.0 } else { LARGER };
        kind.occurs(step);
        match followed.how {
            // It does work that later ones need not repeat, and makes the gradients that those find.
            Adherence::Whole(_) if step < FIRST_PROFILED => self.attempts.followed(),
            Adherence::Whole(_) | Adherence::Part | Adherence::Larger | Adherence::Altered => {
                let scale = kind.scale(&followed);
                if !course.is_interim {
                    kind.saw_height(course, &followed, observed);
                    kind.fitted(is_kept || followed.stayed_whole, followed.at_once, observed);
                }
                match (is_kept, is_timed) {
                    _ if course.is_interim => kind.passes_by(objective, peak),
                    (false, _) if followed.stayed_whole => kind.passes(),
                    (false, true) => kind.stepped(objective, scale, observed),
                    (false, false) => kind.peaked(objective, Planned::peak, peak),
                    (true, is_timed) => {
                        kind.peaked(objective, Planned::kept_peak, peak);
                        // One that began as steps of another kind do has not kept everything.
                        if observed.moved > 0 {
                            kind.spoils(objective, others);
                        } else if is_timed {
                            kind.kept(objective, scale, observed);
                        }
                    }
                }
                match followed.how {
                    // Steps that are never alike get along with the plans that there are.
                    Adherence::Altered if may_have_more => self.attempts.want(step),
                    Adherence::Altered => {}
                    // A plan for larger steps also serves those that it was made for until now.
                    how if kind.shrinks(&followed)
                        || how == Adherence::Larger && followed.size > most_larger =>
                    {
                        self.attempts.want(step);
                    }
                    _ => self.attempts.followed(),
                }
            }
            Adherence::Lost => {
                // One that saved something else says nothing of the others; but if all do, or memory is short, the comparison has to end.
                if !objective.compares || observed.pressed > 0 {
                    kind.compares_no_more(objective, others);
                }
                self.attempts.want(step);
            }
        }
    }
}

/// What may stay in steps without a plan until any have shown what else they need.
fn first_headroom(goal: Goal) -> u64 {
    goal.peak.unwrap_or(u64::MAX) / 2
}

/// Whether a step asked the device's driver for memory, or had too little.
fn wanted_memory(observed: &Observation) -> bool {
    observed.has_grown || observed.pressed > 0
}

impl Policy for Auto {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        self.objective.resources = outset.resources;
        self.objective.compares = outset.step <= COMPARED;
        let daily = self.objective.daily.as_mut();
        if daily.is_some_and(|daily| daily.begins(&outset.today)) {
            self.kinds.revise(&self.objective, Decision::Daily);
        }
        if self.scarcity.is_over(outset.step) {
            self.objective.room = u64::MAX;
            self.kinds.revise(&self.objective, Decision::MoreMemory);
        }
        if let Some(planned) = self.start.plan(&self.objective, outset.scope) {
            self.attempts.spare();
            self.kinds.take_over(planned);
        }
        let most_written = self.objective.daily.map(|daily| daily.left(&outset.today));
        StepPlan { most_written, most_peak: self.objective.goal.peak, ..self.next_step(outset) }
    }

    fn end(&mut self, plan: &StepPlan, mut observed: Observation) {
        let averted = self.averted(&observed);
        // The peak that it would have had counts.
        observed.peak += averted;
        let excess = self.objective.goal.peak.map_or(0, |most| observed.peak.saturating_sub(most));
        self.memory.ended(observed.wall, observed.pressed > 0);
        if observed.pressed > 0 {
            self.kinds.iter_mut().for_each(Kind::wants_memory);
        }
        self.compiled += u32::from(observed.compiled);
        self.wanting = if wanted_memory(&observed) { self.wanting + 1 } else { 0 };
        let is_lost = plan.saves != Saves::Leave
            && observed.followed.is_none_or(|followed| followed.how == Adherence::Lost);
        self.unseen.ended(observed.followed);
        self.steady = if is_lost || self.is_warming_up(&observed) { 0 } else { self.steady + 1 };
        if is_lost {
            // What had to go may have gone several times.
            let most = if averted > 0 { self.headroom / 2 } else { self.headroom };
            self.headroom -= excess.min(most);
        }
        self.start.ended(&observed);
        match (&plan.saves, observed.followed) {
            _ if plan.profiled => {
                self.attempts.made(observed.step, observed.profile.is_some());
                if let Some(profile) = observed.profile {
                    // What the first steps, which keep more, had no room for says little of what later ones save beside their plans.
                    if matches!(plan.room, Room::Fitting(_)) {
                        self.headroom = first_headroom(self.objective.goal);
                    }
                    self.kinds.profiled(&self.objective, observed.step, *profile);
                }
            }
            (Saves::Scheduled { courses, .. }, Some(followed)) => {
                if let Some(course) = courses.get(followed.course) {
                    // What it was to recompute has moved.
                    let is_another = plan.unrecorded && course.schedule.recomputes();
                    let is_timed = !is_another && !self.is_warming_up(&observed);
                    self.followed(course, is_timed, followed, &observed);
                }
                if observed.pressed > 0 && averted == 0 && !is_lost {
                    self.pressed(&observed);
                }
            }
            (Saves::Leave, _) if !self.is_warming_up(&observed) => {
                let objective = &self.objective;
                self.kinds.iter_mut().take(1).for_each(|kind| kind.unseen(objective, &observed));
            }
            _ => {}
        }
        let plans = self.kinds.plans();
        if std::mem::replace(&mut self.plans, plans) != plans {
            self.steady = 0;
        }
    }

    fn needs(&self) -> Needs {
        Needs { one_path: true, days: self.objective.daily.is_some(), ..Needs::default() }
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
        let is_timed = self.kinds.first().is_some_and(|kind| kind.watch.has_settled());
        !self.kinds.are_weighed() && (is_timed || self.steady >= STEADY)
    }

    fn warnings(&self, plan: &StepPlan, observed: &Observation) -> Vec<String> {
        let followed = observed.followed.filter(|followed| followed.how != Adherence::Lost);
        let course =
            followed.map(|followed| followed.course).or_else(|| (plan.saves == Saves::Leave).then_some(0));
        let planned = course.and_then(|course| Some(&self.kinds.get(course)?.planned));
        let mut warnings = self.start.warnings(observed);
        warnings.extend(self.objective.daily.and_then(|daily| daily.warning()));
        if planned.is_some_and(|planned| !planned.in_reach) {
            warnings
                .push("the goal of Auto is out of reach: the plan is what comes closest to it".to_owned());
        } else if self.objective.goal.step.is_some() && planned.is_some_and(Planned::keeps_all) {
            warnings.push(
                "Auto moves nothing: whatever left the device would make steps longer than the goal allows, or save little for what it takes"
                    .to_owned(),
            );
        }
        if let Some(most) = self.objective.goal.peak.filter(|most| observed.peak > *most) {
            let (peak, most) = (ByteSize(observed.peak), ByteSize(most));
            warnings.push(format!("the activation peak, {peak}, is beyond the goal of Auto, {most}"));
        }
        warnings
    }

    fn planning(&self, plan: &StepPlan, observed: &Observation) -> Option<Planning> {
        let planning = Planning::of(plan, observed.followed, observed.moved > 0);
        let is_early = planning == Planning::Without && observed.step < FIRST_PROFILED;
        Some(if is_early { Planning::Early } else { planning })
    }

    fn decisions(&mut self) -> Vec<Decision> {
        self.kinds.decisions()
    }

    fn report(&mut self, course: usize, name: &dyn Fn(ScopeId) -> String) -> Option<PolicyReport> {
        let plans = self.kinds.plans();
        let kind = self.kinds.get_mut(course)?;
        Some(PolicyReport::Plan(kind.planned.report(plans, name)))
    }

    /// The profile that this plan was made from.
    fn profile(&self, name: &dyn Fn(ScopeId) -> String) -> Option<Profile> {
        let Planned { profile, machine, .. } = &self.kinds.first()?.planned;
        let micro_batches = NonZero::new(profile.micro_batches).unwrap_or(NonZero::<u32>::MIN);
        let names = Labels::new(profile, name).names();
        Some(Profile { workload: profile.work.clone(), micro_batches, machine: *machine, names })
    }

    fn saved_plan(&self, name: &dyn Fn(ScopeId) -> String) -> Option<SavedPlan> {
        let planned = &self.kinds.first()?.planned;
        // Other runs may have the memory that this one lacks.
        let elsewhere = Objective { room: u64::MAX, free: u64::MAX, ..self.objective };
        if elsewhere == self.objective {
            return Some(SavedPlan::of(planned, &self.objective, name));
        }
        let Planned { profile, machine, corrections, .. } = planned.clone();
        Some(SavedPlan::of(&Planned::new(&elsewhere, profile, machine, corrections), &elsewhere, name))
    }
}

#[cfg(test)]
mod tests;
