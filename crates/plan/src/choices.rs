//! What to recompute, in the order in which it pays.

mod groups;
mod market;

use std::time::Duration;

use self::market::Market;
use crate::Workload;
use crate::graph::Graph;

/// A sequence of changes to what is held from forward to backward. It begins with all that autograd saves, and after
/// each change there is less of it.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    at_first: Vec<bool>,
    changes: Vec<Change>,
}

/// Some activations are held from here on, or are no longer.
#[derive(Clone, Debug)]
struct Change {
    switched: Vec<usize>,
    /// By how much fewer bytes are held.
    bytes: u64,
    /// By how much longer recomputation takes, about; 0 if times do not count.
    time: Duration,
}

/// What comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// What takes the least time for its bytes, and of several alike the oldest or the newest.
    Oldest,
    Newest,
    /// What makes the fewest bytes for its own, whatever times were measured: how low a peak can be does not depend on these.
    FewestBytes,
}

impl Choices {
    /// Makes the cheapest change for each byte again and again. `need` is what a step needs besides what is held: as
    /// much may be recomputed at once without a higher peak.
    pub(crate) fn new(work: &Workload, graph: &Graph, need: u64, order: Order) -> Choices {
        let mut market = Market::new(work, graph, need, order);
        let at_first = market.is_held.clone();
        (0..work.activations.len()).for_each(|index| market.offer(index));
        let mut changes = Vec::new();
        while let Some(change) = market.cheapest() {
            changes.push(change);
        }
        Choices { at_first, changes }
    }

    /// The number of changes.
    pub(crate) fn len(&self) -> usize {
        self.changes.len()
    }

    /// What is held after this many changes.
    pub(crate) fn held(&self, count: usize) -> Vec<bool> {
        let mut is_held = self.at_first.clone();
        for index in self.changes[..count].iter().flat_map(|change| &change.switched) {
            is_held[*index] = !is_held[*index];
        }
        is_held
    }

    /// At most `most` numbers of changes, from none to all, spread evenly over the bytes that they free and the time
    /// that they take, where a quarter of `step` weighs as much as all the bytes.
    pub(crate) fn spread(&self, most: usize, step: Duration) -> Vec<usize> {
        let bytes: u64 = self.changes.iter().map(|change| change.bytes).sum();
        let (per_byte, per_s) = (1.0 / bytes.max(1) as f64, 4.0 / step.as_secs_f64().max(f64::MIN_POSITIVE));
        let weights = self
            .changes
            .iter()
            .map(|change| change.bytes as f64 * per_byte + change.time.as_secs_f64() * per_s);
        let reached: Vec<f64> = weights
            .scan(0.0, |sum, weight| {
                *sum += weight;
                Some(*sum)
            })
            .collect();
        let whole = reached.last().copied().unwrap_or(0.0);
        let mut counts: Vec<usize> = (0..most)
            .map(|nth| {
                let share = nth as f64 / most.saturating_sub(1).max(1) as f64;
                reached.partition_point(|reached| *reached <= share * whole)
            })
            .collect();
        counts.dedup();
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, Recompute, Role};

    const MS: Duration = Duration::from_millis(1);

    fn activation(role: Role, bytes: u64, time: Duration, inputs: &[usize]) -> Activation {
        let recompute = Some(Recompute { time, inputs: inputs.to_vec() });
        Activation { role, bytes, recompute, ..Activation::default() }
    }

    fn switched(activations: Vec<Activation>, need: u64) -> Vec<Vec<usize>> {
        let work = Workload { activations, turn_extra: need, ..Workload::default() };
        let choices = Choices::new(&work, &Graph::new(&work.activations), need, Order::Oldest);
        choices.changes.into_iter().map(|change| change.switched).collect()
    }

    #[test]
    fn what_takes_the_least_time_for_its_bytes_comes_first() {
        let saved = |bytes, time| activation(Role::Saved, bytes, time, &[]);
        let three = vec![saved(100, 9 * MS), saved(100, MS), saved(300, 9 * MS)];
        assert_eq!(switched(three, 1000), [[1], [2], [0]]);
    }

    #[test]
    fn an_input_is_saved_in_place_of_several_and_dropped_in_the_end() {
        let spare = activation(Role::Spare, 50, 90 * MS, &[]);
        let wide = || activation(Role::Saved, 100, MS, &[0]);
        assert_eq!(switched(vec![spare, wide(), wide()], 1000), [vec![0, 1, 2], vec![0]]);
    }

    #[test]
    fn what_one_run_makes_is_dropped_together() {
        let run = activation(Role::Fleeting, 0, 9 * MS, &[]);
        let read = |inputs: &[usize]| activation(Role::Saved, 100, Duration::ZERO, inputs);
        let other = activation(Role::Saved, 100, 4 * MS, &[]);
        let four = vec![run, read(&[0]), read(&[0, 1]), read(&[0, 1, 2]), other];
        assert_eq!(switched(four, 1000), [vec![1, 2, 3], vec![4]]);
    }

    #[test]
    fn what_is_needed_at_once_when_backward_begins_comes_last() {
        let saved = |time| activation(Role::Saved, 100, time, &[]);
        let mut three = vec![saved(4 * MS), saved(4 * MS), saved(MS)];
        three[2].backward_extra = 900;
        let work = Workload { activations: three, ..Workload::default() };
        let choices = Choices::new(&work, &Graph::new(&work.activations), 1000, Order::Oldest);
        assert_eq!(choices.held(2), [false, false, true]);
    }

    #[test]
    fn a_long_chain_of_unsaved_results_is_not_computed() {
        let mut activations = vec![activation(Role::Fleeting, 1, MS, &[])];
        for index in 0..200 {
            activations.push(activation(Role::Fleeting, 1, MS, &[index]));
        }
        activations.push(activation(Role::Saved, 100, MS, &[200]));
        assert!(switched(activations, 1000).is_empty());
    }

    #[test]
    fn counts_are_spread_from_none_to_all() {
        let activations = (0..10).map(|_| activation(Role::Saved, 100, MS, &[])).collect();
        let work = Workload { activations, ..Workload::default() };
        let choices = Choices::new(&work, &Graph::new(&work.activations), 1000, Order::Newest);
        let counts = choices.spread(4, 1000 * MS);
        assert_eq!((counts.first(), counts.last(), counts.len()), (Some(&0), Some(&choices.len()), 4));
    }
}
