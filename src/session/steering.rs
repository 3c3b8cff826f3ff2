//! What the policy decides before each step, and what it is told of it afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ssdtrain_libtorch as torch;
use ssdtrain_plan::{
    Observation, Outset, PlanReport, Planning, Policy, PolicyReport, Profile, Rates, Resources, SavedPlan,
    Saves, StepPlan, StepProfile, Today,
};
use ssdtrain_store::sync::Mutex;
use ssdtrain_store::{Store, StoreStats};
use tch::Device;

use crate::cache::Cache;
use crate::config::TensorCacheBuilder;
use crate::mem::free_memory;
use crate::profile::Probe;
use crate::route::Route;
use crate::step::StepContext;
use crate::telemetry::{Accounts, Scopes, StepReport, events};
use crate::tier::Tier;

/// Has the policy decide how each step is run.
pub(super) struct Steering {
    policy: Mutex<Box<dyn Policy>>,
    accounts: Arc<Accounts>,
    /// Whether the policy had settled when the last step ended.
    settled: AtomicBool,
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
    pub(super) store: Option<StoreStats>,
    /// How often the device's driver had been asked for memory.
    requests: u64,
    /// How often a ceiling on what is allocated of it had memory asked for.
    ceiling_asked: u64,
    /// Whether host memory for steps to come was being pinned.
    is_pinning: bool,
}

impl Noted {
    /// Whether a ceiling on what is allocated of the device has had memory asked for since then.
    pub(super) fn was_at_ceiling(&self, device: Device) -> bool {
        torch::Ceiling::asked(device) > self.ceiling_asked
    }

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
    pub(super) fn new(config: &TensorCacheBuilder, route: &Route, accounts: &Arc<Accounts>) -> Steering {
        Steering {
            policy: Mutex::new(config.new_policy()),
            accounts: Arc::clone(accounts),
            settled: AtomicBool::new(false),
            resources: Resources {
                host_pool: route.host_bytes(),
                disk: route.disk_bytes(),
                release: route.release(),
            },
            traced: config.trace,
        }
    }

