//! The settings of a cache.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_plan::{Auto, Keep, Needs, Policy};
use ssdtrain_store::{BLOCK, BackendKind, Clock, DiskLog, HistoryFile, Store, StoreConfig, StorePath};
use tch::Device;
use tch::nn::{VarStore, Variables};

use crate::device::{DeviceFaults, Simulation};
use crate::endurance::Endurance;
use crate::error::{Error, ErrorKind, Result};
use crate::processes;
use crate::route::{self, IoPath, PathTrial, Route, RouteRequest};
use crate::units::{GIB, KIB};
use crate::verify::Verify;

/// A policy that a builder holds. It can be cloned, because builders can.
trait Chosen: Policy {
    fn boxed(&self) -> Box<dyn Chosen>;
}

impl<P: Policy + Clone + 'static> Chosen for P {
    fn boxed(&self) -> Box<dyn Chosen> {
        Box::new(self.clone())
    }
}

impl Clone for Box<dyn Chosen> {
    fn clone(&self) -> Box<dyn Chosen> {
        (**self).boxed()
    }
}

/// The variables of a `VarStore`, in the type that tch shares them with.
#[expect(clippy::disallowed_types, reason = "tch's choice")]
type SharedVariables = Arc<std::sync::Mutex<Variables>>;

/// Builds a [`TensorCache`](crate::TensorCache).
#[derive(Clone, Debug)]
#[must_use = "nothing happens before build()"]
pub struct TensorCacheBuilder {
    pub(crate) store: StoreConfig,
    policy: Box<dyn Chosen>,
    pub(crate) verify: Verify,
    pub(crate) min_bytes: u64,
    pub(crate) device: Option<Device>,
    pub(crate) host_pool: Option<u64>,
    processes: Option<u32>,
    disk_endurance: Option<u64>,
    disk_history: Option<PathBuf>,
    clock: Clock,
    pub(crate) path: IoPath,
    pub(crate) required_path: Option<IoPath>,
    pub(crate) read_ahead: u64,
    pub(crate) device_timeout: Duration,
    simulated: Option<Simulation>,
    device_faults: Option<Arc<DeviceFaults>>,
    pub(crate) require_direct_io: bool,
    pub(crate) fail_if_nothing_offloaded: bool,
    pub(crate) fuse_reruns: bool,
    pub(crate) tile_bytes: Option<u64>,
    pub(crate) trace: bool,
    pub(crate) parameters: Vec<SharedVariables>,
}

