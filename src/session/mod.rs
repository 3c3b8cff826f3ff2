//! The public API's core: a cache, and the steps taken with it.

mod checksums;
mod forked;
mod meter;
mod steering;
mod step;
mod unplanned;
mod warnings;

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Ceiling, Reliever, StorageId, WriteObserver};
use ssdtrain_plan::{PlanReport, Profile, SavedPlan, Saves, Today};
use ssdtrain_store::sync::Mutex;
use ssdtrain_store::{HostPool, Store, StoreStats};
use tch::Device;

use self::checksums::Checksums;
use self::forked::Forked;
pub use self::meter::Meter;
use self::steering::Steering;
pub use self::step::{Backward, Entered, Step, StepHandle};
use self::unplanned::Unplanned;
use self::warnings::Warned;
use crate::cache::{Cache, Limits};
use crate::config::TensorCacheBuilder;
use crate::device::{Clock, Span};
use crate::endurance::Endurance;
use crate::error::{Error, ErrorKind, Result};
use crate::math::resolve_math_kernels;
use crate::policy::Cursor;
use crate::profile::OperationClock;
use crate::replay::{Chains, Replays};
use crate::route::{self, Route};
use crate::step::{Orders, StepContext};
use crate::switch::Switch;
use crate::telemetry::events::warn_once;
use crate::telemetry::{Accounts, Counters, DeviceReruns, ScopeRecord, events};
use crate::tier::Tier;
use crate::trace::{self, Name, Process, Range, Trace};

/// Takes the tensors that autograd saves off the device and loads them back before backward asks for them.
///
/// A cache may be used from several threads, and several caches may be in use at once: what a thread saves goes to the innermost of its
/// steps whose cache is for the tensor's device. A cache may be dropped at any time: tensors saved through it can still be read, and its
/// spill files are removed when the last of them is gone.
///
/// A cache stays in its process. In one that is forked off, such as a loader of data, steps run as without a cache, which their reports
/// warn of, and statistics are empty. A step that was begun before the fork cannot be finished there, and a backward there cannot use what
/// was saved before it: both are errors ([`ErrorKind::Forked`]). A cache that is built there works as anywhere else. Fork before other
/// threads compute, or once each of them has done a step: what libtorch makes at the first use of an operation stays half made in a process
/// that is forked off meanwhile, which then may wait for ever when it computes or exits.
pub struct TensorCache {
    cache: Arc<Cache>,
    /// Dropped after the cache, which may still have transfers under way. `None` without spill files.
    endurance: Option<Endurance>,
    device: Device,
    route: Route,
    config: TensorCacheBuilder,
    steps: AtomicU64,
    steering: Steering,
    accounts: Arc<Accounts>,
    meter: Meter,
    checksums: Checksums,
    /// Kernels that take the place of operations in reruns.
    chains: Option<Arc<Chains>>,
    switch: Switch,
    /// What users should know of every step.
    notices: Vec<String>,
    unplanned: Unplanned,
    warned: Warned,
    /// Whether a step has shown that something is offloaded, or that nothing is.
    is_checked: AtomicBool,
    forked: Forked,
}

impl TensorCacheBuilder {
    /// Opens the spill files, pins the host pool and makes the cache. Errors name the setting, the directory or the device that
    /// cannot be used.
    pub fn build(self) -> Result<TensorCache> {
        TensorCache::over(None, self)
    }
}

impl TensorCache {
    /// Starts the configuration of a cache.
    ///
    /// The environment variable `SSDTRAIN` takes the cache out of a program without a new build. With `off`, steps run as without a
    /// cache: nothing is opened, and autograd saves as always. With `keep`, the policy is [`Keep`](crate::Keep), and nothing is asked of
    /// the machine. Reports warn of it; anything else but `on` is an error when the cache is built.
    pub fn builder() -> TensorCacheBuilder {
        TensorCacheBuilder::default()
    }

