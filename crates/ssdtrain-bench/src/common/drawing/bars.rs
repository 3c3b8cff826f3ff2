//! Bar charts.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Canvas, GRID, INK, text};

/// A row of bars over a common axis from zero.
pub(crate) struct Bars<'a> {
    pub(crate) title: &'a str,
    pub(crate) bars: &'a [Bar],
    /// Whether the bars' labels are written below them.
    pub(crate) labels: bool,
}

/// One bar.
pub(crate) struct Bar {
    pub(crate) value: f64,
    /// Written above the bar.
    pub(crate) shown: String,
    /// Written below it, line by line.
    pub(crate) label: Vec<String>,
    pub(crate) colour: RGBColor,
    /// A diamond at another value.
    pub(crate) mark: Option<f64>,
}

impl Bars<'_> {
    /// The part of the height, in pixels, that the labels take.
    pub(crate) const LABELS: u32 = 64;

    /// Draws the bars over all of `canvas`.
    pub(crate) fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, canvas: &Canvas<B>) -> Result<()> {
        let values = self.bars.iter().flat_map(|bar| [bar.value, bar.mark.unwrap_or(0.0)]);
        let highest = 1.15 * values.fold(0.0, f64::max);
        let width = self.bars.len() as f64;
        let mut chart = ChartBuilder::on(canvas)
            .caption(self.title, text(24, HPos::Left, VPos::Top))
            .margin(12)
            .x_label_area_size(if self.labels { Self::LABELS } else { 8 })
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..width, 0.0..highest)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .y_labels(6)
            .y_label_style(text(17, HPos::Right, VPos::Center))
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .draw()?;
        for (index, bar) in self.bars.iter().enumerate() {
            let (left, middle) = (index as f64 + 0.18, index as f64 + 0.5);
            let corners = [(left, 0.0), (left + 0.64, bar.value)];
            chart.draw_series([Rectangle::new(corners, bar.colour.filled())])?;
            // Keeps clear of a diamond on top of the bar.
            let near = bar.mark.is_some_and(|mark| (mark - bar.value).abs() < 0.05 * highest);
            let above = EmptyElement::at((middle, bar.value))
                + Text::new(
                    bar.shown.clone(),
                    (0, if near { -14 } else { -5 }),
                    text(18, HPos::Center, VPos::Bottom),
                );
            chart.draw_series([above])?;
            if let Some(value) = bar.mark {
                let diamond = vec![(0, -8), (8, 0), (0, 8), (-8, 0)];
                chart.draw_series([EmptyElement::at((middle, value)) + Polygon::new(diamond, INK)])?;
            }
            for (line, label) in bar.label.iter().enumerate().filter(|_| self.labels) {
                let below =
                    Text::new(label.clone(), (0, 8 + 20 * line as i32), text(17, HPos::Center, VPos::Top));
                chart.draw_series([EmptyElement::at((middle, 0.0)) + below])?;
            }
        }
        Ok(())
    }
}