impl Default for TensorCacheBuilder {
    fn default() -> TensorCacheBuilder {
        TensorCacheBuilder {
            store: StoreConfig::default(),
            policy: Box::new(Auto::default()),
            verify: Verify::default(),
            min_bytes: 64 * KIB,
            device: None,
            host_pool: None,
            processes: None,
            disk_endurance: None,
            disk_history: None,
            clock: Clock::default(),
            path: IoPath::default(),
            required_path: None,
            read_ahead: GIB,
            device_timeout: Duration::from_secs(600),
            simulated: None,
            device_faults: None,
            require_direct_io: false,
            fail_if_nothing_offloaded: false,
            fuse_reruns: true,
            tile_bytes: None,
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

    /// Bytes that spill files leave free on each disk for others: a file does not grow into them, and what finds no room stays on the
    /// device. Where files grow without taking space (file systems that cannot preallocate), and where several processes grow theirs at
    /// once, less may be left. Default: the larger of 1 GiB and 1 % of the disk, but no more than a tenth of it.
    pub fn disk_keep_free(mut self, bytes: u64) -> Self {
        self.store.keep_free = Some(bytes);
        self
    }

    /// Bytes that each of the disks may take in its life, as its maker rates it (TBW): 600 TB are `600_000_000_000_000`. Reports then say
    /// how long that lasts at the present rate ([`DiskReport::life`](crate::DiskReport::life)), and warn if it is less than a year.
    /// Default: not known, since disks do not tell.
    pub fn disk_endurance(mut self, bytes: u64) -> Self {
        self.disk_endurance = Some(bytes);
        self
    }

    /// Directory of a file in which all runs add up what they write to each disk, day by day. It holds the models and serial numbers of
    /// disks, and nothing else of this machine or its user. It is written once a minute and when the cache is dropped; a file that cannot
    /// be used is a warning. Default: the one that the environment variable `SSDTRAIN_STATE` names. Without it, nothing is kept, unless
    /// there is a [`disk_endurance`](TensorCacheBuilder::disk_endurance) or an [`Auto::written_per_day`]: then it is
    /// `$XDG_STATE_HOME/ssdtrain` or `~/.local/state/ssdtrain`. With `SSDTRAIN_STATE=off` there is no default.
    pub fn disk_history(mut self, directory: impl Into<PathBuf>) -> Self {
        self.disk_history = Some(directory.into());
        self
    }

    /// Replaces the clock that days are told by; for tests.
    #[doc(hidden)]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// What happens to saved tensors. Default: [`Auto::default()`], which plans.
    pub fn policy(mut self, policy: impl Policy + Clone + 'static) -> Self {
        self.policy = Box::new(policy);
        self
    }

    /// Pinned host memory for a GPU's tensors, in bytes, all of it pinned by `build`. 0: only what staging between device and disk needs,
    /// at least enough for one storage, pinned when a storage first has to leave. Default: as much as steps need, pinned in portions when
    /// storages find no room, up to half of the memory that is available and that control groups allow, shared among
    /// [`processes`](TensorCacheBuilder::processes); a step in which the pool grows is
    /// slow. Nothing is pinned until something leaves. CPU tensors need no pool.
    pub fn host_pool(mut self, bytes: u64) -> Self {
        self.host_pool = Some(bytes);
        self
    }

    /// How many processes of the job share the host. A host pool without a configured size takes no more than this process's share of what
    /// it would take alone. All limits that are set, such as [`host_pool`](TensorCacheBuilder::host_pool) and
    /// [`disk_cap`](TensorCacheBuilder::disk_cap), are of each process. Default: what the launcher tells (torchrun, Open MPI, Intel MPI,
    /// MPICH, SLURM), or else 1.
    pub fn processes(mut self, processes: u32) -> Self {
        self.processes = Some(processes);
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
    /// [`Keep`](ssdtrain_plan::Keep) nothing moves, so any path satisfies the condition.
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

    /// Bytes read from the disk into the host pool ahead of the loads to a GPU. Default: 1 GiB.
    pub fn read_ahead(mut self, bytes: u64) -> Self {
        self.read_ahead = bytes;
        self
    }

    /// Replaces the CPU by a device made of threads, each of whose copies takes `delay` longer; for tests of the path that a GPU's
    /// tensors take.
    #[doc(hidden)]
    pub fn simulated_device(mut self, delay: Duration) -> Self {
        self.simulated = Some(Simulation { delay, staging: None });
        self
    }

    /// Has the device refuse the calls that `faults` says, be it simulated or a GPU; for tests.
    #[doc(hidden)]
    pub fn device_faults(mut self, faults: &Arc<DeviceFaults>) -> Self {
        self.device_faults = Some(Arc::clone(faults));
        self
    }

    /// Has a pool of the simulated device that only stages begin with so many bytes, rather than the 256 MiB of a GPU's; for tests.
    #[doc(hidden)]
    pub fn least_staging(mut self, bytes: u64) -> Self {
        self.simulated.iter_mut().for_each(|simulation| simulation.staging = Some(bytes));
        self
    }

    /// Storages smaller than this stay in the graph. Default: 64 KiB.
    pub fn min_bytes(mut self, bytes: u64) -> Self {
        self.min_bytes = bytes;
        self
    }

    /// Leaves the variables of `vs` in the graph, including those added to it later: they stay in memory anyway. A parameter that is not
    /// registered this way is handled correctly, but written to disk for nothing.
    pub fn parameters(mut self, vs: &VarStore) -> Self {
        self.device = self.device.or_else(|| Some(vs.device()));
        self.parameters.push(Arc::clone(&vs.variables_));
        self
    }

    /// How much is verified. With checksums (CRC-32C of everything that is written to the disk), bytes that come back changed are read
    /// again, and in the end `backward` is an error of [`ErrorKind::Corrupt`]. Threads of the cache take them, not those that move bytes.
    /// [`StepReport`](crate::StepReport) tells what was compared. [`Verify::Full`] also compares what a [`segment`](crate::segment) or a
    /// [`remat`](crate::remat) saves and returns in its first run with what it saves and returns in its rerun; a GPU's tensors are copied
    /// to the host for that. Every element counts, so a function that leaves some elements of its result uninitialised fails. Default:
    /// [`Verify::Auto`].
    pub fn verify(mut self, level: Verify) -> Self {
        self.verify = level;
        self
    }

    /// Encrypts everything that is written to the spill files (AES-256-GCM), with a random key of the cache's own that is only in its
    /// process's memory. Bytes that come back changed do not decrypt: that is treated as with checksums, which are not taken then.
    /// Threads of the cache encrypt into other memory, which takes as much again as what is being written at a time. It cannot be
    /// combined with [`IoPath::Direct`], because the processor does not see those bytes; [`IoPath::Auto`] does not choose it then.
    /// What it protects from, and what it costs, is in `docs/reliability.md`. Default: off.
    pub fn encrypt(mut self, encrypt: bool) -> Self {
        self.store.encrypt = encrypt;
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

    /// How long the disk may take for one operation, which moves at most 4 MiB; time in our own queues does not count. A store that
    /// takes longer leaves its tensor on the device, and a load makes backward an error of [`ErrorKind::TimedOut`]. Memory that the
    /// kernel may still write to or read from is kept until the operation really ends. `Duration::MAX`: no limit. Default: two minutes.
    pub fn disk_timeout(mut self, limit: Duration) -> Self {
        self.store.timeout = limit;
        self
    }

    /// How long the cache waits for the GPU: until a storage is computed or copied that is to be written to the disk, until memory is no
    /// longer in use that is to be read into, where memory is short, and at the end of steps that are timed. A write that is not reached
    /// in time leaves its tensor where it is, and a read makes backward an error of [`ErrorKind::TimedOut`]. Until the GPU has done it
    /// after all, nobody waits for what comes after it in the same queue, and memory that it may still use goes to nobody else. What
    /// nobody would wait for later is never freed, with a warning, and nor is any of it if the cache goes before that. A GPU does nothing
    /// while it waits for other ranks, so give more than these may take. Between GPU and host memory nothing is waited for: the GPU's queue
    /// does that. Nor has a limit what libtorch and the driver wait for by themselves. `Duration::MAX`: no limit. Default: ten minutes.
    pub fn device_timeout(mut self, limit: Duration) -> Self {
        self.device_timeout = limit;
        self
    }

    /// Makes `build` fail if the spill files would go through the page cache. Default: off; the report says which path was used.
    pub fn require_direct_io(mut self, require: bool) -> Self {
        self.require_direct_io = require;
        self
    }

    /// Makes `finish` fail if nothing was offloaded or computed again, so that an ineffective setup is noticed: that of the first step, or
    /// with [`Auto`](crate::Auto) that of the first step after the profiled one that is neither compared nor small
    /// ([`Planning::Small`](crate::Planning::Small)). Default: off.
    pub fn fail_if_nothing_offloaded(mut self, fail: bool) -> Self {
        self.fail_if_nothing_offloaded = fail;
        self
    }

    /// Makes runs of pointwise operations that backward computes again one kernel each, on GPUs of compute capability 8.0 or more. A
    /// kernel is compiled in the background, by the NVRTC that comes with torch's wheels, and used once it has made the bits of the
    /// single operations. Without NVRTC they run one after another, and a warning is logged. On the CPU, such operations run on one part
    /// of the elements after the other, which stays in the caches, once that has made the same bits in less time. It is also for this that
    /// a [`segment`](crate::segment) runs recorded operations again instead of its function. Default: on.
    pub fn fuse_reruns(mut self, fuse: bool) -> Self {
        self.fuse_reruns = fuse;
        self
    }

    /// Makes reruns on the CPU run in tiles that take so many bytes, whether or not that is quicker; for tests.
    #[doc(hidden)]
    pub fn tile_bytes(mut self, bytes: u64) -> Self {
        self.tile_bytes = Some(bytes);
        self
    }

    /// Records events for [`TensorCache::write_trace`](crate::TensorCache::write_trace). Each step, scope, stall, copy and transfer is an
    /// event, and so is each change of the bytes held. That makes a few events of about 100 bytes each per tensor moved; on a GPU each
    /// also holds two CUDA events until the end of the step. The latest 1,048,576 events are kept (about 100 MB). Default: off.
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// The policy as it was set, before any step.
    pub(crate) fn new_policy(&self) -> Box<dyn Policy> {
        self.policy.boxed()
    }

    /// What the policy needs of the cache.
    pub(crate) fn policy_needs(&self) -> Needs {
        self.policy.needs()
    }

    /// Fails, naming the setting, if one is out of range.
    pub(crate) fn checked(&self) -> Result<()> {
        let (files, cap) = (self.store.directories.len().max(1), self.store.cap_bytes);
        let least = (files * BLOCK) as u64;
        if cap < least {
            return refused(format!(
                "disk_cap({cap}) is too small for {files} spill file(s): give at least {least} bytes, or policy(Keep) for a \
                 cache that moves nothing"
            ));
        }
        if self.store.timeout.is_zero() {
            return refused(
                "disk_timeout(0) leaves no time for any transfer: give two minutes, or Duration::MAX for no limit",
            );
        }
        if self.device_timeout.is_zero() {
            return refused(
                "device_timeout(0) leaves a GPU no time for anything: give ten minutes, or Duration::MAX for no limit",
            );
        }
        if self.disk_endurance == Some(0) {
            return refused(
                "disk_endurance(0): no disk is rated for 0 bytes; leave it out if the rating is not known",
            );
        }
        if self.processes == Some(0) {
            return refused("processes(0): this process is one of those that share the host; give 1 or more");
        }
        self.policy.check().or_else(refused)
    }

    /// The same cache, except that it moves nothing and asks nothing of the machine.
    pub(crate) fn keeping(self) -> TensorCacheBuilder {
        TensorCacheBuilder {
            policy: Box::new(Keep),
            host_pool: None,
            path: IoPath::default(),
            required_path: None,
            require_direct_io: false,
            fail_if_nothing_offloaded: false,
            ..self
        }
    }

    /// What watches over the disks of `store`.
    pub(crate) fn endurance(&self, store: &Store) -> Endurance {
        let is_needed = self.disk_endurance.is_some() || self.policy.needs().days;
        let named = self.disk_history.as_ref().map(HistoryFile::within);
        let file = named.or_else(|| HistoryFile::of_user(is_needed));
        Endurance::new(DiskLog::new(store.writes(), file, self.clock.clone()), self.disk_endurance)
    }

    /// The device whose tensors are moved.
    pub(crate) fn target(&self) -> Device {
        self.device.unwrap_or(Device::Cpu)
    }

    /// The settings that decide the route; `given` is the path of spill files that are open already.
    pub(crate) fn route_request<'a>(&'a self, given: Option<&'a StorePath>) -> RouteRequest<'a> {
        let needs = self.policy.needs();
        RouteRequest {
            target: self.target(),
            device_timeout: self.device_timeout,
            simulated: self.simulated.as_ref(),
            faults: self.device_faults.as_ref(),
            keeps: !needs.tiers,
            plans: needs.one_path,
            path: self.path,
            required: self.required_path,
            host_pool: self.host_pool,
            processes: self.processes.and_then(NonZero::new).unwrap_or_else(processes::told),
            read_ahead: self.read_ahead,
            verify: self.verify,
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
