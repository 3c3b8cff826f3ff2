//! The recompute-offload-keep curve: the memory and the throughput of each strategy, over micro-batch sizes.

use serde::{Deserialize, Serialize};

use crate::common::strategy_run::Row;
use crate::common::{size, table};

/// The measurement of one strategy at one micro-batch size. The fields are the columns of the file and the JSON
/// contract; those of the measurement are empty if it failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// In sequences.
    pub(crate) micro_batch: usize,
    pub(crate) strategy: String,
    pub(crate) step_ms_median: Option<f64>,
    /// The ratio of the medians, with the ends of its 95 % interval; empty if keep did not take turns with it.
    pub(crate) ratio_to_keep: Option<f64>,
    pub(crate) ratio_low: Option<f64>,
    pub(crate) ratio_high: Option<f64>,
    pub(crate) tokens_per_s: Option<f64>,
    /// 10^12 operations per second; those of forward and backward count once, even if some are repeated.
    pub(crate) model_tflops: Option<f64>,
    pub(crate) act_peak_bytes: Option<u64>,
    pub(crate) act_peak_to_keep: Option<f64>,
    /// Including gradients; older files do not have this column.
    #[serde(default)]
    pub(crate) step_peak_bytes: Option<u64>,
    pub(crate) offloaded_bytes: Option<u64>,
    pub(crate) recomputed_bytes: Option<u64>,
    pub(crate) stall_ms: Option<f64>,
    /// The plan's prediction.
    pub(crate) predicted_step_ms: Option<f64>,
    pub(crate) predicted_peak_bytes: Option<u64>,
    /// Why there is no measurement.
    pub(crate) failed: Option<String>,
}

impl Point {
    /// The point for `row`, with this many operations per step.
    pub(crate) fn measured(micro_batch: usize, row: &Row, flops_per_step: f64) -> Point {
        let ratio = row.ratio_to_keep;
        Point {
            micro_batch,
            strategy: row.strategy.to_owned(),
            step_ms_median: Some(row.step_ms_median),
            ratio_to_keep: ratio.map(|ratio| ratio.median),
            ratio_low: ratio.map(|ratio| ratio.low),
            ratio_high: ratio.map(|ratio| ratio.high),
            tokens_per_s: Some(row.tokens_per_s),
            model_tflops: Some(flops_per_step / row.step_ms_median / 1e9),
            act_peak_bytes: Some(row.act_peak_bytes),
            act_peak_to_keep: row.act_peak_to_keep,
            step_peak_bytes: Some(row.step_peak_bytes),
            offloaded_bytes: Some(row.offloaded_bytes),
            recomputed_bytes: Some(row.recomputed_bytes),
            stall_ms: Some(row.stall_ms),
            predicted_step_ms: row.planned.as_ref().map(|planned| planned.step_ms),
            predicted_peak_bytes: row.planned.as_ref().map(|planned| planned.peak_bytes),
            ..Point::default()
        }
    }

    /// A measurement that failed.
    pub(crate) fn failed(micro_batch: usize, strategy: &str, why: String) -> Point {
        Point { micro_batch, strategy: strategy.to_owned(), failed: Some(why), ..Point::default() }
    }

    /// Activation peak in bytes and model throughput in TFLOP/s, if it was measured.
    pub(super) fn figures(&self) -> Option<(u64, f64)> {
        Some((self.act_peak_bytes?, self.model_tflops?))
    }

    /// Whether it needs no more memory and is no slower than `other`, and is better in one of the two.
    fn beats(&self, other: &Point) -> bool {
        let (Some((peak, throughput)), Some((other_peak, other_throughput))) =
            (self.figures(), other.figures())
        else {
            return false;
        };
        peak <= other_peak
            && throughput >= other_throughput
            && (peak < other_peak || throughput > other_throughput)
    }
}

/// Which points are on the frontier: those that no other point beats.
pub(crate) fn frontier(points: &[Point]) -> Vec<bool> {
    let on = |point: &Point| point.figures().is_some() && !points.iter().any(|other| other.beats(point));
    points.iter().map(on).collect()
}

/// A table for people.
pub(crate) fn render(points: &[Point]) -> String {
    let header = [
        "strategy",
        "micro-batch",
        "ms",
        "ratio to keep (95 %)",
        "tokens/s",
        "model TFLOP/s",
        "activation peak",
        "/ keep",
        "with gradients",
        "moved",
        "recomputed",
        "frontier",
    ];
    let dash = || "-".to_owned();
    let bytes = |bytes: Option<u64>| bytes.map_or_else(dash, size::format);
    let number =
        |number: Option<f64>, digits: usize| number.map_or_else(dash, |number| format!("{number:.digits$}"));
    let body = points.iter().zip(frontier(points)).map(|(point, on_frontier)| {
        let ratio = match (point.ratio_to_keep, point.ratio_low, point.ratio_high) {
            (Some(ratio), Some(low), Some(high)) => format!("{ratio:.3} ({low:.3}-{high:.3})"),
            _ => dash(),
        };
        [
            point.strategy.clone(),
            point.micro_batch.to_string(),
            number(point.step_ms_median, 1),
            ratio,
            number(point.tokens_per_s, 0),
            number(point.model_tflops, if point.model_tflops < Some(1.0) { 4 } else { 1 }),
            bytes(point.act_peak_bytes),
            number(point.act_peak_to_keep, 3),
            bytes(point.step_peak_bytes),
            bytes(point.offloaded_bytes),
            bytes(point.recomputed_bytes),
            if on_frontier { "*" } else { "" }.to_owned(),
        ]
    });
    let mut text = table::render(header, body);
    text += "\n*: no other point has both a lower activation peak and a higher throughput.";
    for point in points {
        if let Some(why) = &point.failed {
            text += &format!("\n{} at micro-batch {} failed: {why}", point.strategy, point.micro_batch);
        }
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::rok) fn point(micro_batch: usize, strategy: &str, peak: u64, tflops: f64) -> Point {
        Point {
            micro_batch,
            strategy: strategy.to_owned(),
            step_ms_median: Some(12.5),
            model_tflops: Some(tflops),
            act_peak_bytes: Some(peak),
            ..Point::default()
        }
    }

    #[test]
    fn the_frontier_is_what_no_other_point_beats() {
        let points = [
            point(2, "keep", 100, 1.0),
            point(2, "offload", 50, 1.0),
            point(4, "keep", 200, 2.0),
            point(4, "offload", 100, 1.5),
            Point::failed(8, "keep", "out of memory".to_owned()),
            point(8, "offload", 200, 2.0),
        ];
        assert_eq!(frontier(&points), [false, true, true, true, false, true]);
        assert!(frontier(&[]).is_empty());
    }

    #[test]
    fn the_table_marks_the_frontier_and_names_failures() {
        let points =
            [point(2, "keep", 100, 1.0), Point::failed(8, "keep", "out of memory: 9 GiB".to_owned())];
        let table = render(&points);
        assert_eq!(table.matches("* |").count(), 1, "{table}");
        assert!(table.contains("keep at micro-batch 8 failed: out of memory: 9 GiB"), "{table}");
    }
}
