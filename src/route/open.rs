//! What lies below the device, opened as the builder asks, and the way that a GPU's tensors take to the disk.

use std::collections::HashMap;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use ssdtrain_libtorch::library_folder;
use ssdtrain_store::{BackendKind, CuFileMode, Store, StoreConfig};
use tch::Device as Target;

use super::trial::Trial;
use crate::config::{Policy, TensorCacheBuilder};
use crate::device::{Context, Cuda, Device, Simulated};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::available_memory;
use crate::policy::{IoPath, PathRates, PathTrial, choose};
use crate::tier::{DirectTier, DiskTier, HostSettings, HostTier, PoolSize, Tier};
use crate::trace::{DeviceTrace, Trace};
use crate::units::MIB;

/// Host memory of the way through it, while it is tried out. Much less than what the trial moves.
const TRIAL_POOL: u64 = 64 * MIB;

/// What was opened.
pub(crate) struct Below {
    /// None if everything is kept.
    pub(crate) tier: Option<Arc<dyn Tier>>,
    /// Why bytes take this way, where that was not asked for.
    pub(crate) why: Option<String>,
}

/// What decides about the outcome of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Tried {
    target: Target,
    directories: Vec<PathBuf>,
    cufile: Option<PathBuf>,
    cap_bytes: u64,
    queue_depth: usize,
    max_bytes_per_s: Option<NonZero<u64>>,
}

/// What was found out about the ways to the disk, once in a process. Failures are not kept: their causes may go.
static PROBED: LazyLock<Mutex<HashMap<Tried, PathTrial>>> = LazyLock::new(Mutex::default);

/// Opens what lies below the device; over `given` if the caller has spill files already.
pub(crate) fn open(
    config: &TensorCacheBuilder,
    given: Option<Store>,
    trace: Option<&Arc<Trace>>,
) -> Result<Below> {
    if config.chosen_policy() == Policy::Keep {
        // What the device computes is worth seeing all the same.
        if let (Some(trace), Target::Cuda(index)) = (trace, config.target()) {
            drop(DeviceTrace::start(trace, &Arc::new(Cuda::open(index)?))?);
        }
        return Ok(Below { tier: None, why: None });
    }
    match (config.target(), config.simulated) {
        (Target::Cpu, None) => on_cpu(config, given, trace),
        (Target::Cpu, Some(delay)) => Ways { config, open: || Simulated::start(delay) }.below(given, trace),
        (Target::Cuda(index), _) => Ways { config, open: || Cuda::open(index) }.below(given, trace),
        (other, _) => {
            refused(format!("device: tensors on {other:?} cannot be moved; only CPU and CUDA ones can"))
        }
    }
}

impl TensorCacheBuilder {
    /// Tries both ways between the GPU and the spill directories out, as [`IoPath::Auto`] does: sends 64 MiB down and compares what comes
    /// back, and measures each direction and both at once. It takes seconds, once in a process; later calls tell the same.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) without a spill directory, or for CPU tensors.
    pub fn try_paths(&self) -> Result<PathTrial> {
        if self.store.directories.is_empty() {
            return refused("no spill directory: call spill_to(directory) before try_paths()");
        }
        match (self.target(), self.simulated) {
            (Target::Cuda(index), _) => Ok(Ways { config: self, open: || Cuda::open(index) }.probed(true)),
            (_, Some(delay)) => Ok(Ways { config: self, open: || Simulated::start(delay) }.probed(true)),
            _ => refused("try_paths: CPU tensors have one way only, straight to the spill files"),
        }
    }
}

/// CPU tensors are the disk's neighbours already.
fn on_cpu(config: &TensorCacheBuilder, given: Option<Store>, trace: Option<&Arc<Trace>>) -> Result<Below> {
    if matches!(config.wanted_path(), IoPath::Direct | IoPath::HostOnly) {
        return refused(
            "path, require_path: CPU tensors have one way only, straight to the spill files; leave them out",
        );
    }
    let Some(store) = spill_files(config, given)? else {
        return refused(
            "no spill directory: CPU tensors have nowhere else to go. Call spill_to(directory) before build(), or \
             policy(Policy::Keep) for a cache that moves nothing; tensors of a GPU need device(Device::Cuda(0))",
        );
    };
    Ok(Below { tier: Some(Arc::new(DiskTier::new(store, trace.cloned()))), why: None })
}

