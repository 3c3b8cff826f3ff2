//! Plans in a form that can be saved, for other runs to start with.

use std::borrow::Cow;
use std::collections::HashMap;
use std::num::NonZero;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::corrections::Corrections;
use super::objective::Objective;
use super::planned::Planned;
use crate::step_profile::{Save, StepProfile};
use crate::{Budgets, Goal, Machine, Placement, Plan, Position, Profile, Rates, ScopeId};

/// The number of the form in which plans are saved.
const FORMAT: u32 = 1;
/// Goals that allow more than this many times the time of a step that keeps everything do not differ. JSON has no
/// infinity.
const MOST_TIMES: f64 = 1e9;
/// Goals that differ by less than this share are the same, since numbers lose digits in text.
const SAME: f64 = 1e-9;
/// More than this does not occur. With less, nothing that is worked out from a plan overflows.
const MOST_BYTES: u128 = 1 << 60;
const MOST_MICRO_BATCHES: u32 = 1 << 16;
const LONGEST: Duration = Duration::from_secs(1_000_000);

/// A plan of [`Auto`](crate::Auto), with everything that another run needs to follow it from its first step on: what
/// each save is known by, where it goes, the profile that the plan was made from, and what steps have shown since.
///
/// serde can save it and read it back. A plan that is read from a file is validated: whatever it contains, steps can
/// follow it.
///
/// ```
/// use ssdtrain_plan::{Auto, Goal, SavedPlan};
///
/// fn under(text: &str) -> Result<Auto, serde_json::Error> {
///     let saved: SavedPlan = serde_json::from_str(text)?;
///     Ok(Auto::new(Goal::overhead(0.02)).starting_with(saved))
/// }
/// assert!(under("{}").is_err());
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct SavedPlan(Parts);

/// What is saved. Scopes have their paths, since their numbers are those of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Parts {
    format: Format,
    goal: Goal,
    written_per_day: Option<u64>,
    in_reach: bool,
    placements: Vec<Placement>,
    budgets: Budgets,
    min_bytes: u64,
    scopes: Vec<String>,
    saves: Vec<Line>,
    results: Vec<RecordedResult>,
    operators: Vec<Option<Cow<'static, str>>>,
    from_segments: Vec<usize>,
    #[serde(default)]
    varying: Vec<usize>,
    learnt: Corrections,
    profile: Profile,
}

/// A save: its scope, by its place among `scopes`, and its activation.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Line {
    scope: usize,
    bytes: u64,
    position: Position,
    activation: usize,
}

/// A result of a recorded operation, and its activation.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct RecordedResult {
    operation: Position,
    result: usize,
    activation: usize,
}

/// It comes first in a file, so that another form is refused for being another.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
struct Format;

impl SavedPlan {
    pub(super) fn of(
        planned: &Planned,
        objective: &Objective,
        name: &dyn Fn(ScopeId) -> String,
    ) -> SavedPlan {
        let Planned { profile, machine, plan, in_reach, corrections, .. } = planned;
        let (mut scopes, mut places) = (Vec::new(), HashMap::new());
        let saves = profile.saves.iter().map(|&(save, activation)| {
            let scope = *places.entry(save.scope).or_insert_with(|| {
                scopes.push(name(save.scope));
                scopes.len() - 1
            });
            Line { scope, bytes: save.bytes, position: save.position, activation }
        });
        let saves = saves.collect();
        let mut results: Vec<_> = profile.results.iter().collect();
        results.sort_unstable();
        let result = |(&(operation, result), &activation): (&(Position, usize), &usize)| RecordedResult {
            operation,
            result,
            activation,
        };
        let micro_batches = NonZero::new(profile.micro_batches).unwrap_or(NonZero::<u32>::MIN);
        let workload = profile.work.clone();
        SavedPlan(Parts {
            format: Format,
            goal: finite(objective.goal),
            written_per_day: objective.daily.map(|daily| daily.per_day()),
            in_reach: *in_reach,
            placements: plan.placements.clone(),
            budgets: plan.budgets,
            min_bytes: profile.min_bytes,
            scopes,
            saves,
            results: results.into_iter().map(result).collect(),
            operators: profile.operators.clone(),
            from_segments: profile.from_segments.clone(),
            varying: profile.varying.clone(),
            learnt: corrections.clone(),
            profile: Profile { workload, micro_batches, machine: *machine, names: Vec::new() },
        })
    }

