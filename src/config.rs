//! The settings of a cache.

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

/// What happens to saved tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Policy {
    /// Everything that can be moved and is worth moving leaves the device: from a GPU to pinned host memory and on to the disk, from the
    /// CPU to the disk.
    ///
    /// A GPU's tensors leave as late as [`device_budget`](TensorCacheBuilder::device_budget) allows, and what fits it stays. If neither
    /// it nor a [`backward_budget`](TensorCacheBuilder::backward_budget) is set, the budget is
    /// [`prefetch`](TensorCacheBuilder::prefetch): everything else moves, and the GPU waits wherever it computes faster than the copies
    /// run. The report warns of this and says how long the GPU waited.
    Offload,
    /// Everything stays on the device, as without a cache; saves are only counted. Needs no spill directory.
    Keep,
    /// Moves as much as can be back in time. How much that is, is measured.
    Adaptive(Adaptive),
    /// Chooses for each storage what serves the [`Goal`] best: keep it, move it to the host or the disk, or compute it again if it has a
    /// recipe ([`remat`](crate::remat)). This is the default, with the goal [`Goal::overhead(0.02)`](Goal::overhead): the lowest
    /// activation peak for which steps are at most two percent longer.
    ///
    /// The first two steps move everything, and the second is profiled, save by save. They are slow, especially the first if it pins the
    /// host pool, but safe for models whose step would not fit with everything kept. The plan is followed from the third step on. For a
    /// goal that is a time, three steps that keep everything follow if they fit the free memory, so that planned steps can be compared
    /// with them. A plan whose steps keep exceeding the goal is loosened until they meet it, at worst to keeping everything. A goal that
    /// is a peak also applies, as far as possible, to steps that are not planned. The report warns of a goal that is out of reach.
    ///
    /// A plan is corrected when the disk's speed or the step times change. A step that saves something other than planned keeps what fits
    /// from there on, and steps are profiled again at doubling intervals. Smaller micro-batches follow the plan of larger ones.
    /// [`TensorCache::plan`](crate::TensorCache::plan) explains the plan, and each [`StepReport`](crate::StepReport) of a step that
    /// followed it shows it beside what was measured.
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
    /// The paper's method (section 5.3.5). Steps one and two move everything; the second is profiled. From then on, the scopes up to a
    /// last one, in the order of forward, move their tensors. That last scope is the latest one for which the measured write bandwidth
    /// suffices to store everything before it, and to store and load its own tensors, by the time its backward begins. Backward is
    /// assumed to take twice as long as forward.
    ///
    /// The last scope always stays, and so do the last `keep_last` ones if that is more. Never more is kept than a device budget has room
    /// for beside `prefetch`. The CPU needs no budget. A GPU does: its tensors leave as late as the budget allows, so without one none
    /// leaves. A profiled step waits for the device at its end.
    Paper,
}

