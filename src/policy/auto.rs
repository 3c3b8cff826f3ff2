//! Planned steps: when to profile, what to plan for, and when a plan is no longer valid. Pure.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_plan::{Budgets, Machine, Plan, Release};

use super::attempts::{Attempts, FIRST_PROFILED};
use super::planned::{Corrections, Objective, Planned};
use super::schedule::{Adherence, Schedule};
use super::watch::{Drift, SETTLING, Seen, Watch};
use crate::profile::Profile;
use crate::telemetry::{PlanReport, Scopes};

/// Bytes that storages may occupy on the device in a profiled step if they are released when stored. If they leave as late as possible,
/// it is 0, because what stays shows no bandwidth.
const UNPLANNED_BYTES: u64 = 512 << 20;
/// The share of a measured bandwidth that a plan relies on.
const COUNTED_ON: f64 = 0.9;
/// If computing takes longer or shorter than planned by more than this share, the profile's times are corrected. A device that waits
/// between its kernels, as in a profiled step, may run faster than one that does not.
const TELLING_PACE: f64 = 0.02;
/// Unplanned stalls of more than this share of the step justify another plan.
const TELLING_STALL: f64 = 0.002;
/// Steps count as exceeding their goal only beyond this share of it.
const TELLING_OVER: f64 = 0.005;
/// How often a profile is corrected without a baseline.
const CORRECTIONS: u32 = 4;
/// A baseline is the median of at most this many of the latest steps that kept everything.
const BASELINE: usize = 3 * SETTLING;
/// The share of the device's free memory that a step that keeps everything may take.
const FITTING: f64 = 0.9;

/// How the next step is run.
#[derive(Clone, Debug)]
pub(crate) enum NextStep {
    /// Everything moves; the step is profiled if `profiled`.
    OffloadAll { profiled: bool, budgets: Budgets },
    /// What fits stays.
    Keep { headroom: Headroom },
    /// Everything stays, for comparison with planned steps.
    Baseline,
    /// As planned. From the first save that deviates from the plan on, what fits stays.
    Follow { schedule: Arc<Schedule>, budgets: Budgets, headroom: Headroom },
}

/// How much storages without a plan may occupy on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Headroom {
    /// This many bytes.
    Bytes(u64),
    /// The free memory that the rest of a step does not need.
    Free,
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Observed {
    pub(crate) wall: Duration,
    /// The part of `wall` in which it waited for the cache.
    pub(crate) stall: Duration,
    /// The activation peak, in bytes.
    pub(crate) peak: u64,
    /// The disk's bytes per second while it was busy, if it moved enough to measure that.
    pub(crate) written: Option<f64>,
    pub(crate) read: Option<f64>,
}

/// How a step went, compared with its plan.
#[derive(Clone, Debug)]
pub(crate) enum StepOutcome {
    /// Nothing was planned.
    Unplanned,
    /// Nothing was planned, and the step was profiled. Contains the profile if enough was seen.
    Profiled(Option<Profile>),
    /// It kept everything.
    Baseline,
    Planned(Adherence),
}

/// The current plan, and how well steps follow it.
#[derive(Debug)]
pub(crate) struct Auto {
    objective: Objective,
    planned: Option<Planned>,
    watch: Watch,
    attempts: Attempts,
    weighing: Option<Weighing>,
    /// Steps have become smaller for good, so a profile of them replaces that of larger ones.
    smaller: bool,
    /// Bytes that may stay in a step without a plan, so that its peak meets the goal.
    headroom: u64,
    plans: u64,
}

/// Steps that keep everything are being run, for comparison with those of the plan.
#[derive(Debug)]
struct Weighing {
    seen: Seen,
    walls: Vec<Duration>,
}

impl Auto {
    pub(crate) fn new(objective: Objective) -> Auto {
        Auto {
            objective,
            planned: None,
            watch: Watch::default(),
            attempts: Attempts::new(),
            weighing: None,
            smaller: false,
            headroom: objective.goal.peak.unwrap_or(u64::MAX) / 2,
            plans: 0,
        }
    }

