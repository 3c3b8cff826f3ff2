//! What a cache is asked to be.

use std::path::PathBuf;
use std::sync::Arc;

use tch::nn::{VarStore, Variables};

use crate::error::{Error, ErrorKind, Result};
use crate::session::TensorCache;
use crate::store::{BackendKind, StoreConfig};

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// What becomes of saved tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// All that can be moved and is worth it goes to the disk.
    #[default]
    Offload,
    /// Everything stays on the device, as without a cache; only the counting is done. Needs no spill directory.
    Keep,
}

/// The variables of a `VarStore`, as tch shares them.
#[expect(clippy::disallowed_types, reason = "tch's choice")]
type SharedVariables = Arc<std::sync::Mutex<Variables>>;

/// Builds a [`TensorCache`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens before build()"]
pub struct TensorCacheBuilder {
    pub(crate) store: StoreConfig,
    pub(crate) policy: Policy,
    pub(crate) min_bytes: u64,
    pub(crate) device_budget: u64,
    pub(crate) prefetch: u64,
    pub(crate) keep_last: usize,
    pub(crate) require_direct_io: bool,
    pub(crate) fail_if_nothing_offloaded: bool,
    pub(crate) parameters: Vec<SharedVariables>,
}

impl Default for TensorCacheBuilder {
    fn default() -> TensorCacheBuilder {
        TensorCacheBuilder {
            store: StoreConfig::default(),
            policy: Policy::default(),
            min_bytes: 64 * KIB,
            device_budget: u64::MAX,
            prefetch: 64 * MIB,
            keep_last: 0,
            require_direct_io: false,
            fail_if_nothing_offloaded: false,
            parameters: Vec::new(),
        }
    }
}

impl TensorCacheBuilder {
    /// Adds a directory to spill to. Give one per SSD: their speeds add up.
    pub fn spill_to(mut self, directory: impl Into<PathBuf>) -> Self {
        self.store.directories.push(directory.into());
        self
    }

    /// Most bytes all spill files together may take. What does not fit stays on the device. Default: 64 GiB.
    pub fn disk_cap(mut self, bytes: u64) -> Self {
        self.store.cap_bytes = bytes;
        self
    }

    /// What becomes of saved tensors. Default: [`Policy::Offload`].
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Most activation bytes the cache may have on the device: on their way out, back early, and kept by scope. A thread that
    /// saves more waits for a store. Default: no limit.
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.device_budget = bytes;
        self
    }

    /// Bytes loaded ahead of what backward has asked for. Default: 64 MiB.
    pub fn prefetch(mut self, bytes: u64) -> Self {
        self.prefetch = bytes;
        self
    }

    /// Storages smaller than this stay in the graph. Default: 64 KiB.
    pub fn min_bytes(mut self, bytes: u64) -> Self {
        self.min_bytes = bytes;
        self
    }

    /// Keeps what the last `scopes` named scopes save on the device: backward begins with them at once. Which scopes are last is
    /// learned from the step before, so the first step moves everything. Default: 0. Paper section 5.3.1.
    pub fn keep_last(mut self, scopes: usize) -> Self {
        self.keep_last = scopes;
        self
    }

    /// Leaves the variables of `vs` in the graph, those added to it later included: they stay in memory anyway. A parameter that is
    /// not named this way is handled correctly, but written to disk for nothing.
    pub fn parameters(mut self, vs: &VarStore) -> Self {
        self.parameters.push(Arc::clone(&vs.variables_));
        self
    }

    /// Takes a checksum (CRC-32C) of everything stored and compares it on load. Default: off.
    pub fn verify(mut self, verify: bool) -> Self {
        self.store.verify = verify;
        self
    }

    /// How bytes are moved to and from the spill files. Default: [`BackendKind::Auto`].
    pub fn backend(mut self, backend: BackendKind) -> Self {
        self.store.backend = backend;
        self
    }

    /// Most transfers the backend has under way at once. Default: 32.
    pub fn queue_depth(mut self, operations: usize) -> Self {
        self.store.queue_depth = operations;
        self
    }

    /// Makes `build` fail where the spill files would go through the page cache. Default: off; the report says which path ran.
    pub fn require_direct_io(mut self, require: bool) -> Self {
        self.require_direct_io = require;
        self
    }

    /// Makes the first step's `finish` fail if nothing was offloaded, so that a switch that does nothing is seen. Default: off.
    pub fn fail_if_nothing_offloaded(mut self, fail: bool) -> Self {
        self.fail_if_nothing_offloaded = fail;
        self
    }

    /// Opens the spill files and makes the cache. Errors name the setting or the directory that cannot be used.
    pub fn build(self) -> Result<TensorCache> {
        if self.policy == Policy::Offload
            && self.store.directories.is_empty()
            && self.store.backend != BackendKind::Memory
        {
            return Err(Error::new(
                ErrorKind::Config,
                "no spill directory: call spill_to(directory) before build()",
            ));
        }
        TensorCache::open(self)
    }
}
