//! Raw device ceilings: a plain loop over files that were written before, without any overhead.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};
use rustix::fs::FallocateFlags;
use serde::Serialize;
use ssdtrain_store::{IoBuf, Pin, Slot};

use super::memory::buffers;
use crate::common::size;

/// What a pass does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    Write,
    Read,
    /// Every other operation a write, the others reads.
    Both,
}

impl Mode {
    pub(crate) const ALL: [Mode; 3] = [Mode::Write, Mode::Read, Mode::Both];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::Write => "write",
            Mode::Read => "read",
            Mode::Both => "both at once",
        }
    }

    /// Whether the operation of this number is a write.
    pub(crate) fn writes(self, index: u64) -> bool {
        match self {
            Mode::Write => true,
            Mode::Read => false,
            Mode::Both => index.is_multiple_of(2),
        }
    }
}

/// Files to move bytes to and from, and the memory for it.
pub(crate) struct RawFiles {
    files: Vec<File>,
    /// Operations per pass over all files.
    operations: u64,
    io_bytes: usize,
    buffers: Vec<Arc<Slot>>,
    engine: Engine,
    direct: bool,
}

enum Engine {
    Uring(Box<IoUring>),
    /// One thread per buffer.
    Threads,
}

impl RawFiles {
    /// Creates a nameless file in each directory, `bytes` in total, and writes all of them once, since file systems
    /// are slower on blocks that were never written. `threads`: use threads instead of io_uring. The memory is pinned
    /// with `pin`.
    pub(crate) fn create(
        directories: &[PathBuf],
        bytes: u64,
        io_bytes: usize,
        depth: usize,
        threads: bool,
        pin: &Arc<dyn Pin>,
    ) -> Result<RawFiles> {
        let operations = bytes / io_bytes as u64;
        let share = operations.div_ceil(directories.len() as u64) * io_bytes as u64;
        let mut direct = true;
        let mut files = Vec::new();
        for directory in directories {
            let open = |flags| {
                let mut options = OpenOptions::new();
                options
                    .read(true)
                    .write(true)
                    .mode(0o600)
                    .custom_flags(libc::O_TMPFILE | flags)
                    .open(directory)
            };
            let file = open(libc::O_DIRECT).or_else(|refused| {
                direct = false;
                if refused.raw_os_error() == Some(libc::EINVAL) { open(0) } else { Err(refused) }
            });
            let file = file.with_context(|| format!("cannot make a file in {}", directory.display()))?;
            match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, share) {
                Err(rustix::io::Errno::OPNOTSUPP) => {}
                outcome => outcome.with_context(|| {
                    format!("no room for {} in {}", size::format(share), directory.display())
                })?,
            }
            files.push(file);
        }
        let engine = if threads {
            Engine::Threads
        } else {
            let entries = u32::try_from(depth.next_power_of_two())?;
            // The flags of the store's ring, if the kernel supports them: a ring with more interrupts would not show
            // the ceiling.
            let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
            let ring = ring.or_else(|_| IoUring::new(entries));
            let ring = ring.context("io_uring is refused; try --backend pool")?;
            Engine::Uring(Box::new(ring))
        };
        let buffers = buffers(depth, io_bytes, pin)?;
        let mut raw = RawFiles { files, operations, io_bytes, buffers, engine, direct };
        raw.pass(Mode::Write)?;
        Ok(raw)
    }

    /// Processes all bytes once, and returns how long that took.
    pub(crate) fn pass(&mut self, mode: Mode) -> Result<Duration> {
        let RawFiles { files, operations, io_bytes, buffers, engine, .. } = self;
        let plan = Plan { files, operations: *operations, io_bytes: *io_bytes, mode };
        let start = Instant::now();
        match engine {
            Engine::Uring(ring) => plan.run_ring(ring, buffers),
            Engine::Threads => plan.run_threads(buffers),
        }
        .with_context(|| format!("raw {}", mode.name()))?;
        Ok(start.elapsed())
    }

    /// Bytes written and bytes read in a pass.
    pub(crate) fn moved(&self, mode: Mode) -> [u64; 2] {
        let files = self.files.len() as u64;
        let writes = (0..self.operations).filter(|index| mode.writes(index / files)).count() as u64;
        [writes, self.operations - writes].map(|operations| operations * self.io_bytes as u64)
    }

    /// How the bytes are moved.
    pub(crate) fn path(&self) -> String {
        let engine = match self.engine {
            Engine::Uring(_) => "io_uring",
            Engine::Threads => "threads",
        };
        format!("{engine}, {}", if self.direct { "O_DIRECT" } else { "buffered" })
    }
}

/// One pass.
struct Plan<'a> {
    files: &'a [File],
    operations: u64,
    io_bytes: usize,
    mode: Mode,
}

