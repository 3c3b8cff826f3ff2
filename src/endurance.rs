//! What the cache does to the life of the disks: what it writes to each, at which rate, and how long that can go on.

use std::time::{Duration, SystemTime};

use bytesize::ByteSize;
use ssdtrain_plan::Today;
use ssdtrain_store::sync::Mutex;
use ssdtrain_store::{DiskDay, DiskLog, DriveUse};

use crate::telemetry::DiskReport;

/// The present rate is that of no less than this, and of no more than twice as long.
const SHORTEST: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(30 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Less life than this is worth a warning.
const SHORT_LIFE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Watches over the disks that a cache spills to.
pub(crate) struct Endurance {
    log: DiskLog,
    /// Bytes that each disk is rated for.
    rating: Option<u64>,
    seen: Mutex<Vec<Seen>>,
}

/// What was seen of a disk.
#[derive(Default)]
struct Seen {
    /// Bytes of this run at the last report.
    reported: u64,
    pace: Pace,
    /// The warning about its life, which is worded once.
    warning: Option<String>,
}

/// How fast a disk is written to: a moment between half an hour and an hour ago, or at first a minute after the beginning, a later one, and
/// the bytes that had been written by then.
#[derive(Default)]
struct Pace {
    begun: Option<SystemTime>,
    marks: Vec<(SystemTime, u64)>,
}

impl Endurance {
    pub(crate) fn new(log: DiskLog, rating: Option<u64>) -> Endurance {
        Endurance { log, rating, seen: Mutex::default() }
    }

    /// What the disks have taken today, together.
    pub(crate) fn today(&self) -> Today {
        let DiskDay { today, left, drives, .. } = self.log.look();
        let written = drives.iter().fold(0_u64, |all, drive| all.saturating_add(drive.today));
        Today { day: today.0, written, left }
    }

    /// A step has ended: what was written to each disk, and what users should know of it.
    pub(crate) fn report(&self) -> (Vec<DiskReport>, Vec<String>) {
        let DiskDay { time, drives, .. } = self.log.look();
        let mut seen = self.seen.lock();
        seen.resize_with(drives.len(), Seen::default);
        let report = |(drive, seen): (DriveUse, &mut Seen)| seen.report(drive, time, self.rating);
        let reports = drives.into_iter().zip(seen.iter_mut()).map(report).collect();
        let short_lives = seen.iter().filter_map(|seen| seen.warning.clone());
        (reports, self.log.trouble().into_iter().chain(short_lives).collect())
    }
}

impl Seen {
    fn report(&mut self, drive: DriveUse, time: SystemTime, rating: Option<u64>) -> DiskReport {
        let DriveUse { drive, by_store, today, total, .. } = drive;
        let per_day = self.pace.saw(time, total);
        let life = rating.zip(per_day).and_then(|(rating, per_day)| life(rating, total, per_day));
        if let (Some(rating), Some(per_day), Some(life)) =
            (rating, per_day, life.filter(|life| *life < SHORT_LIFE))
        {
            self.warning.get_or_insert_with(|| warning(&drive.name, rating, total, per_day, life));
        }
        let written = by_store.saturating_sub(self.reported);
        self.reported = by_store;
        DiskReport { name: drive.name, written, by_run: by_store, today, by_all_runs: total, per_day, life }
    }
}

impl Pace {
    /// By `time`, `total` bytes were written. Returns the bytes of a day at the present rate.
    fn saw(&mut self, time: SystemTime, total: u64) -> Option<u64> {
        let since = |start: SystemTime| time.duration_since(start).unwrap_or_default();
        // The first steps write more than others.
        let begun = self.begun.map_or(time, |begun| begun.min(time));
        self.begun = Some(begun);
        let is_early = since(begun) < SHORTEST;
        if is_early || self.marks.iter().any(|(mark, bytes)| *mark > time || *bytes > total) {
            // The clock was set back, or the history is another.
            self.marks.clear();
        }
        if is_early {
            return None;
        }
        if self.marks.last().is_none_or(|(last, _)| since(*last) >= LONGEST) {
            self.marks.push((time, total));
            let old = self.marks.len().saturating_sub(2);
            self.marks.drain(..old);
        }
        let (start, bytes) = *self.marks.first()?;
        let passed = since(start);
        (passed >= SHORTEST).then(|| ((total - bytes) as f64 * DAY.div_duration_f64(passed)).round() as u64)
    }
}

/// How long the rest of a rating lasts; `None` if nothing is written, or for longer than can be told.
fn life(rating: u64, total: u64, per_day: u64) -> Option<Duration> {
    let days = rating.saturating_sub(total) as f64 / per_day as f64;
    Duration::try_from_secs_f64(days * DAY.as_secs_f64()).ok()
}

fn warning(name: &str, rating: u64, total: u64, per_day: u64, life: Duration) -> String {
    let [rating, written, per_day] = [rating, total, per_day].map(|bytes| ByteSize(bytes).display().si());
    let lasts = if life.is_zero() {
        "is used up".to_owned()
    } else {
        format!("lasts {:.0} more days", (life.as_secs_f64() / DAY.as_secs_f64()).max(1.0))
    };
    format!(
        "{name} takes {per_day} a day at the present rate: with {written} written by all runs, its endurance of {rating} {lasts}. \
         Auto::written_per_day (--written-per-day) limits what is written in a day"
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ssdtrain_store::Drive;

    use super::*;

    const TB: u64 = 1_000_000_000_000;

    /// The reports on a disk that is seen every ten seconds, and by whose reports so many bytes were written.
    fn reports(rating: Option<u64>, written: impl Fn(u64) -> u64, seconds: u64) -> (Vec<DiskReport>, Seen) {
        let mut seen = Seen::default();
        let mut report = |second: u64| {
            let total = written(second);
            let drive = Drive::named(Path::new("/no/such/root"), "nvme9n1");
            let drive = DriveUse { drive, by_store: total - written(0), today: total, total };
            seen.report(drive, SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + second), rating)
        };
        let reports = (0..=seconds).step_by(10).map(&mut report).collect();
        (reports, seen)
    }

    #[test]
    fn each_byte_is_in_one_report() {
        let (reports, _) = reports(None, |second| 5 + second * second, 200);
        assert_eq!(reports.iter().map(|report| report.written).sum::<u64>(), 200 * 200);
        let last = reports.last().unwrap();
        assert_eq!((last.by_run, last.by_all_runs, last.life), (200 * 200, 5 + 200 * 200, None));
    }

    #[test]
    fn the_rate_leaves_out_the_first_steps_and_follows_later_ones() {
        // A megabyte a second, after much more in the first minute; two a second after two hours.
        let written = |second: u64| match second {
            0..60 => 1000 * second * 1_000_000,
            60..7200 => 60_000_000_000 + second * 1_000_000,
            _ => 60_000_000_000 + (2 * second - 7200) * 1_000_000,
        };
        let (reports, _) = reports(None, written, 12_000);
        let rate_at = |second: usize| reports[second / 10].per_day;
        assert_eq!((rate_at(60), rate_at(110)), (None, None));
        assert_eq!([120, 3600, 7200].map(rate_at), [Some(86_400_000_000); 3]);
        assert_eq!(rate_at(12_000), Some(2 * 86_400_000_000));
    }

    #[test]
    fn a_short_life_is_warned_of_in_words_that_stay_the_same() {
        // 86.4 TB a day.
        let fast = |second: u64| TB + second * 1_000_000_000;
        let (reports, seen) = reports(Some(600 * TB), fast, 3600);
        let life = reports.last().unwrap().life.unwrap().as_secs_f64() / DAY.as_secs_f64();
        assert!((life - (600.0 - 1.0 - 3.6) / 86.4).abs() < 0.01, "{life}");
        let warning = seen.warning.unwrap();
        for word in ["nvme9n1", "86.4 TB a day", "600.0 TB", "7 more days", "--written-per-day"] {
            assert!(warning.contains(word), "{word}: {warning}");
        }
        let (_, again) = self::reports(Some(600 * TB), fast, 36_000);
        assert_eq!(again.warning, Some(warning));
    }

    #[test]
    fn what_is_used_up_is_said_to_be() {
        let (reports, seen) = reports(Some(TB), |second| 2 * TB + second, 600);
        assert_eq!(reports.last().unwrap().life, Some(Duration::ZERO));
        assert!(seen.warning.unwrap().contains("is used up"));
    }

    #[test]
    fn a_long_life_and_a_rating_that_is_not_known_are_no_reason_to_warn() {
        let slow = |second: u64| second * 1_000_000;
        for (rating, has_life) in [(Some(600 * TB), true), (None, false)] {
            let (reports, seen) = reports(rating, slow, 3600);
            assert_eq!((reports.last().unwrap().life.is_some(), seen.warning), (has_life, None));
        }
        let (reports, seen) = reports(Some(TB), |_| 0, 3600);
        assert_eq!((reports.last().unwrap().life, seen.warning), (None, None), "nothing is written");
    }

    #[test]
    fn a_clock_that_is_set_back_starts_the_rate_anew() {
        let mut pace = Pace::default();
        let at = |second| SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        // A byte a second, then none.
        for (second, rate) in
            [(1000, None), (1060, None), (1120, Some(86_400)), (100, None), (160, None), (220, Some(0))]
        {
            assert_eq!(pace.saw(at(second), second.max(1000)), rate, "{second}");
        }
    }
}
