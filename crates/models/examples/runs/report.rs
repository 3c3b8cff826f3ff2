//! What runs showed, as a table.

use std::time::Duration;

use ssdtrain::plan::{Goal, Planning};

use crate::Taken;

/// The steps in which a run may still plan.
const FIRST: usize = 20;
/// The beginning of a run.
const BEGINNING: usize = 10;
/// A step is far beyond its goal if it takes so much more of a step's time.
const FAR: f64 = 0.02;

/// One iteration without the cache, and one with it.
pub(crate) struct Lap {
    pub(crate) plain: Taken,
    pub(crate) cached: Taken,
}

pub(crate) fn head() {
    println!(
        "total: the time of all steps after the first {FIRST} over that without the cache; first: the same of the first {BEGINNING} steps, \
         and of those without the very first; far: of the steps after {FIRST}, those that take over {FAR} of a step more than the goal \
         allows; peak: the highest activation peak after {FIRST} steps over the highest without the cache; above: steps above the budget, \
         of all; planned, compared, profiled, other: steps after {FIRST} by what they had to do with a plan"
    );
    println!(
        "\n| run | total | first {BEGINNING} | 2-{BEGINNING} | far | peak | above | ms, without | planned | compared | profiled | other | plans |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
}

/// One iteration, by itself.
pub(crate) fn step(number: usize, length: i64, lap: &Lap) {
    let Lap { plain, cached } = lap;
    let [plain_ms, ms] = [plain, cached].map(|taken| taken.time.as_secs_f64() * 1e3);
    let [plain_mib, mib] = [plain, cached].map(|taken| taken.peak >> 20);
    let planning = cached
        .report
        .as_ref()
        .and_then(|report| report.planning)
        .map_or_else(String::new, |one| one.to_string());
    let plan = cached.report.as_ref().and_then(|report| report.plan.as_ref());
    let planned = plan.map_or_else(String::new, |plan| {
        let [step, kept] = [plan.step, plan.kept_step].map(|time| time.as_secs_f64() * 1e3);
        format!(", {step:.1} ms planned, {kept:.1} kept ({:?}), plan {}", plan.baseline, plan.plans)
    });
    println!(
        "{number}: {length} tokens, {ms:.1} ms ({}) and {mib} MiB, without {plain_ms:.1} ({}) and {plain_mib}; {planning}{planned}",
        handed_over(cached),
        handed_over(plain),
    );
}

/// When the parts of a step were handed to the GPU, in milliseconds from its beginning.
fn handed_over(taken: &Taken) -> String {
    taken.handed_over.map(|time| format!("{:.1}", time.as_secs_f64() * 1e3)).join(", ")
}

pub(crate) fn row(name: &str, laps: &[Lap], goal: Goal) {
    let sum = |laps: &[Lap], of: fn(&Lap) -> &Taken| laps.iter().map(|lap| of(lap).time).sum::<Duration>();
    // Where keeping everything does not fit, there is nothing beside it.
    let over =
        |cached: f64, plain: f64| if plain > 0.0 { format!("{:.3}", cached / plain) } else { "-".to_owned() };
    let ratio = |laps: &[Lap]| {
        over(sum(laps, |lap| &lap.cached).as_secs_f64(), sum(laps, |lap| &lap.plain).as_secs_f64())
    };
    let part = |from: usize, to: usize| &laps[from.min(laps.len())..to.min(laps.len())];
    let rest = part(FIRST, usize::MAX);
    let far = goal.step.filter(|_| laps.iter().all(|lap| !lap.plain.time.is_zero())).map(|most| {
        let is_far = |lap: &&Lap| lap.cached.time.as_secs_f64() > (most + FAR) * lap.plain.time.as_secs_f64();
        rest.iter().filter(is_far).count()
    });
    let highest = |of: fn(&Lap) -> &Taken| rest.iter().map(|lap| of(lap).peak).max().unwrap_or_default();
    let peak = over(highest(|lap| &lap.cached) as f64, highest(|lap| &lap.plain) as f64);
    let above = goal.peak.map(|most| laps.iter().filter(|lap| lap.cached.peak > most).count());
    let mean = |of: fn(&Lap) -> &Taken| sum(rest, of).as_secs_f64() * 1e3 / rest.len().max(1) as f64;
    let mut kinds = [0; 4];
    for report in rest.iter().filter_map(|lap| lap.cached.report.as_ref()) {
        kinds[match report.planning {
            Some(Planning::Followed | Planning::Small) => 0,
            Some(Planning::Compared) => 1,
            Some(Planning::Profiled) => 2,
            _ => 3,
        }] += 1;
    }
    let plans = laps.iter().filter_map(|lap| Some(lap.cached.report.as_ref()?.plan.as_ref()?.plans)).max();
    let count = |count: Option<usize>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
    println!(
        "| {name} | {} | {} | {} | {} of {} | {peak} | {} | {:.1}, {:.1} | {} | {} | {} | {} | {} |",
        ratio(rest),
        ratio(part(0, BEGINNING)),
        ratio(part(1, BEGINNING)),
        count(far),
        rest.len(),
        count(above),
        mean(|lap| &lap.cached),
        mean(|lap| &lap.plain),
        kinds[0],
        kinds[1],
        kinds[2],
        kinds[3],
        plans.unwrap_or_default(),
    );
    if let Some(warning) = laps.last().and_then(|lap| lap.cached.report.as_ref()?.warnings.first().cloned()) {
        println!("  {name}: {warning}");
    }
}
