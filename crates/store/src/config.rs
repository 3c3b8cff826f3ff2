//! The configuration of a store.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::backend::BackendKind;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::mem::BLOCK;
use crate::open;
use crate::region::Place;

/// Largest allowed size of a single I/O, in bytes; the kernel moves at most slightly less than 2 GiB at once.
const MAX_IO_BYTES: usize = 1 << 30;
/// Most operations that may be in flight. The first kernels with io_uring take no larger ring; later ones take up to 32,768.
const MAX_QUEUE_DEPTH: usize = 4096;

/// The configuration for [`Store::open`](super::Store::open).
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// One spill file is created in each of these; several disks add up. [`BackendKind::Memory`] uses only their
    /// number.
    pub directories: Vec<PathBuf>,
    /// Hard cap over all spill files, in bytes; each file may grow to an equal share of it.
    pub cap_bytes: u64,
    /// Bytes of each disk that are left to others: no spill file grows into them. `None` for the larger of 1 GiB and 1 % of
    /// the disk, but no more than a tenth of it.
    pub keep_free: Option<u64>,
    /// How the bytes are moved.
    pub backend: BackendKind,
    /// The cuFile library for [`BackendKind::CuFile`]; `None` to search for it.
    pub cufile: Option<PathBuf>,
    /// An additional place to search for the library, besides the usual ones.
    pub cufile_beside: Option<PathBuf>,
    /// The GPU whose memory [`BackendKind::CuFile`] can access; `None` for host memory only.
    pub gpu: Option<Arc<dyn Gpu>>,
    /// Whether checksums are taken of what is written, and compared when it is read, until
    /// [`Store::take_checksums`](super::Store::take_checksums) says otherwise.
    pub checksums: bool,
    /// Whether everything that is written is encrypted, with a key of the store's own that is only in memory. Then no checksums
    /// are taken: what came back changed does not decrypt.
    pub encrypt: bool,
    /// Queue depth: the most operations in flight at the same time.
    pub queue_depth: usize,
    /// Largest single I/O, in bytes; rounded up to a multiple of 4 KiB.
    pub io_bytes: usize,
    /// Blobs larger than this are striped over all files in chunks of this many bytes; rounded up to a multiple
    /// of 4 KiB.
    pub stripe_bytes: usize,
    /// The most bytes per second, reads and writes together; `None` for no limit.
    pub max_bytes_per_s: Option<NonZero<u64>>,
    /// How long the disk may take for one operation, which is at most [`io_bytes`](StoreConfig::io_bytes) long; time in
    /// queues of the store does not count. A transfer with an operation that takes longer ends with
    /// [`ErrorKind::TimedOut`]. `Duration::MAX` for no limit.
    pub timeout: Duration,
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        StoreConfig {
            directories: Vec::new(),
            cap_bytes: 64 << 30,
            keep_free: None,
            backend: BackendKind::Auto,
            cufile: None,
            cufile_beside: None,
            gpu: None,
            checksums: false,
            encrypt: false,
            queue_depth: 16,
            io_bytes: 4 << 20,
            stripe_bytes: 4 << 20,
            max_bytes_per_s: None,
            timeout: Duration::from_secs(120),
        }
    }
}

impl StoreConfig {
    /// Bytes in flight that keep the disks busy: the queue depth times the largest operation.
    pub fn window(&self) -> u64 {
        // A queue that is too deep is refused when the store opens, and some caches open none.
        (self.queue_depth as u64).saturating_mul(self.io_bytes as u64)
    }

    /// The directories of spill files that are in memory (tmpfs, ramfs), so that bytes spilled there free none.
    pub fn in_memory(&self) -> Vec<&Path> {
        let named = self.places().into_iter().filter_map(|place| match place {
            Place::Directory(directory) => Some(directory),
            Place::Memory => None,
        });
        named.filter(|directory| open::holds_memory(directory)).collect()
    }

