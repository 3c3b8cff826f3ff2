//! How much a store has written to each drive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use super::drive::{Drive, Portion};

/// What a store writes to each drive. Clones share it, and none of them keeps the store open.
#[derive(Clone, Debug, Default)]
pub struct Writes {
    files: Arc<[FileWrites]>,
}

/// What is written to one spill file, and where that ends up.
#[derive(Debug)]
pub(super) struct FileWrites {
    pub(super) bytes: Arc<AtomicU64>,
    /// None if the file is in memory.
    pub(super) drives: Vec<Portion>,
}

/// What a drive has taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DriveWrites {
    /// The drive.
    pub drive: Drive,
    /// Bytes written to it since the store was opened, as the spill files caused them: whole blocks, for transfers that turned out to be
    /// useless too, and on a mirror as often as there are copies. What the file system writes besides is not among them.
    pub bytes: u64,
}

impl Writes {
    pub(super) fn new(files: Vec<FileWrites>) -> Writes {
        Writes { files: files.into() }
    }

    /// What each drive has taken until now. The drives are always the same, in the same order.
    pub fn by_drive(&self) -> Vec<DriveWrites> {
        let mut all: Vec<DriveWrites> = Vec::new();
        for FileWrites { bytes, drives } in self.files.iter() {
            let written = bytes.load(Relaxed);
            for Portion { drive, share } in drives {
                let bytes = (written as f64 * share) as u64;
                match all.iter_mut().find(|known| known.drive.id == drive.id) {
                    Some(known) => known.bytes += bytes,
                    None => all.push(DriveWrites { drive: drive.clone(), bytes }),
                }
            }
        }
        all
    }

    /// How many bytes of the spill files the drives can take together if they may take `bytes`: less where there are copies. `None` if no
    /// file is on a drive.
    pub fn of_files(&self, bytes: u64) -> Option<u64> {
        let each = self.files.iter().map(|file| file.drives.iter().map(|portion| portion.share).sum());
        let most: f64 = each.fold(0.0, f64::max);
        (most > 0.0).then(|| if most > 1.0 { (bytes as f64 / most) as u64 } else { bytes })
    }
}

#[cfg(test)]
impl Writes {
    /// Of a file on one drive, whose counter is returned as well.
    pub(super) fn pretended(id: &str) -> (Writes, Arc<AtomicU64>) {
        let bytes = Arc::new(AtomicU64::new(0));
        let drive = Drive { name: "pretended0".to_owned(), id: id.to_owned() };
        let file = FileWrites { bytes: Arc::clone(&bytes), drives: vec![Portion { drive, share: 1.0 }] };
        (Writes::new(vec![file]), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(name: &str) -> Drive {
        Drive { name: name.to_owned(), id: format!("id of {name}") }
    }

    #[test]
    fn files_on_one_drive_are_added_up_by_their_shares() {
        let file = |bytes, drives: &[(&str, f64)]| FileWrites {
            bytes: Arc::new(AtomicU64::new(bytes)),
            drives: drives.iter().map(|&(name, share)| Portion { drive: drive(name), share }).collect(),
        };
        let writes =
            Writes::new(vec![file(1000, &[("a", 0.5), ("b", 0.5)]), file(7, &[("b", 1.0)]), file(99, &[])]);
        assert_eq!(writes.of_files(u64::MAX), Some(u64::MAX));
        let found: Vec<_> = writes.by_drive().into_iter().map(|one| (one.drive.name, one.bytes)).collect();
        assert_eq!(found, [("a".to_owned(), 500), ("b".to_owned(), 507)]);
    }

    #[test]
    fn copies_count_against_what_drives_may_take() {
        let mirror = ["a", "b"].map(|name| Portion { drive: drive(name), share: 1.0 });
        let on = |drives| Writes::new(vec![FileWrites { bytes: Arc::default(), drives }]);
        assert_eq!((on(mirror.to_vec()).of_files(1000), on(Vec::new()).of_files(1000)), (Some(500), None));
    }
}
