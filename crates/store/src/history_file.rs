//! The file in which all runs keep what they have written to each drive.

use std::env;
use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::day::Day;
use super::history::History;
use crate::error::{Error, ErrorKind, Result};

/// The number of the form in which it is written.
const VERSION: u64 = 1;
const NAME: &str = "disks.json";
/// Held while the file is replaced. It is never removed, so that all have the same one.
const LOCK: &str = "disks.lock";
/// What was not readable is kept under this name.
const DAMAGED: &str = "disks.damaged.json";
/// No history is as long as this.
const LONGEST: u64 = 16 << 20;
/// The variable that names the directory.
const VARIABLE: &str = "SSDTRAIN_STATE";

/// A history of what was written to each drive, in a file that processes share. It is replaced as a whole, under a lock, so that no process
/// loses what others have counted.
#[derive(Clone, Debug)]
pub struct HistoryFile {
    directory: PathBuf,
}

/// Why nothing could be added.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Another process is adding something at this moment.
    Busy,
    /// It is of another release, so it must not be replaced.
    Foreign(String),
    /// It cannot be read or written.
    Failed(io::Error),
}

/// What was read.
enum Contents {
    Good(History),
    Damaged(String),
}

#[derive(Serialize, Deserialize)]
struct Document<D> {
    version: u64,
    drives: D,
}

#[derive(Deserialize)]
struct Version {
    version: u64,
}

impl HistoryFile {
    /// The history in this directory, which is made when something is first added.
    pub fn within(directory: impl Into<PathBuf>) -> HistoryFile {
        HistoryFile { directory: directory.into() }
    }

    /// The history of this user: in the directory that the environment variable `SSDTRAIN_STATE` names, and without it, if `by_default`, in
    /// `$XDG_STATE_HOME/ssdtrain` or `~/.local/state/ssdtrain`. `None` with `SSDTRAIN_STATE=off`.
    pub fn of_user(by_default: bool) -> Option<HistoryFile> {
        HistoryFile::told(by_default, |name| env::var_os(name).map(PathBuf::from))
    }

    fn told(by_default: bool, variable: impl Fn(&str) -> Option<PathBuf>) -> Option<HistoryFile> {
        let named = |name| variable(name).filter(|path| !path.as_os_str().is_empty());
        match named(VARIABLE) {
            Some(off) if off == Path::new("off") => None,
            Some(directory) => Some(HistoryFile { directory }),
            None if by_default => {
                // Relative ones are to be ignored.
                let absolute = |name| named(name).filter(|path| path.is_absolute());
                let home = || absolute("HOME").map(|home| home.join(".local/state"));
                let state = absolute("XDG_STATE_HOME").or_else(home)?;
                Some(HistoryFile { directory: state.join("ssdtrain") })
            }
            None => None,
        }
    }

    /// The directory that it is in.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.directory.join(NAME)
    }

    /// What all runs have counted; nothing if there is no file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`] if it cannot be read, [`ErrorKind::Corrupt`] if it is damaged or of another release.
    pub fn read(&self) -> Result<History> {
        let shown = self.path();
        let corrupt = |why: String| Error::new(ErrorKind::Corrupt, format!("{}: {why}", shown.display()));
        match self.contents() {
            Ok(Contents::Good(history)) => Ok(history),
            Ok(Contents::Damaged(why)) => Err(corrupt(format!("it is damaged: {why}"))),
            Err(Refusal::Failed(error)) => {
                Err(Error::io(ErrorKind::Io, format!("{} cannot be read", shown.display()), error))
            }
            Err(refusal) => Err(corrupt(refusal.to_string())),
        }
    }

    /// Adds `news` to what others have counted, and returns all. A damaged file is kept under another name, and begun anew.
    pub(super) fn add(&self, news: &History, today: Day) -> Result<History, Refusal> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let lock = private().open(self.directory.join(LOCK))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Refusal::Busy),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        let outcome = self.replace(news, today);
        // A process that was forked off meanwhile has the file open too, and would keep the lock.
        let unlocked = lock.unlock();
        let history = outcome?;
        unlocked?;
        Ok(history)
    }

    fn replace(&self, news: &History, today: Day) -> Result<History, Refusal> {
        let path = self.path();
        let mut history = match self.contents()? {
            Contents::Good(history) => history,
            Contents::Damaged(why) => {
                let aside = self.directory.join(DAMAGED);
                fs::rename(&path, &aside)?;
                let (path, aside) = (path.display(), aside.display());
                tracing::warn!(
                    "{path}: it is damaged ({why}), so it is begun anew; what was there is now {aside}"
                );
                History::default()
            }
        };
        history.merge(news);
        history.forget(today);
        let text = text_of(&history)?;
        // Whoever holds the lock is the only one that uses this name.
        let unfinished = self.directory.join(format!("{NAME}.unfinished"));
        let mut file = private().truncate(true).open(&unfinished)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&unfinished, &path)?;
        Ok(history)
    }

    fn contents(&self) -> Result<Contents, Refusal> {
        // A pipe must not be waited for.
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(self.path());
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Contents::Good(History::default()));
            }
            Err(error) => return Err(error.into()),
        };
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is no file").into());
        }
        Contents::read(file)
    }
}

