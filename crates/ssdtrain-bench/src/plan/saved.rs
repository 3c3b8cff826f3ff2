//! Plans made from saved profiles.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use ssdtrain_plan::{
    Budgets, Explanation, Frontier, Goal, Holder, Holding, Machine, Moment, Peak, Placement, Plan,
    Prediction, Profile, Role,
};

use super::Args;
use super::largest::{self, Largest};
use crate::common::profile::SavedProfile;
use crate::common::{size, table};

/// The most holders of the peak that are listed.
const HOLDERS: usize = 10;

/// The JSON contract.
#[derive(Serialize)]
struct Outcome {
    of: String,
    batch: u64,
    micro_batches: u32,
    goal: Goal,
    in_reach: bool,
    plan: Plan,
    kept: Prediction,
    largest_batch: Option<Largest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    explanation: Option<Explanation>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    ensure!(
        !args.task.setup.cache.policy.saved.saves(),
        "--save and --profile: a saved profile does not say which part of a program saves what, so no run can follow a plan of it; \
         leave --profile out, and a step is profiled"
    );
    let read: Vec<_> = args.profile.iter().map(|path| SavedProfile::read(path)).collect::<Result<_>>()?;
    let (saved, other) = match &read[..] {
        [saved] => (saved, None),
        [saved, other] => (saved, Some(other)),
        _ => bail!("--profile takes one profile, or two of different --batch for --largest-batch"),
    };
    let cache = &args.task.setup.cache;
    let Profile { workload, micro_batches, machine, .. } = &saved.profile;
    let machine = cache.instead_of(*machine);
    let frontier = Frontier::new(workload, &machine, cache.caps(workload.computed()));
    let (plan, in_reach) = closest(&frontier, cache.goal());
    let largest_batch = match args.largest_batch {
        Some(most) => {
            let other = other.context(
                "--largest-batch needs profiles of two sizes: give a second --profile, of another --batch",
            )?;
            Largest::between(
                (other.batch, &other.profile),
                (saved.batch, &saved.profile),
                &machine,
                cache,
                most,
            )?
        }
        None => None,
    };
    let explain = || workload.explain(&plan.placements, &machine, &plan.budgets);
    let explanation = args.explain.explain.then(explain);
    let outcome = Outcome {
        of: saved.of.clone(),
        batch: saved.batch,
        micro_batches: micro_batches.get(),
        goal: cache.goal(),
        in_reach,
        plan,
        kept: workload.simulate(&[], &machine, &Budgets::default()),
        largest_batch,
        explanation,
    };
    if args.output.json {
        return table::print_json(&outcome);
    }
    outcome.show(args.largest_batch.is_some());
    if let Some(explanation) = &outcome.explanation {
        println!("\n{}", explained(&saved.profile, explanation, &outcome.plan, &machine));
    }
    Ok(())
}

/// The plan for the goal, or otherwise what comes closest to it: the fastest within its peak, or the lowest possible
/// peak.
fn closest(frontier: &Frontier<'_>, goal: Goal) -> (Plan, bool) {
    if let Ok(plan) = frontier.plan(goal) {
        return (plan, true);
    }
    let within = goal.peak.and_then(|peak| frontier.plan(Goal::budget(peak)).ok());
    (within.unwrap_or_else(|| frontier.lowest()), false)
}

impl Outcome {
    fn show(&self, largest_asked: bool) {
        println!("of     {}", self.of);
        let whole =
            |prediction: &Prediction| prediction.step.as_secs_f64() * 1e3 * f64::from(self.micro_batches);
        let row = |name: String, ms: f64, bytes: u64| [name, format!("{ms:.1}"), size::format(bytes)];
        let of =
            |name: &str, prediction: &Prediction| row(name.to_owned(), whole(prediction), prediction.peak());
        let largest = self.largest_batch.as_ref();
        let rows = [of("everything kept", &self.kept), of("planned", &self.plan.prediction)];
        let rows = rows
            .into_iter()
            .chain(largest.map(|largest| row(largest.name(), largest.step_ms, largest.peak_bytes)));
        println!("\n{}", table::render(["", "step ms", "activation peak"], rows));
        if !self.in_reach {
            println!("The goal is out of reach: this is what comes closest to it.");
        }
        if largest_asked {
            println!("{}", largest::report(largest));
        }
    }
}

