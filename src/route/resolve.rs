//! Derives the route from what was requested. Pure, except for a trial of the paths where that has to decide.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_store::{BackendKind, StoreConfig, StorePath};
use tch::Device;

use super::path::{IoPath, PathTrial, choose};
use super::way::{Route, Way};
use crate::device::{DeviceFaults, Simulation};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::available_memory;
use crate::tier::{BOUNCE_BYTES, PoolSize};
use crate::verify::Verify;

/// The settings that decide where bytes go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouteRequest<'a> {
    /// The device whose tensors are moved.
    pub(crate) target: Device,
    /// How long threads wait for a GPU.
    pub(crate) device_timeout: Duration,
    /// Set if a simulated GPU stands in for the CPU.
    pub(crate) simulated: Option<&'a Simulation>,
    /// What the device is to refuse, if a test says so.
    pub(crate) faults: Option<&'a Arc<DeviceFaults>>,
    /// Whether the policy keeps everything, and whether it plans.
    pub(crate) keeps: bool,
    pub(crate) plans: bool,
    pub(crate) path: IoPath,
    /// The path that `require_path` demands.
    pub(crate) required: Option<IoPath>,
    pub(crate) host_pool: Option<u64>,
    /// How many processes of the job share the host.
    pub(crate) processes: NonZero<u32>,
    pub(crate) read_ahead: u64,
    pub(crate) verify: Verify,
    pub(crate) store: &'a StoreConfig,
    /// The path of spill files that are open already.
    pub(crate) given: Option<&'a StorePath>,
}

/// The requested route. `found` runs a trial of the paths.
pub(crate) fn resolve(request: &RouteRequest<'_>, found: impl FnOnce() -> PathTrial) -> Result<Route> {
    if request.keeps {
        return Ok(Route { way: Way::Stay, why: None, pool: None, store: None });
    }
    if request.store.encrypt && request.given.is_some_and(|given| !given.is_encrypted()) {
        return refused(
            "encrypt(true) over a store that does not encrypt: open it with StoreConfig::encrypt",
        );
    }
    match (request.target, request.simulated) {
        (Device::Cpu, None) => request.of_cpu(),
        (Device::Cpu, Some(_)) | (Device::Cuda(_), _) => request.of_gpu(found),
        (other, _) => {
            refused(format!("device: tensors on {other:?} cannot be moved; only CPU and CUDA ones can"))
        }
    }
}

