//! What a step is told when it begins, and what was seen of it when it has ended.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::offload::PREFETCH;
use crate::schedule::Schedule;
use crate::step_profile::StepProfile;
use crate::{Budgets, Placement, Release, ScopeId};

/// What is known when a step begins.
pub struct Outset<'a> {
    /// The number of the step, from 1.
    pub step: u64,
    /// What the cache may use.
    pub resources: Resources,
    /// What the disks have taken today.
    pub today: Today,
    /// Finds out how many bytes of the device's memory are free.
    pub free: &'a dyn Fn() -> u64,
    /// Says whether this much host memory is there for steps to move storages to, or as much as there can be. Otherwise more is
    /// provided in the background, which may take seconds.
    pub provide: &'a dyn Fn(u64) -> bool,
    /// Finds the scope with this path, before the program has entered it.
    pub scope: &'a dyn Fn(&str) -> ScopeId,
}

/// What all runs together have written today to the disks that the cache spills to. By default nothing, at the beginning of a day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Today {
    /// The number of the day.
    pub day: u32,
    /// Bytes written.
    pub written: u64,
    /// How long the day still lasts.
    pub left: Duration,
}

/// What a cache may use; the same in every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Host memory for storages, in bytes.
    pub host_pool: u64,
    /// The most bytes on the disk.
    pub disk: u64,
    /// When a storage leaves the device.
    pub release: Release,
}

/// What a step shall do. By default everything moves that can be moved, without a limit on what is on the device
/// meanwhile, and nothing is profiled. Where storages leave as late as their budget allows
/// ([`Release`]), that is: nothing leaves without a [`room`](StepPlan::room).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Whether the step is profiled, which makes it slow: when each storage is saved and asked for is noted, and
    /// operations are recorded.
    pub profiled: bool,
    /// Whether the step is timed to its very end. The cache then waits for the device, which it does not otherwise.
    pub timed: bool,
    /// What becomes of saves.
    pub saves: Saves,
    /// Scopes whose saves stay on the device whatever `saves` says, unless they are recomputed.
    pub kept_scopes: HashSet<ScopeId>,
    /// Whether what the program marked (results by `remat`, and parts of it by `segment`) is recomputed where nothing is
    /// planned for it.
    pub recomputes_marked: bool,
    /// Which results are recomputed where nothing is planned for them, unless `recomputes_marked`.
    pub recomputed: Recomputed,
    /// Whether no operations are recorded though a course recomputes something, because no step of that course is expected. One that comes all
    /// the same moves it instead.
    pub unrecorded: bool,
    /// How much may be on the device.
    pub room: Room,
    /// The highest activation peak that the step is to have, in bytes. Before an allocation exceeds it, on whichever thread of the process and
    /// until the step is finished, what can go leaves at once, as where memory runs out, which takes long. `None` for no limit.
    pub most_peak: Option<u64>,
    /// The most bytes that may be written to the disks until the next step begins; what finds no other room below the device stays there.
    /// `None` for no limit.
    pub most_written: Option<u64>,
}

/// Which results are recomputed that nothing is planned for, in a step whose operations are recorded: of those that a few operations in a row
/// make of what is there. That is parameters, what is small, and what the cache has and the device still holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recomputed {
    /// None.
    #[default]
    Nothing,
    /// Those that pointwise operations and norms make, four in a row at most, which takes a few passes over memory. In a step that has left its
    /// plan, only what [`Room`] does not let stay.
    PointwiseWithoutRoom,
    /// Those that pointwise operations and norms make.
    Pointwise,
    /// Those, and what up to twelve other operations make of less than they make, such as the wide products of a perceptron.
    Everything,
}

/// What becomes of the saves of a step that could be moved.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Saves {
    /// They are only counted, and stay in the graph as without a cache.
    Count,
    /// They are not even looked at: the step goes as without a cache.
    Leave,
    /// They stay on the device.
    Keep,
    /// They leave the device, as far as [`Room`] does not let them stay and they are not [`recomputed`](StepPlan::recomputed).
    #[default]
    Move,
    /// Each has its place in one of these courses: the first one that the step follows, or else the one that it followed
    /// longest. Once more than an eighth of what is planned was saved for which there is no place, what fits stays.
    Scheduled {
        /// At least one.
        courses: Vec<Course>,
        /// How much may stay that has no place.
        unplanned: Headroom,
    },
    /// They have these placements in turn, whatever is saved.
    InTurn(Arc<[Placement]>),
}

