//! The steps of one kind: their plan, and what was seen of it.

mod courses;
mod heights;
mod judging;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use self::courses::Interim;
use self::heights::Heights;
use self::judging::first_weighing;
use super::corrections::Corrections;
use super::cost::{Told, Weight};
use super::decisions::Decision;
use super::disk_watch::DiskWatch;
use super::objective::Objective;
use super::planned::Planned;
use super::shown::Shown;
use super::sizes::KeptSizes;
use super::watch::{Seen, Watch};
use super::weighing::Weighing;
use super::{Adherence, Course, Followed, Observation};
use crate::Placement;
use crate::schedule::Schedule;
use crate::step_profile::{COUNTED_ON, StepProfile};

/// The share of the device's free memory that a step that keeps everything may take, or a planned one.
pub(super) const FITTING: f64 = 0.9;
/// Of a step that is not looked at nothing can leave, so it may become so many times as large.
const AMPLE: u64 = 2;
/// A device that has this share of a step still to compute when its program is done with it does not wait for that.
const BEHIND: f64 = 0.02;
/// Steps that save fewer than this many times the planned bytes may be worth a plan of their own.
const SMALL: f64 = 0.75;

/// Where steps vary in size, some may be so many times as large as any before.
pub(super) const LARGER_STILL: f64 = 1.25;
/// Sizes that differ by more than this share vary.
const VARIED: f64 = 0.02;
/// Steps that take or save more than so many times what is planned are judged as if it were no more.
const MOST_SCALE: f64 = 1e3;
/// Those that did not occur in as many steps are not waited for.
pub(super) const RECENT: u64 = 16;
/// For so many steps after one whose first storages did not tell how much was open after them, those of others do not either.
const UNTOLD: u64 = 512;

/// The steps of one kind, which save the same things in the same order.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    pub(super) planned: Planned,
    /// Follows its steps and keeps everything.
    kept: Arc<Schedule>,
    pub(super) watch: Watch,
    disk_watch: DiskWatch,
    pub(super) weighing: Option<Weighing>,
    /// What steps took that kept everything, in the last comparison, and whether only those of other sizes than planned have told what one
    /// of the planned size takes.
    kept_sizes: KeptSizes,
    is_told_by_others: bool,
    /// How many times what is planned the largest step had open at once that kept everything and found memory for it.
    fitted: f64,
    /// Its steps have become smaller for good, so a profile of them replaces that of larger ones.
    pub(super) smaller: bool,
    /// How many times what is planned its largest step had open at once.
    largest: f64,
    /// The same of the largest micro-batch, and whether these vary in size.
    widest: f64,
    varies: bool,
    heights: Heights,
    /// The last step whose first storages did not tell how much was open after them: it left out or repeated something, or grew, or several
    /// micro-batches were open at once.
    untold: Option<u64>,
    /// Whether not even the lowest peak fitted the memory that was free when it was planned last for that.
    pub(super) is_lowest: bool,
    /// What steps do while host memory is provided for the plan with this number, within this peak.
    interim: Option<((u64, u64), Option<Interim>)>,
    /// How many plans there were.
    pub(super) plans: u64,
    /// The last step that was of this kind, and the most from one to the next.
    pub(super) last: u64,
    most_apart: u64,
    /// What has become of its plans since somebody asked.
    pub(super) decisions: Vec<Decision>,
}

impl Kind {
    /// Those that `profile` is of. Where no step keeps everything to show what that takes, what `others` have shown has to do.
    pub(super) fn profiled(objective: &Objective, profile: StepProfile, others: Option<&Shown>) -> Kind {
        let machine = profile.machine(&objective.resources);
        let mut planned = Planned::new(objective, profile, machine, Corrections::default());
        if let Some(others) = others.filter(|_| !objective.compares) {
            planned.takes_over(objective, others);
            let Planned { profile, machine, corrections, .. } = planned;
            planned = Planned::new(objective, profile, machine, corrections);
        }
        Kind { weighing: first_weighing(objective, &planned), ..Kind::new(planned) }
    }

