//! Spill files and what moves bytes between them and memory.
//!
//! A [`Store`] reserves a [`Blob`] for each value and writes or reads it whole. It knows nothing of tensors.
//!
//! # Byte layout
//!
//! There is one spill file per directory. It has no name from birth, so nothing is left behind however the process
//! ends; it has no header and no index either, since nothing in it outlives the store. It is a plain array of
//! 4 KiB blocks:
//!
//! | bytes | what |
//! |---|---|
//! | `0 .. grown` | preallocated, in steps of 256 MiB, as far as any extent has ever reached |
//! | `grown .. cap` | not there yet; `cap` is the file's equal share of `cap_bytes` |
//!
//! Within it, an *extent* is a contiguous range of whole blocks that belongs to one blob. A blob has one extent (a
//! *piece*) in each file it is striped over; the blocks after its payload's end are padding. It is cut from the shortest
//! free range within what has grown that is long enough; the file grows only if there is none.
//!
//! # Stripe rule
//!
//! A blob of at most `stripe_bytes` is one piece, and blobs take the files in turn. A larger one is cut into chunks
//! of `stripe_bytes`, and chunk `i` of a blob with `n` pieces is chunk `i / n` of piece `i % n`; which file has
//! the first piece goes round too. A file without room is passed over.
//!
//! # Transfers
//!
//! A transfer moves the payload padded to whole blocks, in operations of at most `io_bytes`, straight between the
//! caller's memory and the file. Memory may be scattered; each operation then lies within one of its parts. Memory
//! that is not aligned for direct I/O, or has no room for the padding, goes through a bounce buffer. Reads and writes that wait take turns, a read first. A failed write is reported at once; a failed read
//! is tried three times in all.

mod backend;
mod blob;
mod busy_time;
mod completion;
mod config;
mod error;
mod extent;
mod gpu;
mod growth;
mod mem;
mod open;
mod path;
mod region;
mod spill_file;
mod stats;
mod store;
mod stripe;
mod transfer;
mod volume;

pub use backend::{
    Backend, BackendInfo, BackendKind, CuFileMode, Direction, Fault, Faulty, Op, Pool, Throttled, Uring,
};
pub use blob::Blob;
pub use completion::{Completion, contained};
pub use config::StoreConfig;
pub use error::{Error, ErrorKind, Result};
pub use gpu::{Gpu, SegmentWatcher};
pub use mem::{AlignedBuf, BLOCK, HostPool, IoBuf, PAGE, Pin, Slot, parts};
pub use path::StorePath;
pub use region::{Medium, Place, Region, RegionInfo};
pub use stats::StoreStats;
pub use store::Store;