    fn over(store: Option<Store>, config: TensorCacheBuilder) -> Result<TensorCache> {
        config.checked()?;
        torch::notice_forks();
        let switch = Switch::read()?;
        let config = if switch == Switch::On { config } else { config.keeping() };
        if switch != Switch::Off {
            torch::install().map_err(Error::torch)?;
            resolve_math_kernels().map_err(Error::torch)?;
            torch::install_cpu_allocator();
        }
        let given = store.as_ref().map(|store| store.path().clone());
        let request = config.route_request(given.as_ref());
        let route = config.routed(&request)?;
        let trace: Option<Arc<Trace>> = (config.trace || config.policy_needs().profiles).then(Arc::default);
        if let Some(trace) = trace.as_ref().filter(|_| !config.trace) {
            trace.pause();
        }
        let tier = route::open(&route, &request, store, trace.as_ref())?;
        let path = tier.as_ref().and_then(|tier| tier.store()).map(Store::path);
        if let Some(path) = path.filter(|path| config.require_direct_io && !path.is_direct()) {
            let message = format!("require_direct_io: the spill files would go through {path}");
            return Err(Error::new(ErrorKind::Unmet, message));
        }
        let endurance = tier.as_ref().and_then(|tier| tier.store()).map(|store| config.endurance(store));
        let cache = Cache::new(tier, Limits::none(config.store.window()), trace);
        let observer: Weak<dyn WriteObserver> =
            Arc::downgrade(&(Arc::clone(&cache) as Arc<dyn WriteObserver>));
        if switch != Switch::Off {
            torch::observe_writes(observer).map_err(Error::torch)?;
        }
        if cache.tier().is_some() {
            let reliever: Weak<dyn Reliever> = Arc::downgrade(&(Arc::clone(&cache) as Arc<dyn Reliever>));
            if let Err(error) = torch::relieve_with(config.target(), reliever) {
                tracing::warn!(%error, "an allocation that finds no memory fails, whatever the cache could let go of");
            }
        }
        let notices = switch.warning().into_iter().chain(warnings::of_route(&route)).collect();
        let mut cache = TensorCache::assemble(config, route, cache, switch, notices);
        cache.endurance = endurance;
        Ok(cache)
    }

    fn assemble(
        config: TensorCacheBuilder,
        route: Route,
        cache: Arc<Cache>,
        switch: Switch,
        notices: Vec<String>,
    ) -> TensorCache {
        let shares_cores = !config.target().is_cuda();
        let checksums = Checksums::new(config.verify, &route, shares_cores);
        if let Some(store) = cache.tier().and_then(Tier::store) {
            checksums.begin(store);
        }
        let chains = || Chains::new(config.target(), config.device_timeout, config.tile_bytes);
        let chains = config.fuse_reruns.then(|| Arc::new(chains()));
        let accounts = Arc::default();
        TensorCache {
            endurance: None,
            device: config.target(),
            steps: AtomicU64::new(0),
            steering: Steering::new(&config, &route, &accounts),
            meter: Meter::new(&cache, &accounts),
            accounts,
            checksums,
            cache,
            route,
            config,
            chains,
            switch,
            notices,
            unplanned: Unplanned::default(),
            warned: Warned::default(),
            is_checked: AtomicBool::new(false),
            forked: Forked::default(),
        }
    }

    /// A cache over a store that is already open; for tests with their own backend.
    #[doc(hidden)]
    pub fn with_store(config: TensorCacheBuilder, store: Store) -> Result<TensorCache> {
        TensorCache::over(Some(store), config)
    }

