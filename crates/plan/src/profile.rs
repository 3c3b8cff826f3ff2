//! The measurements of a step, in a form that can be saved and planned with.

use std::error::Error;
use std::fmt;
use std::num::NonZero;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::graph::{Flaw, Graph};
use super::machine::MOST_MOVING;
use super::{Machine, Workload};

/// More bytes than any step has. Planning with fewer bytes is safe from overflow.
const MOST_BYTES: u64 = 1 << 60;
/// Longer than any step takes; this limit exists for the same reason.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);
/// The lowest accepted rate, in bytes per second.
const SLOWEST: f64 = 1.0;

/// The measurements of a step, to plan with: for another goal, at another time, or on another machine.
///
/// A profile that is read from a file is validated: whatever it contains, planning with it works.
///
/// ```
/// use std::num::NonZero;
///
/// use ssdtrain_plan::{Caps, Frontier, Goal, Machine, Profile, Workload};
///
/// # fn main() -> Result<(), serde_json::Error> {
/// let (workload, machine) = (Workload::default(), Machine::default());
/// let seen = Profile { workload, micro_batches: NonZero::<u32>::MIN, machine, names: Vec::new() };
/// let saved = serde_json::to_string(&seen)?;
/// let read: Profile = serde_json::from_str(&saved)?;
/// assert_eq!(read, seen);
/// let frontier = Frontier::new(&read.workload, &read.machine, Caps::default());
/// assert!(frontier.plan(Goal::budget(1 << 30)).is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Profile {
    /// One micro-batch, including its share of what follows the last one.
    pub workload: Workload,
    /// The number of micro-batches in the step.
    pub micro_batches: NonZero<u32>,
    /// What moved the step's bytes.
    pub machine: Machine,
    /// What each activation is called, such as "block.0.mlp mm"; empty if that is not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
}

/// Why a profile that was read is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Implausible {
    /// There are names, but not one for each activation.
    Names,
    /// Something moves less than a byte per second.
    Rate,
    /// Moving a byte takes less than no time, or more than a millisecond, of the program's own.
    Moving,
    /// Less than nothing, or more than all, of the cache's work on the program's own thread makes the step longer.
    Exposed,
    /// Everything that is saved or needed adds up to more than 2^60 bytes.
    Bytes,
    /// The step takes more than 10^9 seconds.
    Time,
    /// The activation with this index would be recomputed from one that does not exist.
    Recompute(usize),
    /// The activation with this index would be recomputed from itself, directly or through others.
    Cycle(usize),
}

/// A profile as it is stored in a file.
#[derive(Deserialize)]
struct Unchecked {
    workload: Workload,
    micro_batches: NonZero<u32>,
    machine: Machine,
    #[serde(default)]
    names: Vec<String>,
}

impl TryFrom<Unchecked> for Profile {
    type Error = Implausible;

    fn try_from(read: Unchecked) -> Result<Profile, Implausible> {
        let Unchecked { workload, micro_batches, machine, names } = read;
        if !names.is_empty() && names.len() != workload.activations.len() {
            return Err(Implausible::Names);
        }
        let Machine { copy_out, copy_in, disk_write, disk_read, .. } = machine;
        if [copy_out, copy_in, disk_write, disk_read].iter().any(|rate| rate.is_nan() || *rate < SLOWEST) {
            return Err(Implausible::Rate);
        }
        if !(0.0..=MOST_MOVING).contains(&machine.moving) {
            return Err(Implausible::Moving);
        }
        if !(0.0..=1.0).contains(&machine.exposed) {
            return Err(Implausible::Exposed);
        }
        let Workload { turn, rest, handling, .. } = &workload;
        let moves =
            handling.each_move.saturating_mul(u32::try_from(workload.activations.len()).unwrap_or(u32::MAX));
        let times = [*turn, *rest, handling.saves, handling.operations, moves];
        let (mut bytes, mut time) =
            (u128::from(workload.turn_extra), times.iter().map(Duration::as_nanos).sum::<u128>());
        for activation in &workload.activations {
            bytes += [activation.bytes, activation.forward_extra, activation.backward_extra]
                .map(u128::from)
                .iter()
                .sum::<u128>();
            time += activation.forward.as_nanos() + activation.backward.as_nanos();
            time += activation.recompute.as_ref().map_or(0, |recompute| recompute.time.as_nanos());
        }
        if bytes > u128::from(MOST_BYTES) {
            return Err(Implausible::Bytes);
        }
        if time > LONGEST.as_nanos() {
            return Err(Implausible::Time);
        }
        match Graph::flaw(&workload.activations) {
            Some(Flaw::Missing(index)) => Err(Implausible::Recompute(index)),
            Some(Flaw::Cycle(index)) => Err(Implausible::Cycle(index)),
            None => Ok(Profile { workload, micro_batches, machine, names }),
        }
    }
}

