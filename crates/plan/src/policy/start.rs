//! How a run starts that was given a plan.

use super::objective::Objective;
use super::planned::Planned;
use super::saved::SavedPlan;
use super::{Adherence, Observation, Resources};
use crate::step_profile::UNKNOWN_DISK;
use crate::{Machine, Prediction, Release, ScopeId};

/// Plans that are predicted to take longer or to have a higher peak by more than this share are others.
const TELLING: f64 = 0.001;

const OTHER_GOAL: &str = "the saved plan was made for another goal of Auto, or for days of which more or less is left to write: this run has a plan of its own, made from the profile that was \
                          saved with it";
const NO_ROOM: &str = "the saved plan needs more host memory or disk than there is: this run has a plan of its own, made from the profile \
                       that was saved with it";
const OTHER_DEVICE: &str = "the saved plan is not followed: it was made for another kind of device, or for another path to the disk. This \
                            run profiles its second step, as without it; save its plan instead";
const OTHER_STEPS: &str = "the saved plan is of another program: this step saves something else. The next step is profiled, as without the plan; \
                           save a plan of this program, with the same model, sizes and min_bytes";

/// The plan that a run was given, and what became of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Start {
    given: Option<Box<SavedPlan>>,
    /// What the next report tells of it.
    news: Option<&'static str>,
    /// Whether it is the plan, and no step has shown yet whether it fits.
    is_untried: bool,
}

impl Start {
    pub(super) fn with(saved: SavedPlan) -> Start {
        Start { given: Some(Box::new(saved)), ..Start::default() }
    }

    /// The plan to start with, if one was given that suits this device: as it was saved if it is for this goal and there
    /// is room for it, and else made anew from its profile. `scope` finds the scope with a path.
    pub(super) fn plan(&mut self, objective: &Objective, scope: &dyn Fn(&str) -> ScopeId) -> Option<Planned> {
        let saved = self.given.take()?;
        if saved.machine().release != objective.resources.release {
            self.news = Some(OTHER_DEVICE);
            return None;
        }
        self.is_untried = true;
        let machine = present(saved.machine(), &objective.resources);
        let plan = saved.plan(&machine);
        let is_for_goal = saved.is_for(objective);
        let is_there_room = plan.prediction.written <= objective.resources.disk
            && !is_worse(&plan.prediction, &saved.plan(&saved.machine()).prediction);
        let in_reach = saved.is_in_reach();
        let (profile, learnt) = saved.made_from(scope);
        if is_for_goal && is_there_room {
            return Some(Planned::with(plan, in_reach, profile, machine, learnt));
        }
        self.news = Some(if is_for_goal { NO_ROOM } else { OTHER_GOAL });
        let learnt = if is_for_goal { learnt } else { learnt.of_any_goal() };
        Some(Planned::new(objective, profile, machine, learnt))
    }

    /// What users should know of it in the report of this step.
    pub(super) fn warnings(&self, observed: &Observation) -> Vec<String> {
        let other_steps = self.leaves(observed).then_some(OTHER_STEPS);
        self.news.into_iter().chain(other_steps).map(str::to_owned).collect()
    }

    /// A step has ended.
    pub(super) fn ended(&mut self, observed: &Observation) {
        self.news = None;
        self.is_untried &= observed.followed.is_none();
    }

    /// Whether this step is the first to show whether the plan fits, and it does not.
    fn leaves(&self, observed: &Observation) -> bool {
        let is_other = |how| matches!(how, Adherence::Lost | Adherence::Altered);
        self.is_untried && observed.followed.is_some_and(|followed| is_other(followed.how))
    }
}

/// The machine of a saved plan with what there is now.
fn present(saved: Machine, resources: &Resources) -> Machine {
    let host_pool = resources.host_pool;
    let is_less = saved.release == Release::InStreamOrder && host_pool < saved.host_pool;
    let disk = |rate: f64| if is_less && rate.is_infinite() { UNKNOWN_DISK } else { rate };
    // Plans of earlier releases did not know of it.
    let exposed = if saved.release == Release::WhenStored { 1.0 } else { saved.exposed };
    let [disk_write, disk_read] = [saved.disk_write, saved.disk_read].map(disk);
    Machine { host_pool, disk_write, disk_read, exposed, ..saved }
}

/// Whether a step is predicted to be clearly worse than another.
fn is_worse(step: &Prediction, other: &Prediction) -> bool {
    let longer = step.step.as_secs_f64() > (1.0 + TELLING) * other.step.as_secs_f64();
    longer || step.peak() as f64 > (1.0 + TELLING) * other.peak() as f64
}
