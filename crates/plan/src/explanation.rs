//! What a plan comes to, activation by activation: who holds the peak, and what is computed again how often.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::graph::Graph;
use crate::reruns::Reruns;
use crate::{Budgets, Machine, Placement, Workload, simulate};

/// What a step with given placements is expected to do with each activation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The moment with the most bytes on the device, and what they are.
    pub peak: Peak,
    /// For each activation, whether it is stored from forward to backward, on the device or below it.
    pub stored: Vec<bool>,
    /// For each activation, how often backward computes it again.
    pub reruns: Vec<u32>,
}

/// The moment with the most bytes on the device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Peak {
    /// When it is; the first such moment, if there are several.
    pub moment: Moment,
    /// Everything on the device, in bytes.
    pub bytes: u64,
    /// What is on the device besides activations, in bytes: gradients, temporary results, and whatever else the
    /// program holds.
    pub extra: u64,
    /// The activations on the device, by index.
    pub holders: Vec<Holder>,
}

/// What is on the device at a moment, in bytes. What is in none of the parts is in use, or was computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Sample {
    /// What the step does.
    pub moment: Moment,
    /// The time since the step began.
    pub at: Duration,
    /// Everything.
    pub bytes: u64,
    /// What is there besides activations.
    pub extra: u64,
    /// What stays from forward to backward.
    pub kept: u64,
    /// What has yet to leave, or has come back.
    pub moving: u64,
}

/// A moment of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Forward computes this activation.
    Forward(usize),
    /// Between the last save and the first time that backward asks for something.
    #[default]
    Turn,
    /// Backward has asked for this activation, and it is being computed again.
    Rerun(usize),
    /// Backward uses this activation.
    Backward(usize),
}

/// An activation that is on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// Its index.
    pub activation: usize,
    /// Why it is there.
    pub holding: Holding,
}

/// Why an activation is on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Holding {
    /// It stays from forward to backward.
    Kept,
    /// It is to leave for host memory or the disk, and has not left.
    Leaving,
    /// It has come back, ahead of its use or for others that are computed from it.
    Loaded,
    /// It was computed again.
    Recomputed,
    /// The program has just made it or still holds it in forward, or backward uses it.
    InUse,
}

/// In words, such as "in use".
impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Holding::Kept => "kept",
            Holding::Leaving => "leaving",
            Holding::Loaded => "loaded",
            Holding::Recomputed => "recomputed",
            Holding::InUse => "in use",
        })
    }
}

impl Workload {
    /// Explains the step that [`simulate`](Workload::simulate) predicts for the same arguments.
    pub fn explain(&self, placements: &[Placement], machine: &Machine, budgets: &Budgets) -> Explanation {
        let graph = Graph::new(&self.activations);
        let reruns = Reruns::of(&self.activations, &graph, placements);
        Explanation {
            peak: simulate::peak(self, &graph, placements, &reruns, machine, budgets),
            stored: (0..self.activations.len()).map(|index| reruns.is_held(index)).collect(),
            reruns: reruns.counts(&self.activations, &graph),
        }
    }

    /// What is on the device at each moment of the step that [`simulate`](Workload::simulate) predicts for the same
    /// arguments.
    pub fn samples(&self, placements: &[Placement], machine: &Machine, budgets: &Budgets) -> Vec<Sample> {
        let graph = Graph::new(&self.activations);
        let reruns = Reruns::of(&self.activations, &graph, placements);
        simulate::samples(self, placements, &reruns, machine, budgets)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Activation, Recompute, Release, Role};

    use Placement::{Disk, Host, Keep, Recompute as Again};

    const S: Duration = Duration::from_secs(1);

    /// An activation of 10 bytes that takes a second wherever it is computed, from these.
    fn from(inputs: &[usize]) -> Activation {
        let recompute = Some(Recompute { time: S, inputs: inputs.to_vec() });
        Activation { bytes: 10, forward: S, backward: S, recompute, ..Activation::default() }
    }

    fn work(activations: &[Activation]) -> Workload {
        Workload { activations: activations.to_vec(), ..Workload::default() }
    }

    fn explain(work: &Workload, placements: &[Placement]) -> Explanation {
        work.explain(placements, &Machine::default(), &Budgets::default())
    }

    fn holders(peak: &Peak) -> Vec<(usize, Holding)> {
        peak.holders.iter().map(|holder| (holder.activation, holder.holding)).collect()
    }

