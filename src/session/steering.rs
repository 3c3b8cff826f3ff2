//! What the policy decides before each step, and what it is told of it afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ssdtrain_libtorch as torch;
use ssdtrain_plan::{
    Observation, Outset, PlanReport, Planning, Policy, PolicyReport, Prediction, Profile, Rates, Resources,
    SavedPlan, Saves, StepPlan, StepProfile,
};
use ssdtrain_store::{Store, StoreStats};
use tch::Device;

use crate::cache::Cache;
use crate::config::TensorCacheBuilder;
use crate::mem::free_memory;
use crate::profile::Probe;
use crate::route::Route;
use crate::step::StepContext;
use crate::telemetry::{Scopes, StepReport};
use crate::tier::Tier;

/// Has the policy decide how each step is run.
pub(super) struct Steering {
    policy: Mutex<Box<dyn Policy>>,
    resources: Resources,
    /// Whether the user asked for a trace as well.
    traced: bool,
}

/// What was decided for a step.
pub(super) struct Steered {
    pub(super) plan: StepPlan,
    /// Takes notes of the step, if it is profiled.
    pub(super) probe: Option<Arc<Probe>>,
    pub(super) noted: Noted,
}

/// What is known when a step begins.
pub(super) struct Noted {
    /// The store's statistics.
    store: Option<StoreStats>,
    /// How often the device's driver had been asked for memory.
    requests: u64,
    /// Whether host memory for steps to come was being pinned.
    is_pinning: bool,
}

impl Noted {
    /// Whether the device's driver was asked for memory since then.
    pub(super) fn has_grown(&self, device: Device) -> bool {
        torch::memory(device).requests > self.requests
    }
}

/// Copies whose speed cannot be tried out are taken to move so many bytes per second.
const UNKNOWN_COPIES: f64 = 1e9;
/// Fewer bytes than this say nothing about a disk's speed.
const TELLING_BYTES: u64 = 8 << 20;

impl Steering {
    pub(super) fn new(config: &TensorCacheBuilder, route: &Route) -> Steering {
        Steering {
            policy: Mutex::new(config.new_policy()),
            resources: Resources {
                host_pool: route.host_bytes(),
                disk: route.disk_bytes(),
                release: route.release(),
            },
            traced: config.trace,
        }
    }

    /// Step `number` begins.
    pub(super) fn begin(&self, number: u64, cache: &Cache, device: Device) -> Steered {
        let free = || free_memory(device);
        let scope = |path: &str| cache.scopes.at(path);
        let lacks_host = AtomicBool::new(false);
        let provide = |bytes: u64| {
            let is_there = cache.tier().is_none_or(|tier| tier.provide(bytes));
            lacks_host.fetch_or(!is_there, Ordering::Relaxed);
            is_there
        };
        let outset =
            Outset { step: number, resources: self.resources, free: &free, provide: &provide, scope: &scope };
        let plan = self.policy.lock().begin(&outset);
        let trace = cache.trace.as_ref().filter(|_| plan.profiled);
        let probe = trace.map(|trace| Arc::new(Probe::begin(trace, device)));
        if probe.is_some() {
            cache.hold_back(true);
        }
        let store = cache.tier().and_then(Tier::store).map(Store::stats);
        let noted =
            Noted { store, requests: torch::memory(device).requests, is_pinning: lacks_host.into_inner() };
        Steered { plan, probe, noted }
    }

    /// What users should know of a step that is ending.
    pub(super) fn warnings(&self, step: &StepContext, observed: &Observation) -> Vec<String> {
        self.policy.lock().warnings(&step.plan, observed)
    }

    /// What a step that is ending had to do with a plan.
    pub(super) fn planning(&self, step: &StepContext, observed: &Observation) -> Option<Planning> {
        self.policy.lock().planning(&step.plan, observed)
    }

