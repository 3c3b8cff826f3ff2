//! Spill files, and the backends that move bytes between them and memory.
//!
//! A [`Store`] reserves a [`Blob`] for each value and writes or reads the whole blob at a time. It knows nothing
//! about tensors.
//!
//! # Byte layout
//!
//! There is one spill file per directory. It never has a name, so nothing is left behind however the process ends. It
//! has neither a header nor an index, since nothing in it outlives the store. It is a plain array of 4 KiB blocks:
//!
//! | bytes | what |
//! |---|---|
//! | `0 .. grown` | preallocated in steps of 256 MiB, up to the furthest point that any extent has needed |
//! | `grown .. cap` | not allocated yet; `cap` is the file's equal share of `cap_bytes` |
//!
//! An *extent* is a contiguous range of whole blocks that belongs to one blob. A blob has one extent (a *piece*) in
//! each file it is striped over; the bytes after the end of its payload are padding. An extent is cut from the
//! shortest free range that is long enough within the grown part of the file. The file grows only if there is no such
//! range.
//!
//! # Stripe rule
//!
//! A blob of at most `stripe_bytes` is a single piece, and such blobs are placed in the files in turn. A larger blob
//! is cut into chunks of `stripe_bytes`; chunk `i` of a blob with `n` pieces is chunk `i / n` of piece `i % n`. The
//! file that holds the first piece rotates as well. A file without room is skipped.
//!
//! # Transfers
//!
//! A transfer moves the payload, padded to whole blocks, directly between the caller's memory and the file, in
//! operations of at most `io_bytes`. If the memory is scattered, each operation lies within one of its parts. Memory
//! that is not aligned for direct I/O, or has no room for the padding, goes through a bounce buffer. Queued reads and
//! writes take turns, starting with a read. A failed write is reported at once; a read is attempted up to three
//! times.
//!
//! With checksums, a CRC-32C of each `io_bytes` of the payload is taken while it is written, and compared before a read
//! completes. Threads of the store do that, and copy from bounce buffers; those that carry out I/O do not. Checksums may
//! be turned on and off at any time: a blob that was written without them is read without.
//!
//! With encryption, a blob is written from a bounce buffer, into which the payload is sealed (AES-256-GCM) before, in pieces of
//! 64 KiB, and opened where it was read to. The key is made with the store. The seals stay with the blob in memory: no byte on
//! disk has another place or another size. They also tell what came back changed, so checksums are not taken then. The same
//! threads do that.
//!
//! An operation that the disk does not answer in time ends its transfer with an error. What the kernel may still touch
//! (memory, file and extent) stays with the operation until its real end.

mod abandoned;
mod allowance;
mod backend;
mod blob;
mod busy_time;
mod checksum;
mod completion;
mod config;
mod control_groups;
mod copies;
mod day;
mod directory;
mod disk_log;
mod drive;
mod encryption;
mod error;
mod extent;
mod failure;
#[cfg(fuzzing)]
pub mod fuzzing;
mod gather;
mod gpu;
mod growth;
mod history;
mod history_file;
mod host_memory;
mod limits;
mod maker;
mod marks;
mod mem;
mod numa;
mod open;
mod path;
mod region;
mod seal;
mod spill_file;
mod stats;
mod store;
mod stripe;
pub mod sync;
mod transfer;
mod volume;
mod volumes;
mod watch;
mod workers;
mod writes;

pub use allowance::Outlook;
pub use backend::{
    Backend, BackendInfo, BackendKind, CuFileMode, Direction, Fault, Faulty, Op, Pool, Throttled, Uring,
};
pub use blob::Blob;
pub use checksum::checksum_rate;
pub use completion::{Completion, contained};
pub use config::StoreConfig;
pub use control_groups::GroupMemory;
pub use day::Day;
pub use disk_log::{Clock, DiskDay, DiskLog, DriveUse};
pub use drive::Drive;
pub use error::{Error, ErrorKind, Result};
pub use gpu::{Gpu, SegmentWatcher};
pub use history::{DriveHistory, History};
pub use history_file::HistoryFile;
pub use host_memory::HostMemory;
pub use limits::no_thread;
pub use mem::{AlignedBuf, BLOCK, HostPool, IoBuf, PAGE, Pin, Shrunk, Slot, parts};
pub use numa::node_of_device;
pub use path::StorePath;
pub use region::{Disk, Medium, Place, Region, RegionInfo};
pub use stats::StoreStats;
pub use store::Store;
pub use writes::{DriveWrites, Writes};
