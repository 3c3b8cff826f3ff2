//! Names for the activations of a profile, and reports by name.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::report::{OperationRow, PeakPhase, PeakReport, PeakRow};
use crate::step_profile::StepProfile;
use crate::{Explanation, Holding, Moment, Peak, Role, ScopeId, Tally};

/// What the activations of a profile are called.
pub(super) struct Labels<'a> {
    profile: &'a StepProfile,
    /// The path of each activation's scope.
    paths: Vec<String>,
    /// The same, but equal for scopes that differ only in numbers.
    shared: Vec<String>,
}

impl Labels<'_> {
    pub(super) fn new<'a>(profile: &'a StepProfile, name: &dyn Fn(ScopeId) -> String) -> Labels<'a> {
        let mut of_each: Vec<Option<ScopeId>> = vec![None; profile.work.activations.len()];
        for (save, place) in profile.saves.iter().rev() {
            of_each[*place] = Some(save.scope);
        }
        // What is not saved stands before what is made from it.
        let mut scope = ScopeId::default();
        let mut ids: Vec<ScopeId> = of_each
            .into_iter()
            .rev()
            .map(|own| {
                scope = own.unwrap_or(scope);
                scope
            })
            .collect();
        ids.reverse();
        let names: HashMap<ScopeId, String> = ids.iter().map(|id| (*id, name(*id))).collect();
        let paths: Vec<String> = ids.iter().map(|id| names[id].clone()).collect();
        let mut alike: HashMap<String, HashSet<&str>> = HashMap::new();
        names.values().for_each(|path| {
            alike.entry(without_numbers(path)).or_default().insert(path);
        });
        let share = |path: &String| {
            let folded = without_numbers(path);
            if alike[&folded].len() > 1 { folded } else { path.clone() }
        };
        let shared = paths.iter().map(share).collect();
        Labels { profile, paths, shared }
    }

    /// What each activation is called: its scope, and the operation that makes it.
    pub(super) fn names(&self) -> Vec<String> {
        let name =
            |(index, path): (usize, &String)| format!("{path} {}", self.operation(index)).trim().to_owned();
        self.paths.iter().enumerate().map(name).collect()
    }

    /// What is recomputed or saved in others' place, by operation; what frees the most bytes comes first.
    pub(super) fn operations(&self, explanation: &Explanation) -> Vec<OperationRow> {
        let mut rows: BTreeMap<(&str, &str), OperationRow> = BTreeMap::new();
        let outcomes = explanation.stored.iter().zip(&explanation.reruns);
        for ((index, activation), (stored, reruns)) in
            self.profile.work.activations.iter().enumerate().zip(outcomes)
        {
            let saved = activation.role == Role::Saved;
            if *stored == saved && *reruns == 0 {
                continue;
            }
            let (scope, operation) = self.label(index);
            let row = rows.entry((scope, operation)).or_insert_with(|| OperationRow {
                scope: scope.to_owned(),
                operation: operation.to_owned(),
                ..OperationRow::default()
            });
            let one = Tally { count: 1, bytes: activation.bytes };
            match (saved, *stored) {
                (true, false) => row.dropped = row.dropped.plus(one),
                (false, true) => row.instead = row.instead.plus(one),
                _ => {}
            }
            let time = activation.recompute.as_ref().map(|recipe| recipe.time).unwrap_or_default();
            // What takes no time is read from the run of another.
            row.reruns += if time.is_zero() { 0 } else { u64::from(*reruns) };
            row.time += time * *reruns;
        }
        let mut rows: Vec<_> = rows.into_values().collect();
        rows.sort_by_key(|row| std::cmp::Reverse((row.dropped.bytes, row.instead.bytes, row.time)));
        rows
    }

    /// Who holds a peak, by operation.
    pub(super) fn peak(&self, peak: &Peak) -> PeakReport {
        let mut rows: BTreeMap<(&str, &str, Holding), Tally> = BTreeMap::new();
        for holder in &peak.holders {
            let (scope, operation) = self.label(holder.activation);
            let held = rows.entry((scope, operation, holder.holding)).or_default();
            *held =
                held.plus(Tally { count: 1, bytes: self.profile.work.activations[holder.activation].bytes });
        }
        let row = |((scope, operation, holding), held): ((&str, &str, Holding), Tally)| PeakRow {
            scope: scope.to_owned(),
            operation: operation.to_owned(),
            holding,
            held,
        };
        let mut holders: Vec<_> = rows.into_iter().map(row).collect();
        holders.sort_by_key(|row| std::cmp::Reverse(row.held.bytes));
        let (phase, at) = match peak.moment {
            Moment::Forward(index) => (PeakPhase::Forward, Some(index)),
            Moment::Turn => (PeakPhase::Turn, None),
            Moment::Rerun(index) => (PeakPhase::Rerun, Some(index)),
            Moment::Backward(index) => (PeakPhase::Backward, Some(index)),
        };
        PeakReport {
            phase,
            scope: at.map(|index| self.paths[index].clone()).unwrap_or_default(),
            operation: at.map(|index| self.operation(index).to_owned()).unwrap_or_default(),
            bytes: peak.bytes,
            extra: peak.extra,
            holders,
        }
    }

    /// The scope and the operation that an activation's row is for.
    fn label(&self, index: usize) -> (&str, &str) {
        (&self.shared[index], self.operation(index))
    }

    fn operation(&self, index: usize) -> &str {
        let name = self.profile.operators.get(index).and_then(Option::as_deref).unwrap_or_default();
        name.strip_prefix("aten::").unwrap_or(name)
    }
}