impl Contents {
    fn read(from: impl Read) -> Result<Contents, Refusal> {
        let mut bytes = Vec::new();
        from.take(LONGEST + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LONGEST {
            return Ok(Contents::Damaged(format!("it has more than {LONGEST} bytes")));
        }
        if let Ok(Version { version }) = serde_json::from_slice(&bytes)
            && version != VERSION
        {
            let message =
                format!("it has version {version}, and this release reads {VERSION}; name another directory");
            return Err(Refusal::Foreign(message));
        }
        Ok(match serde_json::from_slice::<Document<_>>(&bytes) {
            Ok(Document { drives, .. }) => Contents::Good(History { drives }),
            Err(error) => Contents::Damaged(error.to_string()),
        })
    }
}

/// What the file of a history has in it.
fn text_of(history: &History) -> io::Result<Vec<u8>> {
    let document = Document { version: VERSION, drives: &history.drives };
    let mut text = serde_json::to_vec_pretty(&document)?;
    text.push(b'\n');
    Ok(text)
}

/// Reads bytes as a history. It is the same after it was written, and can be added to and asked.
#[cfg(fuzzing)]
pub fn read_bytes(bytes: &[u8], today: Day) {
    let Ok(Contents::Good(mut history)) = Contents::read(bytes) else { return };
    let written = text_of(&history).expect("it was read from such text");
    assert!(matches!(Contents::read(&*written), Ok(Contents::Good(again)) if again == history));
    let before = history.clone();
    history.merge(&before);
    history.forget(today);
    for (id, known) in &history.drives {
        assert!(known.total >= before.drives[id].total && known.on(today) >= before.drives[id].on(today));
        known.per_day(today);
    }
}

/// Only its owner can read it. A link is not followed.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::Failed(error)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Busy => f.write_str("other processes kept it locked"),
            Refusal::Foreign(message) => f.write_str(message),
            Refusal::Failed(error) => error.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::drive::Drive;

    const TODAY: Day = Day(20_782);

    fn drive(name: &str) -> Drive {
        Drive::named(Path::new("/no/such/root"), name)
    }

    fn news(name: &str, bytes: u64) -> History {
        let mut history = History::default();
        history.add(&drive(name), TODAY, bytes);
        history
    }

    fn temporary() -> (tempfile::TempDir, HistoryFile) {
        let directory = tempfile::tempdir().unwrap();
        let file = HistoryFile::within(directory.path().join("state/ssdtrain"));
        (directory, file)
    }

    /// Adds once nobody else does.
    fn add(file: &HistoryFile, news: &History) -> History {
        loop {
            match file.add(news, TODAY) {
                Err(Refusal::Busy) => thread::yield_now(),
                outcome => return outcome.unwrap(),
            }
        }
    }

    #[test]
    fn many_writers_lose_none_of_each_others_bytes() {
        let (_directory, file) = temporary();
        thread::scope(|scope| {
            for name in ["a", "b", "a"] {
                let file = &file;
                let work = move || (0..40).for_each(|_| drop(add(file, &news(name, 5))));
                thread::Builder::new().spawn_scoped(scope, work).unwrap();
            }
        });
        let history = file.read().unwrap();
        assert_eq!((history.total(&drive("a")), history.on(&drive("b"), TODAY)), (400, 200));
    }

    #[test]
    fn nobody_waits_for_a_lock_and_nothing_is_written_without_it() {
        let (_directory, file) = temporary();
        add(&file, &news("a", 1));
        let lock = File::open(file.directory.join(LOCK)).unwrap();
        lock.lock().unwrap();
        assert!(matches!(file.add(&news("a", 1), TODAY), Err(Refusal::Busy)));
        assert_eq!(file.read().unwrap().total(&drive("a")), 1, "reading needs no lock");
        lock.unlock().unwrap();
        assert_eq!(add(&file, &news("a", 1)).total(&drive("a")), 2);
    }