    /// Its plans were not compared, so what `others` have shown has to do.
    fn takes_over(&mut self, objective: &Objective, others: Option<&Shown>) {
        if let Some(others) = others {
            let why = if others.is_compared() { Decision::Baseline } else { Decision::Unproven };
            self.revise(objective, why, |planned| planned.takes_over(objective, others));
        }
    }

    /// Those that are planned like this.
    pub(super) fn new(planned: Planned) -> Kind {
        let profile = &planned.profile;
        let kept = Arc::new(keeping(profile));
        Kind {
            planned,
            kept,
            watch: Watch::default(),
            disk_watch: DiskWatch::default(),
            weighing: None,
            kept_sizes: KeptSizes::default(),
            is_told_by_others: false,
            fitted: 0.0,
            smaller: false,
            largest: 1.0,
            widest: 1.0,
            varies: false,
            heights: Heights::default(),
            untold: None,
            is_lowest: false,
            interim: None,
            plans: 1,
            last: 0,
            most_apart: 0,
            decisions: Vec::new(),
        }
    }

    /// The sizes of these saves of its profile go with no other's.
    pub(super) fn varies_in(&mut self, saves: &BTreeSet<usize>) {
        let Planned { profile, plan, schedule, .. } = &mut self.planned;
        profile.varying = saves.iter().copied().collect();
        *schedule = Arc::new(profile.schedule(&plan.placements));
        self.kept = Arc::new(keeping(profile));
        self.interim = None;
    }

    /// What steps took that kept everything, by the bytes that they saved, unless they wait for their launches whatever their size.
    pub(super) fn shows_kept(&self) -> Vec<(u64, Duration)> {
        if self.planned.waits() {
            return Vec::new();
        }
        let sizes = self.weighing.as_ref().map(Weighing::kept_sizes).filter(|sizes| !sizes.is_empty());
        let sizes = sizes.as_ref().unwrap_or(&self.kept_sizes);
        let bytes = |scale: f64| (scale * self.planned.saved_bytes as f64) as u64;
        let shown = |(scale, seconds)| Some((bytes(scale), Duration::try_from_secs_f64(seconds).ok()?));
        sizes.all().filter_map(shown).collect()
    }

    /// Whether its next steps go as without a cache if this is their course: everything is kept, they do not vary, and nothing is to be
    /// learned from them.
    pub(super) fn is_unseen(&self, objective: &Objective, course: &Course) -> bool {
        let is_done = !objective.compares && !self.settles() && self.watch.has_settled();
        is_done && !course.is_baseline && self.has_ample(course.in_graph) && !self.varies
    }

    /// Whether steps that keep everything need only a part of these bytes.
    pub(super) fn has_ample(&self, in_graph: u64) -> bool {
        in_graph > 0 && AMPLE.saturating_mul(self.largest_kept_peak()) <= in_graph
    }

    /// The activation peak of the largest step seen as its plan has it.
    pub(super) fn largest_peak(&self) -> u64 {
        let planned = self.planned.peak() as f64 * self.largest;
        (planned as u64).saturating_add(self.planned.corrections.unforeseen.bytes())
    }

    /// The activation peak of the largest step seen if it kept everything.
    fn largest_kept_peak(&self) -> u64 {
        let kept = self.planned.kept_peak() as f64 * self.largest;
        (kept as u64).saturating_add(self.planned.corrections.unforeseen.bytes())
    }

    /// The highest peak of the last steps before `step` that went as planned.
    pub(super) fn highest(&mut self, step: u64) -> u64 {
        self.heights.highest(step)
    }

    /// Up to which size its micro-batches need not move anything in step `step`, since another has a peak of `highest` anyway, and there is
    /// memory for that. It is not so before the plan was compared or timed, and no peak of a goal is left to what is known of sizes.
    pub(super) fn whole_up_to(&self, objective: &Objective, step: u64, highest: u64) -> f64 {
        let is_known = !objective.compares && self.weighing.is_none() && self.watch.has_settled();
        if !is_known || objective.goal.peak.is_some() || self.is_untold(step) {
            return 0.0;
        }
        let (kept, besides) = (self.planned.kept_peak(), self.planned.besides_activations());
        self.heights.size_within(step, highest.min(objective.most_peak()), kept, besides)
    }

