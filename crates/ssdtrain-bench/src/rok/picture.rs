//! A sweep as a picture.

use anyhow::Result;
use plotters::prelude::DrawingBackend;

use super::point::{Point, frontier};
use super::record::Record;
use crate::common::drawing::{Canvas, Curve, Curves, Picture, Spot};

/// One curve for each strategy: activation peak on the x axis, model throughput on the y axis.
pub(crate) struct RokPicture<'a>(pub(crate) &'a Record);

impl Picture for RokPicture<'_> {
    fn size(&self) -> (u32, u32) {
        (1_000, 680)
    }

    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, canvas: &Canvas<B>) -> Result<()> {
        let RokPicture(Record { title, points, .. }) = self;
        let figures = points.iter().filter_map(Point::figures);
        let (bytes, size) = byte_unit(figures.clone().map(|(peak, _)| peak).max().unwrap_or(0));
        let (tflops, rate) = rate_unit(figures.map(|(_, tflops)| tflops).fold(0.0, f64::max));
        Curves {
            title: &format!("{title}; points: sequences per micro-batch"),
            x_title: &format!("activation peak, {size}"),
            y_title: &format!("model throughput, {rate}"),
            curves: &curves(points, bytes, tflops),
            marked: "frontier",
        }
        .draw(canvas)
    }
}

/// A curve for each strategy, in the order of their first points, in these units.
fn curves(points: &[Point], bytes: f64, tflops: f64) -> Vec<Curve> {
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !names.contains(&point.strategy.as_str()) {
            names.push(&point.strategy);
        }
    }
    let marks = frontier(points);
    let curve = |name: &str| {
        let own = || points.iter().zip(&marks).filter(|(point, _)| point.strategy == name);
        let spots = own().filter_map(|(point, &marked)| {
            let (peak, throughput) = point.figures()?;
            let (x, y) = (peak as f64 / bytes, throughput / tflops);
            Some(Spot { x, y, label: point.micro_batch.to_string(), marked })
        });
        let failed: Vec<_> = own()
            .filter(|(point, _)| point.failed.is_some())
            .map(|(point, _)| point.micro_batch.to_string())
            .collect();
        let failed =
            if failed.is_empty() { String::new() } else { format!(" (fails at {})", failed.join(", ")) };
        Curve { name: format!("{name}{failed}"), spots: spots.collect() }
    };
    names.into_iter().map(curve).collect()
}

/// A unit in which `most` bytes are a readable number, and its name.
fn byte_unit(most: u64) -> (f64, &'static str) {
    match most {
        0..1_048_576 => (1024.0, "KiB"),
        1_048_576..1_073_741_824 => (1024.0 * 1024.0, "MiB"),
        _ => (1024.0 * 1024.0 * 1024.0, "GiB"),
    }
}

/// The same for TFLOP/s.
fn rate_unit(most: f64) -> (f64, &'static str) {
    if most < 1.0 { (1e-3, "GFLOP/s") } else { (1.0, "TFLOP/s") }
}

#[cfg(test)]
mod tests {
    use super::super::point::tests::point;
    use super::*;

    #[test]
    fn each_strategy_has_a_curve_through_what_was_measured() {
        let failed = Point::failed(4, "keep", "out of memory".to_owned());
        let points = [
            point(2, "keep", 2 << 20, 0.5),
            point(2, "offload", 1 << 20, 0.5),
            failed,
            point(4, "offload", 3 << 20, 0.75),
        ];
        let curves = curves(&points, byte_unit(3 << 20).0, rate_unit(0.75).0);
        let names: Vec<_> = curves.iter().map(|curve| curve.name.as_str()).collect();
        assert_eq!(names, ["keep (fails at 4)", "offload"]);
        assert_eq!(curves[0].spots.len(), 1);
        let spots: Vec<_> =
            curves[1].spots.iter().map(|spot| (spot.x, spot.y, spot.label.as_str(), spot.marked)).collect();
        assert_eq!(spots, [(1.0, 500.0, "2", true), (3.0, 750.0, "4", true)]);
    }
}
