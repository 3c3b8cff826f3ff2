//! How a step went by the plan of a policy that makes plans.

use std::fmt;

use serde::Serialize;

use super::step::{Adherence, Course, Followed, Room, Saves, StepPlan};

/// What a step had to do with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Planning {
    /// It followed the plan. It may have been smaller or larger than the steps that the plan was made for, or left out or
    /// repeated something. Where the plan keeps everything, most steps go without a look at what they save, of which nothing is counted
    /// then.
    Followed,
    /// It was so small that everything stayed, and still needed no more memory than larger ones do as planned.
    Small,
    /// It saved something other than planned; from that save on it kept what fits.
    Left,
    /// It kept everything, to be compared with steps that follow the plan, or because these lack host memory that is being
    /// provided.
    Compared,
    /// What does not stay was recomputed, because planned steps lack host memory that is being provided.
    Interim,
    /// It was profiled.
    Profiled,
    /// It came before the first profile.
    Early,
    /// There was no plan for it, because no profile has shown anything to plan. It kept what fits.
    Without,
}

impl Planning {
    /// Whether the step may have kept everything because it was small, or came before one that follows a plan.
    pub fn keeps_what_fits(self) -> bool {
        matches!(
            self,
            Planning::Small | Planning::Compared | Planning::Interim | Planning::Profiled | Planning::Early
        )
    }

    /// Of a step that was told `plan` and followed its schedule, if it had one, like this; `has_moved` says whether anything left the device
    /// or is recomputed.
    pub(super) fn of(plan: &StepPlan, followed: Option<Followed>, has_moved: bool) -> Planning {
        let of_course = |followed: Followed, is_so: fn(&Course) -> bool| match &plan.saves {
            Saves::Scheduled { courses, .. } => courses.get(followed.course).is_some_and(is_so),
            _ => false,
        };
        let is_baseline = |followed: Followed| of_course(followed, |course| course.is_baseline);
        let is_interim = |followed: Followed| of_course(followed, |course| course.is_interim);
        match (followed, plan.room) {
            _ if plan.profiled => Planning::Profiled,
            _ if plan.saves == Saves::Leave => Planning::Followed,
            (Some(followed), _) if followed.how == Adherence::Lost => Planning::Left,
            // It may have begun as steps of another kind do.
            (Some(followed), _) if is_baseline(followed) && !has_moved => Planning::Compared,
            (Some(followed), _) if is_interim(followed) => Planning::Interim,
            (Some(followed), _) if followed.stayed_whole => Planning::Small,
            (Some(_), _) => Planning::Followed,
            (None, Room::Fitting(_)) => Planning::Without,
            (None, _) => Planning::Early,
        }
    }
}

impl fmt::Display for Planning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Planning::Followed => "planned",
            Planning::Small => "planned: so small that everything stays",
            Planning::Left => "not planned: it saved something else than was planned",
            Planning::Compared => "not planned: everything is kept, to be compared with the plan",
            Planning::Interim => {
                "not planned yet: what does not stay is computed again while host memory is pinned"
            }
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
    use crate::Budgets;
    use crate::policy::{Course, Headroom};

    #[test]
    fn each_kind_of_step_is_told_from_the_others() {
        let early = StepPlan::default();
        let profiled = StepPlan { profiled: true, ..early.clone() };
        let fitting = StepPlan { room: Room::Fitting(Headroom::Free), ..early.clone() };
        let course = |is_baseline, is_interim| Course {
            schedule: Arc::default(),
            budgets: Budgets::default(),
            is_baseline,
            is_interim,
            in_graph: 0,
            whole_up_to: 0.0,
        };
        let courses = vec![course(false, false), course(true, false), course(false, true)];
        let saves = Saves::Scheduled { courses, unplanned: Headroom::Free };
        let planned = StepPlan { saves, ..early.clone() };
        let followed = |course, how| Some(Followed::new(course, how));
        let small =
            |course| followed(course, Adherence::Part).map(|one| Followed { stayed_whole: true, ..one });
        for (plan, followed, expected) in [
            (&early, None, Planning::Early),
            (&profiled, None, Planning::Profiled),
            (&fitting, None, Planning::Without),
            (&planned, followed(1, Adherence::Whole(1)), Planning::Compared),
            (&planned, followed(2, Adherence::Part), Planning::Interim),
            (&planned, followed(2, Adherence::Lost), Planning::Left),
            (&planned, followed(0, Adherence::Lost), Planning::Left),
            (&planned, followed(0, Adherence::Whole(2)), Planning::Followed),
            (&planned, followed(0, Adherence::Part), Planning::Followed),
            (&planned, followed(0, Adherence::Larger), Planning::Followed),
            (&planned, small(0), Planning::Small),
            (&planned, small(1), Planning::Compared),
        ] {
            assert_eq!(Planning::of(plan, followed, false), expected, "{plan:?}");
        }
        let has_moved = Planning::of(&planned, followed(1, Adherence::Whole(1)), true);
        assert_eq!(has_moved, Planning::Followed);
    }
}