    /// Whether the first storages of one of the last steps before `step` did not tell how much is open after them.
    fn is_untold(&self, step: u64) -> bool {
        self.untold.is_some_and(|untold| step <= untold + UNTOLD)
    }

    /// Takes note of how high a step was that followed one of its courses.
    pub(super) fn saw_height(&mut self, course: &Course, followed: &Followed, observed: &Observation) {
        let &Followed { how, at_once, one_by_one, stayed_whole, outgrew, .. } = followed;
        let &Observation { step, peak, pressed, .. } = observed;
        if how == Adherence::Altered || outgrew || !one_by_one {
            self.untold = Some(step);
        }
        if pressed > 0 || self.is_untold(step) {
            return;
        }
        if course.is_baseline || stayed_whole || self.planned.keeps_all() {
            self.heights.saw_kept(step, at_once, peak);
        } else {
            let most = self.planned.peak() as f64 * at_once.max(1.0);
            self.heights.saw_planned(step, peak.min(most as u64));
        }
    }

    /// Step `number` was of this kind.
    pub(super) fn occurs(&mut self, number: u64) {
        self.most_apart = self.most_apart.max(number.saturating_sub(self.last));
        self.last = number;
    }

    /// Whether step `number` may be of this kind, by how often it occurs.
    pub(super) fn is_expected(&self, number: u64) -> bool {
        number <= self.last + self.most_apart.saturating_mul(2).max(RECENT)
    }

    /// A step was so small that it kept everything, so its time shows nothing of the plan.
    pub(super) fn passes(&mut self) {
        self.watch.passes();
    }

    /// No more of its steps keep everything: what they have shown until now has to do, if it tells of the plan. Without a result, it is not
    /// known what that takes, but it may clearly be too much. Returns whether the comparison has ended so.
    pub(super) fn concludes(&mut self, objective: &Objective) -> bool {
        let Some(weighing) = &self.weighing else { return false };
        let allowed = objective.step().map(|most| most - 1.0 + objective.spare());
        let so_far =
            || weighing.so_far().filter(|weight| allowed.is_some_and(|most| weight.is_far_beyond(most)));
        let told = weighing.last.or_else(so_far);
        let kept_sizes = weighing.kept_sizes();
        if !kept_sizes.is_empty() {
            self.kept_sizes = kept_sizes;
        }
        told.inspect(|weight| self.weigh(objective, *weight, true)).is_some()
    }

    /// The same, and if they have not, what others have shown has to do.
    fn conclude(&mut self, objective: &Objective, others: Option<&Shown>) {
        let Some(weighing) = &self.weighing else { return };
        let seen = weighing.seen;
        if self.concludes(objective) {
            return;
        }
        self.weighing = None;
        if self.returns_to_proven(objective) {
            return;
        }
        // The steps of a new plan are timed without it.
        let Some(seen) = seen else { return self.takes_over(objective, others) };
        match objective.most_time() {
            Some(most) => self.judge_alone(objective, seen, most),
            None => self.correct(objective, seen),
        }
    }

    /// Whether the next of its steps is timed to its very end.
    pub(super) fn settles(&self) -> bool {
        self.watch.settles() || self.weighing.is_some()
    }

    /// Whether so many steps in a row were much smaller than planned, with this one, that they have changed for good.
    pub(super) fn shrinks(&mut self, followed: &Followed) -> bool {
        let is_small = followed.how == Adherence::Part && followed.size < SMALL;
        self.smaller |= self.watch.partial(is_small);
        is_small && self.smaller
    }

    /// A step has ended, timed or not, that kept everything for comparison or went as planned.
    pub(super) fn fitted(&mut self, is_kept: bool, at_once: f64, observed: &Observation) {
        if is_kept || self.planned.keeps_all() {
            self.fitted = if observed.pressed == 0 { self.fitted.max(at_once.min(MOST_SCALE)) } else { 0.0 };
        }
    }

    /// A step, of this kind or another, found too little memory.
    pub(super) fn wants_memory(&mut self) {
        self.fitted = 0.0;
    }

