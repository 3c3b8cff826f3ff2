//! What was written to the disks, and how long they last.

use bytesize::ByteSize;
use ssdtrain_store::{Day, Drive, DriveHistory, History};

use super::page::{Check, Status};
use super::place::Place;
use super::tree::Tree;

/// Ratings count years of 365 days.
const DAYS_PER_YEAR: f64 = 365.0;
/// The kernel counts sectors of so many bytes, whatever the disk has.
const SECTOR: u64 = 512;

/// A line for each disk below the places. `rating` is what each may take in its life.
pub(super) fn wear(
    tree: &Tree,
    places: &[Place],
    history: ssdtrain_store::Result<History>,
    rating: Option<u64>,
    today: Day,
) -> Vec<Check> {
    let history = match history {
        Ok(history) => history,
        Err(error) => {
            let check = Check::ok("endurance", error.to_string());
            return vec![check.but(
                Status::Warn,
                "what other runs have written is not known; repair or remove the file, or name another directory with SSDTRAIN_STATE",
            )];
        }
    };
    let mut names: Vec<&str> =
        places.iter().flat_map(|place| &place.disks).map(|disk| disk.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let known = |name| history.of(&Drive::named(tree.root(), name));
    names.into_iter().map(|name| disk(name, known(name), since_boot(tree, name), rating, today)).collect()
}

fn disk(
    name: &str,
    known: Option<&DriveHistory>,
    since_boot: Option<u64>,
    rating: Option<u64>,
    today: Day,
) -> Check {
    let mut found = match known {
        Some(known) => format!(
            "{name}: all runs have written {} today and {} since {}",
            shown(known.on(today)),
            shown(known.total),
            known.since
        ),
        None => format!("{name}: no run has counted what it writes"),
    };
    if let Some(bytes) = since_boot {
        found += &format!("; all programs {} since the system started", shown(bytes));
    }
    let per_day = known.and_then(|known| known.per_day(today)).filter(|bytes| *bytes > 0);
    if let Some(per_day) = per_day {
        found += &format!("; {} a day", shown(per_day));
    }
    let Some(rating) = rating else {
        found += "; its endurance is not known (--disk-endurance)";
        return Check::ok("endurance", found);
    };
    found += &format!("; rated for {}", shown(rating));
    let left = rating.saturating_sub(known.map_or(0, |known| known.total));
    if left == 0 {
        return Check::ok("endurance", found)
            .but(Status::Warn, "that is used up: look at its own counters (`health`, the next lines)");
    }
    let Some(per_day) = per_day else { return Check::ok("endurance", found) };
    let years = left as f64 / per_day as f64 / DAYS_PER_YEAR;
    found += &format!(", of which the rest lasts {years:.1} years at that rate");
    let check = Check::ok("endurance", found);
    if years < 1.0 {
        return check.but(Status::Warn, "`train --written-per-day SIZE` limits what is written in a day");
    }
    check
}

/// Bytes that all programs have written to a disk since the system started.
fn since_boot(tree: &Tree, name: &str) -> Option<u64> {
    let text = tree.text(&format!("/sys/class/block/{name}/stat"))?;
    text.split_whitespace().nth(6)?.parse::<u64>().ok()?.checked_mul(SECTOR)
}

fn shown(bytes: u64) -> String {
    ByteSize(bytes).display().si().to_string()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use ssdtrain_store::HistoryFile;

    use super::super::page;
    use super::super::samples::bare_metal;
    use super::*;

    const TODAY: Day = Day(20_782);

    /// The line for the disk of a machine, when all runs have written a terabyte in each of ten days, and half of one today.
    fn line(rating: Option<u64>) -> Check {
        let machine = bare_metal();
        let machine = machine.file("sys/class/block/nvme0n1/stat", "1 2 3 4 5 6 2000000000 8 9\n");
        let tree = Tree::new(machine.root.path());
        let id = Drive::named(tree.root(), "nvme0n1").id;
        let days: Vec<String> = (1..=10).map(|ago| format!("\"{}\": 1000000000000", TODAY.0 - ago)).collect();
        let text = format!(
            "{{\"version\": 1, \"drives\": {{\"{id}\": {{\"name\": \"nvme0n1\", \"since\": {}, \"total\": 10500000000000, \
             \"days\": {{{}, \"{}\": 500000000000}}}}}}}}",
            TODAY.0 - 10,
            days.join(", "),
            TODAY.0
        );
        let directory = tempfile::tempdir().unwrap();
        let file = HistoryFile::within(directory.path());
        fs::write(file.path(), text).unwrap();
        let places = [Place::read(&tree, Path::new("/mnt/ssd/spill"))];
        wear(&tree, &places, file.read(), rating, TODAY).remove(0)
    }

    #[test]
    fn what_was_written_is_told_by_day_in_all_and_since_the_start() {
        let check = line(None);
        for words in [
            "nvme0n1",
            "500.0 GB today",
            "10.5 TB since 2026-11-15",
            "1.0 TB since the system",
            "--disk-endurance",
        ] {
            assert!(check.found.contains(words), "{words}: {}", check.found);
        }
        assert_eq!((check.status, check.advice), (Status::Ok, None));
    }

    #[test]
    fn a_life_of_less_than_a_year_is_a_warning() {
        let (long, short, over) =
            (line(Some(600_000_000_000_000)), line(Some(100_000_000_000_000)), line(Some(1)));
        assert!(long.status == Status::Ok && long.found.contains("1.6 years"), "{}", long.found);
        assert!(short.status == Status::Warn && short.found.contains("0.2 years"), "{}", short.found);
        assert!(over.advice.is_some_and(|advice| advice.contains("used up")));
        assert!(short.advice.is_some_and(|advice| advice.contains("--written-per-day")));
    }

    #[test]
    fn a_disk_that_no_run_has_written_to_and_a_damaged_history_are_told() {
        let machine = bare_metal();
        let tree = Tree::new(machine.root.path());
        let places = [Place::read(&tree, Path::new("/mnt/ssd/spill"))];
        let fresh = wear(&tree, &places, Ok(History::default()), Some(1 << 40), TODAY);
        assert!(fresh[0].found.contains("no run has counted"), "{}", page::text(&fresh));
        let directory = tempfile::tempdir().unwrap();
        let file = HistoryFile::within(directory.path());
        fs::write(file.path(), "{").unwrap();
        let damaged = wear(&tree, &places, file.read(), None, TODAY);
        assert!(
            damaged[0].status == Status::Warn && damaged[0].found.contains("damaged"),
            "{}",
            damaged[0].found
        );
    }
}
