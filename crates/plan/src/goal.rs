//! What a plan has to achieve, and what it is.

use std::cmp::Ordering;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::simulate::Bounds;
use crate::{Budgets, Placement, Prediction};

/// What a plan may use besides the machine's host pool. By default there are no limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Caps {
    /// The most bytes on the disk at a time.
    pub disk: u64,
    /// The most bytes written to the disk in a step: what is left of a day's share of its endurance.
    pub written: u64,
}

/// What a plan has to achieve. With both limits, it is the lowest peak among the plans within the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    /// The most bytes that the activation peak may have.
    pub peak: Option<u64>,
    /// The longest step, as a multiple of the step with everything kept.
    pub step: Option<f64>,
}

/// A placement for every activation, the settings that go with them, and the expected cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// One for each activation.
    pub placements: Vec<Placement>,
    /// The cache settings that go with the placements.
    pub budgets: Budgets,
    /// What the step is expected to do.
    pub prediction: Prediction,
}

/// No placement reaches the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OutOfReach {
    /// The lowest peak that any placement reaches, in bytes.
    pub peak: u64,
    /// The step time of that placement.
    pub step: Duration,
    /// The step time with everything kept.
    pub kept: Duration,
}

impl Default for Caps {
    fn default() -> Caps {
        Caps { disk: u64::MAX, written: u64::MAX }
    }
}

impl Goal {
    /// The fastest step whose activation peak is at most this many bytes.
    pub fn budget(bytes: u64) -> Goal {
        Goal { peak: Some(bytes), step: None }
    }

    /// The lowest peak whose step is longer than the one with everything kept by at most this fraction: 0.01 is one
    /// percent.
    pub fn overhead(share: f64) -> Goal {
        Goal { peak: None, step: Some(1.0 + share) }
    }

    /// The bounds that the goal sets if a step with everything kept takes this long.
    pub(crate) fn bounds(&self, kept: Duration) -> Bounds {
        // No time at all, any number of times.
        let allowed = |times: f64| if times.is_finite() { times * kept.as_secs_f64() } else { times };
        let step = self.step.map_or(f64::INFINITY, allowed);
        let peak = self.peak.unwrap_or(u64::MAX);
        let may_stay = self.step.is_some() && self.peak.is_none();
        Bounds { peak, promised: peak, step, may_stay, ..Bounds::NONE }
    }

    /// Which of two allowed predictions is better; the better one is `Less`.
    pub(crate) fn order(&self, left: &Prediction, right: &Prediction) -> Ordering {
        let quicker = left.step.cmp(&right.step);
        let lower = left.peak().cmp(&right.peak());
        let moves_less = (left.copied_out + left.written).cmp(&(right.copied_out + right.written));
        if self.step.is_some() {
            lower.then(quicker).then(moves_less)
        } else {
            quicker.then(moves_less).then(lower)
        }
    }
}

impl fmt::Display for OutOfReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longer = self.step.as_secs_f64() / self.kept.as_secs_f64().max(f64::MIN_POSITIVE);
        write!(
            f,
            "no placement reaches it: the lowest activation peak is {}, with steps {longer:.2} times as long as with everything kept",
            ByteSize(self.peak),
        )
    }
}

impl Error for OutOfReach {}
