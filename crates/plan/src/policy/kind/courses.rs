//! How the steps of one kind go: by their plan, or otherwise while that is compared or lacks host memory.

use std::sync::Arc;

use super::{FITTING, Kind, LARGER_STILL, may_compare};
use crate::policy::Course;
use crate::policy::free_memory::Look;
use crate::policy::objective::Objective;
use crate::policy::planned::Planned;
use crate::policy::shown::Shown;
use crate::policy::weighing::Weighing;
use crate::schedule::Schedule;
use crate::{Budgets, Caps, Frontier, Goal, Machine};

/// Once one has found memory, nothing of those that follow need be able to leave where that is no more than this share, nor of those that
/// are compared, up to so many times what is known.
const PLENTY: f64 = 0.5;
const LARGER_BY_CHANCE: f64 = 1.1;
/// Once this share of the host memory is there that its steps need, a plan is followed.
const ENOUGH: f64 = 0.9;

/// A plan that moves nothing.
#[derive(Clone, Debug)]
pub(super) struct Interim {
    schedule: Arc<Schedule>,
    budgets: Budgets,
    peak: u64,
}

impl Kind {
    /// How the step that begins goes if it is of this kind.
    pub(in crate::policy) fn course(
        &mut self,
        objective: &Objective,
        provide: &dyn Fn(u64) -> bool,
        memory: &Look<'_>,
        others: Option<&Shown>,
    ) -> Course {
        if self.is_to_conclude(objective, memory) {
            self.conclude(objective, others);
        }
        // What the plan needs is provided as soon as there is a plan.
        let is_provided = provide(self.host_memory());
        if self.weighing.as_ref().is_some_and(Weighing::wants_kept) {
            if !self.is_to_conclude(objective, memory) {
                return self.baseline();
            }
        } else if !is_provided && objective.compares && self.may_keep(objective, memory) {
            return self.baseline();
        } else if !is_provided
            && objective.goal.step.is_none()
            && !provide((ENOUGH * self.needed_host_memory()) as u64)
            && let Some(course) = self.interim_course(objective)
        {
            return course;
        }
        let may_stay = self.fitted > 0.0 && objective.goal.peak.is_none() && self.planned.keeps_all();
        let in_graph = if may_stay { (PLENTY * memory.lately() as f64) as u64 } else { 0 };
        let in_graph = if self.largest_kept_peak() <= in_graph { in_graph } else { 0 };
        let Planned { schedule, plan, .. } = &self.planned;
        let (schedule, budgets) = (Arc::clone(schedule), plan.budgets);
        Course { schedule, budgets, is_baseline: false, is_interim: false, in_graph, whole_up_to: 0.0 }
    }

    /// Whether its plan is being compared, and no more of its steps may keep everything for that.
    pub(in crate::policy) fn is_to_conclude(&self, objective: &Objective, memory: &Look<'_>) -> bool {
        self.weighing.as_ref().is_some_and(|weighing| {
            let may_compare = may_compare(objective, weighing.seen);
            let is_next = || weighing.wants_kept() && !self.may_keep(objective, memory);
            if may_compare { is_next() } else { weighing.wants_kept() || !weighing.has_kept() }
        })
    }

    /// The host memory that the largest step so far needs under the plan, in bytes.
    fn needed_host_memory(&self) -> f64 {
        self.planned.plan.prediction.host_peak as f64 * self.widest
    }

    /// The same with what larger steps may need.
    fn host_memory(&self) -> u64 {
        let still = if self.varies { LARGER_STILL } else { 1.0 };
        (self.needed_host_memory() * still) as u64
    }

    /// Whether a step that keeps everything reaches the goal for the peak, on a device with so much free memory.
    fn may_keep(&self, objective: &Objective, memory: &Look<'_>) -> bool {
        let peak = self.largest_kept_peak();
        peak <= objective.most_peak() && peak as f64 <= FITTING * memory.now() as f64
    }

    /// A step that keeps everything: for comparison with planned steps, or until these have the host memory that they need.
    fn baseline(&self) -> Course {
        let (schedule, budgets) = (Arc::clone(&self.kept), Budgets::default());
        let in_graph = (LARGER_BY_CHANCE * self.fitted * self.planned.kept_peak() as f64) as u64;
        Course { schedule, budgets, is_baseline: true, is_interim: false, in_graph, whole_up_to: 0.0 }
    }

    /// How a step goes that moves nothing; `None` if its peak would be beyond the goal.
    fn interim_course(&mut self, objective: &Objective) -> Option<Course> {
        let unforeseen = self.planned.corrections.unforeseen.bytes();
        let peak = self.of_largest(objective).most_peak().saturating_sub(unforeseen);
        let key = (self.plans, peak);
        if self.interim.as_ref().is_none_or(|(known, _)| *known != key) {
            self.interim = Some((key, self.interim_within(peak)));
        }
        let Interim { schedule, budgets, .. } = self.interim.as_ref()?.1.as_ref()?;
        let (schedule, budgets) = (Arc::clone(schedule), *budgets);
        let (is_baseline, is_interim) = (false, true);
        Some(Course { schedule, budgets, is_baseline, is_interim, in_graph: 0, whole_up_to: 0.0 })
    }

    fn interim_within(&self, peak: u64) -> Option<Interim> {
        let profile = &self.planned.profile;
        let machine = Machine { host_pool: 0, ..self.planned.machine };
        let caps = Caps { disk: 0, ..Caps::default() };
        let plan = Frontier::rough(&profile.work, &machine, caps).plan(Goal::budget(peak)).ok()?;
        let schedule = Arc::new(profile.schedule(&plan.placements));
        Some(Interim { schedule, budgets: plan.budgets, peak: plan.prediction.peak() })
    }

    /// A step has ended that moved nothing. What was beyond the goal may be so in others too; that nothing was says nothing of them.
    pub(in crate::policy) fn passes_by(&mut self, objective: &Objective, peak: u64) {
        let is_beyond = objective.goal.peak.is_some_and(|most| peak > most);
        if let Some((_, Some(Interim { peak: expected, .. }))) = self.interim
            && is_beyond
        {
            self.peaked(objective, |_| expected, peak);
        }
    }
}
