//! The faults that a run's disk and device have, and the errors that they account for.

use std::error::Error as _;
use std::io;
use std::iter::successors;
use std::time::Duration;

use ssdtrain::store::{Direction, Fault};
use ssdtrain::{DeviceCall, DeviceFaults, Error, ErrorKind};

use crate::fallible::Fallible;
use crate::random::Random;
use crate::values::Event;

/// A read has so many attempts.
const ATTEMPTS: u64 = 3;

/// What any error about bytes that the disk did not return says.
const UNREAD: [&str; 2] = ["could not be read", "came back changed"];

/// Faults among the next transfers of a store, and the next calls of a device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    transfers: Vec<Rule>,
    device: Option<Refusals>,
    /// So many attempts to let a spill file grow are refused.
    growths: u64,
    /// The disk is gone with the next read or write after so many.
    vanishes: Option<u64>,
}

/// `times` transfers of a direction fail, after the first `skip`.
#[derive(Clone, Copy, Debug)]
struct Rule {
    direction: Direction,
    fault: Fault,
    skip: u64,
    times: u64,
}

/// `times` calls of a device are refused, after the first `skip`; those of any kind for `None`.
#[derive(Clone, Copy, Debug)]
struct Refusals {
    call: Option<DeviceCall>,
    skip: u64,
    times: u64,
}

/// What a disk that is gone answers.
const GONE: i32 = libc::ENODEV;

impl Faults {
    /// Up to two faults of transfers, each once or more often or for good, and now and then one of the device, a spill file that does not
    /// grow, or a disk that vanishes. Only if checksums are taken may one change bytes.
    pub(crate) fn draw(random: &mut Random, verifies: bool) -> Faults {
        let rule = |random: &mut Random| {
            let direction = *random.of(&[Direction::Write, Direction::Read]);
            let fault = match random.below(7) {
                0 => Fault::Errno(libc::EIO),
                1 => Fault::Errno(libc::ENOSPC),
                2 => Fault::Errno(libc::EINTR),
                3 => Fault::Errno(libc::EAGAIN),
                4 if verifies => Fault::FlippedBit,
                5 => Fault::Delayed(Duration::from_millis(*random.of(&[1, 5]))),
                _ => Fault::Short,
            };
            let times = match fault {
                // A thread each.
                Fault::Delayed(_) => 4,
                _ => *random.of(&[1, 1, 2, u64::MAX]),
            };
            Rule { direction, fault, skip: random.below(20) as u64, times }
        };
        let transfers = (0..random.below(3)).map(|_| rule(random)).collect();
        let device = random.percent(25).then(|| Refusals {
            call: random.percent(80).then(|| *random.of(&DeviceCall::ALL)),
            skip: random.below(40) as u64,
            times: *random.of(&[1, 3, u64::MAX]),
        });
        let growths = if random.percent(10) { *random.of(&[1, 2, u64::MAX]) } else { 0 };
        let vanishes = random.percent(5).then(|| random.below(20) as u64);
        Faults { transfers, device, growths, vanishes }
    }

    /// Makes transfers and calls fail.
    pub(crate) fn inject(&self, parts: &Fallible) {
        if let Some(disk) = &parts.disk {
            for Rule { direction, fault, skip, times } in self.transfers.iter().copied() {
                disk.inject(direction, fault, skip, times);
            }
            disk.refuse_growth(libc::ENOSPC, 0, self.growths);
            self.vanishes.into_iter().for_each(|skip| disk.vanish(None, GONE, skip));
        }
        if let Some(Refusals { call, skip, times }) = self.device {
            parts.device.inject(call, skip, times);
        }
    }

    /// The kind of error that they make of a load; `None` if they do not account for the error of this event.
    pub(crate) fn account_for(&self, event: &Event) -> Option<ErrorKind> {
        let text = event.outcome.as_ref().err()?;
        self.of_disk(text, event).or_else(|| self.of_device(text, event))
    }

    fn of_device(&self, text: &str, event: &Event) -> Option<ErrorKind> {
        use DeviceCall::{Allocate, BlockUnlessLate, CopyOut, Pin, Query, Synchronize, Time};
        let call = self.device?.call;
        // Without these everything goes on: what cannot leave stays, and what cannot be known is not.
        let is_harmless = matches!(call, Some(BlockUnlessLate | CopyOut | Pin | Query | Synchronize | Time));
        if is_harmless || !text.contains(DeviceFaults::WORDS) {
            return None;
        }
        let kind = match call {
            Some(Allocate) => ErrorKind::Torch,
            None if text.contains("Allocate:") => ErrorKind::Torch,
            _ => ErrorKind::Device,
        };
        event.error.as_ref().is_none_or(|error| error.kind() == kind).then_some(kind)
    }

    fn of_disk(&self, text: &str, event: &Event) -> Option<ErrorKind> {
        let is_of = |code: i32| {
            let is_told = text.contains(&io::Error::from_raw_os_error(code).to_string());
            let is_kept = |error: &Error| error.kind() == ErrorKind::Io && system_error(error) == Some(code);
            is_told && event.error.as_ref().is_none_or(is_kept)
        };
        if self.vanishes.is_some() && is_of(GONE) {
            return Some(ErrorKind::Io);
        }
        // What cannot be written stays where it is.
        let reads = || self.transfers.iter().filter(|rule| rule.direction == Direction::Read);
        let times = reads().map(|rule| rule.times).fold(0, u64::saturating_add);
        // The last attempt can have one error, and those before it another: of a disk that is gone too.
        if times < ATTEMPTS && self.vanishes.is_none() {
            return None;
        }
        let of = |rule: &Rule| match rule.fault {
            // Neither is an attempt until there were a hundred.
            Fault::Errno(libc::EINTR | libc::EAGAIN) if rule.times < u64::MAX => None,
            Fault::Errno(code) => is_of(code).then_some(ErrorKind::Io),
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
    let words = [UNREAD[0], UNREAD[1], DeviceFaults::WORDS, "internal error"];
    let told = |text: &String| words.iter().any(|words| text.contains(words));
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
        Faults { transfers: vec![Rule { direction, fault, skip: 0, times }], ..Faults::default() }
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
    fn the_last_read_of_a_disk_that_is_gone_may_have_failed_otherwise() {
        let eio = unread(store::ErrorKind::Io, libc::EIO);
        let once = faults(Direction::Read, Fault::Errno(libc::EIO), 1);
        assert_eq!(once.account_for(&eio), None);
        let gone_too = Faults { vanishes: Some(0), ..once };
        assert_eq!(gone_too.account_for(&eio), Some(ErrorKind::Io));
        assert_eq!(Faults { vanishes: Some(0), ..Faults::default() }.account_for(&eio), None);
    }

    #[test]
    fn a_call_that_has_to_succeed_accounts_for_an_error_of_the_device() {
        let refused = |kind| event(&format!("Wait: the device {}", DeviceFaults::WORDS), kind);
        let of = |call| Faults {
            device: Some(Refusals { call: Some(call), skip: 0, times: 1 }),
            ..Faults::default()
        };
        assert_eq!(of(DeviceCall::Wait).account_for(&refused(None)), Some(ErrorKind::Device));
        assert_eq!(of(DeviceCall::CopyOut).account_for(&refused(None)), None);
        assert_eq!(Faults::default().account_for(&refused(None)), None);
        let other = Error::from(store::Error::new(store::ErrorKind::Io, "of the disk"));
        assert_eq!(of(DeviceCall::Wait).account_for(&refused(Some(other))), None);
        assert!(is_a_fault(&refused(None)));
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
