//! What a cache is asked to be.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_plan::{Goal, Placement};
use ssdtrain_store::{BLOCK, BackendKind, StoreConfig, StorePath};
use tch::Device;
use tch::nn::{VarStore, Variables};

use crate::error::{Error, ErrorKind, Result};
use crate::route::{self, IoPath, PathTrial, Route, RouteRequest};
use crate::units::{GIB, KIB, MIB};

/// What becomes of saved tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Policy {
    /// All that can be moved and is worth it leaves the device: from a GPU to pinned host memory and on to the disk, from the CPU
    /// to the disk.
    ///
    /// A GPU's tensors leave as late as [`device_budget`](TensorCacheBuilder::device_budget) allows, and what fits it stays. Without one,
    /// and without a [`backward_budget`](TensorCacheBuilder::backward_budget), it is as much as
    /// [`prefetch`](TensorCacheBuilder::prefetch): everything else moves, at the price of a GPU that waits wherever it computes faster
    /// than copies go; the report says so, and how long.
    Offload,
    /// Everything stays on the device, as without a cache; only the counting is done. Needs no spill directory.
    Keep,
    /// As much leaves the device as is back in time; which that is, is measured.
    Adaptive(Adaptive),
    /// For each storage what serves the [`Goal`] best: keep it, move it to the host or the disk, or, where it has a recipe
    /// ([`remat`](crate::remat)), compute it again. The default, with a goal of [`Goal::overhead(0.02)`](Goal::overhead): the lowest
    /// activation peak for which steps are at most two percent longer.
    ///
    /// The first step moves everything, and so does the second, which is profiled, save by save: they are slow, the first above all
    /// where it pins the host pool, and safe where a step with everything kept would not fit. The plan is followed from the third on. For a
    /// goal that is a time, three steps that keep everything follow where they fit the memory that is free, to hold the plan's beside; one
    /// that stays beyond its goal is loosened until it keeps it, at worst to keeping everything. A goal of a peak holds for steps that
    /// are not planned as well, as far as can be; one that is out of reach is warned of in the report.
    ///
    /// A plan is corrected when the disk's speed or the steps' times change. A step that saves something else than planned keeps what
    /// fits from there on, and steps are profiled again at doubling intervals; smaller micro-batches keep to the plan of larger ones.
    /// [`TensorCache::plan`](crate::TensorCache::plan) explains the plan, and each [`StepReport`](crate::StepReport) that kept to it has it beside what was measured.
    ///
    /// The plan sets `device_budget`, `backward_budget`, `prefetch` and what `keep_last` would.
    Auto(Goal),
}

impl Default for Policy {
    fn default() -> Policy {
        Policy::Auto(Goal::overhead(0.02))
    }
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

/// Builds a [`TensorCache`](crate::TensorCache).
#[derive(Clone, Debug)]
#[must_use = "nothing happens before build()"]
pub struct TensorCacheBuilder {
    pub(crate) store: StoreConfig,
    policy: Option<Policy>,
    pub(crate) min_bytes: u64,
    pub(crate) device: Option<Device>,
    pub(crate) device_budget: Option<u64>,
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
            policy: None,
            min_bytes: 64 * KIB,
            device: None,
            device_budget: None,
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

    /// What becomes of saved tensors. Default: [`Policy::default()`], which plans; or [`Policy::Offload`] where `device_budget`,
    /// `backward_budget` or `keep_last` say by hand what a plan would find out.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Pinned host memory for tensors of a GPU, in bytes, all of it pinned by `build`. 0: no more than the way between device and disk
    /// needs, for one storage at least, pinned when a storage first has to leave. Default: as much as steps ask for, pinned in portions
    /// when storages find no room, at most half of the memory that is available and that control groups allow; a step in which the
    /// pool grows is slow. Nothing is pinned as long as nothing leaves. CPU tensors need none.
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

    /// Most activation bytes the cache may have on the device: on their way out, back early, and kept by scope. A CPU thread that
    /// saves more waits for a store; a GPU is told to wait, in the order of its queue, so that the peak does not depend on how far the
    /// thread is ahead of it. A GPU's budget is used to the full: what fits stays until backward wants it. Default: no limit on the CPU;
    /// see [`Policy::Offload`] for a GPU.
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.device_budget = Some(bytes);
        self
    }

    /// The device budget once backward asks for tensors, if less than forward's: backward needs memory for gradients, and forward
    /// needs some for what is still on its way out. On a GPU what exceeds it leaves as backward begins. More than the device budget is as
    /// much as that. Default: the device budget.
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