    /// A step has ended: the policy learns from it.
    pub(super) fn end(&self, step: &StepContext, observed: Observation) {
        if step.plan.timed {
            let Observation { wall, stall, compiled, has_grown, followed, .. } = &observed;
            let kept = match &step.plan.saves {
                Saves::Scheduled { courses, .. } => followed
                    .and_then(|followed| courses.get(followed.course))
                    .is_some_and(|one| one.is_baseline),
                saves => matches!(saves, Saves::Keep),
            };
            tracing::debug!(?wall, ?stall, kept, compiled, has_grown, "step {} is timed", step.number);
        }
        let before = self.plan(&step.cache.scopes);
        self.policy.lock().end(&step.plan, observed);
        let plans = before.map(|plan| plan.plans);
        if let Some(plan) = self.plan(&step.cache.scopes).filter(|plan| Some(plan.plans) != plans) {
            let Prediction { step, stall, .. } = plan.prediction;
            let (stall, peak) = (stall.total(), plan.prediction.peak());
            tracing::debug!(?step, ?stall, peak, "plan {}, of a micro-batch", plan.plans);
        }
    }

    /// What was seen of a step that is ending.
    pub(super) fn observe(&self, noted: &Noted, step: &StepContext, report: &StepReport) -> Observation {
        let now = step.cache.tier().and_then(Tier::store).map(Store::stats);
        let rate = |bytes: fn(&StoreStats) -> u64, busy: fn(&StoreStats) -> Duration| {
            let (now, before) = (now.as_ref()?, noted.store.as_ref()?);
            let (bytes, busy) = (bytes(now) - bytes(before), busy(now) - busy(before));
            (bytes >= TELLING_BYTES && !busy.is_zero()).then(|| bytes as f64 / busy.as_secs_f64())
        };
        let profile = step.probe.as_ref().and_then(|probe| probe.end()).map(|profile| {
            let rates = with_copies(profile.rates, step.cache.tier());
            Box::new(StepProfile { min_bytes: step.min_bytes, rates, ..profile })
        });
        if let Some(trace) = step.cache.trace.as_ref().filter(|_| step.probe.is_some() && !self.traced) {
            trace.pause();
        }
        Observation {
            step: step.number,
            wall: report.wall,
            launched: !report.awaited,
            stall: report.stall.total(),
            peak: report.act_peak_bytes,
            written: rate(|stats| stats.bytes_written, |stats| stats.write_busy),
            read: rate(|stats| stats.bytes_read, |stats| stats.read_busy),
            profile,
            followed: step.cursor.followed(),
            scopes: step.record.in_order(),
            moved: report.offloaded.count + report.recomputed.count + report.store_failures.count,
            cancelled: report.cancelled.count,
            pressed: report.pressed.bytes,
            compiled: false,
            has_grown: false,
            pinned: noted.is_pinning,
        }
    }

    /// Whether the policy has settled: as far as is known, steps will go like the last one.
    pub(super) fn is_settled(&self) -> bool {
        self.policy.lock().is_settled()
    }

    pub(super) fn profile(&self, scopes: &Scopes) -> Option<Profile> {
        self.policy.lock().profile(&|scope| scopes.name(scope))
    }

    pub(super) fn saved_plan(&self, scopes: &Scopes) -> Option<SavedPlan> {
        self.policy.lock().saved_plan(&|scope| scopes.name(scope))
    }

    /// What the policy has decided for the course with this number; see [`Policy::report`].
    pub(super) fn report(&self, course: usize, scopes: &Scopes) -> Option<PolicyReport> {
        self.policy.lock().report(course, &|scope| scopes.name(scope))
    }

    /// Its plan for each storage of steps like the last one, if it makes one.
    pub(super) fn plan(&self, scopes: &Scopes) -> Option<Arc<PlanReport>> {
        match self.report(0, scopes)? {
            PolicyReport::Plan(plan) => Some(plan),
            _ => None,
        }
    }
}

/// The rates of a step, with those of copies as a trial shows them if the step has copied nothing.
fn with_copies(rates: Rates, tier: Option<&dyn Tier>) -> Rates {
    let Some(tier) = tier.filter(|_| rates.out.is_none() || rates.back.is_none()) else { return rates };
    match tier.try_copies() {
        Ok(tried) => {
            let (out, back) = tried.unzip();
            Rates { out: rates.out.or(out), back: rates.back.or(back), ..rates }
        }
        Err(error) => {
            tracing::warn!(%error, "how fast copies to host memory are could not be tried out: plans count on 1 GB/s");
            let unknown = Some(UNKNOWN_COPIES);
            Rates { out: rates.out.or(unknown), back: rates.back.or(unknown), ..rates }
        }
    }
}
