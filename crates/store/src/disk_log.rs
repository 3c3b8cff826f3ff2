//! Counts what a store writes, and adds it to the history of all runs.

use std::fmt;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use crate::sync::Mutex;

use super::day::Day;
use super::drive::Drive;
use super::history::History;
use super::history_file::{HistoryFile, Refusal};
use super::writes::{DriveWrites, Writes};

/// The file is written no more often than this.
const PERIOD: Duration = Duration::from_secs(60);
/// How often, and how long apart, the end of a run tries to get the lock.
const ATTEMPTS: u32 = 300;
const PAUSE: Duration = Duration::from_millis(10);

/// Counts what a store writes to each drive, day by day, together with what other runs have written. Dropping it adds the rest to the
/// [`HistoryFile`]; in a process that was forked off, nothing is added.
pub struct DiskLog {
    writes: Writes,
    file: Option<HistoryFile>,
    clock: Clock,
    /// The process that it counts for.
    process: u32,
    books: Mutex<Books>,
}

/// Tells the time of day.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

/// What was written until a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskDay {
    /// The moment.
    pub time: SystemTime,
    /// Its day.
    pub today: Day,
    /// How long the day still lasts.
    pub left: Duration,
    /// Each drive of the store.
    pub drives: Vec<DriveUse>,
}

/// What was written to a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveUse {
    /// The drive.
    pub drive: Drive,
    /// Bytes that this store has written.
    pub by_store: u64,
    /// Bytes that all runs have written today, as far as is known. What others have written in the last minute may be missing.
    pub today: u64,
    /// Bytes that all runs have written, as far as is known.
    pub total: u64,
}

#[derive(Default)]
struct Books {
    /// What all runs have counted, as of the latest look at the file; without a file, what this one has.
    shared: History,
    /// What this run has counted, and the file does not have yet.
    news: History,
    /// Bytes of each drive that are in one of the two.
    counted: Vec<u64>,
    looked: Option<SystemTime>,
    /// The file cannot be used, and others need not be tried again.
    is_closed: bool,
    trouble: Option<String>,
}

impl DiskLog {
    /// Counts from now on. Without a file, only what this store writes is known.
    pub fn new(writes: Writes, file: Option<HistoryFile>, clock: Clock) -> DiskLog {
        let mut books = Books::default();
        if let Some(file) = &file {
            match file.read() {
                Ok(history) => books.shared = history,
                // Whether it stays so shows when something is added.
                Err(error) => tracing::debug!(%error, "the history of the disks is not known yet"),
            }
            books.looked = Some(clock.now());
        }
        DiskLog { writes, file, clock, process: process::id(), books: Mutex::new(books) }
    }

    /// What was written until now. Adds it to the file if that was not done in the last minute.
    pub fn look(&self) -> DiskDay {
        let time = self.clock.now();
        let today = Day::of(time);
        let drives = if self.is_forked() { Vec::new() } else { self.count(time, today) };
        DiskDay { time, today, left: Day::left(time), drives }
    }

    /// What users should know of the file; `None` as long as all is well.
    pub fn trouble(&self) -> Option<String> {
        if self.is_forked() { None } else { self.books.lock().trouble.clone() }
    }

    fn count(&self, time: SystemTime, today: Day) -> Vec<DriveUse> {
        let mut books = self.books.lock();
        let written = self.writes.by_drive();
        books.count(&written, today, self.file.is_some());
        // A clock that was set back is no reason to wait.
        let is_due = books
            .looked
            .is_none_or(|last| time.duration_since(last).is_ok_and(|since| since >= PERIOD) || time < last);
        if is_due {
            books.looked = Some(time);
            self.add(&mut books, today, 1);
        }
        let Books { shared, news, .. } = &*books;
        let known = |DriveWrites { drive, bytes }: DriveWrites| DriveUse {
            by_store: bytes,
            today: shared.on(&drive, today).saturating_add(news.on(&drive, today)),
            total: shared.total(&drive).saturating_add(news.total(&drive)),
            drive,
        };
        written.into_iter().map(known).collect()
    }

