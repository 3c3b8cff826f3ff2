//! Plans made from saved profiles.

use anyhow::{Context, Result, bail};
use serde::Serialize;
use ssdtrain_plan::{Budgets, Frontier, Goal, Machine, Placement, Plan, Prediction, Profile};

use super::Args;
use super::largest::{self, Largest};
use crate::common::profile::SavedProfile;
use crate::common::{size, table};

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
}

pub(super) fn run(args: &Args) -> Result<()> {
    let read: Vec<_> = args.profile.iter().map(|path| SavedProfile::read(path)).collect::<Result<_>>()?;
    let (saved, other) = match &read[..] {
        [saved] => (saved, None),
        [saved, other] => (saved, Some(other)),
        _ => bail!("--profile takes one profile, or two of different --batch for --largest-batch"),
    };
    let cache = &args.task.setup.cache;
    let Profile { workload, micro_batches, machine } = &saved.profile;
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
    let outcome = Outcome {
        of: saved.of.clone(),
        batch: saved.batch,
        micro_batches: micro_batches.get(),
        goal: cache.goal(),
        in_reach,
        plan,
        kept: workload.simulate(&[], &machine, &Budgets::default()),
        largest_batch,
    };
    if args.output.json {
        return table::print_json(&outcome);
    }
    outcome.show(args.largest_batch.is_some());
    if args.explain.explain {
        println!("\n{}", explained(&saved.profile, &outcome.plan, &machine));
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

/// How much is placed where, and what that relies on.
fn explained(profile: &Profile, plan: &Plan, machine: &Machine) -> String {
    let places = [
        ("keep", Placement::Keep),
        ("host", Placement::Host),
        ("disk", Placement::Disk),
        ("recompute", Placement::Recompute),
    ];
    let rows = places.map(|(name, place)| {
        let entries = profile.workload.activations.iter().zip(&plan.placements);
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
        "{}\ncounting on {}",
        table::render(["of a micro-batch", "storages", "bytes"], rows),
        rates.join(", ")
    )
}