    /// Where the spill files are to be created.
    pub(super) fn places(&self) -> Vec<Place<'_>> {
        let directories = self.directories.iter().map(|directory| Place::Directory(directory));
        if !self.backend.is_in_memory() {
            return directories.collect();
        }
        vec![Place::Memory; self.directories.len().max(1)]
    }

    /// How many spill files there are.
    pub(super) fn files(&self) -> usize {
        self.places().len()
    }

    /// The configuration with its sizes rounded to whole blocks, or which setting is out of range.
    pub(super) fn checked(mut self) -> Result<StoreConfig> {
        let files = self.files();
        if files == 0 {
            return Err(config("directories: at least one spill directory is needed"));
        }
        let least = (files * BLOCK) as u64;
        if self.cap_bytes < least {
            let cap = self.cap_bytes;
            return Err(config(format!(
                "cap_bytes: {cap} is too small for {files} spill file(s); give at least {least}"
            )));
        }
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            let depth = self.queue_depth;
            return Err(config(format!("queue_depth: {depth} is not within 1..={MAX_QUEUE_DEPTH}")));
        }
        if self.timeout.is_zero() {
            return Err(config(
                "timeout: 0 leaves no time for any transfer; give two minutes, or Duration::MAX for no limit",
            ));
        }
        if self.encrypt && self.gpu.is_some() {
            return Err(config(
                "encrypt: what goes straight between a GPU and the disk is not encrypted, since the processor does not see it; \
                 leave out one of encrypt and gpu",
            ));
        }
        for (name, bytes) in [("io_bytes", &mut self.io_bytes), ("stripe_bytes", &mut self.stripe_bytes)] {
            if !(1..=MAX_IO_BYTES).contains(bytes) {
                return Err(config(format!("{name}: {bytes} is not within 1..={MAX_IO_BYTES}")));
            }
            *bytes = bytes.next_multiple_of(BLOCK);
        }
        Ok(self)
    }
}

fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::SegmentWatcher;

    #[derive(Debug)]
    struct NoGpu;

    // SAFETY: it has no memory, and so no segments.
    unsafe impl Gpu for NoGpu {
        fn within(&self, work: &mut dyn FnMut()) -> Result<(), String> {
            work();
            Ok(())
        }

        fn watch(&self, _watcher: &'static dyn SegmentWatcher) -> Result<(), String> {
            Ok(())
        }
    }

    fn memory() -> StoreConfig {
        StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() }
    }

    #[test]
    fn directories_in_memory_are_told_from_those_on_disks() {
        let config = |directories: &[&str]| StoreConfig {
            directories: directories.iter().map(PathBuf::from).collect(),
            ..StoreConfig::default()
        };
        assert!(config(&["/proc", "/no/such/place"]).in_memory().is_empty());
        if tempfile::tempdir_in("/dev/shm").is_err() {
            return eprintln!("skipped: there is no /dev/shm here");
        }
        let shared = config(&["/proc", "/dev/shm"]);
        assert_eq!(shared.in_memory(), [Path::new("/dev/shm")]);
        let asked_for = StoreConfig { backend: BackendKind::Memory, ..shared };
        assert!(asked_for.in_memory().is_empty(), "it was asked for");
    }

    #[test]
    fn every_setting_out_of_range_is_named() {
        let wrong = [
            ("directories", StoreConfig { backend: BackendKind::Auto, ..memory() }),
            ("cap_bytes", StoreConfig { cap_bytes: 4095, ..memory() }),
            ("queue_depth", StoreConfig { queue_depth: 0, ..memory() }),
            ("queue_depth", StoreConfig { queue_depth: 4097, ..memory() }),
            ("timeout", StoreConfig { timeout: Duration::ZERO, ..memory() }),
            ("io_bytes", StoreConfig { io_bytes: 0, ..memory() }),
            ("io_bytes", StoreConfig { io_bytes: MAX_IO_BYTES + 1, ..memory() }),
            ("stripe_bytes", StoreConfig { stripe_bytes: 0, ..memory() }),
        ];
        for (name, config) in wrong {
            let error = config.checked().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().starts_with(name), "{error}");
        }
    }

    #[test]
    fn a_gpus_memory_is_not_encrypted_and_refused() {
        let config = StoreConfig { encrypt: true, gpu: Some(Arc::new(NoGpu)), ..memory() };
        let error = config.checked().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().starts_with("encrypt: "), "{error}");
    }

    #[test]
    fn sizes_become_whole_blocks() {
        let config = StoreConfig { io_bytes: 1, stripe_bytes: BLOCK + 1, ..memory() }.checked().unwrap();
        assert_eq!((config.io_bytes, config.stripe_bytes), (BLOCK, 2 * BLOCK));
    }
}