    /// Begins a step: until it is finished or dropped, what autograd saves on this thread goes through the cache. Bind it to a name:
    /// `let _ = cache.step()` drops it at once, and what follows is saved as without a cache. The first step that is dropped before
    /// anything was saved in it is reported by a `tracing` warning.
    pub fn step(&self) -> Step<'_> {
        self.here().begin_step()
    }

    fn begin_step(&self) -> Step<'_> {
        let tape = self.cache.begin_step();
        let number = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let span = tracing::debug_span!(target: events::STEP, "step", step = number).entered();
        torch::reset_peak(self.device);
        let today = || self.endurance.as_ref().map_or_else(Today::default, Endurance::today);
        let steered = self.steering.begin(number, &self.cache, self.device, today);
        // Planning is no part of what each step takes.
        let begun = Instant::now();
        // Events hold the device up, so they are left out where nobody asks how long a step takes.
        let device_reruns = steered.plan.timed.then(DeviceReruns::default);
        let counters = Arc::new(Counters { device_reruns, ..Counters::default() });
        self.accounts.open(&counters);
        let clock = steered.probe.as_ref().map(|probe| probe.clock());
        let is_off = self.switch == Switch::Off;
        // In a trace it has its scopes.
        let is_left = steered.plan.saves == Saves::Leave && !self.config.trace;
        let (parameters, held) = match is_off || is_left {
            true => Default::default(),
            false => (self.parameters(), self.cache.held_elsewhere()),
        };
        let records = steered.probe.is_some() || steered.plan.recomputes();
        let replays = if records { self.replays(&counters, clock) } else { None };
        let context = Arc::new(StepContext {
            cache: Arc::clone(&self.cache),
            origin: torch::Origin::default(),
            number,
            verify: self.config.verify.compares_reruns(),
            min_bytes: self.config.min_bytes,
            device: self.device,
            parameters,
            held,
            cursor: Cursor::new(&steered.plan.saves),
            plan: steered.plan,
            kept_before: self.cache.kept(),
            strange: OnceLock::new(),
            stores_in_flight: self.config.store.window(),
            replays: replays.map(OnceLock::from).unwrap_or_default(),
            chains: self.chains.clone(),
            probe: steered.probe,
            counters,
            record: ScopeRecord::default(),
            orders: Orders::new(tape),
        });
        context.give_room(context.plan.room);
        let gradients = self.gradient_bytes();
        let handle = StepHandle { context, is_off, is_left };
        let range = self.range(Name::Step(number), &format!("step {number}"));
        // Nor is reading the clock.
        let overhead = begun.elapsed();
        let clock = handle.context.plan.timed.then(|| self.clock()).flatten();
        let allocated = torch::memory(self.device).allocated;
        let most_peak = handle.context.plan.most_peak.filter(|_| !is_off);
        let ceiling = most_peak.map(|most| Ceiling::new(self.device, allocated.saturating_add(most)));
        Step {
            clock,
            overhead,
            start: Instant::now(),
            allocated,
            _ceiling: ceiling,
            gradients,
            peak: Mutex::new(None),
            computed: Mutex::new(None),
            noted: steered.noted,
            is_finished: false,
            entered: handle.enter(),
            handle,
            cache: self,
            _range: range,
            _span: span,
        }
    }

    /// How bytes travel: backend, direct or buffered, and why not a faster way.
    pub fn io_path(&self) -> String {
        let TensorCache { cache, route, .. } = self.here();
        let path = cache.tier().map_or_else(|| "none: everything is kept".to_owned(), Tier::path);
        route.why.iter().fold(path, |path, why| format!("{path} ({why})"))
    }

    /// Where saved bytes go, and why.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Statistics of the spill files since the cache was built; `None` if there are none.
    pub fn store_stats(&self) -> Option<StoreStats> {
        self.here().cache.tier().and_then(Tier::store).map(Store::stats)
    }

    /// The plan of [`Auto`](crate::Auto) for the next step; `None` until enough was profiled, and under other policies. Its `Display` is a
    /// table of what goes where.
    pub fn plan(&self) -> Option<Arc<PlanReport>> {
        let TensorCache { steering, cache, .. } = self.here();
        steering.plan(&cache.scopes)
    }

    /// Whether the policy has settled: its plan, or the paper's decision, was made and corrected. It may still change when the steps do.
    pub fn is_settled(&self) -> bool {
        self.here().steering.is_settled()
    }

    /// What [`Auto`](crate::Auto) has measured of one micro-batch and of the bandwidths, to be saved or to compute plans with: see
    /// [`plan`](crate::plan). `None` as long as there is no plan.
    pub fn profile(&self) -> Option<Profile> {
        let TensorCache { steering, cache, .. } = self.here();
        steering.profile(&cache.scopes)
    }

    /// The plan of [`Auto`](crate::Auto) for the next step, to be saved: another run follows it from its first step on with
    /// [`Auto::starting_with`](crate::Auto::starting_with). `None` as long as there is no plan.
    pub fn saved_plan(&self) -> Option<SavedPlan> {
        let TensorCache { steering, cache, .. } = self.here();
        steering.saved_plan(&cache.scopes)
    }

    /// Host memory pinned for the device, in bytes.
    pub fn pinned_bytes(&self) -> u64 {
        self.here().cache.tier().and_then(Tier::host_pool).map_or(0, HostPool::capacity)
    }

    /// Gives back what no graph needs, between phases of a program such as training, evaluation and saving a checkpoint: pinned host
    /// memory, memory of CPU tensors as [`trim`](crate::trim) does, a GPU's memory that libtorch holds but does not use, and the space of
    /// the spill files, with the memory from which they are written when they are [encrypted](TensorCacheBuilder::encrypt). Waits for the
    /// device up to [`device_timeout`](TensorCacheBuilder::device_timeout), and then for as long as libtorch does, and for each disk up
    /// to [`disk_timeout`](TensorCacheBuilder::disk_timeout). Returns what was given back.
    ///
    /// The cache goes on as before: the next step pins memory again, with a [`host_pool`](TensorCacheBuilder::host_pool) of its own size
    /// before it begins, and otherwise as steps need it. So do the spill files grow. Plans stay.
    pub fn pause(&self) -> GivenBack {
        let here = self.here();
        let pinned_bytes = here.cache.tier().map_or(0, Tier::shrink);
        let store = here.cache.tier().and_then(Tier::store);
        let spill_bytes = store.map_or(0, Store::shrink);
        let bounce_bytes = store.map_or(0, Store::trim);
        let reserved = |device| torch::memory(device).reserved;
        let (host, device) = (reserved(Device::Cpu), reserved(self.device));
        torch::trim();
        let host_bytes = host.saturating_sub(reserved(Device::Cpu)) + bounce_bytes;
        let trimmed = match self.device {
            Device::Cuda(index) => torch::CudaDevice::new(index).and_then(torch::CudaDevice::trim),
            _ => Ok(()),
        };
        if let Err(error) = &trimmed {
            tracing::warn!(%error, "the device's memory is not given back");
        }
        let device_bytes =
            if self.device.is_cuda() { device.saturating_sub(reserved(self.device)) } else { 0 };
        GivenBack { pinned_bytes, host_bytes, device_bytes, spill_bytes }
    }

    /// What the cache holds now: all zero once every graph of its steps is gone.
    pub fn held(&self) -> Held {
        let (entries, tapes, device_bytes) = self.here().cache.held();
        Held { entries, tapes, device_bytes }
    }

    /// Writes what was recorded so far as a trace for [Perfetto](https://ui.perfetto.dev) or `chrome://tracing`: on one time line the
    /// steps, scopes and stalls of each thread, what the device computed and copied, and the disk transfers. Waits for the device to
    /// reach what was recorded. Events dropped to stay within the cap are counted in the file, and a warning is logged.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the cache was built without [`trace`](TensorCacheBuilder::trace), [`ErrorKind::Io`] if the file cannot
    /// be written.
    pub fn write_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        write_traces(path, &[("ssdtrain", self)])
    }

    /// What records a step's operations; `None` if they cannot be recorded in this process.
    fn replays(&self, counters: &Arc<Counters>, clock: Option<Arc<OperationClock>>) -> Option<Arc<Replays>> {
        let replays = Replays::new(&self.cache, counters, clock, self.chains.as_ref());
        replays.inspect_err(|error| self.warned.tell_unrecorded(error)).ok()
    }

    fn range(&self, name: Name, shown: &str) -> Range {
        Range::open(self.cache.trace.clone(), name, shown)
    }

    /// Storages of the parameters, collected anew for each step, because loading weights replaces them.
    fn parameters(&self) -> HashSet<StorageId> {
        let mut ids = HashSet::new();
        for variables in &self.config.parameters {
            // A poisoned lock only says that some thread panicked while it registered variables; those present are valid.
            let variables = variables.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let variables = variables.named_variables.values();
            ids.reserve(variables.len());
            ids.extend(variables.filter_map(StorageId::of_tensor));
        }
        ids
    }

    /// The clock of the device from now on, if it has one that can be read.
    fn clock(&self) -> Option<Span> {
        let Device::Cuda(index) = self.device else { return None };
        let begun = Clock::begin(index);
        let begun = begun.inspect_err(|error| {
            warn_once!(%error, "the clock of the device cannot be read: steps are compared less certainly");
        });
        begun.ok().flatten()
    }

    /// Bytes of the gradients that the parameters have at present.
    fn gradient_bytes(&self) -> u64 {
        let variables = self.config.parameters.iter();
        let variables =
            variables.map(|variables| variables.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        variables.map(|variables| torch::gradient_bytes(variables.named_variables.values())).sum()
    }
}

