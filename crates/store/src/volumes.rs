//! The spill files of a store, and where a blob finds room in them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytesize::ByteSize;

use crate::allowance::Grant;
use crate::blob::Blob;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::round_to_block;
use crate::stripe;
use crate::volume::{Extent, Full, Volume};

/// The spill files of a store. Each blob begins in the next of them.
pub(super) struct Volumes {
    all: Vec<Arc<Volume>>,
    next: AtomicUsize,
    stripe_bytes: u64,
}

/// A reserved blob, or the volume that has to grow before the blob can be reserved.
pub(super) enum Reservation<'a> {
    Made(Arc<Blob>),
    /// The volume must first grow to at least this many bytes.
    Until(&'a Arc<Volume>, u64),
}

impl Volumes {
    /// Blobs are cut into stripes of so many bytes.
    pub(super) fn new(all: Vec<Arc<Volume>>, stripe_bytes: u64) -> Volumes {
        Volumes { all, next: AtomicUsize::new(0), stripe_bytes }
    }

    pub(super) fn all(&self) -> &[Arc<Volume>] {
        &self.all
    }

    pub(super) fn no_bytes(&self) -> Arc<Blob> {
        Arc::new(Blob::new(0, self.stripe_bytes, Vec::new(), None))
    }

    /// Finds room for a blob of `bytes` bytes, which the grant is for.
    pub(super) fn reserve(&self, bytes: u64, grant: Grant) -> Result<Reservation<'_>> {
        let Volumes { all, next, stripe_bytes } = self;
        let first = next.fetch_add(1, Ordering::Relaxed) % all.len();
        let mut usable: Vec<&Arc<Volume>> = all[first..].iter().chain(&all[..first]).collect();
        if bytes > self.cap_bytes() {
            usable.clear();
        }
        let mut refusals = Vec::new();
        while !usable.is_empty() {
            match reserve_pieces(bytes, *stripe_bytes, &usable) {
                Ok(pieces) => {
                    let blob = Blob::new(bytes, *stripe_bytes, pieces, Some(Arc::new(grant)));
                    return Ok(Reservation::Made(Arc::new(blob)));
                }
                Err((index, Full::Until(end))) => {
                    grant.give_back();
                    return Ok(Reservation::Until(usable[index], end));
                }
                Err((index, Full::Cap)) => drop(usable.remove(index)),
                Err((index, Full::Refused(error))) => {
                    let name = &usable.remove(index).info().name;
                    refusals.push(format!("; the {name} cannot grow: {error}"));
                }
            }
        }
        grant.give_back();
        let (asked, taken, cap) =
            (ByteSize(bytes), ByteSize(self.reserved_bytes()), ByteSize(self.cap_bytes()));
        let message = format!(
            "no room for {asked} in the spill files: {taken} of at most {cap} are taken{}; raise the cap, or name \
             larger disks",
            refusals.concat()
        );
        Err(Error::new(ErrorKind::NoSpace, message))
    }

    pub(super) fn reserved_bytes(&self) -> u64 {
        self.all.iter().map(|volume| volume.reserved_bytes()).sum()
    }

    pub(super) fn cap_bytes(&self) -> u64 {
        self.all.iter().map(|volume| volume.cap_bytes()).sum()
    }

    /// What the files have grown to.
    pub(super) fn grown_bytes(&self) -> u64 {
        self.all.iter().map(|volume| volume.grown_bytes()).sum()
    }

    /// What was written to them.
    pub(super) fn written_bytes(&self) -> u64 {
        self.all.iter().map(|volume| volume.written().load(Ordering::Relaxed)).sum()
    }
}

/// Reserves the pieces of a blob, each in a volume of its own. The error holds the index of a volume without room,
/// and the reason.
fn reserve_pieces(
    bytes: u64,
    stripe_bytes: u64,
    volumes: &[&Arc<Volume>],
) -> Result<Vec<Extent>, (usize, Full)> {
    let padded = round_to_block(bytes);
    let width = stripe::width(padded, volumes.len(), stripe_bytes);
    let shares = stripe::shares(padded, width, stripe_bytes);
    let pieces = shares.into_iter().zip(volumes).enumerate();
    pieces.map(|(index, (share, volume))| volume.reserve(share).map_err(|full| (index, full))).collect()
}