impl RouteRequest<'_> {
    /// The requested path, or else the required one.
    fn wanted(&self) -> IoPath {
        if self.path == IoPath::Auto { self.required.unwrap_or_default() } else { self.path }
    }

    /// Whether the processor can read and write the device's memory.
    pub(crate) fn is_host(&self) -> bool {
        self.simulated.is_some()
    }

    /// Whether what is written to the spill files is encrypted.
    pub(super) fn encrypts(&self) -> bool {
        self.store.encrypt || self.given.is_some_and(StorePath::is_encrypted)
    }

    fn has_folders(&self) -> bool {
        !self.store.directories.is_empty() || self.store.backend == BackendKind::Memory
    }

    /// The spill files, if any were requested.
    fn spill_files(&self) -> Option<StoreConfig> {
        let config = || StoreConfig { encrypt: self.encrypts(), ..self.store.clone() };
        (self.given.is_some() || self.has_folders()).then(config)
    }

    /// CPU tensors go straight to the disk: there is nothing in between.
    fn of_cpu(&self) -> Result<Route> {
        if matches!(self.wanted(), IoPath::Direct | IoPath::HostOnly) {
            return refused(
                "path, require_path: CPU tensors have one way only, straight to the spill files; leave them out",
            );
        }
        let Some(store) = self.spill_files() else {
            return refused(
                "no spill directory: CPU tensors have nowhere else to go. Call spill_to(directory) before build(), or \
                 policy(Keep) for a cache that moves nothing; tensors of a GPU need device(Device::Cuda(0))",
            );
        };
        Ok(Route { way: Way::Disk, why: None, pool: None, store: Some(store) })
    }

    fn of_gpu(&self, found: impl FnOnce() -> PathTrial) -> Result<Route> {
        let (path, why) = match self.wanted() {
            IoPath::Auto if self.has_a_choice() => {
                let (path, why) = choose(&found());
                (path, Some(why))
            }
            IoPath::Auto => (IoPath::Staged, None),
            path => (path, None),
        };
        let route = match path {
            IoPath::Direct => self.direct()?,
            IoPath::HostOnly => self.staged(None)?,
            IoPath::Staged | IoPath::Auto => self.staged(self.spill_files())?,
        };
        match self.required {
            Some(required) if required != IoPath::Auto && required != path => {
                let why = why.map_or(String::new(), |why| format!(", {why}"));
                Err(Error::new(
                    ErrorKind::Unmet,
                    format!("require_path({required:?}): the way is {path:?}{why}"),
                ))
            }
            _ => Ok(Route { why: why.or(route.why), ..route }),
        }
    }

    /// Whether no setting decides the path, so that a trial must. A host pool decides it, because it holds what is wanted next, and so
    /// does a policy that plans, because plans are made for one path. Checksums and encryption need the processor to see the bytes.
    fn has_a_choice(&self) -> bool {
        self.host_pool == Some(0)
            && self.given.is_none()
            && !self.plans
            && !self.verify.requires_checksums()
            && !self.encrypts()
            && !self.store.directories.is_empty()
            && self.store.backend == BackendKind::Auto
    }

    /// The route straight to the disk.
    pub(super) fn direct(&self) -> Result<Route> {
        if self.verify.requires_checksums() {
            return refused(format!(
                "path(Direct) with verify({:?}): checksums are taken of host memory, which these bytes pass by; choose one",
                self.verify
            ));
        }
        if self.encrypts() {
            return refused(
                "path(Direct) with encrypt(true): the processor encrypts, and does not see what goes straight between a GPU and the \
                 disk; choose one",
            );
        }
        let mut store = self.store.clone();
        match self.given {
            Some(path) if !self.is_host() && path.cufile().is_none() => {
                return refused(
                    "path(Direct) over a store that does not reach a GPU's memory: only cuFile's does",
                );
            }
            Some(_) => {}
            None if !self.has_folders() => {
                return refused(
                    "path(Direct) without a spill directory: call spill_to(directory) before build()",
                );
            }
            None if !matches!(store.backend, BackendKind::Auto | BackendKind::CuFile) && !self.is_host() => {
                let backend = store.backend;
                return refused(format!(
                    "backend({backend:?}) with path(Direct): only cuFile reaches a GPU's memory"
                ));
            }
            None if store.backend == BackendKind::Auto && (!self.is_host() || store.cufile.is_some()) => {
                store.backend = BackendKind::CuFile;
            }
            None => {}
        }
        Ok(Route { way: Way::Direct, why: None, pool: None, store: Some(store) })
    }

    /// The route through pinned host memory.
    fn staged(&self, store: Option<StoreConfig>) -> Result<Route> {
        let pool = match self.host_pool {
            None => PoolSize::Learned { cap: available_memory() / 2 / u64::from(self.processes.get()) },
            Some(0) => PoolSize::Bounce(
                self.simulated.and_then(|simulation| simulation.staging).unwrap_or(BOUNCE_BYTES),
            ),
            Some(bytes) => PoolSize::Fixed(bytes),
        };
        if matches!(pool, PoolSize::Bounce(_)) && store.is_none() {
            return refused(
                "host_pool(0) without a spill directory leaves no place to offload to: give one of them",
            );
        }
        let is_shared = self.processes.get() > 1 && matches!(pool, PoolSize::Learned { .. });
        let why = is_shared.then(|| format!("{} processes share the host", self.processes));
        Ok(Route { way: Way::Host, why, pool: Some(pool), store })
    }
}

pub(super) fn refused<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, message))
}

#[cfg(test)]
mod tests {
    use ssdtrain_plan::Release;
    use ssdtrain_store::CuFileMode;

    use super::*;
    use crate::route::PathRates;