    /// Whether it was made for this goal.
    pub(super) fn is_for(&self, objective: &Objective) -> bool {
        let Parts { goal, written_per_day, .. } = &self.0;
        let asked = finite(objective.goal);
        let same_time = match (goal.step, asked.step) {
            (Some(one), Some(other)) => (one - other).abs() <= SAME * one.abs(),
            (one, other) => one == other,
        };
        let daily = objective.daily.map(|daily| daily.per_day());
        same_time && goal.peak == asked.peak && *written_per_day == daily
    }

    /// The machine that it was made for.
    pub(super) fn machine(&self) -> Machine {
        self.0.profile.machine
    }

    /// The plan on this machine.
    pub(super) fn plan(&self, machine: &Machine) -> Plan {
        let Parts { placements, budgets, profile, .. } = &self.0;
        let prediction = profile.workload.simulate(placements, machine, budgets);
        Plan { placements: placements.clone(), budgets: *budgets, prediction }
    }

    /// Whether the plan reached its goal.
    pub(super) fn is_in_reach(&self) -> bool {
        self.0.in_reach
    }

    /// What it was made from, where `scope` finds the scope with a path.
    pub(super) fn made_from(self, scope: &dyn Fn(&str) -> ScopeId) -> (StepProfile, Corrections) {
        let Parts { min_bytes, scopes, saves, results, operators, from_segments, .. } = self.0;
        let Parts { mut varying, learnt, profile, .. } = self.0;
        let scopes: Vec<ScopeId> = scopes.iter().map(|path| scope(path)).collect();
        let save = |Line { scope, bytes, position, activation }: Line| {
            (Save { entry: activation as u64, bytes, scope: scopes[scope], position }, activation)
        };
        let result = |made: RecordedResult| ((made.operation, made.result), made.activation);
        varying.sort_unstable();
        let profile = StepProfile {
            work: profile.workload,
            saves: saves.into_iter().map(save).collect(),
            results: results.into_iter().map(result).collect(),
            operators,
            from_segments,
            min_bytes,
            micro_batches: profile.micro_batches.get(),
            varying,
            rates: Rates::default(),
            moved: 0,
        };
        (profile, learnt)
    }
}

impl TryFrom<Parts> for SavedPlan {
    type Error = String;

    fn try_from(read: Parts) -> Result<SavedPlan, String> {
        let Parts { placements, scopes, saves, results, operators, from_segments, profile, .. } = &read;
        if read.varying.iter().any(|save| *save >= saves.len()) {
            return Err("a save that varies does not exist".to_owned());
        }
        let activations = &profile.workload.activations;
        let count = activations.len();
        if placements.len() != count || operators.len() != count {
            return Err("it does not have a placement and an operator for each activation".to_owned());
        }
        let is_known = |line: &Line| line.scope < scopes.len() && line.activation < count;
        if let Some(wrong) = saves.iter().position(|line| !is_known(line)) {
            return Err(format!("save {wrong} is of a scope or an activation that does not exist"));
        }
        let others = results.iter().map(|made| made.activation).chain(from_segments.iter().copied());
        if let Some(wrong) = others.into_iter().find(|activation| *activation >= count) {
            return Err(format!("something makes activation {wrong}, which does not exist"));
        }
        if saves.iter().map(|line| u128::from(line.bytes)).sum::<u128>() > MOST_BYTES {
            return Err("its saves come to more than 2^60 bytes".to_owned());
        }
        let again = activations.iter().filter_map(|activation| activation.recompute.as_ref());
        let again: Duration = again.map(|recompute| recompute.time).sum();
        if profile.workload.computed() + again > LONGEST {
            return Err("a micro-batch takes more than 10^6 seconds".to_owned());
        }
        if profile.micro_batches.get() > MOST_MICRO_BATCHES {
            return Err("its steps have more than 65536 micro-batches".to_owned());
        }
        let learnt = read.learnt.within_reason();
        Ok(SavedPlan(Parts { learnt, ..read }))
    }
}

impl TryFrom<u32> for Format {
    type Error = String;

    fn try_from(format: u32) -> Result<Format, String> {
        if format == FORMAT {
            return Ok(Format);
        }
        Err(format!("it has format {format}, and this release reads {FORMAT}: save the plan again"))
    }
}

impl From<Format> for u32 {
    fn from(_: Format) -> u32 {
        FORMAT
    }
}

/// The goal in numbers that can be saved.
fn finite(goal: Goal) -> Goal {
    Goal { step: goal.step.map(|times| times.min(MOST_TIMES)), ..goal }
}

#[cfg(test)]
mod tests;
