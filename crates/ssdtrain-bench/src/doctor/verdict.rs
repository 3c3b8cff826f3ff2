//! The last line: whether bytes can be moved directly, why not, and the path that they take.

use super::facts::Facts;
use super::findings::{Way, way};
use super::page::{Check, Status};

/// The verdict on these checks. `used` is the path to the disk that a run would take.
///
/// Compatibility mode, in which cuFile copies through host memory, is never called direct.
pub(super) fn verdict(facts: &Facts, checks: &[Check], used: &str) -> Check {
    let reasons = |status| {
        let mut reasons: Vec<&str> = Vec::new();
        for check in checks.iter().filter(|check| check.status == status) {
            if let Some(reason) = check.reason.as_deref().filter(|reason| !reasons.contains(reason)) {
                reasons.push(reason);
            }
        }
        reasons
    };
    let gpu = facts.has_gpu();
    let uses = if facts.tried.gpus > 0 {
        format!("what ssdtrain uses here: {used}, through pinned host memory on the way to and from a GPU")
    } else {
        format!("what ssdtrain uses here: {used}, to and from tensor memory on the CPU")
    };
    let say = |text: String| Check::ok("verdict", format!("direct: {text}; {uses}"));
    if !gpu {
        return say(format!("no, because {}", list(&reasons(Status::Missing))));
    }
    let compatibility = match &facts.tried.cufile {
        Ok(_) => "; cuFile would run in compatibility mode, through host memory",
        Err(_) => "",
    };
    let (blocked, unknown) = (reasons(Status::Blocks), reasons(Status::Unknown));
    if !blocked.is_empty() {
        let check = say(format!("no, because {}{compatibility}", list(&blocked)));
        return Check { status: Status::Blocks, ..check };
    }
    if !unknown.is_empty() {
        let check = say(format!("unknown, because {}", list(&unknown)));
        return Check { status: Status::Unknown, ..check };
    }
    match way(facts) {
        Way::NvidiaFs => say("yes, cuFile can go through nvidia-fs".to_owned()),
        _ => say("yes, cuFile can go through PCI P2PDMA".to_owned()),
    }
}

/// Such as `a, b and c`.
fn list(reasons: &[&str]) -> String {
    match reasons {
        [] => "it is not known why".to_owned(),
        [one] => (*one).to_owned(),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_listed_as_people_do() {
        assert_eq!(list(&["a"]), "a");
        assert_eq!(list(&["a", "b"]), "a and b");
        assert_eq!(list(&["a", "b", "c"]), "a, b and c");
    }
}
