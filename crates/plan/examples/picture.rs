//! A picture of what a plan does, as SVG: the bytes on the device over a step, beside a step that keeps everything.
//!
//! `cargo run --release -p ssdtrain-plan --example picture -- PROFILE OVERHEAD > docs/plan.svg`, where PROFILE was saved
//! by `--save-profile`, draws the picture of docs/planning.md.

use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use ssdtrain_plan::{Budgets, Caps, Frontier, Goal, Profile, Sample};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
/// Where the diagram begins, and the room below it.
const LEFT: f64 = 50.0;
const TOP: f64 = 34.0;
const BELOW: f64 = 58.0;
const GIB: f64 = (1_u64 << 30) as f64;

const STYLE: &str = "
text { font: 12px system-ui, sans-serif; fill: #333 } .grid { stroke: #888; stroke-opacity: 0.3 }
.whole { fill: none; stroke: #777; stroke-width: 1.5; stroke-dasharray: 4 3 }
.extra { fill: #b9bec6 } .kept { fill: #4c78a8 } .moving { fill: #f2a541 } .again { fill: #6aab5e }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .whole { stroke: #aaa }
.extra { fill: #60666f } .kept { fill: #5b8dc4 } .moving { fill: #d98e2b } .again { fill: #57944c } }
";

/// The bands of the picture from below: a class, a name, and the bytes of a sample.
type Band = (&'static str, &'static str, fn(&Sample) -> u64);
const BANDS: [Band; 4] = [
    ("extra", "besides activations", |sample| sample.extra),
    ("kept", "kept", |sample| sample.kept),
    ("moving", "on its way", |sample| sample.moving),
    ("again", "in use or computed again", |sample| sample.bytes - sample.extra - sample.kept - sample.moving),
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, overhead] = &arguments[..] else { return Err("give a profile and an overhead".into()) };
    let saved: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let Profile { workload, machine, .. } = serde_json::from_value(saved["profile"].clone())?;
    let overhead: f64 = overhead.parse()?;
    let plan = Frontier::new(&workload, &machine, Caps::default()).plan(Goal::overhead(overhead))?;
    let whole = workload.samples(&workload.unplanned(), &machine, &Budgets::default());
    let planned = workload.samples(&plan.placements, &machine, &plan.budgets);
    let step = plan.prediction.step;
    print!("{}", picture(&whole, &planned, step, overhead));
    Ok(())
}

fn picture(whole: &[Sample], planned: &[Sample], step: Duration, overhead: f64) -> String {
    let most = whole.iter().chain(planned).map(|sample| sample.bytes).max().unwrap_or(1) as f64;
    let x = |at: Duration| LEFT + (WIDTH - LEFT - 10.0) * at.as_secs_f64() / step.as_secs_f64();
    let y = |bytes: f64| HEIGHT - BELOW - (HEIGHT - BELOW - TOP) * bytes / most;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\"><style>{STYLE}</style>\n\
         <text x=\"{LEFT}\" y=\"18\">GiB on the device over a step that takes at most {:.0} % longer</text>\n",
        100.0 * overhead
    );
    let mut line = |text: &str| {
        svg.push_str(text);
        svg.push('\n');
    };
    for gib in (0..).map(|nth| 5.0 * f64::from(nth)).take_while(|gib| gib * GIB <= most) {
        let at = y(gib * GIB);
        line(&format!("<path class=\"grid\" d=\"M{LEFT} {at:.1}H{}\"/>", WIDTH - 10.0));
        line(&format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{gib}</text>", LEFT - 6.0, at + 4.0));
    }
    let mut below = vec![0_u64; planned.len()];
    for (class, _, part) in BANDS {
        let floor = below.clone();
        below.iter_mut().zip(planned).for_each(|(bytes, sample)| *bytes += part(sample));
        let steps = |levels: &[u64]| -> Vec<(f64, f64)> {
            let ends = planned.iter().skip(1).map(|sample| sample.at).chain([step]);
            let sides = planned.iter().zip(ends).zip(levels);
            sides
                .flat_map(|((sample, end), level)| {
                    [(x(sample.at), y(*level as f64)), (x(end), y(*level as f64))]
                })
                .collect()
        };
        let mut around = steps(&below);
        around.extend(steps(&floor).into_iter().rev());
        line(&format!("<path class=\"{class}\" d=\"{}Z\"/>", path(&around)));
    }
    let outline: Vec<_> = whole.iter().map(|sample| (x(sample.at), y(sample.bytes as f64))).collect();
    line(&format!("<path class=\"whole\" d=\"{}\"/>", path(&outline)));
    for tenths in (0..).take_while(|tenths| Duration::from_millis(100 * tenths) <= step) {
        let at = x(Duration::from_millis(100 * tenths));
        line(&format!(
            "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{} ms</text>",
            HEIGHT - BELOW + 16.0,
            100 * tenths
        ));
    }
    let mut at = LEFT;
    for (class, name, _) in BANDS {
        line(&format!(
            "<rect class=\"{class}\" x=\"{at}\" y=\"{}\" width=\"12\" height=\"12\"/>",
            HEIGHT - 22.0
        ));
        line(&format!("<text x=\"{}\" y=\"{}\">{name}</text>", at + 17.0, HEIGHT - 12.0));
        at += 45.0 + 6.4 * name.len() as f64;
    }
    line(&format!("<path class=\"whole\" d=\"M{at} {0}h24\"/>", HEIGHT - 16.0));
    line(&format!("<text x=\"{}\" y=\"{}\">everything kept</text>", at + 29.0, HEIGHT - 12.0));
    svg + "</svg>\n"
}

/// A path through these points, without those that lie closer than can be seen.
fn path(points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    let mut last: Option<(f64, f64)> = None;
    for &(x, y) in points {
        if last.is_some_and(|(before, level)| (x - before).abs() < 0.05 && (y - level).abs() < 0.05) {
            continue;
        }
        // Writing to a string cannot fail.
        _ = write!(path, "{}{x:.1} {y:.1}", if last.is_none() { 'M' } else { 'L' });
        last = Some((x, y));
    }
    path
}