    /// None of its steps are compared with others any more, whatever they have shown.
    pub(super) fn compares_no_more(&mut self, objective: &Objective, others: Option<&Shown>) {
        if self.weighing.take().is_some() && !self.returns_to_proven(objective) {
            self.takes_over(objective, others);
        }
    }

    /// A step that was to keep everything has not.
    pub(super) fn spoils(&mut self, objective: &Objective, others: Option<&Shown>) {
        if self.weighing.as_mut().is_some_and(Weighing::spoils) {
            self.compares_no_more(objective, others);
        }
    }

    /// Follows the plan again that was seen to keep its goal, if the present one is to take more, and nothing has shown what it does take.
    fn returns_to_proven(&mut self, objective: &Objective) -> bool {
        let has_proven = self.planned.corrections.returns_to_proven();
        if has_proven {
            self.revise(objective, Decision::Unproven, |_| {});
        }
        has_proven
    }

    /// A step that kept everything has ended, and has saved `scale` times what is planned.
    pub(super) fn kept(&mut self, objective: &Objective, scale: f64, observed: &Observation) {
        let Some(weighing) = self.weighing.as_mut() else { return };
        weighing.keeps(observed.step);
        if observed.launched {
            return;
        }
        let is_behind = &mut self.planned.corrections.is_behind;
        let before = *is_behind;
        if observed.behind > observed.wall.mul_f64(BEHIND) {
            *is_behind = Some(true);
        } else if observed.is_told && before.is_none() {
            *is_behind = Some(false);
        }
        if before == Some(false) && *is_behind == Some(true) {
            // What steps take goes with their size after all, and what the program's thread does for a plan does not show.
            let begun = Weighing::new(weighing.seen, weighing.cost);
            self.revise(objective, Decision::Baseline, Planned::shows_waiting);
            self.weighing = Some(begun);
        }
        let Some(weighing) = &mut self.weighing else { return };
        let scale = if self.planned.waits() { 1.0 } else { scale };
        let clock = observed.clock.filter(|_| !self.planned.waits());
        weighing.idle = self.planned.idle();
        let weight = weighing.kept(observed.wall.div_f64(scale), scale, clock);
        if let Some(told) = weighing.begins_with() {
            self.keeps_in(objective, told);
        }
        self.weighed(objective, weight);
    }

    /// A step of the comparison has ended. Where sizes tell nothing of each other, it ends without a result.
    fn weighed(&mut self, objective: &Objective, weight: Option<Weight>) {
        if let Some(weight) = weight {
            self.weigh(objective, weight, false);
        } else if let Some(weighing) = self.weighing.take_if(|weighing| weighing.is_long()) {
            self.kept_sizes = weighing.kept_sizes();
            self.watch.compared();
            if !self.returns_to_proven(objective) {
                self.revise(objective, Decision::Unproven, Planned::stays_unproven);
            }
        }
    }

    /// This was told of steps that keep everything. Beside the profiled step, which moved everything, it shows what moving costs, so the
    /// plan is made anew before any of its steps is compared.
    fn keeps_in(&mut self, objective: &Objective, told: Told) {
        let Some(kept) = self.kept_by(told) else { return };
        let weighing = self.weighing.take();
        if self.planned.shows_moving(kept) {
            self.revise(objective, Decision::Baseline, |_| {});
            // One profile is not enough to keep everything for good.
            if self.planned.keeps_all() {
                self.revise(objective, Decision::Baseline, Planned::doubt_moving);
            }
        }
        let known = self.planned.corrections.cost.unwrap_or_else(|| self.planned.first_cost());
        self.weighing = weighing.filter(|_| !self.planned.keeps_all());
        if let Some(weighing) = &mut self.weighing {
            weighing.cost = known;
        }
    }

    /// How long a step of the planned size takes that keeps everything, if these tell. Those of other sizes tell it only where none of that
    /// size has, and only that it takes less than is known: what does not go with the size, such as launching, makes small ones seem longer.
    fn kept_by(&mut self, told: Told) -> Option<Duration> {
        let is_known = self.planned.corrections.is_measured && !self.is_told_by_others;
        let is_told = told.is_of_size || (!is_known && told.wall < self.planned.kept_step());
        if is_told {
            self.is_told_by_others = !told.is_of_size;
        }
        is_told.then_some(told.wall)
    }

