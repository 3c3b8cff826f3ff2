//! The kinds of steps that have plans.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::Course;
use super::decisions::Decision;
use super::free_memory::Look;
use super::kind::{Kind, RECENT};
use super::objective::Objective;
use super::planned::Planned;
use super::shown::Shown;
use crate::step_profile::StepProfile;

/// How many of them have plans at once.
const MOST: usize = 4;
/// Those that did not occur in as many steps are not expected to occur again.
const GONE: u64 = 1024;

/// The kinds of steps that have plans, the one of the last step first.
#[derive(Clone, Debug, Default)]
pub(super) struct Kinds {
    all: Vec<Kind>,
    /// What steps have shown last that say something of others.
    shown: Option<Shown>,
    /// How many plans there were of kinds that were given up.
    given_up: u64,
    /// What has become of plans since somebody asked, beside what their kinds tell.
    decisions: Vec<Decision>,
}

impl Kinds {
    /// Whether another would be one too many.
    pub(super) fn is_full(&self) -> bool {
        self.len() >= MOST
    }

    /// How step `number` goes, by the kind that it turns out to be of.
    pub(super) fn courses(
        &mut self,
        number: u64,
        objective: &Objective,
        provide: &dyn Fn(u64) -> bool,
        memory: &Look<'_>,
    ) -> Vec<Course> {
        self.shows();
        // What the steps of one have shown of its plan tells those of others more than nothing.
        let mut has_concluded = false;
        for kind in self.iter_mut() {
            has_concluded |= kind.is_to_conclude(objective, memory) && kind.concludes(objective);
        }
        if has_concluded {
            self.shows();
        }
        let others = self.shown.as_ref();
        let courses = self.all.iter_mut().map(|kind| kind.course(objective, provide, memory, others));
        let mut courses: Vec<Course> = courses.collect();
        let highest = self.all.iter_mut().map(|kind| kind.highest(number)).max().unwrap_or(0);
        for (course, kind) in courses.iter_mut().zip(&self.all).filter(|(course, _)| !course.is_baseline) {
            course.whole_up_to = kind.whole_up_to(objective, number, highest);
        }
        courses
    }

    /// A plan of another run is followed.
    pub(super) fn take_over(&mut self, planned: Planned) {
        self.decisions.push(Decision::TakenOver);
        self.all.insert(0, Kind::new(planned));
    }

    /// Step `number` was profiled.
    pub(super) fn profiled(&mut self, objective: &Objective, number: u64, profile: StepProfile) {
        self.shows();
        let mut kind = Kind::profiled(objective, profile, self.shown.as_ref());
        kind.last = number;
        let beside = |other: &Kind| kind.planned.profile.varying_beside(&other.planned.profile);
        let beside: Vec<Option<Vec<usize>>> = self.iter().map(beside).collect();
        let varying: BTreeSet<usize> = beside.iter().flatten().flatten().copied().collect();
        if !varying.is_empty() {
            let alike = self.iter_mut().zip(beside).filter_map(|(other, beside)| beside.map(|_| other));
            alike.chain([&mut kind]).for_each(|kind| kind.varies_in(&varying));
        }
        let (known, new) = (|kind: &Kind| Arc::clone(&kind.planned.schedule), &kind.planned.schedule);
        // A plan also serves smaller steps, as long as there are larger ones. With a limit on bytes, nothing of them is larger.
        let may_grow = objective.goal.peak.is_none();
        if let Some(place) = self.iter().position(|kind| known(kind).covers(new, may_grow)) {
            let serving = &mut self[place];
            if !std::mem::take(&mut serving.smaller) {
                serving.occurs(number);
                return;
            }
            self.give_up(place, Decision::Smaller);
        } else if let Some(place) = self.iter().position(|kind| new.covers(&known(kind), may_grow)) {
            self.give_up(place, Decision::Larger);
        } else if self.is_full() {
            self.give_up(MOST - 1, Decision::Crowded);
        }
        self.decisions.push(Decision::Profiled);
        self.all.insert(0, kind);
    }

