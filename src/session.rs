//! The public scope: a cache, and the steps taken with it.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Storage, StorageId};
use tch::{Device, TchError, Tensor};

use crate::cache::{Cache, Limits, NO_TAPE, Recorder, StepContext, TapeKey};
use crate::config::{Policy, TensorCacheBuilder};
use crate::error::{Error, ErrorKind, Result};
use crate::policy::{Filter, Keeping, Module, Profile, Rule, Stay};
use crate::recompute::{self, Level, Marks};
use crate::scope::{self, Scope};
use crate::store::{Store, StoreStats};
use crate::telemetry::{ScopeId, ScopeRecord, StepReport};
use crate::tier::Tier;
use crate::trace::{self, Forward, Name, Process, Range, Trace};

/// Takes the tensors autograd saves off the device and has them back before backward asks.
///
/// A cache may be used from several threads, and several caches may be in use at once. Dropping it is safe at any time: tensors
/// saved through it can still be asked for, and the spill files go when the last of them is gone.
pub struct TensorCache {
    cache: Arc<Cache>,
    device: Device,
    config: TensorCacheBuilder,
    steps: AtomicU64,
    /// The scopes whose tensors stay on the device.
    keeping: Mutex<Keeping>,
}

impl TensorCache {
    /// Starts describing a cache.
    pub fn builder() -> TensorCacheBuilder {
        TensorCacheBuilder::default()
    }

    pub(crate) fn open(config: TensorCacheBuilder) -> Result<TensorCache> {
        let store = match config.policy {
            Policy::Keep => None,
            Policy::Offload | Policy::Adaptive(_) => config.open_store()?,
        };
        TensorCache::over(store, config)
    }

    fn over(store: Option<Store>, config: TensorCacheBuilder) -> Result<TensorCache> {
        if let Some(store) =
            store.as_ref().filter(|store| config.require_direct_io && !store.path().is_direct())
        {
            return Err(Error::new(
                ErrorKind::Unmet,
                format!("require_direct_io: the spill files would go through {}", store.path()),
            ));
        }
        torch::install().map_err(|error| Error::new(ErrorKind::Torch, error.to_string()))?;
        torch::install_cpu_allocator();
        let stores_in_flight = (config.store.queue_depth * config.store.io_bytes) as u64;
        let limits = Limits {
            device_budget: config.device_budget,
            backward_budget: config.backward_budget.unwrap_or(config.device_budget),
            prefetch: config.prefetch,
            stores_in_flight,
        };
        let adaptive = matches!(config.policy, Policy::Adaptive(_));
        let trace: Option<Arc<Trace>> = (config.trace || adaptive).then(Arc::default);
        if let Some(trace) = trace.as_ref().filter(|_| !config.trace) {
            trace.pause();
        }
        let room = limits.device_budget.min(limits.backward_budget).saturating_sub(limits.prefetch);
        let rule = if adaptive {
            Rule::paper(Stay { modules: config.keep_last.max(1), bytes: room })
        } else {
            Rule::Last(config.keep_last)
        };
        Ok(TensorCache {
            cache: Cache::new(config.open_tier(store, trace.as_ref())?, limits, trace),
            device: config.target(),
            config,
            steps: AtomicU64::new(0),
            keeping: Mutex::new(Keeping::new(rule)),
        })
    }

    /// A cache over a store that is already open; for tests with a backend of their own.
    #[doc(hidden)]
    pub fn with_store(config: TensorCacheBuilder, store: Store) -> Result<TensorCache> {
        TensorCache::over(Some(store), config)
    }