    /// How many times what is planned a step has saved that went like this, all its micro-batches together.
    pub(super) fn scale(&mut self, followed: &Followed) -> f64 {
        let scale = followed.micro_batches / f64::from(self.planned.profile.micro_batches.max(1));
        let scale = scale.clamp(1.0 / MOST_SCALE, MOST_SCALE);
        self.largest = self.largest.max(followed.at_once.min(MOST_SCALE));
        self.widest = self.widest.max(followed.size.min(MOST_SCALE));
        self.varies |= is_varied(followed.size);
        scale
    }

    /// A step that followed its plan has ended, and has saved `scale` times what is planned.
    pub(super) fn stepped(&mut self, objective: &Objective, scale: f64, observed: &Observation) {
        let Planned { machine, .. } = &self.planned;
        let rates = [(observed.written, machine.disk_write), (observed.read, machine.disk_read)];
        let known = rates.map(|(seen, counted_on)| {
            seen.filter(|_| counted_on.is_finite()).map(|seen| seen * COUNTED_ON / counted_on)
        });
        let (disk, plans) = (self.disk_watch.saw(known), self.plans);
        self.peaked(objective, Planned::peak, observed.peak);
        if let Some([written, read]) = disk {
            self.revise(objective, Decision::DiskRate, |planned| {
                planned.machine.disk_write *= written;
                planned.machine.disk_read *= read;
                planned.corrections.forget_stalls();
            });
        }
        if self.plans == plans {
            let scale = if self.planned.waits() { 1.0 } else { scale };
            // Other sizes take another time for each byte.
            let is_whole =
                observed.followed.is_some_and(|followed| matches!(followed.how, Adherence::Whole(_)));
            let rerun = observed.rerun.filter(|rerun| is_whole && !is_varied(scale) && !rerun.is_zero());
            // Without the cache, a step would not take what it takes to begin one. Where no such step is known, it would be taken for computing.
            let counts = self.planned.corrections.knows_kept() && !self.planned.keeps_all();
            let overhead = if counts { observed.overhead } else { Duration::ZERO };
            // Only where it is one thread's, and on a device that does not wait for its program, steps are longer by all that they wait.
            let is_one_wait = observed.clock.is_some() && rerun.is_some() && !self.planned.waits();
            let spared = self.weighing.as_mut().filter(|_| is_one_wait);
            let spared = spared.map(|weighing| weighing.spared(observed.step, scale, observed.device_stall));
            let spared = spared.unwrap_or_default();
            let [wall, stall, device_stall] = [observed.wall, observed.stall, observed.device_stall]
                .map(|time| time.saturating_sub(spared).div_f64(scale));
            let wall = wall + overhead;
            // How long launching takes is not what steps take that are timed to their ends, and does not go with the size.
            match observed.launched && (is_varied(scale) || self.settles()) {
                true => self.watch.rests(),
                false => {
                    // One that waits for its program takes as long at any clock.
                    let clock = observed.clock.filter(|_| !self.planned.waits());
                    self.timed(objective, Timed { wall, stall, device_stall, rerun, scale, clock });
                }
            }
        }
    }

    /// The same of one that went as without a cache. It is taken to be like those that were seen.
    pub(super) fn unseen(&mut self, objective: &Objective, observed: &Observation) {
        match self.settles() {
            true => self.watch.rests(),
            false => {
                let Observation { wall, stall, device_stall, .. } = *observed;
                let timed = Timed { wall, stall, device_stall, rerun: None, scale: 1.0, clock: None };
                self.timed(objective, timed);
            }
        }
    }

    /// A step of the present plan was timed.
    fn timed(&mut self, objective: &Objective, timed: Timed) {
        let Timed { wall, stall, device_stall, rerun, scale, clock } = timed;
        if let Some(weighing) = &mut self.weighing {
            let took = rerun.and_then(|rerun| weighing.reran(rerun));
            let shown = rerun.map(|rerun| rerun + stall);
            weighing.idle = self.planned.idle();
            let weight = weighing.planned(wall, scale, clock, device_stall, shown);
            match took.filter(|_| self.planned.shows_reruns()) {
                Some(took) if self.reruns_took(objective, took) => {}
                _ => self.weighed(objective, weight),
            }
        } else if let Some(wall) = self.as_if_planned(wall, scale) {
            if let Some(seen) = self.watch.observe(wall, stall) {
                self.judge(objective, seen);
            }
        } else {
            self.watch.rests();
        }
    }