    fn give_up(&mut self, place: usize, why: Decision) {
        let gone = self.all.remove(place);
        self.given_up += gone.plans;
        self.decisions.extend(gone.decisions);
        self.decisions.push(why);
    }

    /// The last step was of the kind at `place`, if there is one. Returns it with what others have shown.
    pub(super) fn was_of(&mut self, place: usize) -> Option<(&mut Kind, Option<&Shown>)> {
        self.get_mut(..=place)?.rotate_right(1);
        self.shows();
        Some((self.all.first_mut()?, self.shown.as_ref()))
    }

    /// Takes note of what the last steps have shown that others tell nothing better than.
    fn shows(&mut self) {
        // What is taken from others tells nothing of others still.
        let tell = |kind: &&Kind| !kind.planned.corrections.is_by_others;
        for kind in self.all.iter().rev().filter(tell) {
            self.shown = Some(kind.planned.shown().or(self.shown.take()));
        }
        let sizes = self.all.iter().rev().flat_map(Kind::shows_kept).collect();
        self.shown = self.shown.take().map(|shown| shown.with_sizes(sizes));
    }

    /// Plans all of them again.
    pub(super) fn revise(&mut self, objective: &Objective, why: Decision) {
        self.iter_mut().for_each(|kind| kind.revise(objective, why, |_| {}));
    }

    /// Plans all of them again for the memory that is free now, except those that not even the lowest peak has fitted and does not fit now.
    pub(super) fn fit(&mut self, objective: &Objective) {
        for kind in self.iter_mut().filter(|kind| !kind.fits_in_vain(objective.free)) {
            kind.revise(objective, Decision::Memory, |_| {});
            kind.is_lowest = kind.largest_peak() > objective.free;
        }
    }

    /// Whether step `number` is timed to its very end.
    pub(super) fn settle(&self, number: u64) -> bool {
        self.iter().any(|kind| kind.settles() && number <= kind.last + RECENT)
    }

    /// Whether the next steps go as without a cache if these are their courses: all are of one kind, and any other would have the memory
    /// for it.
    pub(super) fn are_unseen(&self, objective: &Objective, courses: &[Course]) -> bool {
        let ([kind, others @ ..], [course, ..]) = (&**self, courses) else { return false };
        let are_gone = others.iter().all(|other| other.last + GONE < kind.last);
        are_gone
            && kind.is_unseen(objective, course)
            && others.iter().all(|other| other.has_ample(course.in_graph))
    }

    /// Whether one that is expected in step `number` recomputes something if these are their courses.
    pub(super) fn recompute(&self, number: u64, courses: &[Course]) -> bool {
        let is_expected =
            |(kind, course): (&Kind, &Course)| kind.is_expected(number) && course.schedule.recomputes();
        self.iter().zip(courses).any(is_expected)
    }

    /// Whether one that still occurs is being compared with steps that keep everything.
    pub(super) fn are_weighed(&self) -> bool {
        let last = self.first().map_or(0, |kind| kind.last);
        self.iter().any(|kind| last <= kind.last + RECENT && kind.weighing.is_some())
    }

    /// How many plans there were.
    pub(super) fn plans(&self) -> u64 {
        self.given_up + self.iter().map(|kind| kind.plans).sum::<u64>()
    }

    /// What has become of plans since somebody asked.
    pub(super) fn decisions(&mut self) -> Vec<Decision> {
        let mut all = std::mem::take(&mut self.decisions);
        all.extend(self.iter_mut().flat_map(|kind| std::mem::take(&mut kind.decisions)));
        all
    }
}

impl Deref for Kinds {
    type Target = [Kind];

    fn deref(&self) -> &[Kind] {
        &self.all
    }
}

impl DerefMut for Kinds {
    fn deref_mut(&mut self) -> &mut [Kind] {
        &mut self.all
    }
}