    /// Begins a step: until it is finished or dropped, what autograd saves on this thread goes through the cache.
    pub fn step(&self) -> Step<'_> {
        let tape = self.cache.begin_step();
        let number = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let (kept_scopes, profiling) = {
            let keeping = self.keeping.lock();
            (keeping.kept(), keeping.profiles(number).then(|| Profiling::begin(&self.cache)).flatten())
        };
        let context = Arc::new(StepContext {
            cache: Arc::clone(&self.cache),
            number,
            filter: Filter { keep_all: self.config.policy == Policy::Keep, min_bytes: self.config.min_bytes },
            device: self.device,
            parameters: self.parameters(),
            kept_scopes,
            counters: Arc::default(),
            record: ScopeRecord::default(),
            tape: AtomicUsize::new(tape),
        });
        torch::reset_peak(self.device);
        let handle = StepHandle(context);
        let range = self.range(Name::Step(number), &format!("step {number}"));
        Step {
            start: Instant::now(),
            allocated: torch::memory(self.device).allocated,
            peak: Mutex::new(None),
            tapes: Mutex::new(vec![tape]),
            profiling: Mutex::new(profiling),
            _entered: handle.enter(),
            handle,
            cache: self,
            _range: range,
        }
    }

    /// Names a part of the step, as [`crate::scope`] does.
    pub fn scope(&self, name: &str) -> Scope {
        scope::scope(name)
    }

    /// Computes `f(x)` and has backward compute it again, as [`crate::segment`] does.
    pub fn segment<F>(&self, name: &str, x: &Tensor, f: F) -> Result<Tensor, TchError>
    where
        F: Fn(&Tensor) -> Result<Tensor, TchError> + Send + 'static,
    {
        recompute::segment(name, x, f)
    }

    /// Computes `f(inputs)` and has backward compute it again wherever it was saved, as [`crate::remat`] does.
    pub fn remat<F>(&self, inputs: &[&Tensor], f: F) -> Result<Tensor, TchError>
    where
        F: Fn(&[&Tensor]) -> Result<Tensor, TchError> + Send + 'static,
    {
        recompute::remat(inputs, f)
    }

    /// Which way bytes go: backend, direct or buffered, and why not a faster one.
    pub fn io_path(&self) -> String {
        self.cache.tier().map_or_else(|| "none: everything is kept".to_owned(), Tier::path)
    }

    /// What the spill files have seen since the cache was built; none if there are none.
    pub fn store_stats(&self) -> Option<StoreStats> {
        self.cache.tier().and_then(Tier::store).map(Store::stats)
    }

    /// Host memory pinned for the device, in bytes.
    pub fn pinned_bytes(&self) -> u64 {
        self.cache.tier().map_or(0, Tier::pinned_bytes)
    }

    /// What the cache holds now: all zero once every graph of its steps is gone.
    pub fn held(&self) -> Held {
        let (entries, tapes, device_bytes) = self.cache.held();
        Held { entries, tapes, device_bytes }
    }

    /// Writes what was recorded so far as a trace that [Perfetto](https://ui.perfetto.dev) and `chrome://tracing` show: on one time
    /// line the steps, scopes and stalls of each thread, what the device computed and copied, and the transfers of the disk. It waits
    /// for the device to reach what was recorded. What was dropped to stay within the cap is counted in the file, and warned of.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the cache was built without [`trace`](TensorCacheBuilder::trace), [`ErrorKind::Io`] if the file cannot
    /// be written.
    pub fn write_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        write_traces(path, &[("ssdtrain", self)])
    }

    fn range(&self, name: Name, shown: &str) -> Range {
        Range::open(self.cache.trace.clone(), name, shown)
    }

    /// Storages of the parameters, read anew for each step: loading weights replaces them.
    fn parameters(&self) -> HashSet<StorageId> {
        let mut ids = HashSet::new();
        for variables in &self.config.parameters {
            // A poisoned lock only says that some thread panicked while it named variables; those there are valid.
            let variables = variables.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            ids.extend(
                variables.named_variables.values().filter_map(Storage::of).map(|storage| storage.id()),
            );
        }
        ids
    }
}

/// A step that is profiled.
struct Profiling {
    /// Where the trace was when it began.
    position: u64,
    /// What each scope had saved when forward ended.
    saved: Option<Vec<(ScopeId, u64)>>,
}

