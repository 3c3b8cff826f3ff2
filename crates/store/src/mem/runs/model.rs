//! A plain record of every page of a host pool, and steps that are taken with it and with [`Runs`] alike.

use std::cmp::Reverse;
use std::ops::Range;

use super::Runs;

/// A change of the pages.
#[derive(Clone, Copy, Debug)]
pub enum RunsStep {
    /// This many new pages are added, behind those that there ever were.
    Add(usize),
    /// One of the ranges that were added is removed, if all of it is free; they are counted round.
    Remove(usize),
    /// This many pages are taken, if as many are free.
    Take(usize),
    /// What was taken at once comes back; they are counted round.
    Give(usize),
}

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Free,
    Taken,
    /// Its range was removed.
    Gone,
}

/// Every page that there ever was, and the ranges that are there.
#[derive(Default)]
struct Pages {
    pages: Vec<Page>,
    ranges: Vec<Range<usize>>,
}

impl Pages {
    /// The free runs, none of them next to another of the same range.
    fn free_runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for range in &self.ranges {
            let before = runs.len();
            for page in range.clone().filter(|&page| self.pages[page] == Page::Free) {
                match runs[before..].last_mut().filter(|run| run.end == page) {
                    Some(run) => run.end += 1,
                    None => runs.push(page..page + 1),
                }
            }
        }
        runs
    }

    /// The runs that have to be taken: of the first that is long enough, or of all, the longest first.
    fn runs_for(&self, pages: usize) -> Option<Vec<Range<usize>>> {
        let mut free = self.free_runs();
        if free.iter().map(Range::len).sum::<usize>() < pages {
            return None;
        }
        match free.iter().find(|run| run.len() >= pages) {
            Some(run) => free = vec![run.clone()],
            None => free.sort_by_key(|run| (Reverse(run.len()), run.start)),
        }
        let mut left = pages;
        for run in &mut free {
            run.end = run.end.min(run.start + left);
            left -= run.len();
        }
        free.retain(|run| !run.is_empty());
        Some(free)
    }

    fn set(&mut self, runs: &[Range<usize>], from: Page, to: Page) {
        for page in runs.iter().cloned().flatten() {
            assert_eq!(self.pages[page], from, "page {page}");
            self.pages[page] = to;
        }
    }
}

/// Takes `steps` with runs and with a record of their pages, and gives everything back at last. Panics where the two
/// differ.
pub fn compare(steps: impl IntoIterator<Item = RunsStep>) {
    let (mut runs, mut pages, mut taken) = (Runs::default(), Pages::default(), Vec::new());
    for step in steps {
        match step {
            RunsStep::Add(0) => {}
            RunsStep::Add(count) => {
                let first = pages.pages.len();
                runs.add(first..first + count);
                pages.pages.resize(first + count, Page::Free);
                pages.ranges.push(first..first + count);
            }
            RunsStep::Remove(_) if pages.ranges.is_empty() => {}
            RunsStep::Remove(index) => {
                let index = index % pages.ranges.len();
                let range = pages.ranges[index].clone();
                let is_free = pages.pages[range.clone()].iter().all(|page| *page == Page::Free);
                assert_eq!(runs.remove(&range), is_free);
                if is_free {
                    pages.set(&[range], Page::Free, Page::Gone);
                    pages.ranges.remove(index);
                }
            }
            RunsStep::Take(count) => {
                let found = runs.take(count);
                assert_eq!(found, pages.runs_for(count));
                found.iter().for_each(|found| pages.set(found, Page::Free, Page::Taken));
                taken.extend(found);
            }
            RunsStep::Give(_) if taken.is_empty() => {}
            RunsStep::Give(index) => {
                let given = taken.swap_remove(index % taken.len());
                runs.give(&given);
                pages.set(&given, Page::Taken, Page::Free);
            }
        }
        assert_same(&runs, &pages);
    }
    for given in taken {
        runs.give(&given);
        pages.set(&given, Page::Taken, Page::Free);
    }
    assert_same(&runs, &pages);
    assert!(pages.ranges.iter().all(|range| runs.remove(range)), "each range is one free run again");
    assert_eq!((runs.free(), runs.runs.len(), runs.borders.len()), (0, 0, 0));
}

fn assert_same(runs: &Runs, pages: &Pages) {
    assert_eq!(runs.free(), pages.pages.iter().filter(|page| **page == Page::Free).count());
    assert!(runs.runs.iter().map(|(&start, &end)| start..end).eq(pages.free_runs()), "the free runs differ");
}
