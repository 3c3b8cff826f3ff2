//! The faults that a run's transfers have, and the errors that they account for.

use std::error::Error as _;
use std::io;
use std::iter::successors;

use ssdtrain::store::{Direction, Fault, Faulty};
use ssdtrain::{Error, ErrorKind};

use crate::random::Random;
use crate::values::Event;

/// A read has so many attempts.
const ATTEMPTS: u64 = 3;

/// What any error about bytes that the disk did not return says.
const UNREAD: [&str; 2] = ["could not be read", "came back changed"];

/// Faults among the next transfers of a store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults(Vec<Rule>);

/// `times` transfers of a direction fail, after the first `skip`.
#[derive(Clone, Copy, Debug)]
struct Rule {
    direction: Direction,
    fault: Fault,
    skip: u64,
    times: u64,
}

impl Faults {
    /// Up to two faults, each once or more often or for good. Only if checksums are taken may one change bytes.
    pub(crate) fn draw(random: &mut Random, verifies: bool) -> Faults {
        let rule = |random: &mut Random| {
            let direction = *random.of(&[Direction::Write, Direction::Read]);
            let fault = match random.below(6) {
                0 => Fault::Errno(libc::EIO),
                1 => Fault::Errno(libc::ENOSPC),
                2 => Fault::Errno(libc::EINTR),
                3 => Fault::Errno(libc::EAGAIN),
                4 if verifies => Fault::FlippedBit,
                _ => Fault::Short,
            };
            let times = *random.of(&[1, 1, 2, u64::MAX]);
            Rule { direction, fault, skip: random.below(20) as u64, times }
        };
        Faults((0..random.below(3)).map(|_| rule(random)).collect())
    }

    /// Makes transfers fail.
    pub(crate) fn inject(&self, faulty: &Faulty) {
        for Rule { direction, fault, skip, times } in self.0.iter().copied() {
            faulty.inject(direction, fault, skip, times);
        }
    }

    /// The kind of error that they make of a load; `None` if they do not account for the error of this event.
    pub(crate) fn account_for(&self, event: &Event) -> Option<ErrorKind> {
        let text = event.outcome.as_ref().err()?;
        // What cannot be written stays where it is.
        let reads = || self.0.iter().filter(|rule| rule.direction == Direction::Read);
        let times = reads().map(|rule| rule.times).fold(0, u64::saturating_add);
        if times < ATTEMPTS {
            return None;
        }
        let of = |rule: &Rule| match rule.fault {
            // Neither is an attempt until there were a hundred.
            Fault::Errno(libc::EINTR | libc::EAGAIN) if rule.times < u64::MAX => None,
            Fault::Errno(code) => {
                let is_told = text.contains(&io::Error::from_raw_os_error(code).to_string());
                let is_kept =
                    |error: &Error| error.kind() == ErrorKind::Io && system_error(error) == Some(code);
                (is_told && event.error.as_ref().is_none_or(is_kept)).then_some(ErrorKind::Io)
            }
            Fault::FlippedBit => {
                let is_kept = |error: &Error| error.kind() == ErrorKind::Corrupt;
                (text.contains(UNREAD[1]) && event.error.as_ref().is_none_or(is_kept))
                    .then_some(ErrorKind::Corrupt)
            }
            _ => None,
        };
        reads().find_map(of)
    }
}

/// Whether the error of an event is one that only faults account for.
pub(crate) fn is_a_fault(event: &Event) -> bool {
    let own = event
        .error
        .as_ref()
        .is_some_and(|error| !matches!(error.kind(), ErrorKind::Torch | ErrorKind::ChangedInPlace));
    let told =
        |text: &String| UNREAD.iter().any(|words| text.contains(words)) || text.contains("internal error");
    own || event.outcome.as_ref().err().is_some_and(told)
}

/// The number of the system's own error, the last cause.
fn system_error(error: &Error) -> Option<i32> {
    let causes = successors(error.source(), |&cause| cause.source());
    causes.last()?.downcast_ref::<io::Error>()?.raw_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    use ssdtrain::store;

    fn event(text: &str, error: Option<Error>) -> Event {
        Event {
            what: "backward".to_owned(),
            outcome: Err(text.to_owned()),
            error,
            has_changed: false,
            may_be_refused: false,
            may_be_served: false,
        }
    }

    /// The error of a step whose load failed with this error of the system.
    fn unread(kind: store::ErrorKind, code: i32) -> Event {
        let cause = io::Error::from_raw_os_error(code);
        let error = Error::from(store::Error::io(kind, "a blob could not be read", cause));
        event(&error.to_string(), Some(error))
    }

    fn faults(direction: Direction, fault: Fault, times: u64) -> Faults {
        Faults(vec![Rule { direction, fault, skip: 0, times }])
    }

    #[test]
    fn only_reads_that_fail_as_often_as_they_are_tried_account_for_an_error() {
        let eio = unread(store::ErrorKind::Io, libc::EIO);
        let of = |direction, fault, times| faults(direction, fault, times).account_for(&eio);
        let failed = Fault::Errno(libc::EIO);
        assert_eq!(of(Direction::Read, failed, 3), Some(ErrorKind::Io));
        assert_eq!(of(Direction::Read, failed, 2), None);
        assert_eq!(of(Direction::Write, failed, u64::MAX), None);
        assert_eq!(of(Direction::Read, Fault::Errno(libc::ENOSPC), u64::MAX), None);
        assert_eq!(of(Direction::Read, Fault::Short, u64::MAX), None);
        assert_eq!(Faults::default().account_for(&eio), None);
        assert!(is_a_fault(&eio));
    }

    #[test]
    fn an_error_of_another_kind_or_without_its_cause_is_not_accounted_for() {
        let eio = faults(Direction::Read, Fault::Errno(libc::EIO), u64::MAX);
        let words = unread(store::ErrorKind::Io, libc::EIO).outcome.unwrap_err();
        let without = |kind| Some(Error::from(store::Error::new(kind, words.as_str())));
        assert_eq!(eio.account_for(&unread(store::ErrorKind::NoSpace, libc::EIO)), None);
        assert_eq!(eio.account_for(&event(&words, without(store::ErrorKind::Io))), None);
        // Errors cross libtorch as text.
        assert_eq!(eio.account_for(&event(&words, None)), Some(ErrorKind::Io));
        let flipped = faults(Direction::Read, Fault::FlippedBit, u64::MAX);
        let changed = |kind| Error::from(store::Error::new(kind, "a blob came back changed"));
        let event_of = |kind| event(&changed(kind).to_string(), Some(changed(kind)));
        assert_eq!(flipped.account_for(&event_of(store::ErrorKind::Corrupt)), Some(ErrorKind::Corrupt));
        assert_eq!(flipped.account_for(&event_of(store::ErrorKind::Io)), None);
        assert!(
            is_a_fault(&event("it could not be read", None)) && !is_a_fault(&event("sizes differ", None))
        );
    }
}