    /// Request for a GPU with a spill directory and without a host pool that would decide the path.
    fn request(store: &StoreConfig) -> RouteRequest<'_> {
        RouteRequest {
            target: Device::Cuda(0),
            device_timeout: Duration::MAX,
            simulated: None,
            faults: None,
            keeps: false,
            plans: false,
            path: IoPath::Auto,
            required: None,
            host_pool: Some(0),
            processes: NonZero::<u32>::MIN,
            read_ahead: 0,
            verify: Verify::Auto,
            store,
            given: None,
        }
    }

    fn on_disk() -> StoreConfig {
        StoreConfig { directories: vec!["/mnt/nvme".into()], ..StoreConfig::default() }
    }

    fn encrypted() -> StoreConfig {
        StoreConfig { encrypt: true, ..on_disk() }
    }

    fn direct_is_faster() -> PathTrial {
        let rates = |both| PathRates { write: both, read: both, both };
        PathTrial { direct: Ok((CuFileMode::NvidiaFs, rates(2e9))), staged: Ok(rates(1e9)) }
    }

    fn untried() -> PathTrial {
        panic!("nothing is to be found out")
    }

    #[test]
    fn a_way_that_nothing_decides_is_tried_out() {
        let store = on_disk();
        let route = resolve(&request(&store), direct_is_faster).unwrap();
        assert_eq!((route.way, route.host_bytes()), (Way::Direct, 0));
        assert_eq!(route.store.as_ref().unwrap().backend, BackendKind::CuFile);
        assert!(route.to_string().contains("chosen: "), "{route}");
    }

    #[test]
    fn what_was_asked_for_decides_without_a_trial() {
        let (store, encrypted) = (on_disk(), encrypted());
        for request in [
            RouteRequest { host_pool: Some(1 << 30), ..request(&store) },
            RouteRequest { host_pool: None, ..request(&store) },
            RouteRequest { plans: true, ..request(&store) },
            RouteRequest { path: IoPath::Staged, ..request(&store) },
            RouteRequest { verify: Verify::Checksums, ..request(&store) },
            request(&encrypted),
        ] {
            let route = resolve(&request, untried).unwrap();
            assert_eq!((route.way, route.release()), (Way::Host, Release::InStreamOrder), "{request:?}");
        }
        let cpu = RouteRequest { target: Device::Cpu, host_pool: None, ..request(&store) };
        assert_eq!(resolve(&cpu, untried).unwrap().way, Way::Disk);
        let kept = RouteRequest { keeps: true, ..request(&store) };
        assert_eq!(resolve(&kept, untried).unwrap().way, Way::Stay);
    }

    #[test]
    fn host_memory_alone_uses_no_directory() {
        let store = on_disk();
        let request = RouteRequest { path: IoPath::HostOnly, host_pool: Some(1 << 30), ..request(&store) };
        let route = resolve(&request, untried).unwrap();
        assert_eq!((route.host_bytes(), route.disk_bytes()), (1 << 30, 0));
    }

    #[test]
    fn a_pool_without_a_size_is_shared_among_the_processes_of_the_host() {
        let store = on_disk();
        let resolved = |processes: u32, host_pool| {
            let processes = NonZero::new(processes).unwrap();
            resolve(&RouteRequest { processes, host_pool, ..request(&store) }, untried).unwrap()
        };
        let [alone, shared] = [1, 8].map(|processes| resolved(processes, None));
        // Memory comes and goes meanwhile.
        assert!((7..=9).contains(&(alone.host_bytes() / shared.host_bytes())), "{alone} {shared}");
        assert!(shared.to_string().contains("8 processes share the host") && alone.why.is_none(), "{shared}");
        assert_eq!(resolved(8, Some(1 << 30)).host_bytes(), 1 << 30, "what is set is each one's");
    }

    #[test]
    fn another_way_than_required_is_unmet() {
        let store = on_disk();
        let request =
            RouteRequest { required: Some(IoPath::Direct), path: IoPath::Staged, ..request(&store) };
        let error = resolve(&request, untried).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unmet);
    }

    #[test]
    fn what_cannot_be_is_refused_by_the_name_of_its_setting() {
        let (store, nowhere) = (on_disk(), StoreConfig::default());
        let pool = StoreConfig { backend: BackendKind::Pool, ..on_disk() };
        let encrypted = encrypted();
        let cases = [
            (RouteRequest { target: Device::Mps, ..request(&store) }, "device: "),
            (RouteRequest { target: Device::Cpu, ..request(&nowhere) }, "spill_to(directory)"),
            (
                RouteRequest { target: Device::Cpu, path: IoPath::Direct, ..request(&store) },
                "path, require_path",
            ),
            (RouteRequest { path: IoPath::Direct, ..request(&nowhere) }, "path(Direct)"),
            (RouteRequest { path: IoPath::Direct, ..request(&pool) }, "backend(Pool)"),
            (RouteRequest { path: IoPath::Direct, ..request(&encrypted) }, "encrypt(true)"),
            (RouteRequest { required: Some(IoPath::Direct), ..request(&encrypted) }, "encrypt(true)"),
            (request(&nowhere), "host_pool(0)"),
        ];
        for (request, named) in cases {
            let error = resolve(&request, untried).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn a_route_says_whether_what_goes_to_disk_is_encrypted() {
        let (plain, encrypted) = (on_disk(), encrypted());
        let text = |store| {
            let cpu = RouteRequest { target: Device::Cpu, host_pool: None, ..request(store) };
            [request(store), cpu].map(|request| resolve(&request, direct_is_faster).unwrap().to_string())
        };
        assert!(text(&encrypted).iter().all(|text| text.contains("encrypted spill files")));
        assert!(text(&plain).iter().all(|text| !text.contains("encrypted")));
    }
}