    #[test]
    fn the_peak_of_forward_is_held_by_what_is_kept_and_what_is_being_made() {
        let mut work = work(&[from(&[]), from(&[]), from(&[])]);
        work.activations[1].forward_extra = 100;
        let peak = explain(&work, &[]).peak;
        assert_eq!((peak.moment, peak.bytes, peak.extra), (Moment::Forward(1), 120, 100));
        assert_eq!(holders(&peak), [(0, Holding::Kept), (1, Holding::InUse)]);
    }

    #[test]
    fn what_the_program_still_holds_in_forward_counts_although_nothing_keeps_it() {
        let mut work = work(&[from(&[]), from(&[0]), from(&[])]);
        work.activations[1].in_use_until = 2;
        let peak = explain(&work, &[Keep, Again, Keep]).peak;
        assert_eq!((peak.moment, peak.bytes), (Moment::Forward(2), 30));
        assert_eq!(holders(&peak), [(0, Holding::Kept), (1, Holding::InUse), (2, Holding::InUse)]);
    }

    #[test]
    fn the_peak_between_forward_and_backward_is_told() {
        let work = Workload { turn_extra: 7, ..work(&[from(&[]), from(&[])]) };
        let peak = explain(&work, &[]).peak;
        assert_eq!((peak.moment, peak.bytes, peak.extra), (Moment::Turn, 27, 7));
        assert_eq!(holders(&peak), [(0, Holding::Kept), (1, Holding::Kept)]);
    }

    #[test]
    fn the_peak_of_a_rerun_includes_what_the_computation_leads_through() {
        let wide = Activation { role: Role::Fleeting, bytes: 100, ..from(&[0]) };
        let work = work(&[from(&[]), wide, from(&[1])]);
        let explanation = explain(&work, &[Keep, Again, Again]);
        let peak = &explanation.peak;
        assert_eq!((peak.moment, peak.bytes), (Moment::Rerun(2), 120));
        assert_eq!(holders(peak), [(0, Holding::Kept), (1, Holding::Recomputed), (2, Holding::Recomputed)]);
        assert_eq!((explanation.stored, explanation.reruns), (vec![true, false, false], vec![0, 1, 1]));
    }

    #[test]
    fn the_peak_of_a_rerun_is_where_its_results_are_widest() {
        let fleeting = |bytes, input| Activation { role: Role::Fleeting, bytes, ..from(&[input]) };
        let work = work(&[from(&[]), fleeting(100, 0), fleeting(10, 1), fleeting(5, 2), from(&[3])]);
        let peak = explain(&work, &[Keep, Again, Again, Again, Again]).peak;
        assert_eq!((peak.moment, peak.bytes), (Moment::Rerun(4), 120));
        assert_eq!(holders(&peak), [(0, Holding::Kept), (1, Holding::Recomputed), (2, Holding::Recomputed)]);
    }

    #[test]
    fn what_an_earlier_rerun_left_is_on_the_device_during_the_next() {
        let wide = Activation { role: Role::Fleeting, bytes: 100, ..from(&[0]) };
        let work = work(&[from(&[]), from(&[0]), wide, from(&[2]), from(&[1])]);
        let peak = explain(&work, &[Keep, Again, Again, Again, Again]).peak;
        assert_eq!((peak.moment, peak.bytes), (Moment::Rerun(3), 130));
        let computed = [1, 2, 3].map(|index| (index, Holding::Recomputed));
        assert_eq!(holders(&peak), [&[(0, Holding::Kept)], &computed[..]].concat());
    }

    #[test]
    fn what_was_computed_with_others_is_on_the_device_until_it_is_used() {
        let mut work = work(&[from(&[]), from(&[0]), from(&[1])]);
        work.activations[2].backward_extra = 50;
        let peak = explain(&work, &[Keep, Again, Again]).peak;
        assert_eq!((peak.moment, peak.bytes, peak.extra), (Moment::Backward(2), 80, 50));
        assert_eq!(holders(&peak), [(0, Holding::Kept), (1, Holding::Recomputed), (2, Holding::InUse)]);
    }