impl Plan<'_> {
    /// The position of the operation with this number, and whether it writes. Files take turns, and each file is read
    /// as much as it is written.
    fn place(&self, index: u64) -> (&File, u64, bool) {
        let files = self.files.len() as u64;
        let within = index / files;
        (&self.files[(index % files) as usize], within * self.io_bytes as u64, self.mode.writes(within))
    }

    fn run_ring(&self, ring: &mut IoUring, buffers: &[Arc<Slot>]) -> Result<()> {
        let mut free: Vec<usize> = (0..buffers.len()).collect();
        let mut next = 0;
        let mut failed = Ok(());
        // Whatever fails, the buffers stay here until the kernel has finished with them.
        while free.len() < buffers.len() || (next < self.operations && failed.is_ok()) {
            while next < self.operations && failed.is_ok() {
                let Some(slot) = free.pop() else { break };
                let (file, offset, write) = self.place(next);
                let (fd, memory, len) =
                    (types::Fd(file.as_raw_fd()), buffers[slot].part(0).0, self.io_bytes as u32);
                let entry = match write {
                    true => opcode::Write::new(fd, memory, len).offset(offset).build(),
                    false => opcode::Read::new(fd, memory, len).offset(offset).build(),
                };
                // SAFETY: `slot` was free, so no operation uses its buffer, which outlives the operation: the loop
                // does not end before all slots are free again.
                let pushed = unsafe { ring.submission().push(&entry.user_data(slot as u64)) };
                if pushed.is_err() {
                    free.push(slot);
                    break;
                }
                next += 1;
            }
            match ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => failed = Err(error),
                _ => {}
            }
            for done in ring.completion() {
                free.push(done.user_data() as usize);
                if let Err(error) = outcome(done.result(), self.io_bytes) {
                    failed = Err(error);
                }
            }
        }
        Ok(failed?)
    }

    fn run_threads(&self, buffers: &mut [Arc<Slot>]) -> Result<()> {
        let next = AtomicU64::new(0);
        let work = |buffer: &Slot| {
            // SAFETY: a buffer is contiguous and was filled when it was made; the pass has it alone, and in it this
            // thread.
            let memory = unsafe { slice::from_raw_parts_mut(buffer.part(0).0, self.io_bytes) };
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.operations {
                    return Ok(());
                }
                match self.place(index) {
                    (file, offset, true) => file.write_all_at(memory, offset)?,
                    (file, offset, false) => file.read_exact_at(memory, offset)?,
                }
            }
        };
        thread::scope(|scope| {
            let workers: Vec<_> = buffers.iter().map(|buffer| scope.spawn(|| work(buffer))).collect();
            for worker in workers {
                let outcome: io::Result<()> =
                    worker.join().map_err(|_| io::Error::other("a thread panicked"))?;
                outcome?;
            }
            Ok(())
        })
    }
}

fn outcome(result: i32, wanted: usize) -> io::Result<()> {
    match usize::try_from(result) {
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
        Ok(moved) if moved == wanted => Ok(()),
        Ok(moved) => Err(io::Error::other(format!("the device moved {moved} bytes of {wanted}"))),
    }
}

/// The bytes of a pass: whole values of `value` bytes, as many in each of `parts`, and at least `bytes`.
pub(crate) fn rounded(bytes: u64, value: u64, parts: u64) -> Result<u64> {
    let unit = value.checked_mul(parts).context("--io-bytes is too large")?;
    let rounded = bytes.checked_next_multiple_of(unit).context("--size is too large")?;
    ensure!(rounded > 0, "--size is 0");
    Ok(rounded)
}

#[cfg(test)]
mod tests {
    use ssdtrain_store::AlignedBuf;

    use super::super::memory::Unpinned;
    use super::*;

    #[test]
    fn both_ways_of_moving_bytes_go_over_all_files() {
        let directory = tempfile::tempdir().unwrap();
        let directories = [directory.path().to_owned(), directory.path().to_owned()];
        let pin: Arc<dyn Pin> = Arc::new(Unpinned);
        for threads in [false, true] {
            // A kernel may refuse io_uring; then there is nothing to test.
            let Ok(mut raw) = RawFiles::create(&directories, 1 << 20, 8192, 4, threads, &pin) else {
                assert!(!threads);
                continue;
            };
            for (mode, moved) in Mode::ALL.into_iter().zip([[1 << 20, 0], [0, 1 << 20], [1 << 19; 2]]) {
                raw.pass(mode).unwrap();
                assert_eq!(raw.moved(mode), moved);
            }
            for file in &raw.files {
                let mut last = AlignedBuf::new(8192).unwrap();
                file.read_exact_at(last.as_mut_slice(), (1 << 19) - 8192).unwrap();
                assert_ne!(last.as_mut_slice(), [0; 8192]);
            }
        }
    }

    #[test]
    fn passes_are_whole_values_in_every_file() {
        assert_eq!(rounded(1, 8, 3).unwrap(), 24);
        assert_eq!(rounded(48, 8, 3).unwrap(), 48);
        assert!(rounded(u64::MAX, 8, 1).is_err());
    }
}
