//! What is decided before each step, and what is learned from it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ssdtrain_plan::{Goal, Placement, Prediction, Release};
use ssdtrain_store::{Store, StoreStats};
use tch::Device;

use crate::cache::{Cache, Limits};
use crate::config::{Policy, TensorCacheBuilder};
use crate::mem::free_memory;
use crate::policy::{
    Auto, Cursor, Keeping, Module, NextStep, Objective, Observed, Profile, Rule, Stay, StepOutcome,
};
use crate::profile::Probe;
use crate::route::Route;
use crate::step::{StepContext, Unplanned};
use crate::telemetry::{AdaptiveReport, PlanReport, ScopeId, Scopes, StepReport};
use crate::tier::Tier;
use crate::trace::{Forward, Trace};

/// Decides how each step is run.
pub(super) struct Steering {
    by: By,
    /// The limits from the configuration.
    limits: Limits,
    forced: Option<Arc<[Placement]>>,
    /// Whether the user asked for a trace as well.
    traced: bool,
}

enum By {
    /// By scope: some keep their tensors, all others move them.
    Scopes(Mutex<Keeping>),
    /// By a plan for each storage.
    Plans(Box<Mutex<Auto>>),
}

/// What was decided for a step.
pub(super) struct Steered {
    pub(super) kept_scopes: HashSet<ScopeId>,
    pub(super) cursor: Cursor,
    pub(super) probe: Option<Arc<Probe>>,
    /// How saves that deviate from the plan are treated.
    pub(super) unplanned: Option<Unplanned>,
    pub(super) noted: Noted,
}

/// What is recorded of a step while it runs.
#[derive(Default)]
pub(super) struct Noted {
    /// The trace's position when the step began, if its scopes are profiled.
    scopes_from: Option<u64>,
    /// What each scope had saved by the end of forward.
    saved: Mutex<Option<Vec<(ScopeId, u64)>>>,
    /// The store's statistics before the step.
    store: Option<StoreStats>,
    /// Whether the step keeps everything, for comparison with planned steps.
    baseline: bool,
}

/// Fewer bytes than this say nothing about a disk's speed.
const TELLING_BYTES: u64 = 8 << 20;

/// Whether everything movable leaves the GPU, because no budget was given.
pub(super) fn is_without_budget(config: &TensorCacheBuilder, route: &Route) -> bool {
    let has_budget = config.device_budget.is_some() || config.backward_budget.is_some();
    config.chosen_policy() == Policy::Offload && !has_budget && route.release() != Release::WhenStored
}

/// The limits from the configuration.
fn limits(config: &TensorCacheBuilder, route: &Route) -> Limits {
    // Storages that leave as late as possible would never leave under an unlimited budget.
    let by_default = if is_without_budget(config, route) { config.prefetch } else { u64::MAX };
    let device_budget = config.device_budget.unwrap_or(by_default);
    Limits {
        device_budget,
        backward_budget: config.backward_budget.unwrap_or(u64::MAX).min(device_budget),
        prefetch: config.prefetch,
        stores_in_flight: config.store.window(),
        late: false,
    }
}

/// The goal of planning, and the resources it may use.
fn objective(goal: Goal, config: &TensorCacheBuilder, route: &Route) -> Objective {
    Objective {
        goal,
        host_pool: route.host_bytes(),
        disk: route.disk_bytes(),
        release: route.release(),
        written_per_day: config.written_per_day,
    }
}

impl Steering {
    pub(super) fn new(config: &TensorCacheBuilder, route: &Route) -> Steering {
        let limits = limits(config, route);
        let room = limits.device_budget.min(limits.backward_budget).saturating_sub(limits.prefetch);
        let by = match config.chosen_policy() {
            Policy::Auto(goal) => By::Plans(Box::new(Mutex::new(Auto::new(objective(goal, config, route))))),
            Policy::Adaptive(_) => {
                let stay = Stay { modules: config.keep_last.max(1), bytes: room };
                By::Scopes(Mutex::new(Keeping::new(Rule::paper(stay))))
            }
            Policy::Offload | Policy::Keep => {
                By::Scopes(Mutex::new(Keeping::new(Rule::Last(config.keep_last))))
            }
        };
        Steering { by, limits, forced: config.forced.clone(), traced: config.trace }
    }

