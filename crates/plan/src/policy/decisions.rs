//! What becomes of the plans of a policy that makes plans, and why.

use std::fmt;

/// A decision about a plan, by its reason. Its `Display` is the reason in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Decision {
    /// Made: a step was profiled.
    Profiled,
    /// Made: another run has saved it.
    TakenOver,
    /// Loosened: steps take longer than the goal allows.
    Slow,
    /// Tightened: steps take less time than the goal allows.
    Quick,
    /// Corrected: the disk's speed has changed.
    DiskRate,
    /// Corrected: steps exceed the goal's peak, or have not done so for long.
    Peak,
    /// Corrected: the device had no memory for what it keeps.
    Memory,
    /// Corrected: the device may have the memory again that it lacked for a time.
    MoreMemory,
    /// Corrected: what may still be written today, or in a day, is another amount.
    Daily,
    /// Corrected: steps that keep everything take another time than was known.
    Baseline,
    /// Corrected: computing takes another time than in the profiled step.
    Pace,
    /// Corrected: recomputing takes another time than was planned.
    Reruns,
    /// Corrected: nothing has shown what the plan takes, so one is followed that takes less: the one before it, if it was tightened.
    Unproven,
    /// Withdrawn: steps have become smaller, and have a plan of their own.
    Smaller,
    /// Withdrawn: the plan of larger steps serves these too.
    Larger,
    /// Withdrawn: there are more kinds of steps than plans.
    Crowded,
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Decided {
    /// There is another plan, of steps that had none.
    Made,
    /// The plan was replaced by one that takes less time or has a higher peak.
    Loosened,
    /// The plan was replaced by one that takes more of the time that the goal allows.
    Tightened,
    /// The plan was replaced because something else is known than before.
    Corrected,
    /// Steps do not follow the plan any more.
    Withdrawn,
}

impl Decision {
    /// What was decided.
    pub fn what(self) -> Decided {
        match self {
            Decision::Profiled | Decision::TakenOver => Decided::Made,
            Decision::Slow => Decided::Loosened,
            Decision::Quick => Decided::Tightened,
            Decision::DiskRate
            | Decision::Peak
            | Decision::Memory
            | Decision::MoreMemory
            | Decision::Daily
            | Decision::Baseline
            | Decision::Pace
            | Decision::Reruns
            | Decision::Unproven => Decided::Corrected,
            Decision::Smaller | Decision::Larger | Decision::Crowded => Decided::Withdrawn,
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Decision::Profiled => "a step was profiled",
            Decision::TakenOver => "another run has saved it",
            Decision::Slow => "steps take longer than the goal allows",
            Decision::Quick => "steps take less time than the goal allows",
            Decision::DiskRate => "the disk's speed has changed",
            Decision::Peak => "steps exceed the goal's peak, or have not done so for long",
            Decision::Memory => "the device had no memory for what it keeps",
            Decision::MoreMemory => "the device may have the memory again that it lacked for a time",
            Decision::Daily => "what may still be written to the disk in a day has changed",
            Decision::Baseline => "steps that keep everything take another time than was known",
            Decision::Pace => "computing takes another time than in the profiled step",
            Decision::Reruns => "recomputing takes another time than was planned",
            Decision::Unproven => "no comparison has shown what the plan takes",
            Decision::Smaller => "steps have become smaller, and have a plan of their own",
            Decision::Larger => "the plan of larger steps serves these too",
            Decision::Crowded => "there are more kinds of steps than plans",
        })
    }
}

impl fmt::Display for Decided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Decided::Made => "made",
            Decided::Loosened => "loosened",
            Decided::Tightened => "tightened",
            Decided::Corrected => "corrected",
            Decided::Withdrawn => "withdrawn",
        })
    }
}
