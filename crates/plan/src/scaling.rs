//! The same step with a larger or smaller micro-batch.

use std::time::Duration;

use super::{Activation, Caps, Frontier, Goal, Handling, Machine, Plan, Recompute, Workload};

/// How a step changes with the size of its micro-batch: every quantity is taken to grow linearly with the number of
/// sequences.
#[derive(Clone, Debug)]
pub struct Scaling<'a> {
    less: (u64, &'a Workload),
    more: (u64, &'a Workload),
}

impl<'a> Scaling<'a> {
    /// Interpolates between two profiles, each given with the size of its micro-batch. `None` if they have the same
    /// size, or are not of the same model: they have other activations, or compute them from others.
    pub fn between(one: (u64, &'a Workload), other: (u64, &'a Workload)) -> Option<Scaling<'a>> {
        let (less, more) = if one.0 < other.0 { (one, other) } else { (other, one) };
        let (smaller, larger) = (&less.1.activations, &more.1.activations);
        let is_same = smaller.len() == larger.len()
            && smaller.iter().zip(larger).all(|(one, other)| one.is_like(other));
        (less.0 < more.0 && is_same).then_some(Scaling { less, more })
    }

    /// The step with a micro-batch of this many sequences.
    pub fn at(&self, size: u64) -> Workload {
        let ((less, from), (more, to)) = (self.less, self.more);
        let share = (size as f64 - less as f64) / (more - less) as f64;
        let number = |from: f64, to: f64| (from + (to - from) * share).max(0.0);
        let bytes = |from: u64, to: u64| number(from as f64, to as f64).round() as u64;
        let time = |from: Duration, to: Duration| {
            Duration::from_secs_f64(number(from.as_secs_f64(), to.as_secs_f64()))
        };
        let activation = |(from, to): (&Activation, &Activation)| Activation {
            role: from.role,
            bytes: bytes(from.bytes, to.bytes),
            forward: time(from.forward, to.forward),
            backward: time(from.backward, to.backward),
            forward_extra: bytes(from.forward_extra, to.forward_extra),
            backward_extra: bytes(from.backward_extra, to.backward_extra),
            recompute: from
                .recompute
                .as_ref()
                .zip(to.recompute.as_ref())
                .map(|(from, to)| Recompute { time: time(from.time, to.time), inputs: from.inputs.clone() }),
            in_use_until: from.in_use_until.max(to.in_use_until),
            in_use_with: from.in_use_with.max(to.in_use_with),
            traffic: from.traffic.zip(to.traffic).map(|(from, to)| bytes(from, to)),
        };
        Workload {
            activations: from.activations.iter().zip(&to.activations).map(activation).collect(),
            turn: time(from.turn, to.turn),
            turn_extra: bytes(from.turn_extra, to.turn_extra),
            rest: time(from.rest, to.rest),
            handling: Handling {
                saves: time(from.handling.saves, to.handling.saves),
                operations: time(from.handling.operations, to.handling.operations),
                each_move: time(from.handling.each_move, to.handling.each_move),
            },
        }
    }

    /// The largest micro-batch, of at most `most` sequences, whose plan reaches the goal, together with that plan.
    /// `None` if even a single sequence does not.
    pub fn largest(&self, machine: &Machine, caps: Caps, goal: Goal, most: u64) -> Option<(u64, Plan)> {
        let plan = |size: u64| Frontier::new(&self.at(size), machine, caps).plan(goal).ok();
        let (mut fits, mut too_large) = ((1, plan(1)?), most.saturating_add(1));
        while too_large - fits.0 > 1 {
            let middle = fits.0 + (too_large - fits.0) / 2;
            match plan(middle) {
                Some(plan) => fits = (middle, plan),
                None => too_large = middle,
            }
        }
        Some(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Layers whose bytes and times grow with the number of sequences, except for 50 bytes and a millisecond that
    /// stay the same.
    fn of(size: u64) -> Workload {
        let time = size as u32 * MS;
        let activation = Activation {
            bytes: 10 * size,
            forward: time,
            backward: 2 * time,
            backward_extra: 50 + size,
            in_use_until: 1,
            in_use_with: 1,
            ..Activation::default()
        };
        Workload { activations: vec![activation; 4], turn: MS, rest: MS, ..Workload::default() }
    }

    #[test]
    fn sizes_between_and_beyond_are_as_if_profiled() {
        let (two, six) = (of(2), of(6));
        let scaling = Scaling::between((6, &six), (2, &two)).unwrap();
        for size in [1, 2, 3, 6, 40] {
            assert_eq!(scaling.at(size), of(size));
        }
    }

    #[test]
    fn profiles_that_do_not_belong_together_are_refused() {
        let (two, mut six) = (of(2), of(6));
        assert!(Scaling::between((2, &two), (2, &two)).is_none());
        six.activations[3].recompute = Some(Recompute::default());
        assert!(Scaling::between((2, &two), (6, &six)).is_none());
        six.activations.pop();
        assert!(Scaling::between((2, &two), (6, &six)).is_none());
    }

    #[test]
    fn the_largest_that_fits_is_found_and_one_more_does_not_fit() {
        let (two, six) = (of(2), of(6));
        let scaling = Scaling::between((2, &two), (6, &six)).unwrap();
        // Nothing can be moved: there are 4 layers of 10 bytes per sequence; backward needs one more byte per
        // sequence and 50 bytes.
        let machine = Machine { host_pool: 0, ..Machine::default() };
        let caps = Caps { disk: 0, ..Caps::default() };
        let largest =
            |budget, most| scaling.largest(&machine, caps, Goal::budget(budget), most).map(|(size, _)| size);
        assert_eq!(largest(50 + 41 * 7, 1000), Some(7));
        assert_eq!(largest(50 + 41 * 8 - 1, 1000), Some(7));
        assert_eq!(largest(50 + 41 * 7, 3), Some(3));
        assert_eq!(largest(90, 1000), None);
    }
}
