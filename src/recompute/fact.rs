//! What a segment saved, position by position.

use ssdtrain_libtorch::SavedTensor;

use crate::digest::Digest;

/// What was saved at a position. A rerun must save the same there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fact {
    /// Whether the segment took it.
    pub(super) taken: bool,
    pub(super) storage_bytes: u64,
    layout: Option<u64>,
    /// Its digest, if it was taken and is verified.
    digest: Option<Digest>,
}

impl Fact {
    pub(super) fn of(saved: &SavedTensor<'_>, taken: bool, verify: bool) -> Result<Fact, String> {
        let tensor = if taken && verify { saved.tensor() } else { None };
        let digest = tensor.map_or(Ok(None), |tensor| Digest::of(&tensor));
        let digest = digest.map_err(|error| error.to_string())?;
        Ok(Fact { taken, storage_bytes: saved.storage_bytes(), layout: saved.layout(), digest })
    }

    /// A description of how it differs from `other`.
    pub(super) fn told_from(&self, other: &Fact) -> String {
        let bytes = format!("{} bytes", self.storage_bytes);
        match self {
            _ if self.storage_bytes != other.storage_bytes => bytes,
            _ if self.layout != other.layout => format!("{bytes} of another kind or shape"),
            _ => format!("{bytes} of another value, which verify(Verify::Full) has shown,"),
        }
    }
}