    /// The limits of steps that are not planned.
    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether steps may be profiled, which needs a trace.
    pub(super) fn profiles(&self) -> bool {
        match &self.by {
            By::Scopes(keeping) => keeping.lock().may_profile(),
            By::Plans(_) => true,
        }
    }

    /// Step `number` begins.
    pub(super) fn begin(&self, number: u64, cache: &Cache, device: Device) -> Steered {
        let mut steered = Steered {
            kept_scopes: HashSet::new(),
            cursor: Cursor::default(),
            probe: None,
            unplanned: None,
            noted: Noted { store: cache.tier().and_then(Tier::store).map(Store::stats), ..Noted::default() },
        };
        match &self.by {
            By::Scopes(keeping) => {
                let keeping = keeping.lock();
                steered.kept_scopes = keeping.kept();
                if let Some(trace) = cache.trace.as_ref().filter(|_| keeping.profiles(number)) {
                    trace.resume();
                    steered.noted.scopes_from = Some(trace.position());
                }
            }
            By::Plans(auto) => {
                let limits = match auto.lock().next_step(number, || free_memory(device)) {
                    NextStep::OffloadAll { profiled, budgets } => {
                        steered.cursor = Cursor::of_all();
                        let trace = cache.trace.as_ref().filter(|_| profiled);
                        steered.probe = trace.map(|trace| Arc::new(Probe::begin(trace, device)));
                        cache.hold_back(steered.probe.is_some());
                        self.planned(budgets)
                    }
                    NextStep::Keep { headroom } => {
                        steered.cursor = Cursor::of_all();
                        Unplanned { headroom, device, limits: self.limits }.limits(cache)
                    }
                    NextStep::Baseline => {
                        steered.cursor = Cursor::forced(Arc::new([Placement::Keep]));
                        steered.noted.baseline = true;
                        self.planned(ssdtrain_plan::Budgets::default())
                    }
                    NextStep::Follow { schedule, budgets, headroom } => {
                        steered.cursor = Cursor::new(schedule);
                        steered.unplanned = Some(Unplanned { headroom, device, limits: self.limits });
                        self.planned(budgets)
                    }
                };
                cache.set_limits(limits);
            }
        }
        if let Some(forced) = &self.forced {
            steered.cursor = Cursor::forced(Arc::clone(forced));
        }
        steered
    }

    fn planned(&self, budgets: ssdtrain_plan::Budgets) -> Limits {
        let ssdtrain_plan::Budgets { device_budget, backward_budget, prefetch, .. } = budgets;
        Limits { device_budget, backward_budget, prefetch, ..self.limits }
    }

    /// Whether the step that is ending must wait for the device, so that its time covers all it computes.
    pub(super) fn is_timed(&self) -> bool {
        match &self.by {
            By::Scopes(_) => false,
            By::Plans(auto) => auto.lock().settles(),
        }
    }