    #[test]
    fn only_its_owner_can_read_it_and_nothing_else_stays() {
        let (_directory, file) = temporary();
        add(&file, &news("a", 1));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&file.directory), mode(&file.path())), (0o700, 0o600));
        let mut names: Vec<_> =
            fs::read_dir(&file.directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [NAME, LOCK]);
    }

    #[test]
    fn a_file_of_another_release_is_left_alone() {
        let (_directory, file) = temporary();
        add(&file, &news("a", 1));
        let later = r#"{"version": 2, "drives": [1, 2]}"#;
        fs::write(file.path(), later).unwrap();
        let refusal = file.add(&news("a", 1), TODAY).unwrap_err();
        assert!(matches!(&refusal, Refusal::Foreign(text) if text.contains("version 2")), "{refusal}");
        assert_eq!(file.read().unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(fs::read_to_string(file.path()).unwrap(), later);
    }

    #[test]
    fn what_is_no_file_is_refused_and_not_waited_for() {
        let (_directory, file) = temporary();
        add(&file, &news("a", 1));
        fs::remove_file(file.path()).unwrap();
        fs::create_dir(file.path()).unwrap();
        assert!(matches!(file.add(&news("a", 1), TODAY), Err(Refusal::Failed(_))));
        fs::remove_dir(file.path()).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(file.path()).status().unwrap();
        assert!(pipe.success());
        assert!(matches!(file.add(&news("a", 1), TODAY), Err(Refusal::Failed(_))));
        let beside = HistoryFile::within(file.path().join("within"));
        assert!(matches!(beside.add(&news("a", 1), TODAY), Err(Refusal::Failed(_))));
    }

    #[test]
    fn the_environment_says_where_it_is() {
        let told = |by_default, set: &[(&str, &str)]| {
            let variable = |name: &str| Some(set.iter().find(|(known, _)| *known == name)?.1.into());
            HistoryFile::told(by_default, variable).map(|file| file.directory.display().to_string())
        };
        let home = ("HOME", "/home/x");
        assert_eq!(told(true, &[home]).as_deref(), Some("/home/x/.local/state/ssdtrain"));
        assert_eq!(told(true, &[home, ("XDG_STATE_HOME", "/s")]).as_deref(), Some("/s/ssdtrain"));
        assert_eq!(
            told(true, &[home, ("XDG_STATE_HOME", "s")]).as_deref(),
            Some("/home/x/.local/state/ssdtrain")
        );
        assert_eq!(told(false, &[home, (VARIABLE, "here")]).as_deref(), Some("here"));
        for (by_default, set) in [(false, home), (true, (VARIABLE, "off")), (true, ("HOME", ""))] {
            assert_eq!(told(by_default, &[set]), None);
        }
    }

    proptest! {
        #[test]
        fn damage_in_any_byte_loses_no_byte_of_the_run(
            place in any::<prop::sample::Index>(),
            damage in prop_oneof![any::<u8>().prop_map(Some), Just(None)],
        ) {
            let (_directory, file) = temporary();
            add(&file, &news("a", 1000));
            let before = add(&file, &news("b", 7));
            let mut bytes = fs::read(file.path()).unwrap();
            let index = place.index(bytes.len());
            match damage {
                Some(byte) => bytes[index] = byte,
                None => bytes.truncate(index),
            }
            fs::write(file.path(), &bytes).unwrap();
            let found = file.read();
            match file.add(&news("c", 5), TODAY) {
                Ok(history) => {
                    prop_assert!(history.total(&drive("c")) >= 5);
                    let after = file.read().unwrap();
                    prop_assert_eq!(&after, &history);
                    // What could not be read is still there for people.
                    prop_assert_eq!(found.is_err(), file.directory.join(DAMAGED).exists());
                    if bytes == fs::read(file.directory.join(NAME)).unwrap() {
                        prop_assert_eq!(after, before);
                    }
                }
                // Then the file is as it was.
                Err(Refusal::Foreign(_)) => prop_assert_eq!(fs::read(file.path()).unwrap(), bytes),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }

        #[test]
        fn bytes_that_mean_nothing_are_no_history(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (_directory, file) = temporary();
            add(&file, &news("a", 1));
            fs::write(file.path(), &bytes).unwrap();
            prop_assert_eq!(add(&file, &news("a", 3)).total(&drive("a")), 3);
        }
    }
}
