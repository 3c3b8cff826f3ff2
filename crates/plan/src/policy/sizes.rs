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
    pub(super) fn new(kept: impl IntoIterator<Item = Timed>) -> KeptSizes {
        let tells = |timed: &Timed| timed.wall.is_normal() && timed.scale.is_normal();
        KeptSizes(kept.into_iter().filter(tells).collect())
    }

    /// Steps that keep everything take so many times as long now.
    pub(super) fn pace(&mut self, times: f64) {
        let kept = std::mem::take(&mut self.0);
        *self = KeptSizes::new(kept.into_iter().map(|timed| Timed { wall: timed.wall * times, ..timed }));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sizes of all steps, and what steps of each took, in seconds.
    pub(super) fn all(&self) -> impl Iterator<Item = (f64, f64)> {
        self.0.iter().filter_map(|timed| Some((timed.scale, timed.scale * self.alike(timed.scale)?)))
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

    /// The same, or where there are none, what one of this size would have taken as those of other sizes have it. Beyond all sizes that there
    /// were, it takes what the closest would for as much. `None` far beyond them.
    pub(super) fn take(&self, scale: f64) -> Option<f64> {
        self.alike(scale).or_else(|| {
            let scales = || self.0.iter().map(|timed| timed.scale);
            let least = scales().min_by(f64::total_cmp)?;
            let most = scales().max_by(f64::total_cmp)?;
            let is_close = (least / CLOSE..=most * CLOSE).contains(&scale);
            is_close.then(|| Curve::through(&self.0).at(scale.clamp(least, most)))
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
        let nearness = |timed: &Timed| -0.5 * ((timed.scale / scale).ln() / FAR.ln()).powi(2);
        // However far the nearest one is, it counts in full.
        let nearest = self.steps.iter().map(nearness).fold(f64::NEG_INFINITY, f64::max);
        let mut all = 0.0;
        let [mut parts, mut walls, mut squares, mut both] = [0.0; 4];
        for (timed, weight) in self.steps.iter().zip(&self.weights) {
            let Timed { scale: size, wall, .. } = *timed;
            let weight = weight * (nearness(timed) - nearest).exp() / wall.powi(2);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of these sizes that took so long.
    fn kept(steps: &[(f64, f64)]) -> KeptSizes {
        KeptSizes::new(steps.iter().map(|&(scale, wall)| Timed {
            scale,
            wall: wall / scale,
            stall: 0.0,
            clock: None,
        }))
    }

    #[test]
    fn a_step_of_another_size_takes_what_goes_with_it_and_what_does_not() {
        let affine = |size: f64| 1.0 + 0.1 * size;
        for gap in [1.5, 4.0, 16.0, 64.0] {
            let sizes = [1.0, 1.1, gap, 1.1 * gap].map(|size| (size, affine(size)));
            let between = gap.sqrt();
            let off = kept(&sizes).take(between).unwrap() * between / affine(between) - 1.0;
            assert!(off.abs() < 0.02, "{gap}: {off}");
        }
    }

    #[test]
    fn beyond_all_sizes_a_disturbed_step_does_not_tell_what_others_would_have_taken() {
        let kept = kept(&[(1.25, 2.0 * 1.25), (1.0, 1.0)]);
        assert!((kept.take(0.85).unwrap() - 1.0).abs() < 0.05, "{:?}", kept.take(0.85));
        assert!(kept.take(1.5).unwrap() <= 2.0 && kept.take(0.7).is_none() && kept.take(1.6).is_none());
    }

    #[test]
    fn a_step_that_took_no_time_tells_nothing() {
        let kept = kept(&[(1.0, 0.0), (2.0, 0.2), (3.0, 0.3)]);
        assert!(kept.take(2.5).is_some_and(f64::is_normal) && kept.count() == 2);
    }
}