/// The variables of a `VarStore`, in the type that tch shares them with.
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
    /// The device whose tensors are moved; what is saved on other devices stays. Default: that of the first
    /// [`parameters`](TensorCacheBuilder::parameters), or else the CPU. For CUDA call [`load_cuda`](crate::load_cuda) first.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Adds a directory to spill to. Give one per SSD: their speeds add up. A GPU's tensors go there when the host pool is full; without
    /// a directory they then stay on the device.
    pub fn spill_to(mut self, directory: impl Into<PathBuf>) -> Self {
        self.store.directories.push(directory.into());
        self
    }

    /// Upper limit on the bytes of all spill files together. What does not fit stays on the device. Default: 64 GiB.
    pub fn disk_cap(mut self, bytes: u64) -> Self {
        self.store.cap_bytes = bytes;
        self
    }

    /// What happens to saved tensors. Default: [`Policy::default()`], which plans, or [`Policy::Offload`] if `device_budget`,
    /// `backward_budget` or `keep_last` is set by hand, since a plan would choose these.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Pinned host memory for a GPU's tensors, in bytes, all of it pinned by `build`. 0: only what staging between device and disk needs,
    /// at least enough for one storage, pinned when a storage first has to leave. Default: as much as steps need, pinned in portions when
    /// storages find no room, up to half of the memory that is available and that control groups allow; a step in which the pool grows is
    /// slow. Nothing is pinned until something leaves. CPU tensors need no pool.
    pub fn host_pool(mut self, bytes: u64) -> Self {
        self.host_pool = Some(bytes);
        self
    }

    /// The I/O path of a GPU's tensors. Default: [`IoPath::Auto`].
    pub fn path(mut self, path: IoPath) -> Self {
        self.path = path;
        self
    }

    /// Makes `build` fail if a GPU's tensors would take another path. Only GPUDirect Storage satisfies [`IoPath::Direct`]; cuFile's
    /// compatibility mode, which copies through host memory, does not. cuFile 1.15 counts how the bytes of a trial travelled; for other
    /// releases the driver's own statement is trusted. If no [`path`](TensorCacheBuilder::path) is given, this one is used. With
    /// [`Policy::Keep`] nothing moves, so any path satisfies the condition.
    pub fn require_path(mut self, path: IoPath) -> Self {
        self.required_path = Some(path);
        self
    }

    /// The library that [`IoPath::Direct`] and [`BackendKind::CuFile`] load. Default: searched for by name in the wheels beside libtorch
    /// and in the installation of the CUDA toolkit.
    pub fn cufile_library(mut self, path: impl Into<PathBuf>) -> Self {
        self.store.cufile = Some(path.into());
        self
    }

    /// Upper limit on the activation bytes the cache holds on the device: those on their way out, those loaded early, and those kept by
    /// scope. A CPU thread that saves more waits for a store. A GPU waits in its own queue instead, so that the peak does not depend on
    /// how far the thread runs ahead of it. A GPU's budget is used to the full: what fits stays until backward wants it. Default: no
    /// limit on the CPU; for a GPU see [`Policy::Offload`].
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.device_budget = Some(bytes);
        self
    }

    /// The device budget once backward asks for tensors, if it should be less than forward's: backward needs memory for gradients, and
    /// forward needs some for what is still on its way out. On a GPU, what exceeds it leaves as backward begins. Values above the device
    /// budget count as the device budget. Default: the device budget.
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

    /// Replaces the CPU by a device made of threads, each of whose copies takes `delay` longer; for tests of the path that a GPU's
    /// tensors take.
    #[doc(hidden)]
    pub fn simulated_device(mut self, delay: Duration) -> Self {
        self.simulated = Some(delay);
        self
    }

    /// Gives the saves of each step these placements in turn, cyclically, whatever the policy; for tests of plans.
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

    /// Keeps on the device what the last `scopes` named scopes save, because backward starts with them at once. Which scopes are last is
    /// learned from the step before, so the first step moves everything. Default: 0. Paper section 5.3.1.
    pub fn keep_last(mut self, scopes: usize) -> Self {
        self.keep_last = scopes;
        self
    }

    /// Upper limit on the bytes that [`Policy::Auto`] writes to the disk in a day of uninterrupted steps: its share of the SSD's
    /// endurance. Default: no limit.
    pub fn written_per_day(mut self, bytes: u64) -> Self {
        self.written_per_day = Some(bytes);
        self
    }

    /// Leaves the variables of `vs` in the graph, including those added to it later: they stay in memory anyway. A parameter that is not
    /// registered this way is handled correctly, but written to disk for nothing.
    pub fn parameters(mut self, vs: &VarStore) -> Self {
        self.device = self.device.or_else(|| Some(vs.device()));
        self.parameters.push(Arc::clone(&vs.variables_));
        self
    }

    /// Takes a checksum (CRC-32C) of everything stored and compares it on load. Also compares what a [`segment`](crate::segment) or a
    /// [`remat`](crate::remat) saves and returns in its first run with what it saves and returns in its rerun; a GPU's tensors are copied
    /// to the host for that. Every element counts, so a function that leaves some elements of its result uninitialised fails. Default:
    /// off.
    pub fn verify(mut self, verify: bool) -> Self {
        self.store.verify = verify;
        self
    }

    /// How bytes are moved to and from the spill files. Default: [`BackendKind::Auto`].
    pub fn backend(mut self, backend: BackendKind) -> Self {
        self.store.backend = backend;
        self
    }

    /// Upper limit on the transfers, each of at most 4 MiB, that the backend has in flight. Default: 16.
    pub fn queue_depth(mut self, operations: usize) -> Self {
        self.store.queue_depth = operations;
        self
    }

    /// Upper limit on the bytes per second to and from the spill files together, for disks that others use too. 0: no limit. Default: 0.
    pub fn disk_rate(mut self, bytes_per_s: u64) -> Self {
        self.store.max_bytes_per_s = NonZero::new(bytes_per_s);
        self
    }

    /// Makes `build` fail if the spill files would go through the page cache. Default: off; the report says which path was used.
    pub fn require_direct_io(mut self, require: bool) -> Self {
        self.require_direct_io = require;
        self
    }

    /// Makes the first step's `finish` fail if nothing was offloaded, so that an ineffective setup is noticed. Default: off.
    pub fn fail_if_nothing_offloaded(mut self, fail: bool) -> Self {
        self.fail_if_nothing_offloaded = fail;
        self
    }

    /// Records events for [`TensorCache::write_trace`](crate::TensorCache::write_trace). Each step, scope, stall, copy and transfer is an
    /// event, and so is each change of the bytes held. That makes a few events of about 100 bytes each per tensor moved; on a GPU each
    /// also holds two CUDA events until the end of the step. The latest 1,048,576 events are kept (about 100 MB). Default: off.
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// The policy in force: the one that was set, or the default.
    pub(crate) fn chosen_policy(&self) -> Policy {
        let by_hand = self.device_budget.is_some() || self.backward_budget.is_some() || self.keep_last > 0;
        self.policy.unwrap_or_else(|| if by_hand { Policy::Offload } else { Policy::default() })
    }

    /// Fails, naming the setting, if one is out of range.
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

    /// The settings that decide the route; `given` is the path of spill files that are open already.
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

    /// Where bytes will go with these settings, and why: the route that [`build`](TensorCacheBuilder::build) would open. Opens nothing,
    /// unless a trial of the paths is needed to decide; see [`IoPath::Auto`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for settings that exclude each other, [`ErrorKind::Unmet`] if the path is not the one that
    /// [`require_path`](TensorCacheBuilder::require_path) demands.
    pub fn route(&self) -> Result<Route> {
        self.routed(&self.route_request(None))
    }

    pub(crate) fn routed(&self, request: &RouteRequest<'_>) -> Result<Route> {
        let failed =
            |error: Error| PathTrial { direct: Err(error.to_string()), staged: Err(error.to_string()) };
        route::resolve(request, || route::probed(request, false).unwrap_or_else(failed))
    }

    /// Tries both paths between the GPU and the spill directories, as [`IoPath::Auto`] does: moves 64 MiB there and back and compares the
    /// bytes, then measures each direction and both at once. This takes seconds, once per process; later calls return the same result.
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
