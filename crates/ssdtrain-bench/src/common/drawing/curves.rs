//! Curves through labelled points.

use anyhow::Result;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{COLOURS, Canvas, GRID, INK, text};

/// Curves over two axes that start at zero, with a legend above them. Points may be marked: they get a ring, and a
/// dashed line joins them from left to right.
pub(crate) struct Curves<'a> {
    pub(crate) title: &'a str,
    pub(crate) x_title: &'a str,
    pub(crate) y_title: &'a str,
    pub(crate) curves: &'a [Curve],
    /// The legend's text for marked points.
    pub(crate) marked: &'a str,
}

/// One curve.
pub(crate) struct Curve {
    pub(crate) name: String,
    /// In the order in which they are joined.
    pub(crate) spots: Vec<Spot>,
}

/// A point of a curve.
#[derive(Clone, Debug)]
pub(crate) struct Spot {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Written beside the point, if there is room.
    pub(crate) label: String,
    pub(crate) marked: bool,
}

type Chart<'a, B> = ChartContext<'a, B, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Pixels from the picture's edge to its contents.
const MARGIN: i32 = 16;
/// Pixels of a line of the legend.
const LEGEND: i32 = 26;
/// Pixels of the title.
const TITLE: i32 = 38;
/// Radius of a point and of its ring, in pixels.
const POINT: i32 = 5;
/// See [`POINT`].
const RING: i32 = 9;
/// Height of a label, in pixels.
const LABEL: i32 = 16;

impl Curves<'_> {
    /// Draws the curves over all of `canvas`.
    pub(crate) fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, canvas: &Canvas<B>) -> Result<()> {
        let below = self.draw_legend(canvas)?;
        let (_, area) = canvas.split_vertically(below);
        let highest = |value: fn(&Spot) -> f64| 1.08 * self.spots().map(value).fold(0.0, f64::max);
        // An axis has a length even if nothing is on it.
        let end = |highest: f64| if highest > 0.0 { highest } else { 1.0 };
        let (right, top) = (end(highest(|spot| spot.x)), end(highest(|spot| spot.y)));
        let mut chart = ChartBuilder::on(&area)
            .margin(MARGIN)
            .x_label_area_size(56)
            .y_label_area_size(76)
            .build_cartesian_2d(0.0..right, 0.0..top)?;
        chart
            .configure_mesh()
            .x_labels(8)
            .y_labels(6)
            .x_label_formatter(&|value| number(*value, right))
            .y_label_formatter(&|value| number(*value, top))
            .x_desc(self.x_title)
            .y_desc(self.y_title)
            .label_style(text(16, HPos::Center, VPos::Center))
            .axis_desc_style(text(18, HPos::Center, VPos::Center))
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .draw()?;
        let mut marked: Vec<_> =
            self.spots().filter(|spot| spot.marked).map(|spot| (spot.x, spot.y)).collect();
        marked.sort_by(|left, right| left.0.total_cmp(&right.0));
        chart.draw_series(DashedLineSeries::new(marked, 6, 5, INK.mix(0.6).stroke_width(2)))?;
        for (index, curve) in self.curves.iter().enumerate() {
            let line = curve.spots.iter().map(|spot| (spot.x, spot.y));
            chart.draw_series(LineSeries::new(line.clone(), colour(index).stroke_width(3)))?;
            chart.draw_series(line.map(|at| Circle::new(at, POINT, colour(index).filled())))?;
            let rings = curve.spots.iter().filter(|spot| spot.marked).map(|spot| (spot.x, spot.y));
            chart.draw_series(rings.map(|at| Circle::new(at, RING, INK.stroke_width(2))))?;
        }
        self.draw_labels(&mut chart, canvas)
    }

    fn spots(&self) -> impl Iterator<Item = &Spot> {
        self.curves.iter().flat_map(|curve| &curve.spots)
    }

    /// Draws the title and the legend; returns the height that they take.
    fn draw_legend<B: DrawingBackend<ErrorType: 'static>>(&self, canvas: &Canvas<B>) -> Result<i32> {
        canvas.draw(&Text::new(self.title, (MARGIN, MARGIN), text(22, HPos::Left, VPos::Top)))?;
        let style = text(17, HPos::Left, VPos::Center);
        let (mut x, mut y) = (MARGIN, MARGIN + TITLE);
        let (width, _) = canvas.dim_in_pixel();
        let names = self.curves.iter().map(|curve| curve.name.as_str()).chain([self.marked]);
        for (index, name) in names.enumerate() {
            let taken = 40 + canvas.estimate_text_size(name, &style)?.0 as i32;
            if x > MARGIN && x + taken + MARGIN > width as i32 {
                (x, y) = (MARGIN, y + LEGEND);
            }
            let (line, middle) = ([(x, y), (x + 30, y)], (x + 15, y));
            if index < self.curves.len() {
                canvas.draw(&PathElement::new(line, colour(index).stroke_width(3)))?;
                canvas.draw(&Circle::new(middle, POINT, colour(index).filled()))?;
            } else {
                canvas.draw(&Circle::new(middle, RING, INK.stroke_width(2)))?;
            }
            canvas.draw(&Text::new(name.to_owned(), (x + 40, y), style.clone()))?;
            x += taken + 24;
        }
        Ok(y + LEGEND / 2)
    }

    fn draw_labels<B: DrawingBackend<ErrorType: 'static>>(
        &self,
        chart: &mut Chart<'_, B>,
        canvas: &Canvas<B>,
    ) -> Result<()> {
        let style = text(LABEL as u32, HPos::Center, VPos::Center);
        let (mut points, mut lines) = (Vec::new(), Vec::new());
        for curve in self.curves {
            let first = points.len();
            for spot in &curve.spots {
                let (width, _) = canvas.estimate_text_size(&spot.label, &style)?;
                points.push((chart.backend_coord(&(spot.x, spot.y)), width as i32));
            }
            lines.extend(points[first..].windows(2).map(|pair| (pair[0].0, pair[1].0)));
        }
        let mut offsets = offsets(&points, &lines).into_iter();
        for (index, curve) in self.curves.iter().enumerate() {
            let ink = colour(index);
            let style = style.color(&ink);
            for (spot, offset) in curve.spots.iter().zip(offsets.by_ref()) {
                let Some(offset) = offset else { continue };
                let label = Text::new(spot.label.clone(), offset, style.clone());
                chart.draw_series([EmptyElement::at((spot.x, spot.y)) + label])?;
            }
        }
        Ok(())
    }
}

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