/// How much is placed where, what that relies on, and who holds the peak.
fn explained(profile: &Profile, explanation: &Explanation, plan: &Plan, machine: &Machine) -> String {
    let places = [
        ("keep", Placement::Keep),
        ("host", Placement::Host),
        ("disk", Placement::Disk),
        ("recompute", Placement::Recompute),
    ];
    let rows = places.map(|(name, place)| {
        let entries = profile.workload.activations.iter().zip(&plan.placements);
        // What autograd does not save, and is not saved in place of others either, has no place.
        let entries = entries.filter(|(entry, at)| entry.role == Role::Saved || **at != Placement::Recompute);
        let bytes: Vec<_> =
            entries.filter(|(_, placement)| **placement == place).map(|(entry, _)| entry.bytes).collect();
        [name.to_owned(), bytes.len().to_string(), size::format(bytes.iter().sum())]
    });
    let Machine { copy_out, copy_in, disk_write, disk_read, .. } = *machine;
    let rates = [
        ("copies out at", copy_out),
        ("copies in at", copy_in),
        ("writes at", disk_write),
        ("reads at", disk_read),
    ];
    let rates = rates.into_iter().filter(|(_, rate)| rate.is_finite());
    let rates: Vec<_> = rates.map(|(name, rate)| format!("{name} {}/s", size::format(rate as u64))).collect();
    format!(
        "{}\ncounting on {}\n\n{}",
        table::render(["of a micro-batch", "storages", "bytes"], rows),
        rates.join(", "),
        held(profile, &explanation.peak),
    )
}

/// Who holds the peak: by the names of the activations, as far as the profile has them.
fn held(profile: &Profile, peak: &Peak) -> String {
    let name = |index: usize| match profile.names.get(index).filter(|name| !name.is_empty()) {
        Some(name) => name.clone(),
        None => format!("activation {index}"),
    };
    let when = match peak.moment {
        Moment::Forward(index) => format!("in forward, while {} is computed", name(index)),
        Moment::Turn => "between forward and backward".to_owned(),
        Moment::Rerun(index) => format!("in backward, while {} is computed again", name(index)),
        Moment::Backward(index) => format!("in backward, while {} is used", name(index)),
    };
    let mut alike: BTreeMap<(String, Holding), (usize, u64)> = BTreeMap::new();
    for &Holder { activation, holding, .. } in &peak.holders {
        let name = name(activation);
        let name = if profile.names.is_empty() { name } else { without_numbers(&name) };
        let (storages, bytes) = alike.entry((name, holding)).or_default();
        *storages += 1;
        *bytes += profile.workload.activations[activation].bytes;
    }
    let mut rows: Vec<(u64, [String; 3])> = alike
        .into_iter()
        .map(|((name, why), (storages, bytes))| (bytes, [name, why.to_string(), storages.to_string()]))
        .chain([(peak.extra, ["besides activations".to_owned(), String::new(), String::new()])])
        .collect();
    rows.sort_by_key(|(bytes, _)| Reverse(*bytes));
    let others = rows.split_off(rows.len().min(HOLDERS));
    if !others.is_empty() {
        let bytes = others.iter().map(|(bytes, _)| bytes).sum();
        rows.push((bytes, [format!("{} others", others.len()), String::new(), String::new()]));
    }
    let rows = rows.into_iter().map(|(bytes, [name, why, storages])| {
        let share = 100.0 * bytes as f64 / peak.bytes.max(1) as f64;
        [name, why, storages, size::format(bytes), format!("{share:.0} %")]
    });
    let table = table::render(["on the device", "why", "storages", "bytes", "share"], rows);
    format!("peak as planned: {}, {when}\n{table}", size::format(peak.bytes))
}

/// A name with `*` for each number in it: that of the same operation in other layers.
fn without_numbers(name: &str) -> String {
    let mut folded = String::with_capacity(name.len());
    for letter in name.chars() {
        match letter {
            '0'..='9' if folded.ends_with('*') => {}
            '0'..='9' => folded.push('*'),
            _ => folded.push(letter),
        }
    }
    folded
}