/// The ways below a GPU.
struct Ways<'a, F> {
    config: &'a TensorCacheBuilder,
    open: F,
}

impl<D: Device, F: Fn() -> Result<D>> Ways<'_, F> {
    fn below(&self, given: Option<Store>, trace: Option<&Arc<Trace>>) -> Result<Below> {
        let (path, why) = match self.config.wanted_path() {
            IoPath::Auto if self.has_a_choice() && given.is_none() => {
                let (path, why) = choose(&self.probed(false));
                (path, Some(why))
            }
            IoPath::Auto => (IoPath::Staged, None),
            path => (path, None),
        };
        let tier = match path {
            IoPath::Direct => self.direct(given, trace)?,
            IoPath::HostOnly => self.staged(None, trace)?,
            IoPath::Staged | IoPath::Auto => self.staged(spill_files(self.config, given)?, trace)?,
        };
        self.check(path, &*tier, why.as_deref())?;
        Ok(Below { tier: Some(tier), why })
    }

    /// Whether nothing that was asked for decides about the way. A host pool does: it holds what is wanted next. Plans are made for one
    /// way.
    fn has_a_choice(&self) -> bool {
        let TensorCacheBuilder { host_pool, store, .. } = self.config;
        *host_pool == Some(0)
            && !store.verify
            && !store.directories.is_empty()
            && !matches!(self.config.chosen_policy(), Policy::Auto(_))
            && store.backend == BackendKind::Auto
    }

    /// Fails unless the way is the one that has to be.
    fn check(&self, path: IoPath, tier: &dyn Tier, why: Option<&str>) -> Result<()> {
        let Some(required) = self.config.required_path else { return Ok(()) };
        let unmet =
            |reason: &str| Err(Error::new(ErrorKind::Unmet, format!("require_path({required:?}): {reason}")));
        if required != IoPath::Auto && required != path {
            return unmet(&format!(
                "the way is {path:?}{}",
                why.map_or(String::new(), |why| format!(", {why}"))
            ));
        }
        match tier.store().and_then(|store| store.path().cufile()) {
            Some(CuFileMode::Compatibility) if required == IoPath::Direct => unmet(
                "cuFile runs in compatibility mode, through host memory, on this machine: neither nvidia-fs nor PCI \
                 P2PDMA moves its bytes. `ssdtrain-bench doctor` tells what is missing",
            ),
            _ => Ok(()),
        }
    }

    // ---- the ways ----

    /// Straight to the disk. Bytes that cuFile moves are tried out first.
    fn direct(&self, given: Option<Store>, trace: Option<&Arc<Trace>>) -> Result<Arc<dyn Tier>> {
        if self.config.store.verify {
            return refused("path(Direct) with verify(true): checksums are taken of host memory; choose one");
        }
        let store = match given {
            Some(store) if !D::IS_HOST && store.path().cufile().is_none() => {
                return refused(
                    "path(Direct) over a store that does not reach a GPU's memory: only cuFile's does",
                );
            }
            Some(store) => store,
            None => opened(self.direct_store()?)?,
        };
        let tier: Arc<dyn Tier> = DirectTier::new((self.open)()?, store, self.config.store.window(), trace)?;
        if tier.store().is_some_and(|store| store.path().cufile().is_some()) {
            self.trial(&tier, |trial| trial.round_trip())?;
        }
        Ok(tier)
    }

    fn direct_store(&self) -> Result<StoreConfig> {
        let mut store = self.config.store.clone();
        if store.directories.is_empty() && store.backend != BackendKind::Memory {
            return refused(
                "path(Direct) without a spill directory: call spill_to(directory) before build()",
            );
        }
        if !matches!(store.backend, BackendKind::Auto | BackendKind::CuFile) && !D::IS_HOST {
            let backend = store.backend;
            return refused(format!(
                "backend({backend:?}) with path(Direct): only cuFile reaches a GPU's memory"
            ));
        }
        if store.backend == BackendKind::Auto && (!D::IS_HOST || store.cufile.is_some()) {
            store.backend = BackendKind::CuFile;
        }
        if let Target::Cuda(index) = self.config.target() {
            store.gpu = Some(Arc::new(Context::open(index)?));
        }
        Ok(store)
    }

    /// Through pinned host memory.
    fn staged(&self, store: Option<Store>, trace: Option<&Arc<Trace>>) -> Result<Arc<dyn Tier>> {
        let pool = match self.config.host_pool {
            None => PoolSize::Learned { cap: available_memory() / 2 },
            Some(0) => PoolSize::Bounce,
            Some(bytes) => PoolSize::Fixed(bytes),
        };
        if pool == PoolSize::Bounce && store.is_none() {
            return refused(
                "host_pool(0) without a spill directory leaves no place to offload to: give one of them",
            );
        }
        let settings = HostSettings { pool, read_ahead: self.config.read_ahead };
        Ok(HostTier::new((self.open)()?, store, settings, trace)?)
    }

    // ---- trying them out ----

    /// What the ways do. Unless `both` are asked for, the second is not tried out where the first does not work.
    fn probed(&self, both: bool) -> PathTrial {
        let mut probed = PROBED.lock();
        let key = self.tried();
        if let Some(found) = probed.get(&key) {
            return found.clone();
        }
        let direct = self.try_direct().map_err(|error| error.to_string());
        let staged = if both || direct.is_ok() {
            self.try_staged().map_err(|error| error.to_string())
        } else {
            Err("not tried out".to_owned())
        };
        let found = PathTrial { direct, staged };
        if found.is_whole() {
            probed.insert(key, found.clone());
        }
        found
    }

    fn tried(&self) -> Tried {
        let StoreConfig { directories, cufile, cap_bytes, queue_depth, max_bytes_per_s, .. } =
            self.config.store.clone();
        let target = self.config.target();
        Tried { target, directories, cufile, cap_bytes, queue_depth, max_bytes_per_s }
    }

    fn try_direct(&self) -> Result<(CuFileMode, PathRates)> {
        let store = opened(self.direct_store()?)?;
        let tier: Arc<dyn Tier> = DirectTier::new((self.open)()?, store, self.config.store.window(), None)?;
        self.trial(&tier, |trial| trial.round_trip())?;
        let rates = self.trial(&tier, |trial| trial.rates())?;
        let mode = tier.store().and_then(|store| store.path().cufile());
        Ok((mode.unwrap_or(CuFileMode::Compatibility), rates))
    }

    fn try_staged(&self) -> Result<PathRates> {
        let store = opened(StoreConfig { backend: BackendKind::Auto, ..self.config.store.clone() })?;
        let settings = HostSettings { pool: PoolSize::Fixed(TRIAL_POOL), read_ahead: TRIAL_POOL };
        let tier: Arc<dyn Tier> = HostTier::new((self.open)()?, Some(store), settings, None)?;
        self.trial(&tier, |trial| trial.rates())
    }

    fn trial<T>(&self, tier: &Arc<dyn Tier>, run: impl FnOnce(Trial<'_, D>) -> Result<T>) -> Result<T> {
        run(Trial::new(Arc::clone(tier), &(self.open)()?))
    }
}

/// The spill files, if any were asked for.
fn spill_files(config: &TensorCacheBuilder, given: Option<Store>) -> Result<Option<Store>> {
    let spills = !config.store.directories.is_empty() || config.store.backend == BackendKind::Memory;
    match given {
        Some(store) => Ok(Some(store)),
        None if spills => opened(config.store.clone()).map(Some),
        None => Ok(None),
    }
}

/// A store, which finds cuFile beside libtorch as well.
fn opened(config: StoreConfig) -> Result<Store> {
    Ok(Store::open(StoreConfig { cufile_beside: library_folder(), ..config })?)
}

fn refused<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, message))
}
