//! Whether the disk is as fast as plans assume.

/// A disk is strange if it is this many times as fast as expected, or as slow.
const STRANGE: f64 = 1.3;
/// This many strange steps in a row show another speed. Doubled with each change, so that a disk whose speed varies is left alone.
const PATIENCE: usize = 2;
const MOST_PATIENCE: usize = 64;

/// How fast the disk wrote and read in the last steps, as multiples of what was expected.
#[derive(Clone, Debug)]
pub(super) struct DiskWatch {
    /// Those in which it was strange in the same way.
    strange: Vec<[Option<f64>; 2]>,
    patience: usize,
}

impl Default for DiskWatch {
    fn default() -> DiskWatch {
        DiskWatch { strange: Vec::new(), patience: PATIENCE }
    }
}

impl DiskWatch {
    /// In a planned step, the disk wrote and read this many times as fast as expected, where that is known. If it has changed, returns the
    /// same for all steps that have shown it, by the one that was closest to what was expected.
    pub(super) fn saw(&mut self, rates: [Option<f64>; 2]) -> Option<[f64; 2]> {
        let ways = rates.map(way);
        if self.strange.first().is_some_and(|first| first.map(way) != ways) {
            self.strange.clear();
        }
        if ways == [0, 0] {
            return None;
        }
        self.strange.push(rates);
        if self.strange.len() < self.patience {
            return None;
        }
        self.patience = (2 * self.patience).min(MOST_PATIENCE);
        let strange = std::mem::take(&mut self.strange);
        let closest = |which: usize| {
            let seen = strange.iter().filter_map(|rates| rates[which]);
            seen.min_by(|one, other| one.ln().abs().total_cmp(&other.ln().abs())).unwrap_or(1.0)
        };
        Some([closest(0), closest(1)])
    }
}

/// Whether the disk is strangely fast (1), slow (-1), or neither.
fn way(rate: Option<f64>) -> i8 {
    match rate {
        Some(rate) if rate > STRANGE => 1,
        Some(rate) if rate < 1.0 / STRANGE => -1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_of_another_speed_is_known_by_the_second_step() {
        let mut watch = DiskWatch::default();
        assert_eq!(watch.saw([Some(4.0), None]), None);
        assert_eq!(watch.saw([Some(3.0), Some(1.1)]), Some([3.0, 1.1]));
    }

    #[test]
    fn a_disk_that_is_fast_and_slow_in_turn_is_left_alone() {
        let mut watch = DiskWatch::default();
        for rate in [0.5, 1.0, 2.0, 0.5, 2.0].repeat(8) {
            assert_eq!(watch.saw([Some(rate), None]), None, "{rate}");
        }
    }

    #[test]
    fn each_change_makes_the_next_come_later() {
        let mut watch = DiskWatch::default();
        let mut until = |rate| (1..200).find(|_| watch.saw([None, Some(rate)]).is_some());
        assert_eq!([2.0, 0.5, 2.0].map(&mut until), [2, 4, 8].map(Some));
    }
}