impl Profiling {
    fn begin(cache: &Cache) -> Option<Profiling> {
        let trace = cache.trace.as_ref()?;
        trace.resume();
        Some(Profiling { position: trace.position(), saved: None })
    }

    /// The first micro-batch stands for the others.
    fn forward_ends(&mut self, record: &ScopeRecord) {
        self.saved.get_or_insert_with(|| record.by_last_save());
    }

    /// Decides, if the step has shown enough.
    fn end(self, owner: &TensorCache) {
        let Some(trace) = &owner.cache.trace else { return };
        let forward = trace.forward(self.position);
        if !owner.config.trace {
            trace.pause();
        }
        let Some((Forward { scopes, bandwidth: Some(bandwidth) }, saved)) = forward.zip(self.saved) else {
            return;
        };
        let time = |scope| scopes.get(&scope).copied().unwrap_or_default();
        let modules =
            saved.into_iter().map(|(scope, bytes)| Module { scope, forward: time(scope), bytes }).collect();
        owner.keeping.lock().learn(Profile { modules, forward: scopes.values().sum(), bandwidth });
    }
}

/// Writes the traces of several caches into one file and on one time line, each as a process of the name given; see
/// [`TensorCache::write_trace`].
pub fn write_traces(path: impl AsRef<Path>, caches: &[(&str, &TensorCache)]) -> Result<()> {
    let processes: Option<Vec<_>> = caches
        .iter()
        .map(|(name, TensorCache { cache, config, .. })| {
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

/// What a cache holds; see [`TensorCache::held`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// Storages the graph still has handles of.
    pub entries: usize,
    /// Micro-batches that are open or still have handles in the graph.
    pub tapes: usize,
    /// Bytes on the device that the cache keeps alive.
    pub device_bytes: u64,
}

/// One training step. What autograd saves on the thread that made it goes through the cache until it is finished or dropped.
///
/// Tensors saved in a step stay valid after it: a backward that runs later is served all the same.
#[must_use = "the step ends when it is dropped"]
pub struct Step<'a> {
    // Declared first, so that this thread's hooks end before anything they use.
    _entered: Entered,
    handle: StepHandle,
    cache: &'a TensorCache,
    start: Instant,
    allocated: u64,
    /// Highest allocated bytes seen at the end of a backward.
    peak: Mutex<Option<u64>>,
    tapes: Mutex<Vec<TapeKey>>,
    /// What is noted where the step is profiled.
    profiling: Mutex<Option<Profiling>>,
    // Last, since it is the step's name for all of it.
    _range: Range,
}

impl Step<'_> {
    /// Runs backward from the scalar `loss`. What the cache cannot serve is an error here, never a wrong gradient.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, Backward::default())
    }

    /// Runs backward from the scalar `loss`, keeping the graph for another backward or recording one of the gradients.
    pub fn backward_with(&self, loss: &Tensor, options: Backward) -> Result<()> {
        if let Some(profiling) = &mut *self.profiling.lock() {
            profiling.forward_ends(&self.handle.0.record);
        }
        let _range = self.cache.range(Name::Backward, "backward");
        let outcome = torch::backward(loss, options.retain_graph, options.create_graph);
        let peak = torch::memory(self.cache.device).peak;
        let mut highest = self.peak.lock();
        *highest = Some(highest.unwrap_or(0).max(peak));
        outcome.map_err(|error| Error::new(ErrorKind::Torch, error.to_string()))
    }

    /// Switches to micro-batch `index` (from 0, where each step begins): tensors saved from now on, on every thread of the step, belong
    /// to it, and backward looks ahead within it. Needed only where several are open at once, or to report them apart.
    pub fn micro_batch(&self, index: usize) {
        let mut tapes = self.tapes.lock();
        while tapes.len() <= index {
            tapes.push(self.cache.cache.open_tape());
        }
        self.handle.0.tape.store(tapes[index], Ordering::Release);
    }

    /// Lets all that was saved so far, and is not to stay, leave the device; waits until it has left, or is known to stay.
    pub fn flush(&self) {
        let _range = self.cache.range(Name::Wait("flush"), "flush");
        self.cache.cache.flush(&self.handle.0.counters);
    }

    /// Lets other threads take part in the step.
    pub fn handle(&self) -> StepHandle {
        self.handle.clone()
    }

    /// Ends the step: waits for the transfers under way and reports what was done. Fails if a condition the cache was built with is
    /// not met.
    pub fn finish(self) -> Result<StepReport> {
        let context = Arc::clone(&self.handle.0);
        let peak = self.peak.lock().unwrap_or_else(|| torch::memory(self.cache.device).peak);
        {
            let _range = self.cache.range(Name::Wait("finish"), "finish");
            context.cache.quiesce();
            if let Some(tier) = context.cache.tier() {
                tier.settle();
            }
        }
        if let Some(trace) = &context.cache.trace {
            trace.settle();
        }
        let adaptive = self.cache.keeping.lock().report(&context.cache.scopes);
        let mut report = StepReport {
            adaptive,
            step: context.number,
            wall: self.start.elapsed(),
            act_peak_bytes: peak.saturating_sub(self.allocated),
            scopes: context.record.report(&context.cache.scopes),
            io_path: self.cache.io_path(),
            ..StepReport::of(&context.counters)
        };
        report.warnings = warnings(&report);
        for warning in &report.warnings {
            tracing::warn!(step = report.step, "{warning}");
        }
        let config = &self.cache.config;
        if let Some(profiling) = self.profiling.lock().take() {
            profiling.end(self.cache);
        }
        self.cache.keeping.lock().learn_last(|| context.record.in_order());
        if config.fail_if_nothing_offloaded && report.step == 1 && report.offloaded.bytes == 0 {
            return Err(Error::new(
                ErrorKind::Unmet,
                format!("fail_if_nothing_offloaded: the first step offloaded nothing ({report})"),
            ));
        }
        Ok(report)
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.handle.0.tape.store(NO_TAPE, Ordering::Release);
        for tape in self.tapes.lock().drain(..) {
            self.cache.cache.close_tape(tape);
        }
    }
}

