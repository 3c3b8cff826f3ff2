//! Two copies of a program side by side, one of them with the cache.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use ssdtrain::plan::Goal;
use ssdtrain::{Auto, StepReport, TensorCache};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::arguments::Arguments;
use crate::program::{Program, Result, Seen, Session};
use crate::table;

/// As many iterations make up the beginning of a run, and its end.
const PART: usize = 10;
/// Both copies begin with weights drawn from it.
const SEED: i64 = 2026;

/// What the cache is to achieve.
#[derive(Clone, Copy)]
pub(crate) enum Aim {
    /// Steps that are longer by at most this share.
    Overhead(f64),
    /// An activation peak of at most this share of the highest without a cache.
    Budget(f64),
}

/// How both copies fared.
#[derive(Default)]
pub(crate) struct Outcome {
    /// The iteration after which the policy was settled for good.
    pub(crate) settled: Option<usize>,
    /// Times with the cache over those without, in the first iterations and in the last.
    pub(crate) first: Spread,
    pub(crate) last: Spread,
    /// The median time of the last iterations without the cache.
    pub(crate) plain: Duration,
    /// The highest activation peak of the last iterations over that without the cache.
    pub(crate) peak: f64,
    /// The iterations whose peak was above the goal's, of all; `None` if it has none.
    pub(crate) above: Option<usize>,
    /// What became of what the cache was told to keep, in the last iterations.
    pub(crate) promise: Promise,
    pub(crate) steps: Steps,
    /// How many plans were made.
    pub(crate) plans: u64,
    /// What the last plan takes by its own reckoning, over a step that keeps everything.
    pub(crate) reckoned: f64,
    /// The first iteration whose weights or gradients were not the same, bit for bit.
    pub(crate) differs: Option<usize>,
    /// The iteration that failed, and why.
    pub(crate) failure: Option<(usize, String)>,
    /// Whether weights ceased to be numbers, so that their bits say little.
    pub(crate) is_astray: bool,
    /// What the last step warned of.
    pub(crate) warnings: Vec<String>,
}

/// What became of a goal.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Promise {
    Kept,
    /// It was not kept, and reports of the last iterations say that it is out of reach.
    Withdrawn,
    #[default]
    Broken,
}

/// An iteration without the cache and one with it.
pub(crate) type Lap = [(Duration, Seen); 2];

/// A median with its quartiles.
#[derive(Clone, Copy, Default)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

/// Steps by what the policy did in them.
#[derive(Default)]
pub(crate) struct Steps {
    /// Followed a plan.
    pub(crate) planned: usize,
    /// Saved something else than was planned.
    pub(crate) left: usize,
    /// Moved everything: the first step, and those that were profiled.
    pub(crate) moved: usize,
    /// Kept everything, to be compared with planned ones or because there was no plan yet.
    pub(crate) kept: usize,
}

/// Runs two copies of a program, iteration by iteration in turn, and compares them.
pub(crate) fn race(make: fn() -> Result<Program>, arguments: &Arguments) -> Result<Outcome> {
    let &Arguments { aim, steps: count, min_bytes, .. } = arguments;
    let made = || {
        tch::manual_seed(SEED);
        make()
    };
    let goal = match aim {
        Aim::Overhead(share) => Goal::overhead(share),
        Aim::Budget(share) => Goal::budget((share * highest_peak(made()?, count)? as f64) as u64),
    };
    let mut copies = [made()?, made()?];
    let mut builder = TensorCache::builder().spill_to(&arguments.spill).policy(Auto::new(goal));
    if let Some(bytes) = min_bytes {
        builder = builder.min_bytes(bytes);
    }
    for store in &copies[1].stores {
        builder = builder.parameters(store);
    }
    let cache = builder.build()?;
    let mut outcome = Outcome::default();
    let mut laps: Vec<Lap> = Vec::new();
    for number in 1..=count {
        let [plain, cached] = &mut copies;
        // Whatever slows the machine for a while slows both, and neither is always the first.
        let lap = if number % 2 == 0 {
            let cached = iterate(cached, number, Some(&cache));
            cached.and_then(|cached| Ok([iterate(plain, number, None)?, cached]))
        } else {
            let plain = iterate(plain, number, None);
            plain.and_then(|plain| Ok([plain, iterate(cached, number, Some(&cache))?]))
        };
        match lap {
            Ok(lap) => {
                if arguments.each {
                    table::iteration(number, &lap);
                }
                laps.push(lap);
            }
            Err(failure) => {
                outcome.failure = Some((number, failure));
                break;
            }
        }
        outcome.settled = cache.is_settled().then(|| outcome.settled.unwrap_or(number));
        if outcome.differs.is_none() && !have_same_bits(&copies)? {
            outcome.differs = Some(number);
        }
    }
    if let Some(plan) = cache.plan() {
        outcome.plans = plan.plans;
        if arguments.each {
            println!("{plan}");
        }
        outcome.reckoned = plan.step.as_secs_f64() / plan.kept_step.as_secs_f64();
    }
    outcome.is_astray = !are_numbers(&copies[0].stores)?;
    outcome.judge(&laps, goal);
    Ok(outcome)
}