/// A number on an axis that ends at `end`.
fn number(value: f64, end: f64) -> String {
    let digits = if end < 1.0 {
        2
    } else if end < 10.0 {
        1
    } else {
        0
    };
    format!("{value:.digits$}")
}

/// A position, in pixels.
type Pixel = (i32, i32);

/// Where to put the middle of each label, relative to its point: clear of all points, of the labels before it and, if
/// possible, of the lines. `None` if there is no room. Each point comes with the width of its label.
fn offsets(points: &[(Pixel, i32)], lines: &[(Pixel, Pixel)]) -> Vec<Option<Pixel>> {
    let mut taken: Vec<_> =
        points.iter().map(|&(point, _)| Area::around(point, 2 * RING, 2 * RING)).collect();
    let lines: Vec<_> = lines.iter().flat_map(|&(from, to)| dots(from, to)).collect();
    let offsets = points.iter().map(|&((x, y), width)| {
        let (aside, above) = (RING + 4 + width / 2, RING + 2 + LABEL / 2);
        let tries = [
            (0, -above),
            (aside, 0),
            (0, above),
            (-aside, 0),
            (aside, -above),
            (aside, above),
            (-aside, -above),
            (-aside, above),
        ];
        let area = |(dx, dy): Pixel| Area::around((x + dx, y + dy), width, LABEL);
        let clear = |of: &[Area], offset| !of.iter().any(|other| other.meets(area(offset)));
        let free: Vec<_> = tries.into_iter().filter(|&offset| clear(&taken, offset)).collect();
        let offset = *free.iter().find(|&&offset| clear(&lines, offset)).or_else(|| free.first())?;
        taken.push(area(offset));
        Some(offset)
    });
    offsets.collect()
}

/// The area that a line covers.
fn dots(from: Pixel, to: Pixel) -> impl Iterator<Item = Area> {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let count = (dx.abs().max(dy.abs()) / 4).max(1);
    (0..=count).map(move |dot| Area::around((from.0 + dx * dot / count, from.1 + dy * dot / count), 6, 6))
}

/// A rectangle of pixels: left, top, right, bottom.
#[derive(Clone, Copy)]
struct Area(i32, i32, i32, i32);

impl Area {
    fn around((x, y): (i32, i32), width: i32, height: i32) -> Area {
        Area(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    }

    fn meets(self, other: Area) -> bool {
        self.0 < other.2 && other.0 < self.2 && self.1 < other.3 && other.1 < self.3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_stands_above_its_point_unless_something_else_does() {
        let (low, high) = (((100, 100), 20), ((100, 84), 20));
        assert_eq!(offsets(&[low], &[]), [Some((0, -19))]);
        assert_eq!(offsets(&[low, high], &[]), [Some((23, 0)), Some((0, -19))]);
        let upwards = ((100, 100), (100, 0));
        assert_eq!(offsets(&[low], &[upwards]), [Some((23, 0))]);
    }

    #[test]
    fn a_label_crosses_a_line_where_there_is_no_other_room_and_is_left_out_where_there_is_none() {
        let star: Vec<_> = (0..9).map(|way| ((100, 100), (60 + way % 3 * 40, 60 + way / 3 * 40))).collect();
        assert_eq!(offsets(&[((100, 100), 20)], &star), [Some((0, -19))]);
        let crowd: Vec<_> = (0..7).flat_map(|x| (0..7).map(move |y| ((12 * x, 12 * y), 20))).collect();
        let placed = offsets(&crowd, &[]);
        assert!(placed[24].is_none() && placed.iter().any(Option::is_some), "{placed:?}");
    }
}