/// A way that a step may go.
#[derive(Clone, Debug, PartialEq)]
pub struct Course {
    /// A line for each of the saves.
    pub schedule: Arc<Schedule>,
    /// What may be on the device meanwhile.
    pub budgets: Budgets,
    /// Whether everything stays, to be compared with planned steps.
    pub is_baseline: bool,
    /// Whether nothing moves, while host memory is provided for what the plan moves.
    pub is_interim: bool,
    /// So many bytes of what stays are left in the graph, as without a cache, until a backward lets go of them: they take no time then, but
    /// cannot leave where memory becomes short.
    pub in_graph: u64,
    /// A micro-batch whose storages have at most so many times the planned bytes stays on the device as a whole: others need as much memory
    /// even as planned. 0 where everything goes as planned.
    pub whole_up_to: f64,
}

/// How much of what is saved may be on the device. By default there is no limit, and 64 MiB are loaded ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// No more than these; how far the disk is read ahead is a setting of the cache.
    Within(Budgets),
    /// What fits stays. The rest leaves as late as possible.
    Fitting(Headroom),
}

/// How much storages without a plan may occupy on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Headroom {
    /// This many bytes.
    Bytes(u64),
    /// The free memory that the rest of a step does not need.
    #[default]
    Free,
}

/// What was seen of a step.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    /// The number of the step, from 1.
    pub step: u64,
    /// How long it took.
    pub wall: Duration,
    /// What it took the cache to begin it, before that.
    pub overhead: Duration,
    /// Whether `wall` is only the time to hand the step to a device, which may have gone on computing.
    pub launched: bool,
    /// How far the device was behind the program when the last backward had been handed to it, or at the end of the step if that is more.
    /// 0 unless the step is timed to its end.
    pub behind: Duration,
    /// Whether that is all: the last backward went through the step, so that it was seen where the device was then. Otherwise the program
    /// may have waited for it before the step's end.
    pub is_told: bool,
    /// How many cycles the device's clock had in a second of it, if that is known.
    pub clock: Option<f64>,
    /// The part of `wall` in which it waited for the cache.
    pub stall: Duration,
    /// The part of that in which a device waited, by its own queue.
    pub device_stall: Duration,
    /// The part of it in which a device computed again what had not been saved, without what it waited for meanwhile; `None` if that is not
    /// known.
    pub rerun: Option<Duration>,
    /// The activation peak, in bytes.
    pub peak: u64,
    /// Bytes per second written to the disk while it was busy, if the step moved enough to measure that.
    pub written: Option<f64>,
    /// The same for reads.
    pub read: Option<f64>,
    /// What it showed, if it was profiled and enough was seen.
    pub profile: Option<Box<StepProfile>>,
    /// Which of its courses it followed, and how well; `None` if it had none.
    pub followed: Option<Followed>,
    /// The scopes that saved something, in the order of their last saves.
    pub scopes: Vec<ScopeId>,
    /// How many storages left the device, were to leave it, or are recomputed.
    pub moved: u64,
    /// How many were to leave the device, but were asked for or released before they did.
    pub cancelled: u64,
    /// Bytes that left the device because an allocation found no memory, or would have exceeded the step's [`most_peak`](StepPlan::most_peak).
    /// With any, there is less memory than the step wanted.
    pub pressed: u64,
    /// Whether an allocation would have exceeded a [`most_peak`](StepPlan::most_peak), of this step or another one of the device.
    pub at_ceiling: bool,
    /// Whether kernels for what it recomputes were being made, so that it took longer than later ones will.
    pub compiled: bool,
    /// Whether a device's driver was asked for memory, which takes long and which later steps need not repeat.
    pub has_grown: bool,
    /// Whether host memory for later steps was being provided, which slows the step down.
    pub pinned: bool,
}