impl Outcome {
    /// Fills in what the iterations show together.
    fn judge(&mut self, laps: &[Lap], goal: Goal) {
        let reports = laps.iter().flat_map(|[_, (_, cached)]| &cached.reports);
        reports.clone().for_each(|report| self.steps.count(report));
        self.warnings = reports.last().map(|report| report.warnings.clone()).unwrap_or_default();
        let ratios: Vec<f64> =
            laps.iter().map(|[plain, cached]| cached.0.as_secs_f64() / plain.0.as_secs_f64()).collect();
        let end = laps.len().saturating_sub(PART);
        let last = &laps[end..];
        self.first = Spread::of(&ratios[..PART.min(laps.len())]);
        self.last = Spread::of(&ratios[end..]);
        let mut times: Vec<Duration> = last.iter().map(|[plain, _]| plain.0).collect();
        times.sort_unstable();
        self.plain = times.get(times.len() / 2).copied().unwrap_or_default();
        let highest = |copy: usize| last.iter().map(|lap| lap[copy].1.peak).max().unwrap_or_default();
        self.peak = highest(1) as f64 / highest(0).max(1) as f64;
        self.above = goal.peak.map(|most| laps.iter().filter(|[_, (_, cached)]| cached.peak > most).count());
        let is_low = goal.peak.is_none_or(|most| highest(1) <= most);
        let is_quick = goal.step.is_none_or(|most| self.last.median <= most);
        let is_out_of_reach = |report: &StepReport| report.plan.as_ref().is_some_and(|plan| !plan.in_reach);
        self.promise = match () {
            () if self.failure.is_some() => Promise::Broken,
            () if is_low && is_quick => Promise::Kept,
            () if last.iter().any(|[_, (_, cached)]| cached.reports.iter().any(is_out_of_reach)) => {
                Promise::Withdrawn
            }
            () => Promise::Broken,
        };
    }
}

impl Spread {
    fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |quarter: usize| {
            let place = (sorted.len().saturating_sub(1) * quarter) as f64 / 4.0;
            let [below, above] =
                [place.floor(), place.ceil()].map(|place| sorted.get(place as usize).copied());
            below.zip(above).map_or(f64::NAN, |(below, above)| below + (above - below) * place.fract())
        };
        Spread { low: at(1), median: at(2), high: at(3) }
    }
}

impl Steps {
    fn count(&mut self, report: &StepReport) {
        let moved = report.offloaded.count + report.cancelled.count + report.discarded.count;
        let count = match () {
            () if report.left_plan => &mut self.left,
            () if report.plan.is_some() => &mut self.planned,
            () if moved > 0 => &mut self.moved,
            () => &mut self.kept,
        };
        *count += 1;
    }
}

/// The highest activation peak of a copy's iterations without a cache.
fn highest_peak(mut copy: Program, count: usize) -> Result<u64> {
    (1..=count).try_fold(0, |highest: u64, number| Ok(highest.max(iterate(&mut copy, number, None)?.1.peak)))
}

/// Runs one iteration of a copy. Both copies draw the same random numbers in it.
fn iterate(
    copy: &mut Program,
    number: usize,
    cache: Option<&TensorCache>,
) -> Result<(Duration, Seen), String> {
    tch::manual_seed(SEED + number as i64);
    let session = Session::new(cache);
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| copy.iterate(number, &session)));
    let time = start.elapsed();
    match outcome {
        Ok(Ok(())) => Ok((time, session.end())),
        Ok(Err(error)) => Err(format!("{}: {error}", copy_name(cache))),
        Err(panic) => Err(format!("{}: panic: {}", copy_name(cache), message(&*panic))),
    }
}

fn copy_name(cache: Option<&TensorCache>) -> &'static str {
    cache.map_or("without the cache", |_| "with the cache")
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// Whether weights, buffers and gradients of both copies are the same, bit for bit.
fn have_same_bits(copies: &[Program; 2]) -> Result<bool> {
    for (plain, cached) in copies[0].stores.iter().zip(&copies[1].stores) {
        let cached = cached.variables();
        for (name, plain) in plain.variables() {
            let cached = cached.get(&name).ok_or_else(|| format!("one copy has no {name}"))?;
            if !is_same(&plain, cached)? || !is_same(&plain.f_grad()?, &cached.f_grad()?)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn is_same(one: &Tensor, other: &Tensor) -> Result<bool> {
    if !one.defined() || !other.defined() {
        return Ok(one.defined() == other.defined());
    }
    // As bytes, since numbers that are not a number never equal each other.
    let [one, other] = [one, other].map(|tensor| -> Result<Tensor> {
        Ok(tensor.f_detach()?.f_contiguous()?.f_view([-1])?.f_view_dtype(Kind::Uint8)?)
    });
    Ok(one?.f_equal(&other?)?)
}

fn are_numbers(stores: &[VarStore]) -> Result<bool> {
    for tensor in stores.iter().flat_map(|store| store.variables().into_values()) {
        if tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}
