//! What a plan recomputes, and who holds a peak.

use std::fmt;
use std::time::Duration;

use crate::{Holding, Tally};
use bytesize::ByteSize;
use serde::Serialize;

/// Tables show this many rows; the others are added up.
const OPERATIONS: usize = 12;
const HOLDERS: usize = 10;

/// What a plan does with the results of one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct OperationRow {
    /// The scope's path; empty outside every scope. Scopes whose paths differ only in numbers share a row, with `*` for the numbers.
    pub scope: String,
    /// The operator's name, such as `mul`; empty if it is not known.
    pub operation: String,
    /// Results that autograd saves and that are recomputed instead.
    pub dropped: Tally,
    /// Results that autograd does not save and that are stored in others' place.
    pub instead: Tally,
    /// How often the operation runs again in the backward of a micro-batch.
    pub reruns: u64,
    /// The time that this takes.
    pub time: Duration,
}

/// The moment of a step with the most bytes on the device, and whose bytes they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeakReport {
    /// The part of the step that it is in.
    pub phase: PeakPhase,
    /// The scope that saved what is computed or used then.
    pub scope: String,
    /// The operator that made what is computed or used then; empty if it is not known.
    pub operation: String,
    /// All bytes on the device.
    pub bytes: u64,
    /// Those besides activations: gradients, temporary results, and whatever else the program holds.
    pub extra: u64,
    /// The others, by scope and operation; the largest come first.
    pub holders: Vec<PeakRow>,
}

/// The part of a step that its peak is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PeakPhase {
    /// Forward computes something that is saved.
    Forward,
    /// Between the last save and the first time that backward asks for something.
    Turn,
    /// Backward waits while something that it has asked for is recomputed.
    Rerun,
    /// Backward uses something.
    Backward,
}

/// Activations that are on the device at the peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeakRow {
    /// The scope's path, as in [`OperationRow::scope`].
    pub scope: String,
    /// The operator's name, such as `mul`; empty if it is not known.
    pub operation: String,
    /// Why they are there.
    pub holding: Holding,
    /// How many they are.
    pub held: Tally,
}

impl OperationRow {
    fn add(&mut self, other: &OperationRow) {
        self.dropped = self.dropped.plus(other.dropped);
        self.instead = self.instead.plus(other.instead);
        self.reruns += other.reruns;
        self.time += other.time;
    }

    fn cells(&self) -> [String; 6] {
        [
            self.scope.clone(),
            self.operation.clone(),
            describe(self.dropped),
            describe(self.instead),
            self.reruns.to_string(),
            format!("{:.1}", self.time.as_secs_f64() * 1e3),
        ]
    }
}

/// Writes a table of what is recomputed, without a line break at its end.
pub(super) fn write_operations(f: &mut fmt::Formatter<'_>, rows: &[OperationRow]) -> fmt::Result {
    let shown = shown(rows.len(), OPERATIONS);
    let mut cells: Vec<_> = rows[..shown].iter().map(OperationRow::cells).collect();
    if shown < rows.len() {
        let mut others = OperationRow { scope: others(rows.len() - shown), ..OperationRow::default() };
        rows[shown..].iter().for_each(|row| others.add(row));
        cells.push(others.cells());
    }
    let mut all = OperationRow { scope: "all".to_owned(), ..OperationRow::default() };
    rows.iter().for_each(|row| all.add(row));
    cells.push(all.cells());
    let header = ["in a micro-batch", "operation", "recomputed", "saved instead", "runs again", "ms"];
    write_table(f, header, 2, &cells)
}

/// When the peak is, and a table of who holds it, without a line break at its end.
impl fmt::Display for PeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match (&self.operation[..], &self.scope[..]) {
            ("", "") => "a storage".to_owned(),
            ("", scope) => format!("a storage of {scope}"),
            (operation, "") => format!("the result of {operation}"),
            (operation, scope) => format!("the result of {operation} in {scope}"),
        };
        write!(f, "{}, ", ByteSize(self.bytes))?;
        match self.phase {
            PeakPhase::Forward => writeln!(f, "in forward, while {of} is computed")?,
            PeakPhase::Turn => writeln!(f, "between forward and backward")?,
            PeakPhase::Rerun => writeln!(f, "in backward, while {of} is computed again")?,
            PeakPhase::Backward => writeln!(f, "in backward, while {of} is used")?,
        }
        let row = |scope: &str, operation: &str, why: &str, count: String, bytes: u64| {
            let share = 100.0 * bytes as f64 / self.bytes.max(1) as f64;
            let [scope, operation, why] = [scope, operation, why].map(str::to_owned);
            [scope, operation, why, count, ByteSize(bytes).to_string(), format!("{share:.0} %")]
        };
        let shown = shown(self.holders.len(), HOLDERS);
        let mut rows: Vec<_> = self.holders[..shown]
            .iter()
            .map(|PeakRow { scope, operation, holding, held }| {
                (held.bytes, row(scope, operation, &holding.to_string(), held.count.to_string(), held.bytes))
            })
            .collect();
        let rank = rows.partition_point(|(bytes, _)| *bytes >= self.extra);
        let extra = row("besides activations", "", "", String::new(), self.extra);
        rows.insert(rank, (self.extra, extra));
        if shown < self.holders.len() {
            let rest = &self.holders[shown..];
            let rest_held = rest.iter().fold(Tally::default(), |sum, row| sum.plus(row.held));
            let count = rest_held.count.to_string();
            rows.push((0, row(&others(rest.len()), "", "", count, rest_held.bytes)));
        }
        let cells: Vec<_> = rows.into_iter().map(|(_, cells)| cells).collect();
        write_table(f, ["on the device", "operation", "why", "storages", "bytes", "share"], 3, &cells)
    }
}