    /// Takes a checksum (CRC-32C) of everything stored and compares it on load, and of what a [`segment`](crate::segment) or a
    /// [`remat`](crate::remat) saves and gives when it is computed first and again: from a GPU that is copied to the host for it. All elements
    /// count: a function whose result has some that it leaves uninitialised fails. Default: off.
    pub fn verify(mut self, verify: bool) -> Self {
        self.store.verify = verify;
        self
    }

    /// How bytes are moved to and from the spill files. Default: [`BackendKind::Auto`].
    pub fn backend(mut self, backend: BackendKind) -> Self {
        self.store.backend = backend;
        self
    }

    /// Most transfers the backend has under way at once, each of 4 MiB at most. Default: 16.
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

    /// Records what happens when, for [`TensorCache::write_trace`](crate::TensorCache::write_trace). Each step, scope, stall, copy and transfer is an event, and so is
    /// each change of the bytes held: a few per tensor moved, of about 100 bytes each; on a GPU two CUDA events each besides, until the
    /// end of the step. The latest 1,048,576 events are kept (about 100 MB). Default: off.
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// What becomes of saved tensors.
    pub(crate) fn chosen_policy(&self) -> Policy {
        let by_hand = self.device_budget.is_some() || self.backward_budget.is_some() || self.keep_last > 0;
        self.policy.unwrap_or_else(|| if by_hand { Policy::Offload } else { Policy::default() })
    }

    /// Which setting is out of range, if any is.
    pub(crate) fn checked(&self) -> Result<()> {
        let (files, cap) = (self.store.directories.len().max(1), self.store.cap_bytes);
        let least = (files * BLOCK) as u64;
        if cap < least {
            return refused(format!(
                "disk_cap({cap}) is too small for {files} spill file(s): give at least {least} bytes, or policy(Policy::Keep) for a \
                 cache that moves nothing"
            ));
        }
        let Policy::Auto(goal) = self.chosen_policy() else { return Ok(()) };
        if goal.peak == Some(0) {
            return refused(
                "Goal::budget(0), in Policy::Auto: no step has an activation peak of 0 bytes; give the bytes that it may have, or \
                 Goal::overhead(f64::INFINITY) for the lowest there is",
            );
        }
        match goal.step {
            Some(times) if times.is_nan() || times < 1.0 => refused(format!(
                "Goal::overhead({}), in Policy::Auto: the share by which steps may become longer is 0 or more; 0.02 is two percent",
                (times - 1.0) as f32
            )),
            _ => Ok(()),
        }
    }

    /// The device whose tensors are moved.
    pub(crate) fn target(&self) -> Device {
        self.device.unwrap_or(Device::Cpu)
    }

    /// What decides where bytes go; `given` is the path of spill files that are open already.
    pub(crate) fn route_request<'a>(&'a self, given: Option<&'a StorePath>) -> RouteRequest<'a> {
        let policy = self.chosen_policy();
        RouteRequest {
            target: self.target(),
            simulated: self.simulated,
            keeps: policy == Policy::Keep,
            plans: matches!(policy, Policy::Auto(_)),
            path: self.path,
            required: self.required_path,
            host_pool: self.host_pool,
            read_ahead: self.read_ahead,
            store: &self.store,
            given,
        }
    }

    /// Where bytes will go with these settings, and why: what [`build`](TensorCacheBuilder::build) would open. Nothing is opened but for
    /// a trial of the ways, where that decides; see [`IoPath::Auto`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for settings that exclude each other, [`ErrorKind::Unmet`] for another way than
    /// [`require_path`](TensorCacheBuilder::require_path) says.
    pub fn route(&self) -> Result<Route> {
        self.routed(&self.route_request(None))
    }

    pub(crate) fn routed(&self, request: &RouteRequest<'_>) -> Result<Route> {
        let failed =
            |error: Error| PathTrial { direct: Err(error.to_string()), staged: Err(error.to_string()) };
        route::resolve(request, || route::probed(request, false).unwrap_or_else(failed))
    }

    /// Tries both ways between the GPU and the spill directories out, as [`IoPath::Auto`] does: sends 64 MiB down and compares what comes
    /// back, and measures each direction and both at once. It takes seconds, once in a process; later calls tell the same.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] without a spill directory, or for CPU tensors.
    pub fn try_paths(&self) -> Result<PathTrial> {
        route::probed(&self.route_request(None), true)
    }
}

fn refused<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, message))
}
