//! Medians and their confidence intervals.

use serde::Serialize;

/// Bootstrap resamples: enough for the second digit of the interval's ends.
const RESAMPLES: usize = 2_000;

/// An estimate and its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Estimate {
    pub(crate) median: f64,
    /// The lower end of the interval.
    pub(crate) low: f64,
    /// Its upper end.
    pub(crate) high: f64,
}

/// The middle value; of an even number, the mean of the middle two. NaN if there are none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        len if len.is_multiple_of(2) => (sorted[middle - 1] + sorted[middle]) / 2.0,
        _ => sorted[middle],
    }
}

/// The ratio of the medians of `values` and `base`, which were measured in pairs. Whole rounds are resampled, so that
/// a slowdown of a whole round does not widen the interval. The same seed gives the same interval.
pub(crate) fn ratio_of_medians(values: &[f64], base: &[f64], seed: u64) -> Estimate {
    let pairs = values.len().min(base.len());
    let mut random = SplitMix(seed);
    let mut ratios: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let picks: Vec<usize> = (0..pairs).map(|_| random.below(pairs)).collect();
            let pick = |from: &[f64]| median(&picks.iter().map(|&index| from[index]).collect::<Vec<_>>());
            pick(values) / pick(base)
        })
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let quantile = |share: f64| ratios[(share * (RESAMPLES - 1) as f64).round() as usize];
    Estimate { median: median(values) / median(base), low: quantile(0.025), high: quantile(0.975) }
}

/// Sebastiano Vigna's SplitMix64: small, and good enough to pick rounds.
struct SplitMix(u64);

impl SplitMix {
    /// A number from `0..bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_interval_is_the_same_for_the_same_seed_and_holds_the_ratio() {
        let base: Vec<f64> = (0..20).map(|round| 100.0 + f64::from(round % 7)).collect();
        let values: Vec<f64> = (0..20).map(|round| 110.0 + f64::from(round % 5)).collect();
        let ratio = ratio_of_medians(&values, &base, 7);
        assert_eq!(ratio, ratio_of_medians(&values, &base, 7));
        assert!(ratio.low <= ratio.median && ratio.median <= ratio.high, "{ratio:?}");
        assert!(ratio.low < ratio.high, "{ratio:?}");
        assert!((1.04..1.15).contains(&ratio.median), "{ratio:?}");
    }

    #[test]
    fn what_is_common_to_a_round_cancels_out() {
        let base: Vec<f64> = (0..21).map(|round| 1.0 + f64::from(round)).collect();
        let values: Vec<f64> = base.iter().map(|base| 2.0 * base).collect();
        assert_eq!(ratio_of_medians(&values, &base, 1), Estimate { median: 2.0, low: 2.0, high: 2.0 });
    }
}
