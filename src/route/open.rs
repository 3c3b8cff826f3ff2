//! Opens the tiers below the device as the route says.

use std::sync::Arc;

use ssdtrain_libtorch::library_folder;
use ssdtrain_store::{CuFileMode, Store, StoreConfig};
use tch::Device as Target;

use super::path::IoPath;
use super::resolve::{RouteRequest, refused};
use super::trial::Trial;
use super::way::{Route, Way};
use crate::device::{Context, Cuda, Device, FaultyDevice};
use crate::error::{Error, ErrorKind, Result};
use crate::tier::{DirectTier, DiskTier, HostSettings, HostTier, Tier};
use crate::trace::{DeviceTrace, Trace};

/// Opens the tiers of `route`, over `given` if the caller has spill files already; `None` if everything is kept.
pub(crate) fn open(
    route: &Route,
    request: &RouteRequest<'_>,
    given: Option<Store>,
    trace: Option<&Arc<Trace>>,
) -> Result<Option<Arc<dyn Tier>>> {
    let tier = match (route.way, request.target, request.simulated) {
        (Way::Stay, target, _) => {
            // What the device computes should be in the trace all the same.
            if let (Some(trace), Target::Cuda(index)) = (trace, target) {
                drop(DeviceTrace::start(trace, &Arc::new(Cuda::open(index, request.device_timeout)?))?);
            }
            return Ok(None);
        }
        (_, _, Some(simulation)) => {
            let faults = request.faults.cloned().unwrap_or_default();
            GpuRoute { request, device: || simulation.start(&faults) }.tier(route, given, trace)
        }
        (_, Target::Cuda(index), _) => {
            let device = || Cuda::open(index, request.device_timeout);
            match request.faults {
                None => GpuRoute { request, device }.tier(route, given, trace),
                Some(faults) => {
                    let device = || Ok(FaultyDevice::new(device()?, faults));
                    GpuRoute { request, device }.tier(route, given, trace)
                }
            }
        }
        (..) => match spill_files(route, request, given)? {
            Some(store) => Ok(Arc::new(DiskTier::new(store, trace.cloned())) as Arc<dyn Tier>),
            None => refused("no spill directory: call spill_to(directory) before build()"),
        },
    };
    let tier = tier?;
    if request.required == Some(IoPath::Direct) && cufile(&*tier) == Some(CuFileMode::Compatibility) {
        return Err(Error::new(
            ErrorKind::Unmet,
            "require_path(Direct): cuFile runs in compatibility mode, through host memory, on this machine: neither nvidia-fs \
             nor PCI P2PDMA moves its bytes. `ssdtrain-bench doctor` tells what is missing",
        ));
    }
    Ok(Some(tier))
}

/// The settings of a route for a GPU, and how to open the GPU.
pub(super) struct GpuRoute<'a, F> {
    pub(super) request: &'a RouteRequest<'a>,
    pub(super) device: F,
}

impl<D: Device, F: Fn() -> Result<D>> GpuRoute<'_, F> {
    /// The tier of this route. If cuFile moves its bytes, it is tried first.
    pub(super) fn tier(
        &self,
        route: &Route,
        given: Option<Store>,
        trace: Option<&Arc<Trace>>,
    ) -> Result<Arc<dyn Tier>> {
        let store = spill_files(route, self.request, given)?;
        let tier: Arc<dyn Tier> = match (route.pool, store) {
            (Some(pool), store) => {
                let settings = HostSettings { pool, read_ahead: self.request.read_ahead };
                HostTier::new((self.device)()?, store, settings, trace)?
            }
            (None, Some(store)) => {
                DirectTier::new((self.device)()?, store, self.request.store.window(), trace)?
            }
            (None, None) => return refused("path(Direct) without a spill directory"),
        };
        if route.way == Way::Direct && cufile(&*tier).is_some() {
            self.trial(&tier, |trial| trial.round_trip())?;
        }
        Ok(tier)
    }

    pub(super) fn trial<T>(
        &self,
        tier: &Arc<dyn Tier>,
        run: impl FnOnce(Trial<'_, D>) -> Result<T>,
    ) -> Result<T> {
        run(Trial::new(Arc::clone(tier), &(self.device)()?))
    }
}

/// How cuFile moves a tier's bytes; `None` if it does not.
pub(super) fn cufile(tier: &dyn Tier) -> Option<CuFileMode> {
    tier.store().and_then(|store| store.path().cufile())
}

/// The spill files of a route: `given` if there are any. The store finds cuFile beside libtorch as well.
fn spill_files(route: &Route, request: &RouteRequest<'_>, given: Option<Store>) -> Result<Option<Store>> {
    let (None, Some(config)) = (&given, &route.store) else { return Ok(given) };
    let mut config = StoreConfig { cufile_beside: library_folder(), ..config.clone() };
    if let (Way::Direct, Target::Cuda(index)) = (route.way, request.target) {
        config.gpu = Some(Arc::new(Context::open(index)?));
    }
    Ok(Some(Store::open(config)?))
}