/// Writes the traces of several caches into one file and on one time line, each as a process with the given name; see
/// [`TensorCache::write_trace`].
pub fn write_traces(path: impl AsRef<Path>, caches: &[(&str, &TensorCache)]) -> Result<()> {
    let processes: Option<Vec<_>> = caches
        .iter()
        .map(|(name, cache)| {
            let TensorCache { cache, config, .. } = cache.here();
            let trace = cache.trace.as_deref().filter(|_| config.trace)?;
            Some(Process { name, trace, scopes: &cache.scopes })
        })
        .collect();
    match processes {
        Some(processes) => trace::write(path.as_ref(), &processes),
        None => Err(Error::new(ErrorKind::Config, "nothing was recorded: call trace(true) before build()")),
    }
}

impl fmt::Debug for TensorCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorCache").field("io_path", &self.io_path()).field("config", &self.config).finish()
    }
}

/// What [`TensorCache::pause`] has given back, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GivenBack {
    /// Host memory that was pinned for the device.
    pub pinned_bytes: u64,
    /// Memory of CPU tensors that libtorch held and did not use, and memory from which spill files are written when they are
    /// [encrypted](TensorCacheBuilder::encrypt).
    pub host_bytes: u64,
    /// Memory of a GPU that libtorch held and did not use.
    pub device_bytes: u64,
    /// Space of the spill files. Those of cuFile keep theirs.
    pub spill_bytes: u64,
}

/// What a cache holds at present; see [`TensorCache::held`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// Storages that the graph still has handles to.
    pub entries: usize,
    /// Micro-batches that are open or still have handles in the graph.
    pub tapes: usize,
    /// Bytes on the device that the cache keeps alive.
    pub device_bytes: u64,
}