    /// Learns from a step that has ended.
    pub(super) fn end(&self, noted: &Noted, step: &StepContext, report: &StepReport) {
        let trace = step.cache.trace.as_ref();
        match &self.by {
            By::Scopes(keeping) => {
                if let Some((profile, trace)) = trace.and_then(|trace| Some((noted.profile(trace)?, trace))) {
                    self.pause(trace);
                    keeping.lock().learn(profile);
                }
                keeping.lock().learn_last(|| step.record.in_order());
            }
            By::Plans(auto) => {
                let mut auto = auto.lock();
                let before = auto.plan().map(|(number, _)| number);
                let observed = noted.observed(step, report);
                let went = match (&step.probe, step.cursor.followed()) {
                    (Some(probe), _) => {
                        let profile = probe.end();
                        trace.into_iter().for_each(|trace| self.pause(trace));
                        StepOutcome::Profiled(profile)
                    }
                    (None, Some(followed)) => StepOutcome::Planned(followed),
                    (None, None) if noted.baseline => StepOutcome::Baseline,
                    (None, None) => StepOutcome::Unplanned,
                };
                if auto.settles() {
                    let (wall, stall) = (observed.wall, observed.stall);
                    tracing::debug!(
                        ?wall,
                        ?stall,
                        baseline = noted.baseline,
                        "step {} is timed",
                        step.number
                    );
                }
                auto.ended(step.number, went, observed);
                if let Some((number, plan)) = auto.plan().filter(|(number, _)| Some(*number) != before) {
                    let Prediction { step, stall, .. } = plan.prediction;
                    let (stall, peak) = (stall.total(), plan.prediction.peak());
                    tracing::debug!(?step, ?stall, peak, "plan {number}, of a micro-batch");
                }
            }
        }
    }

    fn pause(&self, trace: &Trace) {
        if !self.traced {
            trace.pause();
        }
    }

    pub(super) fn adaptive(&self, scopes: &Scopes) -> Option<AdaptiveReport> {
        match &self.by {
            By::Scopes(keeping) => keeping.lock().report(scopes),
            By::Plans(_) => None,
        }
    }

    /// Whether the policy has settled: as far as is known, steps will go like the last one.
    pub(super) fn is_settled(&self) -> bool {
        match &self.by {
            By::Scopes(keeping) => keeping.lock().is_settled(),
            By::Plans(auto) => auto.lock().is_settled(),
        }
    }

    pub(super) fn profile(&self) -> Option<ssdtrain_plan::Profile> {
        match &self.by {
            By::Scopes(_) => None,
            By::Plans(auto) => auto.lock().profile(),
        }
    }

    pub(super) fn plan(&self, scopes: &Scopes) -> Option<Arc<PlanReport>> {
        match &self.by {
            By::Scopes(_) => None,
            By::Plans(auto) => auto.lock().report(scopes),
        }
    }
}

impl Noted {
    /// Records what each scope has saved. The first micro-batch stands for the others.
    pub(super) fn forward_ends(&self, step: &StepContext) {
        if self.scopes_from.is_some() {
            self.saved.lock().get_or_insert_with(|| step.record.by_last_save());
        }
    }

    /// The profile of the step's scopes, if they were to be profiled and enough was seen.
    fn profile(&self, trace: &Trace) -> Option<Profile> {
        let Forward { scopes, bandwidth } = trace.forward(self.scopes_from?)?;
        let (saved, bandwidth) = (self.saved.lock().take()?, bandwidth?);
        let time = |scope| scopes.get(&scope).copied().unwrap_or_default();
        let modules =
            saved.into_iter().map(|(scope, bytes)| Module { scope, forward: time(scope), bytes }).collect();
        Some(Profile { modules, forward: scopes.values().sum(), bandwidth })
    }

    fn observed(&self, step: &StepContext, report: &StepReport) -> Observed {
        let now = step.cache.tier().and_then(Tier::store).map(Store::stats);
        let rate = |bytes: fn(&StoreStats) -> u64, busy: fn(&StoreStats) -> Duration| {
            let (now, before) = (now.as_ref()?, self.store.as_ref()?);
            let (bytes, busy) = (bytes(now) - bytes(before), busy(now) - busy(before));
            (bytes >= TELLING_BYTES && !busy.is_zero()).then(|| bytes as f64 / busy.as_secs_f64())
        };
        Observed {
            wall: report.wall,
            stall: report.stall.total(),
            peak: report.act_peak_bytes,
            written: rate(|stats| stats.bytes_written, |stats| stats.write_busy),
            read: rate(|stats| stats.bytes_read, |stats| stats.read_busy),
        }
    }
}
