//! Steps in a row that do not follow a plan, although the policy makes plans.

use bytesize::ByteSize;
use ssdtrain_plan::Planning;
use ssdtrain_store::sync::Mutex;

/// After this many of them in a row, a warning says why.
const MANY: u32 = 20;

/// Notes of the steps since one followed a plan.
#[derive(Debug, Default)]
pub(super) struct Unplanned(Mutex<Row>);

#[derive(Debug, Default)]
struct Row {
    steps: u32,
    /// What the last of them saved that was not planned.
    strange: Option<Strange>,
    /// The warning, once there is one: it says the same to the end of the row.
    warning: Option<String>,
}

/// A save that was not planned: its bytes, and the path of its scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Strange {
    pub(super) bytes: u64,
    pub(super) scope: String,
}

impl Unplanned {
    /// A step has ended that had this to do with a plan, and saved something `strange` if it left the plan. Returns what
    /// users should know.
    pub(super) fn saw(&self, planning: Option<Planning>, strange: Option<Strange>) -> Option<String> {
        let mut row = self.0.lock();
        match planning {
            None | Some(Planning::Followed | Planning::Small | Planning::Interim) => *row = Row::default(),
            Some(_) => row.steps += 1,
        }
        let Row { steps, strange: last, warning } = &mut *row;
        *last = strange.or_else(|| last.take());
        if *steps >= MANY && warning.is_none() {
            *warning = Some(text(last.as_ref()));
        }
        warning.clone()
    }
}

fn text(strange: Option<&Strange>) -> String {
    let begin = format!("no step has followed a plan of Auto for {MANY} steps or more");
    match strange {
        Some(Strange { bytes, scope }) => {
            let scope = if scope.is_empty() { String::new() } else { format!(" in {scope}") };
            format!(
                "{begin}: what they save differs, and the last one left its plan when it saved {}{scope}. Such steps keep what \
                 fits. Let steps save the same tensors in the same order (branches and threads may change it), or take the \
                 policy Offload, which needs no plan",
                ByteSize(*bytes)
            )
        }
        None => format!(
            "{begin}: none has shown anything to plan. Between step() and finish(), autograd has to save storages of at least \
             min_bytes, and a backward has to ask for them"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strange(bytes: u64) -> Option<Strange> {
        Some(Strange { bytes, scope: "block.3".to_owned() })
    }

    #[test]
    fn a_row_of_steps_without_a_plan_is_told_from_its_twentieth_to_its_end_in_the_same_words() {
        let unplanned = Unplanned::default();
        let leaves = |bytes| unplanned.saw(Some(Planning::Left), strange(bytes));
        assert!((1..20).all(|bytes| leaves(bytes).is_none()));
        let told = unplanned.saw(Some(Planning::Profiled), None).unwrap();
        assert!(told.contains("saved 19 B in block.3") && told.contains("Offload"), "{told}");
        assert_eq!(leaves(7), Some(told));
        assert_eq!(unplanned.saw(Some(Planning::Followed), None), None);
        assert!((1..20).all(|bytes| leaves(bytes).is_none()), "the count begins anew");
    }

    #[test]
    fn steps_that_show_nothing_are_told_what_is_needed() {
        let unplanned = Unplanned::default();
        let told = (0..20).filter_map(|_| unplanned.saw(Some(Planning::Without), None)).last().unwrap();
        assert!(told.contains("min_bytes") && told.contains("backward"), "{told}");
    }

    #[test]
    fn policies_that_do_not_plan_are_not_warned_of() {
        let unplanned = Unplanned::default();
        assert!((0..50).all(|_| unplanned.saw(None, None).is_none()));
    }
}