/// A path with `*` for each number in it.
fn without_numbers(path: &str) -> String {
    let mut folded = String::with_capacity(path.len());
    for letter in path.chars() {
        match letter {
            '0'..='9' if folded.ends_with('*') => {}
            '0'..='9' => folded.push('*'),
            _ => folded.push(letter),
        }
    }
    folded
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Activation, Budgets, Machine, Placement, Position, Recompute, Save, Workload};

    use Placement::{Keep, Recompute as Again};

    const MS: Duration = Duration::from_millis(1);

    const PATHS: [&str; 5] = ["", "block.0", "block.10", "head", "conv2d"];

    fn name(scope: ScopeId) -> String {
        PATHS[scope.0 as usize].to_owned()
    }

    /// Two blocks that each save what goes in, and two results of a `mul` that is made through a `silu`, and a head.
    fn profile() -> StepProfile {
        let saved = |inputs: &[usize]| Activation {
            bytes: 100,
            recompute: Some(Recompute { time: MS, inputs: inputs.to_vec() }),
            in_use_until: 0,
            ..Activation::default()
        };
        let spare = |inputs: &[usize]| Activation { role: Role::Spare, bytes: 10, ..saved(inputs) };
        let block = |at: usize| [saved(&[]), spare(&[at]), saved(&[at + 1]), saved(&[at + 1])];
        let activations = [block(0), block(4)].concat().into_iter().chain([saved(&[])]);
        let operators = ["aten::mm", "aten::silu", "aten::mul", "aten::mul"].map(|name| Some(name.into()));
        let [first, second, head] = [1, 2, 3].map(ScopeId);
        let saves = [(0, first), (2, first), (3, first), (4, second), (6, second), (7, second), (8, head)];
        let save = |(place, scope): (usize, ScopeId)| {
            (Save { entry: place as u64, bytes: 100, scope, position: Position::default() }, place)
        };
        StepProfile {
            work: Workload { activations: activations.collect(), turn_extra: 50, ..Workload::default() },
            saves: saves.map(save).to_vec(),
            operators: [&operators[..], &operators, &[None]].concat(),
            micro_batches: 1,
            ..StepProfile::default()
        }
    }

    fn explain(profile: &StepProfile, placements: &[Placement]) -> Explanation {
        profile.work.explain(placements, &Machine::default(), &Budgets::default())
    }

    #[test]
    fn operations_of_scopes_that_differ_in_numbers_share_a_row() {
        let profile = profile();
        // The first block saves its spare one in place of others; the second computes both through it.
        let placements = [Keep, Keep, Again, Again, Keep, Again, Again, Keep, Keep];
        let rows = Labels::new(&profile, &name).operations(&explain(&profile, &placements));
        let tally = |count, bytes| Tally { count, bytes };
        let row = |operation: &str, dropped, instead, reruns| OperationRow {
            scope: "block.*".to_owned(),
            operation: operation.to_owned(),
            dropped,
            instead,
            reruns,
            time: u32::try_from(reruns).unwrap() * MS,
        };
        let none = Tally::default();
        assert_eq!(rows, [row("mul", tally(3, 300), none, 3), row("silu", none, tally(1, 10), 1)]);
    }

    #[test]
    fn names_are_of_the_scope_and_the_operation_as_far_as_that_is_known() {
        let profile = profile();
        let names = Labels::new(&profile, &name).names();
        assert_eq!((&*names[0], &*names[5], &*names[8]), ("block.0 mm", "block.10 silu", "head"));
    }

    #[test]
    fn a_plan_that_keeps_everything_recomputes_nothing() {
        let profile = profile();
        assert_eq!(Labels::new(&profile, &name).operations(&explain(&profile, &[])), []);
    }

    #[test]
    fn the_holders_of_a_peak_are_told_by_name() {
        let mut profile = profile();
        profile.work.activations[6].backward_extra = 500;
        let peak = explain(&profile, &[]).peak;
        let report = Labels::new(&profile, &name).peak(&peak);
        assert_eq!(
            (report.phase, &report.scope[..], &report.operation[..]),
            (PeakPhase::Backward, "block.10", "mul")
        );
        let held: u64 = report.holders.iter().map(|row| row.held.bytes).sum();
        assert_eq!((held + report.extra, report.extra), (report.bytes, 500));
        let rows: Vec<_> = report
            .holders
            .iter()
            .map(|row| (&row.scope[..], &row.operation[..], row.holding, row.held.count))
            .collect();
        assert_eq!(
            rows,
            [
                ("block.*", "mm", Holding::Kept, 2),
                ("block.*", "mul", Holding::Kept, 2),
                ("block.*", "mul", Holding::InUse, 1)
            ]
        );
    }

    #[test]
    fn a_scope_without_its_like_keeps_its_number() {
        let mut profile = profile();
        profile.saves.last_mut().unwrap().0.scope = ScopeId(4);
        let report = Labels::new(&profile, &name).peak(&explain(&profile, &[]).peak);
        assert_eq!(report.phase, PeakPhase::Turn);
        assert!(report.holders.iter().any(|row| row.scope == "conv2d" && row.operation.is_empty()));
    }
}
