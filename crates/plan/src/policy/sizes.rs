//! What steps of several sizes took that kept everything.

use std::time::Duration;

use super::clocks::{Timed, is_alike};
use super::cost::Told;
use super::watch::usual;

/// Where none of the planned size keeps everything, those of the nearest size tell how long it would take, if it is at most so many times as
/// small or as large.
const NEAR: f64 = 3.0;
/// Steps beyond all sizes that kept everything are judged by those of the closest one, if it is at most so many times as small or as large.
const CLOSE: f64 = 1.25;

/// What steps of several sizes took that kept everything.
#[derive(Clone, Debug, Default)]
pub(super) struct KeptSizes(Vec<Timed>);

impl KeptSizes {
    pub(super) fn new(kept: Vec<Timed>) -> KeptSizes {
        KeptSizes(kept)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How long one of this size took for as much as is planned, in seconds, if there were any of about that size, or on both sides of it.
    pub(super) fn take(&self, scale: f64) -> Option<f64> {
        let is_close = |timed: &&Timed| (1.0 / CLOSE..=CLOSE).contains(&(timed.scale / scale));
        let apart = |timed: &&Timed| (timed.scale / scale).ln().abs();
        self.between(scale).or_else(|| {
            let closest =
                self.0.iter().filter(is_close).min_by(|one, other| apart(one).total_cmp(&apart(other)))?;
            self.alike(closest.scale)
        })
    }

    /// What steps of the planned size took, or those of the nearest size for as much as is planned.
    pub(super) fn told(&self) -> Option<Told> {
        let apart = |timed: &&Timed| timed.scale.ln().abs();
        let nearest = self.0.iter().min_by(|one, other| apart(one).total_cmp(&apart(other)))?.scale;
        let seconds = is_near(nearest).then(|| self.alike(nearest)).flatten()?;
        Some(Told { wall: Duration::try_from_secs_f64(seconds).ok()?, is_of_size: is_alike(nearest, 1.0) })
    }

    /// What steps of this size took, in seconds for as much as is planned.
    pub(super) fn alike(&self, scale: f64) -> Option<f64> {
        let alike: Vec<f64> =
            self.0.iter().filter(|timed| is_alike(timed.scale, scale)).map(|timed| timed.wall).collect();
        (!alike.is_empty()).then(|| usual(alike))
    }

    /// The same, or where there are none, between what the next smaller and the next larger ones took. `None` beyond all sizes that there
    /// were.
    pub(super) fn between(&self, scale: f64) -> Option<f64> {
        self.alike(scale).or_else(|| {
            let by_scale = |one: &&Timed, other: &&Timed| one.scale.total_cmp(&other.scale);
            let below = self.0.iter().filter(|timed| timed.scale < scale).max_by(by_scale)?;
            let above = self.0.iter().filter(|timed| timed.scale > scale).min_by(by_scale)?;
            let share = (scale - below.scale) / (above.scale - below.scale);
            let [less, more] = [below, above].map(|timed| timed.wall * timed.scale);
            Some((less + share * (more - less)) / scale)
        })
    }

    /// How far steps are from what those of their size took.
    pub(super) fn deviations_of_alike(&self) -> Vec<f64> {
        let of_size =
            |timed: &&Timed| self.0.iter().filter(|other| is_alike(timed.scale, other.scale)).count();
        let several = self.0.iter().filter(|timed| of_size(timed) > 1);
        several.filter_map(|timed| Some(apart(timed.wall, self.alike(timed.scale)?))).collect()
    }

    /// The same, from what the sizes around theirs took.
    pub(super) fn deviations_of_others(&self) -> Vec<f64> {
        let of_others = |timed: &Timed| {
            let is_other = |other: &&Timed| !is_alike(timed.scale, other.scale);
            let others = KeptSizes(self.0.iter().filter(is_other).copied().collect());
            Some(apart(timed.wall, others.between(timed.scale)?))
        };
        self.0.iter().filter_map(of_others).collect()
    }
}

/// How far a step is from what is expected of it, as a share of that.
pub(super) fn apart(wall: f64, expected: f64) -> f64 {
    (wall / expected.max(f64::MIN_POSITIVE) - 1.0).abs()
}

/// Whether steps of this size tell how long one of the planned size takes.
pub(super) fn is_near(scale: f64) -> bool {
    (1.0 / NEAR..=NEAR).contains(&scale)
}