fn warnings(report: &StepReport) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.store_failures.count > 0 {
        warnings.push(format!(
            "{} stores failed ({} bytes); their tensors stayed in memory and the step is right",
            report.store_failures.count, report.store_failures.bytes
        ));
    }
    if report.kept.no_room.count > 0 {
        warnings.push(format!(
            "{} storages ({} bytes) stayed in memory: host pool and spill files had no room for them, or stores kept failing",
            report.kept.no_room.count, report.kept.no_room.bytes
        ));
    }
    warnings
}

/// How a backward treats its graph; see [`Step::backward_with`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backward {
    /// Keep the graph, and what the cache holds for it, for another backward.
    pub retain_graph: bool,
    /// Record the backward itself, so that gradients can be differentiated.
    pub create_graph: bool,
}

/// A step, as other threads see it. Once the step has ended, what they save stays in the graph.
#[derive(Clone)]
pub struct StepHandle(Arc<StepContext>);

impl StepHandle {
    /// Makes what autograd saves on the calling thread go through the step's cache until the guard is dropped.
    pub fn enter(&self) -> Entered {
        let marks = Arc::new(Marks::default());
        let hooks =
            torch::activate(Arc::new(Recorder { step: Arc::clone(&self.0), marks: Arc::clone(&marks) }));
        let scopes = scope::enter(Arc::clone(&self.0), Level::Step(marks), ScopeId::default());
        Entered { _hooks: hooks, _scopes: scopes }
    }
}

/// Guard of [`StepHandle::enter`].
#[must_use = "the thread leaves the step when this guard is dropped"]
pub struct Entered {
    _hooks: torch::Active,
    _scopes: scope::Entered,
}