    #[test]
    fn what_backward_uses_together_is_in_use_together() {
        let mut work = work(&[from(&[]), from(&[]), from(&[])]);
        work.activations[2].in_use_with = 1;
        work.activations[1].backward_extra = 50;
        let peak = explain(&work, &[]).peak;
        assert_eq!((peak.moment, peak.bytes), (Moment::Backward(1), 80));
        assert_eq!(holders(&peak), [(0, Holding::Kept), (1, Holding::InUse), (2, Holding::InUse)]);
    }

    #[test]
    fn what_is_computed_twice_is_counted_twice() {
        let fleeting = Activation { role: Role::Fleeting, ..from(&[0]) };
        let work = work(&[from(&[]), fleeting, from(&[1]), from(&[1])]);
        assert_eq!(explain(&work, &[Keep, Again, Again, Again]).reruns, [0, 2, 1, 1]);
        assert_eq!(explain(&work, &[]).reruns, [0; 4]);
    }

    #[test]
    fn what_backward_has_used_up_is_computed_for_others_once_more() {
        let work = work(&[from(&[]), from(&[2]), from(&[0]), from(&[2])]);
        assert_eq!(explain(&work, &[Keep, Again, Again, Again]).reruns, [0, 1, 2, 1]);
    }

    fn activation() -> impl Strategy<Value = Activation> {
        let role = prop_oneof![3 => Just(Role::Saved), 1 => Just(Role::Spare), 1 => Just(Role::Fleeting)];
        let recipe = proptest::option::weighted(0.8, proptest::collection::vec(0..14_usize, 0..3));
        let bytes = (1..100_u64, 0..100_u64, 0..100_u64);
        (role, recipe, bytes, 0..4_usize, 0..3_usize).prop_map(|(role, inputs, bytes, until, with)| {
            Activation {
                role,
                bytes: bytes.0,
                forward_extra: bytes.1,
                backward_extra: bytes.2,
                recompute: inputs.map(|inputs| Recompute { time: S, inputs }),
                in_use_until: until,
                in_use_with: with,
                traffic: None,
                forward: S,
                backward: S,
            }
        })
    }

    proptest! {
        #[test]
        fn the_parts_of_a_peak_add_up_to_what_is_predicted(
            activations in proptest::collection::vec(activation(), 1..14),
            placements in proptest::collection::vec(
                prop_oneof![Just(Keep), Just(Host), Just(Disk), Just(Again)], 14),
            turn_extra in 0..100_u64,
            budget in 0..400_u64,
            prefetch in 0..100_u64,
            rate in 5..100_u32,
            release in prop_oneof![
                Just(Release::InStreamOrder), Just(Release::WhenStored), Just(Release::OnceWritten)],
        ) {
            let mut work = Workload { turn_extra, ..work(&activations) };
            for (index, activation) in work.activations.iter_mut().enumerate() {
                activation.in_use_until += index;
                activation.in_use_with = activation.in_use_with.min(index);
                // Some are made from what is saved later, and some from themselves.
                activation.recompute.iter_mut().for_each(|recipe| {
                    recipe.inputs.retain(|input| *input < index || (input ^ index).is_multiple_of(5));
                });
            }
            let rate = f64::from(rate);
            let machine = Machine {
                copy_out: rate, copy_in: rate, disk_write: rate, disk_read: rate, release, ..Machine::default()
            };
            let budgets = Budgets {
                device_budget: budget, backward_budget: budget, prefetch, ..Budgets::default()
            };
            let placements = &placements[..activations.len()];
            let predicted = work.simulate(placements, &machine, &budgets);
            let Explanation { peak, reruns, .. } = work.explain(placements, &machine, &budgets);
            prop_assert_eq!(peak.bytes, predicted.peak());
            let samples = work.samples(placements, &machine, &budgets);
            prop_assert_eq!(samples.iter().map(|sample| sample.bytes).max(), Some(peak.bytes));
            let held = |sample: &Sample| sample.extra + sample.kept + sample.moving;
            prop_assert!(samples.iter().all(|sample| held(sample) <= sample.bytes), "{:?}", samples);
            let mut bytes = peak.extra;
            for holder in &peak.holders {
                bytes += work.activations[holder.activation].bytes;
            }
            prop_assert_eq!(bytes, peak.bytes, "{:?}", peak);
            let times = work.activations.iter().zip(reruns).filter_map(|(activation, count)| {
                Some(activation.recompute.as_ref()?.time * count)
            });
            prop_assert_eq!(times.sum::<Duration>(), predicted.recomputed);
        }
    }
}
