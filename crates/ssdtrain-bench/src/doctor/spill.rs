//! What a spill directory is worth for spilling, whatever cuFile makes of it.

use std::io;
use std::path::Path;

use ssdtrain_store::Store;

use super::page::{Check, Status};
use super::place::Place;
use crate::common::size;
use crate::common::spill::probe;

/// Less free space than this is worth mentioning: a small model's activations would fill it.
const LITTLE_SPACE: u64 = 4 << 30;

/// What was found of a directory.
#[derive(Clone, Copy)]
struct Found<'a> {
    /// Its file system, as the mount table calls it.
    kind: &'a str,
    is_in_memory: bool,
    is_direct: bool,
    /// What its file system cannot do for a spill file.
    notes: &'a [String],
    free: Option<u64>,
}

/// Opens a spill file in the directory, as training would.
pub(super) fn spill(directory: &Path, place: &Place) -> Check {
    let name = "spill";
    let store = match Store::open(probe(directory)) {
        Ok(store) => store,
        Err(error) => {
            let check = Check::ok(name, error.to_string());
            return Check {
                needed: true,
                ..check.but(
                    Status::Missing,
                    "name a directory on a local disk that you may write to: `--spill-dir DIR`",
                )
            };
        }
    };
    let alignment = store.reserve(4096).map_or(4096, |blob| blob.memory_alignment());
    let path = store.path();
    let direct = path.is_direct().then(|| format!("O_DIRECT, memory aligned to {alignment} bytes"));
    let free = free_bytes(directory);
    let space = free.as_ref().map_or_else(
        |error| format!("free space unknown: {error}"),
        |&free| format!("{} free", size::format(free)),
    );
    let kind = place.mount.as_ref().map_or("unknown file system", |mount| &mount.kind);
    let facts: Vec<String> = direct.into_iter().chain(path.notes().iter().cloned()).chain([space]).collect();
    let check = Check::ok(name, format!("{}: {kind}, {}", directory.display(), facts.join(", ")));
    let found = Found {
        kind,
        is_in_memory: !probe(directory).in_memory().is_empty(),
        is_direct: path.is_direct(),
        notes: path.notes(),
        free: free.ok(),
    };
    match found.advice() {
        Some(advice) => check.but(Status::Warn, advice),
        None => check,
    }
}

impl Found<'_> {
    /// What spilling there costs, and what is better; `None` if nothing is.
    fn advice(&self) -> Option<&'static str> {
        if self.is_in_memory {
            return Some(
                "it is in memory: what is spilled there takes as much as before; name a directory on a local ext4 or xfs: \
                 `--spill-dir DIR`",
            );
        }
        match self.kind {
            "nfs" | "nfs4" | "cifs" | "smb3" | "9p" | "ceph" | "lustre" | "beegfs" | "gpfs" | "wekafs"
            | "fuse.sshfs" | "fuse.glusterfs" => {
                return Some(
                    "bytes go over the network or to another system, as slowly as that is, and count for no disk's endurance; \
                     name a directory on a local ext4 or xfs: `--spill-dir DIR`",
                );
            }
            "overlay" | "fuse.fuse-overlayfs" => {
                return Some(
                    "what is spilled lies on whatever disk the container's own files are on, and fills that; give the container \
                     a directory of a local SSD: `docker run -v /mnt/nvme:/mnt/nvme`",
                );
            }
            "zfs" | "bcachefs" => {
                return Some(
                    "it copies what is written again, and needs new room for that also in a spill file that has all of its own; \
                     name a directory on a local ext4 or xfs: `--spill-dir DIR`",
                );
            }
            kind if kind.starts_with("fuse") => {
                return Some(
                    "a program serves it (FUSE), which every transfer waits for and which may keep bytes in memory; name a \
                     directory on a local ext4 or xfs: `--spill-dir DIR`",
                );
            }
            _ => {}
        }
        if !self.is_direct {
            return Some(
                "bytes go through the page cache, and take memory; name a directory on a local ext4 or xfs: `--spill-dir DIR`",
            );
        }
        if !self.notes.is_empty() {
            return Some(
                "writes may find no room in a spill file, or be slow; name a directory on a local ext4 or xfs: `--spill-dir DIR`",
            );
        }
        self.free.filter(|&free| free < LITTLE_SPACE).map(|_| {
            "what does not fit stays in memory; free some space or name another directory: `--spill-dir DIR`"
        })
    }
}

fn free_bytes(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::super::tree::Tree;
    use super::*;

    const GOOD: Found<'_> =
        Found { kind: "ext4", is_in_memory: false, is_direct: true, notes: &[], free: Some(LITTLE_SPACE) };

    #[test]
    fn a_local_file_system_that_is_changed_in_place_is_good() {
        for kind in ["ext4", "xfs", "btrfs", "unknown file system"] {
            assert_eq!(Found { kind, ..GOOD }.advice(), None, "{kind}");
        }
        assert_eq!(Found { free: None, ..GOOD }.advice(), None, "room that is not known is not little");
    }

    #[test]
    fn what_a_file_system_costs_is_told() {
        for (kind, words) in [
            ("nfs4", "network"),
            ("lustre", "network"),
            ("9p", "another system"),
            ("fuse.sshfs", "network"),
            ("overlay", "docker run -v"),
            ("fuse.fuse-overlayfs", "docker run -v"),
            ("zfs", "copies"),
            ("fuseblk", "FUSE"),
        ] {
            let advice = Found { kind, ..GOOD }.advice().unwrap();
            assert!(advice.contains(words), "{kind}: {advice}");
        }
    }

    #[test]
    fn what_costs_most_is_told_first() {
        let notes = ["/mnt copies what is written again: no".to_owned()];
        let little = Found { free: Some(LITTLE_SPACE - 1), ..GOOD };
        let copies = Found { notes: &notes, ..little };
        let buffered = Found { is_direct: false, ..copies };
        let memory = Found { is_in_memory: true, kind: "tmpfs", ..buffered };
        for (found, words) in [
            (little, "does not fit"),
            (copies, "find no room"),
            (buffered, "page cache"),
            (Found { kind: "overlay", ..buffered }, "container"),
            (memory, "takes as much as before"),
        ] {
            let advice = found.advice().unwrap();
            assert!(advice.contains(words), "{advice}");
        }
    }

    #[test]
    fn a_missing_directory_is_named() {
        let directory = Path::new("/no/such/place");
        let check = spill(directory, &Place::read(&Tree::new(Path::new("/")), directory));
        assert!(check.needed && check.status == Status::Missing);
        assert!(check.found.contains("/no/such/place"), "{}", check.found);
    }
}
