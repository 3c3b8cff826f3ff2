//! What a cache is asked to be.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tch::Device;
use tch::nn::{VarStore, Variables};

use crate::below;
use crate::error::Result;
use crate::plan::{Goal, Leaving, Placement};
use crate::policy::{Aim, IoPath, PathTrial};
use crate::session::TensorCache;
use crate::store::{BackendKind, StoreConfig};

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// What becomes of saved tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Policy {
    /// All that can be moved and is worth it leaves the device: from a GPU to pinned host memory and on to the disk, from the CPU
    /// to the disk.
    #[default]
    Offload,
    /// Everything stays on the device, as without a cache; only the counting is done. Needs no spill directory.
    Keep,
    /// As much leaves the device as is back in time; which that is, is measured.
    Adaptive(Adaptive),
    /// For each storage what serves the [`Goal`] best: keep it, move it to the host or the disk, or, where it has a recipe
    /// ([`remat`](crate::remat)), compute it again. The second step is profiled, save by save; the plan made of it is followed
    /// from the third on, corrected by what the first steps under it take, and made anew when steps, shapes or the disk's speed
    /// change. [`TensorCache::plan`] explains it, and each
    /// [`StepReport`](crate::StepReport) has it beside what was measured.
    ///
    /// The plan sets `device_budget`, `backward_budget`, `prefetch` and what `keep_last` would. Steps that are not planned yet move
    /// everything, so that a step that would not fit with everything kept is safe; they are slow.
    Auto(Goal),
}

/// How [`Policy::Adaptive`] decides what leaves the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Adaptive {
    /// The paper's way (section 5.3.5). Steps one and two move everything; the second is profiled. From then on the tensors of the first
    /// so many scopes move, by the order in which forward comes to them: the last of them is the last for which storing everything
    /// before it, and storing and loading its own, fits the measured write bandwidth by the time its backward begins. Backward is
    /// taken as twice as long as forward.
    ///
    /// The last scope stays, and as many as `keep_last` says. No more is kept than a device budget has room for beside `prefetch`; on the
    /// CPU none is needed, but on a GPU tensors leave as late as it allows: without one, none does. A profiled step waits for the
    /// device at its end.
    Paper,
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
    pub(crate) device: Option<Device>,
    pub(crate) device_budget: u64,
    pub(crate) backward_budget: Option<u64>,
    pub(crate) host_pool: Option<u64>,
    pub(crate) path: IoPath,
    pub(crate) required_path: Option<IoPath>,
    pub(crate) prefetch: u64,
    pub(crate) read_ahead: u64,
    pub(crate) simulated: Option<Duration>,
    pub(crate) forced: Option<Arc<[Placement]>>,
    pub(crate) keep_last: usize,
    pub(crate) written_per_day: Option<u64>,
    pub(crate) require_direct_io: bool,
    pub(crate) fail_if_nothing_offloaded: bool,
    pub(crate) trace: bool,
    pub(crate) parameters: Vec<SharedVariables>,
}

impl Default for TensorCacheBuilder {
    fn default() -> TensorCacheBuilder {
        TensorCacheBuilder {
            store: StoreConfig::default(),
            policy: Policy::default(),
            min_bytes: 64 * KIB,
            device: None,
            device_budget: u64::MAX,
            backward_budget: None,
            host_pool: None,
            path: IoPath::default(),
            required_path: None,
            prefetch: 64 * MIB,
            read_ahead: GIB,
            simulated: None,
            forced: None,
            keep_last: 0,
            written_per_day: None,
            require_direct_io: false,
            fail_if_nothing_offloaded: false,
            trace: false,
            parameters: Vec::new(),
        }
    }
}

impl TensorCacheBuilder {
    /// The device whose tensors are moved; what is saved on others stays. Default: that of the first
    /// [`parameters`](TensorCacheBuilder::parameters), or else the CPU. For CUDA call [`load_cuda`](crate::load_cuda) first.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Adds a directory to spill to. Give one per SSD: their speeds add up. Tensors of a GPU go there when the host pool has no more
    /// room for them; without a directory they then stay on the device.
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

    /// Pinned host memory for tensors of a GPU, in bytes, all of it pinned by `build`. 0: no more than the way between device and disk
    /// needs, for one storage at least. Default: as much as the first step asks for, at most half of the memory that is available;
    /// the first step is slow then. CPU tensors need none.
    pub fn host_pool(mut self, bytes: u64) -> Self {
        self.host_pool = Some(bytes);
        self
    }

    /// Which way the tensors of a GPU take. Default: [`IoPath::Auto`].
    pub fn path(mut self, path: IoPath) -> Self {
        self.path = path;
        self
    }

    /// Makes `build` fail where the tensors of a GPU would take another way. [`IoPath::Direct`] is met by GPUDirect Storage only, not
    /// by cuFile's compatibility mode, which copies through host memory: release 1.15 counts how a trial's bytes went; of others
    /// the driver's own word is taken. Where no [`path`](TensorCacheBuilder::path) is given, it is this one. With
    /// [`Policy::Keep`] nothing moves, and any way is right.
    pub fn require_path(mut self, path: IoPath) -> Self {
        self.required_path = Some(path);
        self
    }

