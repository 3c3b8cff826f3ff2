//! What the disks count themselves: how much of their life is used, and what they could not read.

use std::collections::BTreeMap;
use std::io;

use bytesize::ByteSize;

use super::nvme::{PAGE, health_page};
use super::page::{Check, Status};
use super::place::{DiskKind, Place};
use super::tree::Tree;

/// The disk counts thousands of 512 bytes.
const DATA_UNIT: u128 = 512_000;
/// What is worth a warning of the bits of the first byte.
const WARNINGS: [&str; 5] = [
    "its spare blocks run out",
    "it is too hot or too cold",
    "it is no longer reliable",
    "it can only be read",
    "its cache is no longer safe",
];

/// A disk's own counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Health {
    /// A bit for each of [`WARNINGS`].
    warnings: u8,
    /// In percent of what it had when it was new, and below which it warns.
    spare: u8,
    least_spare: u8,
    /// In percent of the rated life; it may go beyond 100, and stays at 255.
    used: u8,
    /// By all programs, since it was made.
    written_bytes: u128,
    /// Reads and writes that it could not correct.
    media_errors: u128,
}

/// A line for each disk below the places.
pub(super) fn health(tree: &Tree, places: &[Place]) -> Vec<Check> {
    let disks = places.iter().flat_map(|place| &place.disks);
    let disks: BTreeMap<&str, DiskKind> = disks.map(|disk| (disk.name.as_str(), disk.kind)).collect();
    let page = |name: &str| health_page(&tree.root().join("dev").join(name));
    disks.into_iter().map(|(name, kind)| disk(name, kind, page)).collect()
}

fn disk(name: &str, kind: DiskKind, page: impl FnOnce(&str) -> io::Result<[u8; PAGE]>) -> Check {
    let told = |found: String| Check::ok("health", format!("{name}: {found}"));
    match kind {
        DiskKind::Virtio => told("a virtual disk (virtio) has no counters of its own".to_owned()),
        DiskKind::Other => told(format!(
            "its counters are not read, since it is not NVMe; `sudo smartctl --all /dev/{name}` may show them"
        )),
        DiskKind::Nvme => match page(name) {
            Ok(page) => Health::parse(&page).check(name),
            Err(error) => told(format!(
                "its counters are not readable: {error}; as root, doctor or `nvme smart-log /dev/{name}` shows them"
            )),
        },
    }
}

impl Health {
    /// Log page 2 of the NVMe specification, "SMART / Health Information".
    fn parse(page: &[u8; PAGE]) -> Health {
        let number = |at: usize| {
            page[at..at + 16].iter().rev().fold(0, |number, &byte| (number << 8) | u128::from(byte))
        };
        Health {
            warnings: page[0],
            spare: page[3],
            least_spare: page[4],
            used: page[5],
            written_bytes: number(48).saturating_mul(DATA_UNIT),
            media_errors: number(160),
        }
    }

    fn check(self, name: &str) -> Check {
        let Health { warnings, spare, least_spare, used, written_bytes, media_errors } = self;
        let written = ByteSize(u64::try_from(written_bytes).unwrap_or(u64::MAX)).display().si();
        let mut found = format!(
            "{name}: {used} % of its rated life is used, {written} were written in it; {spare} % of its spare blocks are left \
             (it warns below {least_spare} %), {media_errors} media errors"
        );
        let mut warns: Vec<&str> =
            (0..).zip(WARNINGS).filter(|(bit, _)| (warnings >> bit) & 1 == 1).map(|(_, text)| text).collect();
        if warns.is_empty() && warnings != 0 {
            warns.push("for a reason that is not known here");
        }
        if !warns.is_empty() {
            found += &format!("; the disk warns: {}", warns.join(", "));
        }
        let check = Check::ok("health", found);
        if warnings != 0 || media_errors > 0 || spare < least_spare {
            return check.but(Status::Warn, "copy what matters from it, and replace it soon");
        }
        if used >= 100 {
            return check.but(
                Status::Warn,
                "its rated life is over: keep nothing on it that is not elsewhere, or spill less \
                 (`train --written-per-day SIZE`)",
            );
        }
        check
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{bare_metal, virtual_machine};
    use super::*;

    /// The page of a disk with 3 % of its life used, that has taken 2^33 units.
    fn page() -> [u8; PAGE] {
        let mut page = [0; PAGE];
        (page[3], page[4], page[5]) = (100, 10, 3);
        page[52] = 2;
        page
    }

    /// What is said of a disk with that page, but for these bytes.
    fn line(bytes: &[(usize, u8)]) -> Check {
        let mut page = page();
        bytes.iter().for_each(|&(at, byte)| page[at] = byte);
        disk("nvme0n1", DiskKind::Nvme, |_| Ok(page))
    }

    #[test]
    fn numbers_are_read_from_where_the_specification_puts_them() {
        let mut page = page();
        (page[0], page[160], page[175]) = (5, 7, 1);
        let expected = Health {
            warnings: 5,
            spare: 100,
            least_spare: 10,
            used: 3,
            written_bytes: (1 << 33) * 512_000,
            media_errors: 7 + (1 << 120),
        };
        assert_eq!(Health::parse(&page), expected);
        assert_eq!(Health::parse(&[0xff; PAGE]).written_bytes, u128::MAX, "no number is too large");
    }

    #[test]
    fn a_disk_in_good_health_is_told_with_its_counters() {
        let check = line(&[]);
        assert_eq!((check.status, check.advice), (Status::Ok, None));
        for words in ["nvme0n1: 3 % of its rated life", "4.4 PB were written", "below 10 %", "0 media errors"]
        {
            assert!(check.found.contains(words), "{words}: {}", check.found);
        }
    }

    #[test]
    fn a_disk_in_bad_health_is_a_warning() {
        for (bytes, words, advice) in [
            (&[(0, 0b1100)][..], "warns: it is no longer reliable, it can only be read", "replace it"),
            (&[(0, 0b1000_0000)], "not known here", "replace it"),
            (&[(160, 1)], "1 media errors", "replace it"),
            (&[(3, 9)], "9 % of its spare", "replace it"),
            (&[(5, 100)], "100 % of its rated life", "--written-per-day"),
        ] {
            let check = line(bytes);
            assert_eq!(check.status, Status::Warn, "{}", check.found);
            assert!(check.found.contains(words), "{words}: {}", check.found);
            assert!(check.advice.unwrap().contains(advice));
        }
    }

    #[test]
    fn where_there_are_no_counters_it_is_said_why() {
        let refused = |_: &str| Err(io::Error::from_raw_os_error(libc::EACCES));
        let check = disk("nvme0n1", DiskKind::Nvme, refused);
        assert!(
            check.status == Status::Ok && check.found.contains("not readable: Permission denied"),
            "{check:?}"
        );
        let unasked = |_: &str| unreachable!("it is not NVMe");
        assert!(disk("vda", DiskKind::Virtio, unasked).found.contains("virtio"));
        assert!(disk("sda", DiskKind::Other, unasked).found.contains("smartctl --all /dev/sda"));
    }

    #[test]
    fn each_disk_below_the_directories_has_one_line() {
        for (machine, name) in [(bare_metal(), "nvme0n1: "), (virtual_machine(), "vda: ")] {
            let tree = Tree::new(machine.root.path());
            let places = [(); 2].map(|()| Place::read(&tree, "/mnt/ssd/spill".as_ref()));
            let found: Vec<String> = health(&tree, &places).into_iter().map(|check| check.found).collect();
            assert!(found.len() == 1 && found[0].starts_with(name), "{found:?}");
        }
    }
}