    /// Adds the news to the file, and learns what others have added.
    fn add(&self, books: &mut Books, today: Day, attempts: u32) {
        let Some(file) = self.file.as_ref().filter(|_| !books.is_closed) else { return };
        if books.news.is_empty() {
            // A file that cannot be read is reported once there is something to add.
            books.shared = file.read().unwrap_or_else(|_| std::mem::take(&mut books.shared));
            return;
        }
        for attempt in 1..=attempts {
            match file.add(&books.news, today) {
                Ok(history) => {
                    (books.shared, books.news, books.trouble) = (history, History::default(), None);
                    return;
                }
                Err(Refusal::Busy) if attempt < attempts => thread::sleep(PAUSE),
                // Next time.
                Err(Refusal::Busy) if attempts == 1 => return,
                Err(refusal) => {
                    books.is_closed |= matches!(refusal, Refusal::Foreign(_));
                    let path = file.path();
                    books.trouble.get_or_insert_with(|| {
                        format!(
                            "{}: {refusal}; what this run writes to its disks is not added to it. SSDTRAIN_STATE names another directory, \
                             or is off",
                            path.display()
                        )
                    });
                    return;
                }
            }
        }
    }

    /// A parent's books may be locked by a thread that is not here.
    fn is_forked(&self) -> bool {
        process::id() != self.process
    }
}

impl Books {
    /// Takes note of what each drive has taken since the last time.
    fn count(&mut self, written: &[DriveWrites], today: Day, is_shared: bool) {
        self.counted.resize(written.len(), 0);
        for (DriveWrites { drive, bytes }, counted) in written.iter().zip(&mut self.counted) {
            let news = if is_shared { &mut self.news } else { &mut self.shared };
            news.add(drive, today, bytes.saturating_sub(*counted));
            *counted = *bytes;
        }
        if !is_shared {
            self.shared.forget(today);
        }
    }
}

impl Drop for DiskLog {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        let today = Day::of(self.clock.now());
        let written = self.writes.by_drive();
        let mut books = self.books.lock();
        books.count(&written, today, self.file.is_some());
        let was_told = books.trouble.is_some();
        self.add(&mut books, today, ATTEMPTS);
        if let Some(trouble) = books.trouble.as_ref().filter(|_| !was_told) {
            tracing::warn!("{trouble}");
        }
    }
}

impl Clock {
    /// Tells what `now` returns.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Clock {
        Clock(Arc::new(now))
    }

    fn now(&self) -> SystemTime {
        (self.0)()
    }
}