impl fmt::Display for Implausible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Implausible::Names => write!(f, "it does not have a name for each activation"),
            Implausible::Rate => write!(f, "a rate is less than a byte per second"),
            Implausible::Moving => {
                write!(f, "moving a byte takes less than 0 or more than 0.001 s of the program's own time")
            }
            Implausible::Exposed => {
                write!(f, "the share of the cache's own work that makes a step longer is not between 0 and 1")
            }
            Implausible::Bytes => write!(f, "its bytes come to more than 2^60"),
            Implausible::Time => write!(f, "it takes more than 10^9 seconds"),
            Implausible::Recompute(activation) => {
                write!(f, "activation {activation} would be computed again from one that does not exist")
            }
            Implausible::Cycle(activation) => {
                write!(f, "activation {activation} would be computed again from itself")
            }
        }
    }
}

impl Error for Implausible {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::{Activation, Caps, Frontier, Goal, Handling, Recompute, Release, Role};
    use super::*;

    fn activation(most: u64) -> impl Strategy<Value = Activation> {
        let bytes = (0..=most, 0..=most, 0..=most);
        let times = (0..=most, 0..=most);
        let uses = (prop_oneof![0..20_usize, Just(usize::MAX)], 0..20_usize);
        let recompute = proptest::option::of((0..=most, proptest::collection::vec(0..20_usize, 0..3)));
        let role = prop_oneof![Just(Role::Saved), Just(Role::Spare), Just(Role::Fleeting)];
        let made = (recompute, proptest::option::of(0..=most));
        (role, bytes, times, uses, made).prop_map(|(role, bytes, times, uses, (recompute, traffic))| {
            Activation {
                role,
                bytes: bytes.0,
                forward_extra: bytes.1,
                backward_extra: bytes.2,
                forward: Duration::from_nanos(times.0),
                backward: Duration::from_nanos(times.1),
                recompute: recompute
                    .map(|(time, inputs)| Recompute { time: Duration::from_nanos(time), inputs }),
                in_use_until: uses.0,
                in_use_with: uses.1,
                traffic,
            }
        })
    }

    fn workload(most: u64) -> impl Strategy<Value = Workload> {
        let times = (0..=most, 0..=most, 0..=most);
        let parts = (proptest::collection::vec(activation(most), 0..12), 0..=most, 0..=most, times);
        parts.prop_map(|(mut activations, turn, turn_extra, (rest, saves, operations))| {
            let count = activations.len();
            // An order in which some are computed before those that are saved before them.
            let made = |index: usize| index ^ 1;
            for (index, activation) in activations.iter_mut().enumerate() {
                let inputs = activation.recompute.iter_mut().map(|recompute| &mut recompute.inputs);
                inputs.for_each(|inputs| inputs.retain(|&input| input < count && made(input) < made(index)));
            }
            let [turn, rest, saves, operations] = [turn, rest, saves, operations].map(Duration::from_nanos);
            Workload {
                activations,
                turn,
                turn_extra,
                rest,
                handling: Handling { saves, operations, each_move: saves / 16 },
            }
        })
    }

