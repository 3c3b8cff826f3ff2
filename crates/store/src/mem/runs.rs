//! Tracks which pages are free, as runs of adjacent pages.

#[cfg(any(test, fuzzing))]
#[cfg_attr(not(fuzzing), expect(unreachable_pub, reason = "fuzz targets are outside"))]
pub(crate) mod model;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The free pages of memory whose users accept any set of runs: there is room as long as enough pages are free,
/// however scattered they are.
#[derive(Debug, Default)]
pub(super) struct Runs {
    /// Free runs: first page to one past the last. Adjacent runs are merged, except across a border.
    runs: BTreeMap<usize, usize>,
    /// The first page of each range that was added.
    borders: BTreeSet<usize>,
    free: usize,
}

impl Runs {
    /// Adds new pages, all of them free. They are never merged into one run with pages that were added before or
    /// later.
    pub(super) fn add(&mut self, pages: Range<usize>) {
        self.borders.insert(pages.start);
        self.insert(pages);
    }

    /// Removes pages that were added as this range, if all of them are free.
    pub(super) fn remove(&mut self, pages: &Range<usize>) -> bool {
        let are_free = self.runs.get(&pages.start) == Some(&pages.end);
        if are_free {
            self.runs.remove(&pages.start);
            self.borders.remove(&pages.start);
            self.free -= pages.len();
        }
        are_free
    }

    /// Takes `pages` pages, or returns `None` if fewer are free. They are one run if any is long enough (the first
    /// such run is used); otherwise the longest runs are used, so that they are as few as possible.
    pub(super) fn take(&mut self, pages: usize) -> Option<Vec<Range<usize>>> {
        if pages > self.free {
            return None;
        }
        let free = || self.runs.iter().map(|(&start, &end)| start..end);
        let mut chosen: Vec<_> = free().find(|run| run.len() >= pages).into_iter().collect();
        if chosen.is_empty() {
            chosen = free().collect();
            chosen.sort_by_key(|run| Reverse(run.len()));
        }
        let (mut taken, mut left) = (Vec::new(), pages);
        for run in chosen {
            let cut = run.start + left.min(run.len());
            if cut == run.start {
                break;
            }
            self.runs.remove(&run.start);
            if cut < run.end {
                self.runs.insert(cut, run.end);
            }
            taken.push(run.start..cut);
            left -= cut - run.start;
        }
        self.free -= pages;
        Some(taken)
    }

    /// Gives back pages that were taken and have not been given back since.
    pub(super) fn give(&mut self, runs: &[Range<usize>]) {
        for run in runs {
            self.insert(run.clone());
        }
    }

    /// The number of free pages.
    pub(super) fn free(&self) -> usize {
        self.free
    }

    /// Frees a run and merges it with the runs next to it.
    fn insert(&mut self, run: Range<usize>) {
        if run.is_empty() {
            return;
        }
        self.free += run.len();
        let before = self.runs.range(..run.start).next_back().map(|(&start, &end)| start..end);
        let start = match before {
            Some(before) if before.end == run.start && !self.borders.contains(&run.start) => before.start,
            _ => run.start,
        };
        let after = if self.borders.contains(&run.end) { None } else { self.runs.remove(&run.end) };
        self.runs.insert(start, after.unwrap_or(run.end));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::model::RunsStep;
    use super::*;

    fn of(ranges: &[Range<usize>]) -> Runs {
        let mut runs = Runs::default();
        ranges.iter().for_each(|range| runs.add(range.clone()));
        runs
    }

    fn free_runs(runs: &Runs) -> Vec<Range<usize>> {
        runs.runs.iter().map(|(&start, &end)| start..end).collect()
    }

    #[test]
    fn the_first_run_that_is_long_enough_is_cut() {
        let mut runs = of(&[0..4, 4..20, 20..40]);
        let taken = [5, 4].map(|pages| runs.take(pages).unwrap());
        assert_eq!(taken.concat(), [4..9, 0..4]);
        assert_eq!(free_runs(&runs), [9..20, 20..40]);
    }

    #[test]
    fn where_none_is_long_enough_the_longest_go_first() {
        let mut runs = of(&[0..4, 10..20, 30..37]);
        assert_eq!(runs.take(15).unwrap(), [10..20, 30..35]);
        assert_eq!(free_runs(&runs), [0..4, 35..37]);
    }

    #[test]
    fn no_pages_are_always_there() {
        assert_eq!(Runs::default().take(0), Some(Vec::new()));
        assert_eq!(of(&[0..3, 3..4]).take(0), Some(Vec::new()));
        assert_eq!(Runs::default().take(1), None);
    }

    fn steps() -> impl Strategy<Value = Vec<RunsStep>> {
        let step = prop_oneof![
            1 => (1_usize..50).prop_map(RunsStep::Add),
            1 => any::<usize>().prop_map(RunsStep::Remove),
            4 => (0_usize..40).prop_map(RunsStep::Take),
            3 => any::<usize>().prop_map(RunsStep::Give),
        ];
        proptest::collection::vec(step, 1..if cfg!(miri) { 30 } else { 200 })
    }

    proptest! {
        #[test]
        fn pages_are_taken_once_while_enough_are_free_and_all_come_back(steps in steps()) {
            model::compare(steps);
        }
    }
}
