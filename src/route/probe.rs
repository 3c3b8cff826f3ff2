//! Trials of the ways that a GPU's bytes can take to the disk, once per process.

use std::collections::HashMap;
use std::num::NonZero;
use std::path::PathBuf;

use ssdtrain_libtorch::PerProcess;
use ssdtrain_store::sync::Mutex;
use ssdtrain_store::{BackendKind, CuFileMode, StoreConfig};
use tch::Device as Target;

use super::open::{GpuRoute, cufile};
use super::path::{PathRates, PathTrial};
use super::resolve::{RouteRequest, refused};
use super::way::{Route, Way};
use crate::device::{Cuda, Device};
use crate::error::Result;
use crate::tier::PoolSize;
use crate::units::MIB;

/// The host pool during a trial of the staged way. Much less than the trial moves.
const TRIAL_POOL: u64 = 64 * MIB;

/// The settings that affect the outcome of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Tried {
    target: Target,
    directories: Vec<PathBuf>,
    cufile: Option<PathBuf>,
    cap_bytes: u64,
    queue_depth: usize,
    max_bytes_per_s: Option<NonZero<u64>>,
    encrypt: bool,
}

/// Outcomes of trials. Failures are not kept, because their causes may go away.
static PROBED: PerProcess<Mutex<Option<HashMap<Tried, PathTrial>>>> = PerProcess::new(Mutex::new(None));

/// The outcome of a trial of both ways. Unless `both` are requested, the staged way is tried only if the direct one works.
///
/// # Errors
///
/// [`ErrorKind::Config`](crate::ErrorKind::Config) without a spill directory, or for CPU tensors.
pub(crate) fn probed(request: &RouteRequest<'_>, both: bool) -> Result<PathTrial> {
    if request.store.directories.is_empty() {
        return refused("no spill directory: call spill_to(directory) before try_paths()");
    }
    match (request.target, request.simulated) {
        (_, Some(simulation)) => {
            let faults = request.faults.cloned().unwrap_or_default();
            Ok(GpuRoute { request, device: || simulation.start(&faults) }.probed(both))
        }
        (Target::Cuda(index), _) => {
            let device = || Cuda::open(index, request.device_timeout);
            Ok(GpuRoute { request, device }.probed(both))
        }
        _ => refused("try_paths: CPU tensors have one way only, straight to the spill files"),
    }
}

impl<D: Device, F: Fn() -> Result<D>> GpuRoute<'_, F> {
    fn probed(&self, both: bool) -> PathTrial {
        let mut probed = PROBED.here().lock();
        let probed = probed.get_or_insert_default();
        let key = self.tried();
        if let Some(found) = probed.get(&key) {
            return found.clone();
        }
        let direct = self.try_direct().map_err(|error| error.to_string());
        let staged = if both || direct.is_ok() {
            self.try_staged().map_err(|error| error.to_string())
        } else {
            Err("not tried".to_owned())
        };
        let found = PathTrial { direct, staged };
        if found.is_whole() {
            probed.insert(key, found.clone());
        }
        found
    }

    fn tried(&self) -> Tried {
        let StoreConfig { directories, cufile, cap_bytes, queue_depth, max_bytes_per_s, .. } =
            self.request.store.clone();
        let (target, encrypt) = (self.request.target, self.request.encrypts());
        Tried { target, directories, cufile, cap_bytes, queue_depth, max_bytes_per_s, encrypt }
    }

    fn try_direct(&self) -> Result<(CuFileMode, PathRates)> {
        let tier = self.tier(&self.request.direct()?, None, None)?;
        let mode = cufile(&*tier);
        if mode.is_none() {
            self.trial(&tier, |trial| trial.round_trip())?;
        }
        let rates = self.trial(&tier, |trial| trial.rates())?;
        Ok((mode.unwrap_or(CuFileMode::Compatibility), rates))
    }

    fn try_staged(&self) -> Result<PathRates> {
        let store = StoreConfig { backend: BackendKind::Auto, ..self.request.store.clone() };
        let pool = Some(PoolSize::Fixed(TRIAL_POOL));
        let route = Route { way: Way::Host, why: None, pool, store: Some(store) };
        let tier = self.tier(&route, None, None)?;
        self.trial(&tier, |trial| trial.rates())
    }
}
