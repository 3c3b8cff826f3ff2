//! How a step went by the plan of a policy that makes plans.

use std::fmt;

use serde::Serialize;

use super::step::{Adherence, Room, Saves, StepPlan};

/// What a step had to do with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Planning {
    /// It followed the plan. It may have been smaller or larger than the steps that the plan was made for.
    Followed,
    /// It saved something other than planned; from that save on it kept what fits.
    Left,
    /// It kept everything, to be compared with steps that follow the plan.
    Compared,
    /// It moved everything and was profiled.
    Profiled,
    /// It came before the first profile.
    Early,
    /// There was no plan for it, because no profile has shown anything to plan. It kept what fits.
    Without,
}

impl Planning {
    /// Of a step that was told `plan` and followed its schedule, if it had one, like this.
    pub(super) fn of(plan: &StepPlan, followed: Option<Adherence>) -> Planning {
        match (followed, &plan.saves, plan.room) {
            _ if plan.profiled => Planning::Profiled,
            (Some(Adherence::Lost), ..) => Planning::Left,
            (Some(_), ..) => Planning::Followed,
            (None, Saves::Keep, _) => Planning::Compared,
            (None, _, Room::Fitting(_)) => Planning::Without,
            (None, ..) => Planning::Early,
        }
    }
}

impl fmt::Display for Planning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Planning::Followed => "planned",
            Planning::Left => "not planned: it saved something else than was planned",
            Planning::Compared => "not planned: everything is kept, to be compared with the plan",
            Planning::Profiled => "profiled",
            Planning::Early => "not planned yet",
            Planning::Without => "not planned: no profile has shown anything to plan",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::policy::Headroom;

    #[test]
    fn each_kind_of_step_is_told_from_the_others() {
        let early = StepPlan::default();
        let profiled = StepPlan { profiled: true, ..early.clone() };
        let kept = StepPlan { saves: Saves::Keep, ..early.clone() };
        let fitting = StepPlan { room: Room::Fitting(Headroom::Free), ..early.clone() };
        let saves = Saves::Scheduled { schedule: Arc::default(), unplanned: Headroom::Free };
        let planned = StepPlan { saves, ..early.clone() };
        for (plan, followed, expected) in [
            (&early, None, Planning::Early),
            (&profiled, None, Planning::Profiled),
            (&kept, None, Planning::Compared),
            (&fitting, None, Planning::Without),
            (&planned, Some(Adherence::Lost), Planning::Left),
            (&planned, Some(Adherence::Whole(2)), Planning::Followed),
            (&planned, Some(Adherence::Part), Planning::Followed),
            (&planned, Some(Adherence::Larger), Planning::Followed),
        ] {
            assert_eq!(Planning::of(plan, followed), expected, "{plan:?}");
        }
    }
}