    /// The library that [`IoPath::Direct`] and [`BackendKind::CuFile`] load. Default: looked for, by name, in the wheels beside libtorch and where
    /// CUDA's toolkit is.
    pub fn cufile_library(mut self, path: impl Into<PathBuf>) -> Self {
        self.store.cufile = Some(path.into());
        self
    }

    /// Tries both ways between the GPU and the spill directories out, as [`IoPath::Auto`] does: sends 64 MiB down and compares what comes
    /// back, and measures each direction and both at once. It takes seconds, once in a process; later calls tell the same.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) without a spill directory, or for CPU tensors.
    pub fn try_paths(&self) -> Result<PathTrial> {
        below::try_paths(self)
    }

    /// Most activation bytes the cache may have on the device: on their way out, back early, and kept by scope. A CPU thread that
    /// saves more waits for a store; a GPU is told to wait, in the order of its queue, so that the peak does not depend on how far the
    /// thread is ahead of it. A GPU's budget is used to the full: what fits stays until backward wants it. Default: no limit.
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.device_budget = bytes;
        self
    }

    /// The device budget once backward asks for tensors, if less than forward's: backward needs memory for gradients, and forward
    /// needs some for what is still on its way out. On a GPU what exceeds it leaves as backward begins. Default: the device budget.
    pub fn backward_budget(mut self, bytes: u64) -> Self {
        self.backward_budget = Some(bytes);
        self
    }

    /// Bytes loaded to the device ahead of what backward has asked for. Default: 64 MiB.
    pub fn prefetch(mut self, bytes: u64) -> Self {
        self.prefetch = bytes;
        self
    }

    /// Bytes read from the disk into the host pool ahead of the loads to a GPU. Default: 1 GiB.
    pub fn read_ahead(mut self, bytes: u64) -> Self {
        self.read_ahead = bytes;
        self
    }

    /// Puts a device made of threads, each of whose copies takes `delay` longer, in the CPU's place; for tests of the way a GPU's
    /// tensors take.
    #[doc(hidden)]
    pub fn simulated_device(mut self, delay: Duration) -> Self {
        self.simulated = Some(delay);
        self
    }

    /// Places the saves of each step so, in turn and again and again, whatever the policy; for tests of plans.
    #[doc(hidden)]
    pub fn forced_placements(mut self, placements: Vec<Placement>) -> Self {
        self.forced = Some(placements.into());
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

    /// Most bytes that [`Policy::Auto`] may have written to the disk in a day of steps on end: its share of what the SSD endures.
    /// Default: no limit.
    pub fn written_per_day(mut self, bytes: u64) -> Self {
        self.written_per_day = Some(bytes);
        self
    }

    /// Leaves the variables of `vs` in the graph, those added to it later included: they stay in memory anyway. A parameter that is
    /// not named this way is handled correctly, but written to disk for nothing.
    pub fn parameters(mut self, vs: &VarStore) -> Self {
        self.device = self.device.or_else(|| Some(vs.device()));
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

    /// Most bytes per second to and from the spill files, together: for disks that others use too. 0 for as many as they take. Default: 0.
    pub fn disk_rate(mut self, bytes_per_s: u64) -> Self {
        self.store.max_bytes_per_s = NonZero::new(bytes_per_s);
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

    /// Records what happens when, for [`TensorCache::write_trace`]. Each step, scope, stall, copy and transfer is an event, and so is
    /// each change of the bytes held: a few per tensor moved, of about 100 bytes each; on a GPU two CUDA events each besides, until the
    /// end of the step. The latest 1,048,576 events are kept (about 100 MB). Default: off.
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// Opens the spill files, pins the host pool and makes the cache. Errors name the setting, the directory or the device that
    /// cannot be used.
    pub fn build(self) -> Result<TensorCache> {
        TensorCache::open(self)
    }

    /// The device whose tensors are moved.
    pub(crate) fn target(&self) -> Device {
        self.device.unwrap_or(Device::Cpu)
    }

    /// The way that was asked for, or that has to be.
    pub(crate) fn wanted_path(&self) -> IoPath {
        if self.path == IoPath::Auto { self.required_path.unwrap_or_default() } else { self.path }
    }

    /// What [`Policy::Auto`] plans for, and with.
    pub(crate) fn aim(&self, goal: Goal) -> Aim {
        let spills = (!self.store.directories.is_empty() || self.store.backend == BackendKind::Memory)
            && self.wanted_path() != IoPath::HostOnly;
        let direct = self.wanted_path() == IoPath::Direct;
        let leaving = match self.target() {
            Device::Cpu if self.simulated.is_none() => Leaving::WhenStored,
            _ if direct => Leaving::OnceWritten,
            _ => Leaving::InStreamOrder,
        };
        Aim {
            goal,
            host_pool: if direct { 0 } else { self.host_pool.unwrap_or_else(|| available_memory() / 2) },
            disk: if spills { self.store.cap_bytes } else { 0 },
            leaving,
            written_per_day: self.written_per_day,
        }
    }
}

/// Memory that could be had now, in bytes; all there is where the kernel does not say.
pub(crate) fn available_memory() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib << 10)
}
