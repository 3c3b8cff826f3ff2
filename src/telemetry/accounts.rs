//! What all steps of a cache have done together.

use std::sync::Arc;

use ssdtrain_plan::Decided;
use ssdtrain_store::sync::Mutex;

use super::activity::Activity;
use super::metrics::Metrics;
use super::report::StepReport;
use super::stats::Counters;

/// Adds up the steps of a cache. Whoever saves or moves something writes to the counters of its step alone: these are added up when
/// somebody asks, and when nobody can write to them any more.
#[derive(Debug, Default)]
pub(crate) struct Accounts(Mutex<Books>);

#[derive(Debug, Default)]
struct Books {
    /// Of steps whose counters are closed, and all that does not come from counters.
    closed: Metrics,
    /// Counters that may still change: of the step under way, and of steps whose tensors are still there.
    open: Vec<Arc<Counters>>,
}

impl Accounts {
    /// A step begins that writes to these counters.
    pub(crate) fn open(&self, counters: &Arc<Counters>) {
        let mut books = self.0.lock();
        books.close();
        books.open.push(Arc::clone(counters));
    }

    /// A step has ended.
    pub(crate) fn ended(&self, report: &StepReport, is_settled: bool) {
        self.0.lock().closed.ended(report, is_settled);
    }

    /// A step was dropped without its end.
    pub(crate) fn dropped(&self) {
        self.0.lock().closed.steps.dropped += 1;
    }

    /// Something was decided about a plan.
    pub(crate) fn decided(&self, what: Decided) {
        self.0.lock().closed.decided(what);
    }

    /// All of it as it is now, apart from what is where.
    pub(crate) fn metrics(&self) -> Metrics {
        let books = self.0.lock();
        let mut metrics = books.closed.clone();
        for counters in &books.open {
            metrics.activity += Activity::of(counters);
        }
        metrics
    }
}

impl Books {
    /// Adds up the counters that nobody else holds.
    fn close(&mut self) {
        let activity = &mut self.closed.activity;
        self.open.retain_mut(|counters| match Arc::get_mut(counters) {
            Some(last) => {
                *activity += Activity::of(last);
                false
            }
            None => true,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ssdtrain_plan::{Planning, Tally};

    use super::super::stats::StallCause;
    use super::*;

    #[test]
    fn what_a_step_does_counts_at_once_and_only_once_however_long_its_counters_live() {
        let accounts = Accounts::default();
        let saved = || accounts.metrics().activity.saved;
        let [first, second] = [(); 2].map(|()| {
            let counters = Arc::default();
            accounts.open(&counters);
            counters.saved.add(8);
            counters
        });
        assert_eq!(saved(), Tally { count: 2, bytes: 16 }, "both are under way");
        drop(first);
        assert_eq!(saved(), Tally { count: 2, bytes: 16 });
        accounts.open(&Arc::default());
        second.saved.add(1);
        assert_eq!(saved(), Tally { count: 3, bytes: 17 }, "one is closed, and one is still written to");
        assert_eq!(accounts.0.lock().open.len(), 2);
    }

    #[test]
    fn every_figure_of_a_step_is_added_up() {
        let accounts = Accounts::default();
        for _ in 0..2 {
            let counters: Arc<Counters> = Arc::default();
            accounts.open(&counters);
            counters.kept_small.add(1);
            counters.rerun(2, Duration::from_secs(3));
            counters.stalled(StallCause::CopyIn, Duration::from_secs(4));
            let wall = Duration::from_secs(5);
            let report = StepReport { planning: Some(Planning::Left), wall, ..StepReport::of(&counters) };
            accounts.ended(&report, true);
        }
        let metrics = accounts.metrics();
        let Activity { kept, reruns, rerun_time, stall, .. } = metrics.activity;
        assert_eq!((kept.small.bytes, reruns.bytes, metrics.steps.left), (2, 4, 2));
        let seconds = [rerun_time, stall.total(), metrics.step_time].map(|time| time.as_secs());
        assert_eq!((seconds, metrics.is_settled), ([6, 8, 10], true));
    }

    #[test]
    fn decisions_and_dropped_steps_are_counted() {
        let accounts = Accounts::default();
        [Decided::Made, Decided::Corrected, Decided::Corrected]
            .into_iter()
            .for_each(|what| accounts.decided(what));
        accounts.dropped();
        let Metrics { decisions, steps, .. } = accounts.metrics();
        assert_eq!((decisions.made, decisions.corrected, decisions.loosened, steps.dropped), (1, 2, 0, 1));
    }
}