    /// What a step of the planned size takes if it takes as many times as long as one that keeps everything as this one. Where no step of
    /// its size has shown that, what a step takes is believed to go with its size, unless only other sizes have told anything: `None` then.
    fn as_if_planned(&self, wall: Duration, scale: f64) -> Option<Duration> {
        if !is_varied(scale) && !self.is_told_by_others {
            return Some(wall);
        }
        let Some(kept) = self.kept_sizes.take(scale) else {
            return (!self.is_told_by_others).then_some(wall);
        };
        let times = wall.as_secs_f64() / kept.max(f64::MIN_POSITIVE);
        Some(self.planned.kept_step().mul_f64(times.min(MOST_SCALE)))
    }

    /// Takes note of a step's peak. If it exceeds the goal, plans from now on aim lower by as much as the peak exceeded the planned one,
    /// until no such excess has occurred for a while.
    pub(super) fn peaked(
        &mut self,
        objective: &Objective,
        planned_peak: impl Fn(&Planned) -> u64,
        peak: u64,
    ) {
        let Some(most) = objective.goal.peak else { return };
        let expected = planned_peak(&self.planned);
        if self.planned.corrections.unforeseen.saw(expected, peak, peak > most) {
            self.revise(objective, Decision::Peak, |_| {});
        }
    }

    /// Plans again after `change`. If steps will go as before, the result does not count as another plan.
    pub(super) fn revise(&mut self, objective: &Objective, why: Decision, change: impl FnOnce(&mut Planned)) {
        change(&mut self.planned);
        self.is_lowest = false;
        let Planned { profile, corrections, machine, .. } = &mut self.planned;
        let (profile, machine) = (std::mem::take(profile), *machine);
        let corrections = std::mem::take(corrections);
        let revised = Planned::new(&self.of_largest(objective), profile, machine, corrections);
        let Planned { plan, schedule, .. } = &self.planned;
        if (revised.plan.budgets, &revised.schedule) != (plan.budgets, schedule) {
            self.plans += 1;
            self.decisions.push(why);
            self.watch.planned();
            self.weighing = first_weighing(objective, &revised);
            if revised.peak() < self.planned.peak() {
                self.heights.is_lowered();
            }
        }
        self.planned = revised;
    }

    /// Whether a plan for `most` bytes would be the same again, which does not fit.
    pub(super) fn fits_in_vain(&self, most: u64) -> bool {
        self.is_lowest && self.largest_peak() > most
    }

    /// The objective of a step of the planned size, if there is to be memory for the largest ones that were seen, too.
    fn of_largest(&self, objective: &Objective) -> Objective {
        match objective.free {
            u64::MAX => *objective,
            free => Objective { free: (free as f64 / self.largest.max(1.0)) as u64, ..*objective },
        }
    }
}

/// What a step of a plan took, for as much as is planned.
#[derive(Clone, Copy)]
struct Timed {
    wall: Duration,
    /// The parts of it in which it waited and recomputed, as far as the latter is known.
    stall: Duration,
    rerun: Option<Duration>,
    /// The part in which the device waited.
    device_stall: Duration,
    /// How many times what is planned it saved.
    scale: f64,
    /// Cycles of the device in a second, if that is known.
    clock: Option<f64>,
}

/// Whether a step has another size than planned.
fn is_varied(scale: f64) -> bool {
    (scale - 1.0).abs() > VARIED
}

/// Whether steps may keep everything for comparison, if these were the reason.
fn may_compare(objective: &Objective, seen: Option<Seen>) -> bool {
    objective.compares || seen.is_some_and(|seen| seen.is_strange)
}

/// The schedule of steps that keep everything.
fn keeping(profile: &StepProfile) -> Schedule {
    profile.schedule(&vec![Placement::Keep; profile.work.activations.len()])
}