    /// Any profile that may be read, up to the largest numbers.
    fn profile() -> impl Strategy<Value = Profile> {
        // Whole numbers: serde_json reads their text back exactly.
        let whole = (1..1_u64 << 40).prop_map(|rate| rate as f64);
        let rate = || prop_oneof![Just(f64::INFINITY), Just(f64::MAX), Just(SLOWEST), whole.clone()];
        let release =
            prop_oneof![Just(Release::InStreamOrder), Just(Release::WhenStored), Just(Release::OnceWritten)];
        let machine = (rate(), rate(), rate(), rate(), any::<u64>(), release).prop_map(|machine| {
            let (copy_out, copy_in, disk_write, disk_read, host_pool, release) = machine;
            let moving = if host_pool % 2 == 0 { 0.0 } else { MOST_MOVING };
            let exposed = if host_pool % 3 == 0 { 0.0 } else { 1.0 };
            Machine { copy_out, copy_in, disk_write, disk_read, host_pool, release, moving, exposed }
        });
        // Twelve activations with such numbers stay just below the limit.
        let workload = prop_oneof![Just(1000), Just(1 << 40), Just(MOST_BYTES >> 6)].prop_flat_map(workload);
        (workload, any::<NonZero<u32>>(), machine, any::<bool>()).prop_map(
            |(workload, micro_batches, machine, is_named)| {
                let count = if is_named { workload.activations.len() } else { 0 };
                let names = (0..count).map(|index| format!("layer {index}")).collect();
                Profile { workload, micro_batches, machine, names }
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_was_saved_and_can_be_planned_with(seen in profile(), budget in any::<u64>()) {
            let read: Profile = serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
            prop_assert_eq!(&read, &seen);
            let frontier = Frontier::new(&read.workload, &read.machine, Caps::default());
            for goal in [Goal::budget(budget), Goal::overhead(0.02)] {
                if let Err(out_of_reach) = frontier.plan(goal) {
                    prop_assert_eq!(out_of_reach.peak, frontier.lowest().prediction.peak());
                }
            }
        }
    }

    fn saved(change: impl FnOnce(&mut Value)) -> Result<Profile, serde_json::Error> {
        let activation =
            Activation { bytes: 100, forward: Duration::from_millis(1), ..Activation::default() };
        let workload = Workload { activations: vec![activation; 2], ..Workload::default() };
        let names = vec!["first".to_owned(), "second".to_owned()];
        let seen =
            Profile { workload, micro_batches: NonZero::<u32>::MIN, machine: Machine::default(), names };
        let mut value = serde_json::to_value(&seen).unwrap();
        change(&mut value);
        serde_json::from_value(value)
    }

    #[test]
    fn a_profile_that_cannot_be_one_is_refused_with_the_reason() {
        assert_eq!(saved(|_| {}).unwrap().machine, Machine::default());
        let refused = |place: &str, value: Value| {
            saved(|all| *all.pointer_mut(place).unwrap() = value).unwrap_err().to_string()
        };
        for (place, value, why) in [
            ("/machine/disk_read", json!(0.5), "byte per second"),
            ("/machine/moving", json!(-1e-12), "moving a byte"),
            ("/machine/exposed", json!(1.5), "not between 0 and 1"),
            ("/workload/turn_extra", json!(u64::MAX), "2^60"),
            ("/workload/rest/secs", json!(u64::MAX), "10^9 seconds"),
            (
                "/workload/activations/1/recompute",
                json!({ "time": { "secs": 0, "nanos": 0 }, "inputs": [0, 2] }),
                "one that does not exist",
            ),
            (
                "/workload/activations/1/recompute",
                json!({ "time": { "secs": 0, "nanos": 0 }, "inputs": [0, 1] }),
                "activation 1 would be computed again from itself",
            ),
            ("/micro_batches", json!(0), "nonzero"),
            ("/names", json!(["first"]), "name for each"),
        ] {
            assert!(refused(place, value).contains(why), "{place}");
        }
    }
}