    /// How to run step `number`, on a device with `free` bytes of free memory.
    pub(crate) fn next_step(&mut self, number: u64, free: impl FnOnce() -> u64) -> NextStep {
        let profiled = self.attempts.is_due(number);
        if profiled || number < FIRST_PROFILED {
            return NextStep::OffloadAll { profiled, budgets: self.looking() };
        }
        let headroom = self.objective.goal.peak.map_or(Headroom::Free, |_| Headroom::Bytes(self.headroom));
        if let (Some(Weighing { seen, .. }), Some(planned)) = (&self.weighing, &self.planned) {
            let (seen, peak) = (*seen, planned.kept_peak() + planned.corrections.unforeseen.bytes());
            if peak <= self.objective.goal.peak.unwrap_or(u64::MAX) && peak as f64 <= FITTING * free() as f64
            {
                return NextStep::Baseline;
            }
            self.weighing = None;
            self.correct(seen);
        }
        match &self.planned {
            Some(Planned { plan, schedule, .. }) => {
                NextStep::Follow { schedule: Arc::clone(schedule), budgets: plan.budgets, headroom }
            }
            None => NextStep::Keep { headroom },
        }
    }

    /// The budgets of a step in which everything moves.
    fn looking(&self) -> Budgets {
        let bytes = match self.objective.release {
            Release::InStreamOrder | Release::OnceWritten => 0,
            Release::WhenStored => self.headroom.min(UNPLANNED_BYTES),
        };
        Budgets { device_budget: bytes, backward_budget: bytes, prefetch: bytes / 2, ..Budgets::default() }
    }

    /// Whether the next step is timed to its very end.
    pub(crate) fn settles(&self) -> bool {
        self.planned.is_some() && (self.watch.settles() || self.weighing.is_some())
    }

    /// Whether there is a plan that was followed long enough to be corrected, if necessary.
    pub(crate) fn is_settled(&self) -> bool {
        self.planned.is_some() && self.watch.has_settled() && self.weighing.is_none()
    }

    /// Step `number` has ended.
    pub(crate) fn ended(&mut self, number: u64, went: StepOutcome, observed: Observed) {
        let excess = self.objective.goal.peak.map_or(0, |most| observed.peak.saturating_sub(most));
        match went {
            StepOutcome::Unplanned => self.headroom = self.headroom.saturating_sub(excess),
            StepOutcome::Profiled(profile) => {
                self.headroom = self.headroom.saturating_sub(excess);
                self.attempts.made(number, profile.is_some());
                if let Some(profile) = profile {
                    self.profiled(profile);
                }
            }
            StepOutcome::Baseline => {
                let plans = self.plans;
                self.peaked(Planned::kept_peak, observed.peak);
                if self.plans == plans {
                    self.weighed(observed.wall);
                } else {
                    self.weighing = None;
                }
            }
            StepOutcome::Planned(Adherence::Lost) => {
                self.headroom = self.headroom.saturating_sub(excess);
                self.attempts.want(number);
            }
            StepOutcome::Planned(Adherence::Whole(micro_batches)) if self.is_whole(micro_batches) => {
                self.attempts.followed();
                self.stepped(observed);
            }
            StepOutcome::Planned(_) => {
                self.attempts.followed();
                self.peaked(Planned::peak, observed.peak);
                if self.watch.partial() {
                    self.smaller = true;
                    self.attempts.want(number);
                }
            }
        }
    }

    /// Whether a step of `micro_batches` micro-batches is like the profiled one.
    fn is_whole(&self, micro_batches: u32) -> bool {
        self.planned.as_ref().is_some_and(|planned| planned.profile.micro_batches == micro_batches)
    }

