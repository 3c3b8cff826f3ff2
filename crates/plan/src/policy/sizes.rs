//! What steps of several sizes took that kept everything.

use std::time::Duration;

use super::clocks::{Timed, is_alike};
use super::cost::Told;
use super::watch::{deviation, usual};

/// Where none of the planned size keeps everything, those of the nearest size tell how long it would take, if it is at most so many times as
/// small or as large.
const NEAR: f64 = 3.0;
/// Steps tell of others that are smaller or larger than all of them by at most so many times.
const CLOSE: f64 = 1.25;
/// What others took tells the less of a step, the farther its size is from theirs: by a factor of e^½ at so many times the size.
const FAR: f64 = 1.6;
/// About so much of what a step takes does not go with its size, more or less, if steps vary by the next.
const FIXED: f64 = 0.3;
const VARIES: f64 = 0.01;
/// Steps that are farther than so many standard deviations from where the others would have them count the less.
const DISTURBED: f64 = 2.0;
/// How often what they count is corrected.
const CORRECTED: usize = 3;

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

    /// How many sizes there were.
    pub(super) fn count(&self) -> usize {
        sizes(&self.0)
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

    /// The same, or where there are none, what one of this size would have taken as those of other sizes have it. `None` far beyond all
    /// sizes that there were.
    pub(super) fn take(&self, scale: f64) -> Option<f64> {
        self.alike(scale).or_else(|| {
            let is_below = self.0.iter().any(|timed| timed.scale <= scale * CLOSE);
            let is_above = self.0.iter().any(|timed| timed.scale >= scale / CLOSE);
            (is_below && is_above).then(|| Curve::through(&self.0).at(scale))
        })
    }

    /// How far steps are from what those of their size took.
    pub(super) fn deviations_of_alike(&self) -> Vec<f64> {
        let of_size =
            |timed: &&Timed| self.0.iter().filter(|other| is_alike(timed.scale, other.scale)).count();
        let several = self.0.iter().filter(|timed| of_size(timed) > 1);
        several.filter_map(|timed| Some(apart(timed.wall, self.alike(timed.scale)?))).collect()
    }

    /// The same, from where steps of all sizes would have them. What is fitted to so few seems closer than it is.
    pub(super) fn deviations_of_others(&self) -> Vec<f64> {
        let (count, curve) = (self.0.len() as f64, Curve::through(&self.0));
        let free = (count / (count - Curve::PARAMETERS).max(1.0)).sqrt();
        self.0.iter().map(|timed| free * apart(timed.wall, curve.at(timed.scale))).collect()
    }
}

/// What steps take by their size: something that goes with it, and something that does not, both fitted to steps of about that size.
struct Curve {
    steps: Vec<Timed>,
    /// What each of them counts.
    weights: Vec<f64>,
}

impl Curve {
    const PARAMETERS: f64 = 2.0;

    fn through(steps: &[Timed]) -> Curve {
        let mut curve = Curve { steps: steps.to_vec(), weights: vec![1.0; steps.len()] };
        for _ in 0..CORRECTED {
            let distances: Vec<f64> =
                steps.iter().map(|timed| apart(timed.wall, curve.at(timed.scale))).collect();
            let most = DISTURBED * deviation(distances.iter().copied()).max(VARIES);
            let weight = |distance: f64| if distance > most { most / distance } else { 1.0 };
            curve.weights = distances.into_iter().map(weight).collect();
        }
        curve
    }

    /// What a step of this size takes for as much as is planned.
    fn at(&self, scale: f64) -> f64 {
        let mut all = 0.0;
        let [mut parts, mut walls, mut squares, mut both] = [0.0; 4];
        for (timed, weight) in self.steps.iter().zip(&self.weights) {
            let Timed { scale: size, wall, .. } = *timed;
            let farther = (size / scale).ln() / FAR.ln();
            let weight = weight * (-0.5 * farther.powi(2)).exp().max(f64::MIN_POSITIVE) / wall.powi(2);
            // Of what does not go with the size, a smaller one has more for as much as is planned.
            let part = scale / size - 1.0;
            all += weight;
            parts += weight * part;
            walls += weight * wall;
            squares += weight * part.powi(2);
            both += weight * part * wall;
        }
        let mean = walls / all;
        let unknown = (VARIES / FIXED / mean).powi(2);
        let fixed = (both - parts * mean) / (squares - parts.powi(2) / all + unknown);
        mean - fixed * parts / all
    }
}

/// How far a step is from what is expected of it, as a share of that.
pub(super) fn apart(wall: f64, expected: f64) -> f64 {
    (wall / expected.max(f64::MIN_POSITIVE) - 1.0).abs()
}

/// How many sizes steps have.
pub(super) fn sizes(steps: &[Timed]) -> usize {
    let is_new = |(place, timed): &(usize, &Timed)| {
        !steps[..*place].iter().any(|before| is_alike(before.scale, timed.scale))
    };
    steps.iter().enumerate().filter(is_new).count()
}

/// Whether steps of this size tell how long one of the planned size takes.
pub(super) fn is_near(scale: f64) -> bool {
    (1.0 / NEAR..=NEAR).contains(&scale)
}