/// The course that a step followed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Followed {
    /// Its number among those of the step's plan.
    pub course: usize,
    /// How well it was followed.
    pub how: Adherence,
    /// How many times the planned bytes a micro-batch saved.
    pub size: f64,
    /// The same for all micro-batches together.
    pub micro_batches: f64,
    /// The same for all that was open at once: saved since the last backward that the cache was told of, or in the whole step if several
    /// micro-batches are open at once.
    pub at_once: f64,
    /// Whether each of its micro-batches ended before the next began, as the cache was told: no more was open at once than the largest.
    pub one_by_one: bool,
    /// Whether its micro-batches were so small that all of it stayed ([`Course::whole_up_to`]).
    pub stayed_whole: bool,
    /// Whether a micro-batch was to stay whole and became larger than its first storages had told, so that the rest went as planned.
    pub outgrew: bool,
}

/// How well a step followed its course.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adherence {
    /// Each of this many micro-batches followed it to its end.
    Whole(u32),
    /// It saved less, or smaller storages. The plan remains valid, but the step's costs say little about it.
    Part,
    /// Its storages were larger than planned; it followed the plan nevertheless.
    Larger,
    /// It left out, repeated or added something. The rest followed the plan.
    Altered,
    /// It saved something else.
    Lost,
}

impl Default for Today {
    fn default() -> Today {
        Today { day: 0, written: 0, left: Duration::from_secs(24 * 60 * 60) }
    }
}

impl Followed {
    /// One micro-batch of the planned size, which went like this.
    pub const fn new(course: usize, how: Adherence) -> Followed {
        let [size, micro_batches, at_once] = [1.0; 3];
        Followed {
            course,
            how,
            size,
            micro_batches,
            at_once,
            one_by_one: true,
            stayed_whole: false,
            outgrew: false,
        }
    }

    /// The same of so many times the planned size.
    #[must_use]
    pub const fn of_size(self, size: f64) -> Followed {
        Followed { size, micro_batches: size, at_once: size, ..self }
    }
}

impl Course {
    /// With this schedule, no limit on what is on the device, and 64 MiB loaded ahead.
    pub fn new(schedule: Schedule) -> Course {
        let budgets = Budgets { prefetch: PREFETCH, ..Budgets::default() };
        let (is_baseline, is_interim) = (false, false);
        Course {
            schedule: Arc::new(schedule),
            budgets,
            is_baseline,
            is_interim,
            in_graph: 0,
            whole_up_to: 0.0,
        }
    }
}

impl Default for Room {
    fn default() -> Room {
        Room::Within(Budgets { prefetch: PREFETCH, ..Budgets::default() })
    }
}

impl Room {
    /// The room that a step needs whose storages have so many times the planned bytes.
    #[must_use]
    pub fn times(self, times: f64) -> Room {
        let more = |bytes: u64| (bytes as f64 * times).ceil() as u64;
        match self {
            Room::Within(budgets) => Room::Within(Budgets {
                device_budget: more(budgets.device_budget),
                backward_budget: more(budgets.backward_budget),
                prefetch: more(budgets.prefetch),
                ..budgets
            }),
            Room::Fitting(headroom) => Room::Fitting(headroom),
        }
    }
}

impl StepPlan {
    /// Whether segments of the program may have to run again for what is planned to be recomputed.
    pub fn offers_segments(&self) -> bool {
        match &self.saves {
            Saves::Scheduled { courses, .. } => {
                courses.iter().any(|course| course.schedule.offers_segments())
            }
            _ => self.recomputes(),
        }
    }

    /// Whether anything may be recomputed from recorded operations.
    pub fn recomputes(&self) -> bool {
        match &self.saves {
            Saves::Count | Saves::Leave | Saves::Keep => false,
            Saves::Move => self.recomputed != Recomputed::Nothing && !self.recomputes_marked,
            Saves::Scheduled { courses, .. } => {
                !self.unrecorded && courses.iter().any(|course| course.schedule.recomputes())
            }
            Saves::InTurn(placements) => placements.contains(&Placement::Recompute),
        }
    }
}