    fn profiled(&mut self, profile: Profile) {
        let moves = &profile.moves;
        let counted_on = |rate: Option<f64>| rate.map_or(f64::INFINITY, |rate| COUNTED_ON * rate);
        let machine = Machine {
            copy_out: counted_on(moves.out),
            copy_in: counted_on(moves.back),
            disk_write: counted_on(moves.written),
            disk_read: counted_on(moves.read.or(moves.written)),
            host_pool: self.objective.host_pool,
            release: self.objective.release,
        };
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
    fn stepped(&mut self, observed: Observed) {
        let Some(Planned { machine, .. }) = &self.planned else { return };
        let rates = [(observed.written, machine.disk_write), (observed.read, machine.disk_read)];
        let known = rates.map(|(seen, counted_on)| seen.map(|seen| seen * COUNTED_ON / counted_on));
        let (drift, plans) = (self.watch.observe(observed.wall, observed.stall, known), self.plans);
        self.peaked(Planned::peak, observed.peak);
        match drift {
            Some(Drift::Settled(seen)) if self.plans == plans => self.judge(seen),
            Some(Drift::Disk([written, read])) => {
                self.watch.disk_known();
                self.revise(|planned| {
                    planned.machine.disk_write *= written;
                    planned.machine.disk_read *= read;
                    planned.corrections.forget_stalls();
                });
            }
            Some(Drift::Settled(_)) | None => {}
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

    /// Judges a plan by the times of its steps. If the goal is a time and it is not clear that they meet it, some steps that keep
    /// everything follow for comparison, because a plan may cost more than its compute time shows.
    fn judge(&mut self, seen: Seen) {
        let Some(planned) = &self.planned else { return };
        let is_paced = (planned.pace(seen) - 1.0).abs() <= TELLING_PACE;
        let is_measured = !planned.corrections.baseline.is_empty();
        match self.objective.goal.step {
            Some(_) if planned.keeps_all() && is_paced => {}
            Some(_) if planned.keeps_all() => self.weigh(seen, &[seen.wall]),
            Some(most) => {
                let over = is_over(seen, most, planned.kept_step());
                let is_news = if is_measured { seen.is_strange } else { !is_paced && seen.is_news() };
                if over || is_news {
                    self.weighing = Some(Weighing { seen, walls: Vec::new() });
                }
            }
            None if seen.is_news() => self.correct(seen),
            None => {}
        }
    }

    /// A step that kept everything took `wall`.
    fn weighed(&mut self, wall: Duration) {
        let Some(weighing) = &mut self.weighing else { return };
        weighing.walls.push(wall);
        if let Some(Weighing { seen, walls }) =
            self.weighing.take_if(|weighing| weighing.walls.len() == SETTLING)
        {
            self.weigh(seen, &walls);
        }
    }

    /// Steps that kept everything took `walls`, and those of the plan `seen`, so the time of computing is known now. A plan that exceeds
    /// the goal is loosened.
    fn weigh(&mut self, seen: Seen, walls: &[Duration]) {
        let Some(planned) = &mut self.planned else { return };
        let baseline = &mut planned.corrections.baseline;
        let is_first = baseline.is_empty();
        if seen.is_strange {
            baseline.clear();
        }
        baseline.extend(walls);
        baseline.drain(..baseline.len().saturating_sub(BASELINE));
        let kept = middle(baseline);
        let pace = kept.as_secs_f64() / planned.kept_step().as_secs_f64().max(f64::MIN_POSITIVE);
        let over =
            !planned.keeps_all() && self.objective.goal.step.is_some_and(|most| is_over(seen, most, kept));
        if over || is_first || (pace - 1.0).abs() > TELLING_PACE {
            self.revise(|planned| {
                planned.profile.work.pace(pace);
                if over {
                    planned.corrections.raise(&planned.plan);
                }
            });
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
        let over = self.objective.goal.step.is_some_and(|most| {
            let kept = pace * planned.profile.work.computed().as_secs_f64();
            beyond.as_secs_f64() > TELLING_STALL * kept && wall.as_secs_f64() > most * kept
        });
        let paced = (pace - 1.0).abs() <= TELLING_PACE;
        if paced && !over {
            return;
        }
        self.revise(|planned| {
            planned.corrections.count += 1;
            if paced {
                planned.corrections.raise(&planned.plan);
            } else {
                // With corrected times, the stalls may differ too.
                planned.profile.work.pace(pace);
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
        }
        self.planned = Some(revised);
    }

    /// The number of plans so far, and the current plan.
    pub(crate) fn plan(&self) -> Option<(u64, &Plan)> {
        self.planned.as_ref().map(|planned| (self.plans, &planned.plan))
    }

    /// The report of the current plan, if there is one.
    pub(crate) fn report(&mut self, scopes: &Scopes) -> Option<Arc<PlanReport>> {
        self.planned.as_mut().map(|planned| planned.report(self.plans, scopes))
    }

    /// The profile that the plan was made from, if there is one.
    pub(crate) fn profile(&self) -> Option<ssdtrain_plan::Profile> {
        let Planned { profile, machine, .. } = self.planned.as_ref()?;
        let micro_batches = NonZero::new(profile.micro_batches).unwrap_or(NonZero::<u32>::MIN);
        Some(ssdtrain_plan::Profile { workload: profile.work.clone(), micro_batches, machine: *machine })
    }
}

/// Whether steps exceed a goal of `most` times the step time with everything kept.
fn is_over(seen: Seen, most: f64, kept: Duration) -> bool {
    seen.quickest.as_secs_f64() > (1.0 + TELLING_OVER) * most * kept.as_secs_f64()
}

fn middle(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests;