/// How many of `count` rows a table of `most` shows, before one that adds up the others.
fn shown(count: usize, most: usize) -> usize {
    if count <= most { count } else { most - 1 }
}

fn others(rows: usize) -> String {
    format!("{rows} others")
}

fn describe(tally: Tally) -> String {
    match tally.count {
        0 => "-".to_owned(),
        count => format!("{count}, {}", ByteSize(tally.bytes)),
    }
}

/// Writes columns of which the first `words` hold words and the others numbers, without a line break at the end.
fn write_table<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    header: [&str; N],
    words: usize,
    rows: &[[String; N]],
) -> fmt::Result {
    let widths: [usize; N] = std::array::from_fn(|column| {
        rows.iter().map(|row| row[column].len()).fold(header[column].len(), usize::max)
    });
    let lines = std::iter::once(header).chain(rows.iter().map(|row| std::array::from_fn(|at| &row[at][..])));
    for (number, line) in lines.enumerate() {
        if number > 0 {
            writeln!(f)?;
        }
        for (column, (cell, width)) in line.iter().zip(widths).enumerate() {
            let apart = if column == 0 { "" } else { "  " };
            if column < words {
                write!(f, "{apart}{cell:width$}")?;
            } else {
                write!(f, "{apart}{cell:>width$}")?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Operations(Vec<OperationRow>);

    impl fmt::Display for Operations {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_operations(f, &self.0)
        }
    }

    fn operation(name: &str, bytes: u64) -> OperationRow {
        OperationRow {
            scope: "block.*/mlp".to_owned(),
            operation: name.to_owned(),
            dropped: Tally { count: 2, bytes },
            reruns: 3,
            time: Duration::from_micros(1500),
            ..OperationRow::default()
        }
    }

    fn peak(holders: usize) -> PeakReport {
        let row = |number: u64| PeakRow {
            scope: String::new(),
            operation: format!("op{number}"),
            holding: Holding::Kept,
            held: Tally { count: 1, bytes: (100 - number) << 10 },
        };
        let holders: Vec<_> = (0..holders as u64).map(row).collect();
        let held: u64 = holders.iter().map(|row| row.held.bytes).sum();
        PeakReport {
            phase: PeakPhase::Backward,
            scope: "block.3/mlp".to_owned(),
            operation: "mul".to_owned(),
            bytes: held + (95 << 10),
            extra: 95 << 10,
            holders,
        }
    }

    #[test]
    fn operations_are_a_table_with_their_sum() {
        let instead = OperationRow {
            instead: Tally { count: 1, bytes: 2 << 10 },
            dropped: Tally::default(),
            ..operation("_to_copy", 0)
        };
        let text = Operations(vec![operation("mul", 4 << 10), instead]).to_string();
        let expected = "\
in a micro-batch  operation  recomputed  saved instead  runs again   ms
block.*/mlp       mul        2, 4.0 KiB              -           3  1.5
block.*/mlp       _to_copy            -     1, 2.0 KiB           3  1.5
all                          2, 4.0 KiB     1, 2.0 KiB           6  3.0";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_long_table_adds_up_its_end() {
        let rows = (0..20).map(|number| operation(&format!("op{number}"), 1 << 10)).collect();
        let text = Operations(rows).to_string();
        assert_eq!(text.lines().count(), 1 + OPERATIONS + 1, "{text}");
        assert!(text.contains("9 others") && text.contains("18, 9.0 KiB"), "{text}");
        assert!(text.lines().last().unwrap().contains("40, 20.0 KiB"), "{text}");
    }

    #[test]
    fn a_peak_is_told_with_its_moment_and_its_holders() {
        let text = peak(2).to_string();
        let expected = "\
294.0 KiB, in backward, while the result of mul in block.3/mlp is used
on the device        operation  why   storages      bytes  share
                     op0        kept         1  100.0 KiB   34 %
                     op1        kept         1   99.0 KiB   34 %
besides activations                              95.0 KiB   32 %";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_is_besides_activations_stands_where_its_bytes_put_it() {
        let text = peak(30).to_string();
        let at = |words: &str| text.lines().position(|line| line.contains(words)).unwrap();
        assert!(at("op5 ") < at("besides") && at("besides") < at("op6 "), "{text}");
        assert!(text.lines().last().unwrap().starts_with("21 others"), "{text}");
    }

    #[test]
    fn each_phase_has_its_words() {
        let text = |phase, operation: &str, scope: &str| {
            let (operation, scope) = (operation.to_owned(), scope.to_owned());
            PeakReport { phase, operation, scope, ..peak(1) }.to_string()
        };
        assert!(text(PeakPhase::Turn, "", "").contains("between forward and backward\n"));
        assert!(text(PeakPhase::Forward, "", "").contains("in forward, while a storage is computed\n"));
        assert!(text(PeakPhase::Rerun, "mul", "").contains("the result of mul is computed again\n"));
        assert!(text(PeakPhase::Backward, "", "head").contains("while a storage of head is used\n"));
    }
}