impl Default for Clock {
    /// The system's.
    fn default() -> Clock {
        Clock::new(SystemTime::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::time::UNIX_EPOCH;

    use super::*;

    const DAY: u64 = 86_400;
    const NOON: u64 = 20_000 * DAY + DAY / 2;

    /// A store that pretends to write, and the time.
    struct Run {
        written: Arc<AtomicU64>,
        seconds: Arc<AtomicU64>,
        log: DiskLog,
    }

    impl Run {
        fn new(directory: Option<&Path>) -> Run {
            let (writes, written) = Writes::pretended("serial 1");
            let seconds = Arc::new(AtomicU64::new(NOON));
            let told = Arc::clone(&seconds);
            let clock = Clock::new(move || UNIX_EPOCH + Duration::from_secs(told.load(Relaxed)));
            let log = DiskLog::new(writes, directory.map(HistoryFile::within), clock);
            Run { written, seconds, log }
        }

        /// `bytes` are written and `seconds` go by. Returns what is then known: bytes of this store, of today and of all.
        fn goes(&self, bytes: u64, seconds: u64) -> [u64; 3] {
            self.written.fetch_add(bytes, Relaxed);
            self.seconds.fetch_add(seconds, Relaxed);
            let DriveUse { by_store, today, total, .. } = self.log.look().drives.remove(0);
            [by_store, today, total]
        }
    }

    #[test]
    fn runs_know_of_each_other_and_write_once_a_minute() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (Run::new(Some(directory.path())), Run::new(Some(directory.path())));
        assert_eq!(one.goes(100, 59), [100, 100, 100]);
        assert!(!directory.path().join("disks.json").exists());
        assert_eq!(one.goes(10, 1), [110, 110, 110]);
        assert_eq!(other.goes(5, 30), [5, 5, 5], "it has not looked yet");
        assert_eq!(other.goes(5, 30), [10, 120, 120]);
        drop((one, other));
        let later = Run::new(Some(directory.path()));
        assert_eq!(later.goes(0, 0), [0, 120, 120]);
    }

    #[test]
    fn the_end_of_a_run_adds_what_was_not_yet_added() {
        let directory = tempfile::tempdir().unwrap();
        for total in [7, 14] {
            let run = Run::new(Some(directory.path()));
            run.written.fetch_add(7, Relaxed);
            drop(run);
            assert_eq!(Run::new(Some(directory.path())).goes(0, 0), [0, total, total]);
        }
    }

    #[test]
    fn bytes_count_for_the_day_they_are_seen_on() {
        for directory in [Some(tempfile::tempdir().unwrap()), None] {
            let run = Run::new(directory.as_ref().map(|directory| directory.path()));
            assert_eq!(run.goes(40, DAY / 2 - 1), [40, 40, 40]);
            assert_eq!(run.log.look().left, Duration::from_secs(1));
            assert_eq!(run.goes(2, 1), [42, 2, 42]);
            let day = run.log.look();
            assert_eq!((day.today, day.left), (Day(20_001), Duration::from_secs(DAY)));
            assert_eq!(run.goes(1, 10 * DAY), [43, 1, 43]);
        }
    }

    #[test]
    fn a_clock_that_is_set_back_stops_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let run = Run::new(Some(directory.path()));
        run.goes(1, 100 * DAY);
        run.seconds.store(NOON, Relaxed);
        assert_eq!(run.goes(2, 0), [3, 2, 3]);
        assert_eq!(Run::new(Some(directory.path())).goes(0, 0), [0, 2, 3]);
    }

    #[test]
    fn a_clock_that_was_wrong_for_a_moment_forgets_nothing_of_today() {
        let directory = tempfile::tempdir().unwrap();
        for wrong in [60, NOON + 100 * DAY] {
            let run = Run::new(Some(directory.path()));
            let [_, today, _] = run.goes(100, 60);
            run.seconds.store(wrong, Relaxed);
            run.goes(1, 0);
            run.seconds.store(NOON + 120, Relaxed);
            assert_eq!(run.goes(0, 0)[1], today);
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_told_of_once_and_the_run_counts_by_itself() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let run = Run::new(Some(&file.join("within")));
        assert_eq!((run.goes(5, 10), run.log.trouble()), ([5, 5, 5], None));
        assert_eq!(run.goes(5, 60), [10, 10, 10]);
        let trouble = run.log.trouble().unwrap();
        assert!(trouble.contains("disks.json") && trouble.contains("SSDTRAIN_STATE"), "{trouble}");
        assert_eq!((run.goes(5, DAY), run.log.trouble()), ([15, 5, 15], Some(trouble)));
    }

    #[test]
    fn the_bytes_of_a_run_are_added_once_the_file_can_be_used_again() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("state");
        fs::write(&folder, "").unwrap();
        let run = Run::new(Some(&folder));
        run.goes(5, 60);
        assert!(run.log.trouble().is_some());
        fs::remove_file(&folder).unwrap();
        run.goes(5, 60);
        assert_eq!(run.log.trouble(), None);
        assert_eq!(Run::new(Some(&folder)).goes(0, 0), [0, 10, 10]);
    }

    #[test]
    fn a_file_of_another_release_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disks.json");
        fs::write(&path, r#"{"version": 9}"#).unwrap();
        let run = Run::new(Some(directory.path()));
        assert_eq!(run.goes(5, 60), [5, 5, 5]);
        assert!(run.log.trouble().unwrap().contains("version 9"));
        drop(run);
        assert_eq!(fs::read_to_string(path).unwrap(), r#"{"version": 9}"#);
    }
}