    /// Step `number` begins; `today` tells how much the disks have taken.
    pub(super) fn begin(
        &self,
        number: u64,
        cache: &Cache,
        device: Device,
        today: impl FnOnce() -> Today,
    ) -> Steered {
        let store = cache.tier().and_then(Tier::store);
        // Before the disks are asked: what is written meanwhile counts in any case.
        let outlook = store.map(Store::outlook);
        let today = today();
        let free = || free_memory(device);
        let scope = |path: &str| cache.scopes.at(path);
        let lacks_host = AtomicBool::new(false);
        let provide = |bytes: u64| {
            let is_there = cache.tier().is_none_or(|tier| tier.provide(bytes));
            lacks_host.fetch_or(!is_there, Ordering::Relaxed);
            is_there
        };
        let outset = Outset {
            step: number,
            resources: self.resources,
            today,
            free: &free,
            provide: &provide,
            scope: &scope,
        };
        let plan = self.policy.lock().begin(&outset);
        self.tell(number, &cache.scopes);
        if let Some((store, outlook)) = store.zip(outlook) {
            store.allow(plan.most_written.and_then(|bytes| store.writes().of_files(bytes)), outlook);
        }
        let trace = cache.trace.as_ref().filter(|_| plan.profiled);
        let probe = trace.map(|trace| Arc::new(Probe::begin(trace, device)));
        if let Some(probe) = &probe {
            cache.show_pressure(probe.pressure());
            cache.hold_back(true);
        }
        let store = store.map(Store::stats);
        let noted = Noted {
            store,
            requests: torch::memory(device).requests,
            ceiling_asked: torch::Ceiling::asked(device),
            is_pinning: lacks_host.into_inner(),
        };
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

    /// A step has ended: the policy learns from it. Returns whether it has settled.
    pub(super) fn end(&self, step: &StepContext, observed: Observation) -> bool {
        if step.plan.timed {
            tell_timed(step, &observed);
        }
        let scopes = &step.cache.scopes;
        self.policy.lock().end(&step.plan, observed);
        self.tell(step.number, scopes);
        let is_settled = self.is_settled();
        let was_settled = self.settled.swap(is_settled, Ordering::Relaxed);
        if is_settled
            && !was_settled
            && let Some(plan) = self.plan(scopes)
        {
            tracing::info!(
                target: events::PLAN,
                step = step.number,
                step_seconds = plan.step.as_secs_f64(),
                peak_bytes = plan.prediction.peak(),
                in_reach = plan.in_reach,
                "the plan has settled"
            );
        }
        is_settled
    }

    /// Tells what has become of plans.
    fn tell(&self, step: u64, scopes: &Scopes) {
        let decisions = self.policy.lock().decisions();
        if decisions.is_empty() {
            return;
        }
        let plan = self.plan(scopes);
        for decision in decisions {
            self.accounts.decided(decision.what());
            tracing::info!(
                target: events::PLAN,
                step,
                change = %decision.what(),
                why = %decision,
                step_seconds = plan.as_ref().map(|plan| plan.step.as_secs_f64()),
                peak_bytes = plan.as_ref().map(|plan| plan.prediction.peak()),
                in_reach = plan.as_ref().map(|plan| plan.in_reach),
                "the plan has changed"
            );
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
        // One that was profiled while a later step was has only a part of what it did on record.
        let probe = step.probe.as_ref().filter(|probe| probe.is_latest());
        let profile = probe.and_then(|probe| probe.end()).map(|profile| {
            let rates = with_copies(profile.rates, step.cache.tier());
            Box::new(StepProfile { min_bytes: step.min_bytes, rates, ..profile })
        });
        self.end_profile(step);
        Observation {
            step: step.number,
            wall: report.wall,
            overhead: Duration::ZERO,
            launched: !report.awaited,
            behind: Duration::ZERO,
            is_told: false,
            clock: None,
            stall: report.stall.total(),
            device_stall: report.stall.device_budget + report.stall.copy_in,
            // What other threads have the device do in between would count.
            rerun: step.counters.device_rerun_time().filter(|_| step.orders.is_one_threads()),
            peak: report.act_peak_bytes,
            written: rate(|stats| stats.bytes_written, |stats| stats.write_busy),
            read: rate(|stats| stats.bytes_read, |stats| stats.read_busy),
            profile,
            followed: step.cursor.followed(),
            scopes: step.record.in_order(),
            moved: report.offloaded.count + report.recomputed.count + report.store_failures.count,
            cancelled: report.cancelled.count,
            pressed: report.pressed.bytes,
            at_ceiling: noted.was_at_ceiling(step.device),
            compiled: false,
            has_grown: false,
            pinned: noted.is_pinning,
        }
    }

    /// Ends the recording of a step that is profiled, unless the user records all.
    pub(super) fn end_profile(&self, step: &StepContext) {
        let Some(probe) = &step.probe else { return };
        // What was saved in the step may keep it for long.
        step.cache.hide_pressure(probe.pressure());
        if !self.traced {
            probe.pause();
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

/// Tells of a step whose time is compared with others.
fn tell_timed(step: &StepContext, observed: &Observation) {
    let Observation { wall, stall, rerun, behind, clock, compiled, has_grown, followed, .. } = observed;
    let kept = match &step.plan.saves {
        Saves::Scheduled { courses, .. } => {
            followed.and_then(|followed| courses.get(followed.course)).is_some_and(|one| one.is_baseline)
        }
        saves => matches!(saves, Saves::Keep),
    };
    tracing::debug!(
        target: events::STEP,
        step = step.number,
        wall_seconds = wall.as_secs_f64(),
        stall_seconds = stall.as_secs_f64(),
        rerun_seconds = rerun.map(|rerun| rerun.as_secs_f64()),
        behind_seconds = behind.as_secs_f64(),
        clock_hertz = clock,
        kept,
        compiled,
        has_grown,
        "a step is timed"
    );
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
