//! The table: a row for each program, and what all of them come to.

use crate::race::{Aim, Lap, Outcome, Promise, Spread};

/// What the columns mean.
const LEGEND: &str = "
  ms                  the median iteration without the cache, of the last 10
  settled             the iteration after which the plan was settled for good
  first 10, last 10   times with the cache over those without: the median, and the quartiles
  peak                the highest activation peak of the last 10 iterations over the highest without the cache
  above               the iterations whose peak was above the goal's, of all
  promise             whether the last 10 iterations kept the goal; withdrawn: they did not, and their reports say that it is out of reach
  plans, reckoned     how many plans were made, and what the last one takes by its own reckoning, over a step that keeps everything
  planned, left, moved, kept
                      steps that followed a plan, saved something else than planned, moved everything, kept everything
  bits                weights, buffers and gradients with the cache and without, compared after each iteration
";

/// Heads the table.
pub(crate) fn head(aim: Aim, steps: usize) {
    let goal = match aim {
        Aim::Overhead(share) => format!("steps that are at most {:.0} % longer", share * 100.0),
        Aim::Budget(share) => format!("a peak of at most {share} of the highest without the cache"),
    };
    println!("{steps} iterations of each program with the cache and without. The goal: {goal}.{LEGEND}");
    line([
        "program", "ms", "settled", "first 10", "last 10", "peak", "above", "promise", "plans", "reckoned",
        "planned", "left", "moved", "kept", "bits",
    ]);
}

/// Prints an iteration, and the reports of its steps.
pub(crate) fn iteration(number: usize, [plain, cached]: &Lap) {
    let [without, with] = [plain, cached].map(|(time, _)| time.as_secs_f64());
    println!("    {number}: {:.2} of {:.1} ms", with / without, without * 1e3);
    cached.1.reports.iter().for_each(|report| println!("        {report}"));
}

/// Prints a program's row, and lines below it for what went wrong.
pub(crate) fn row(name: &str, outcome: &Outcome) {
    let Outcome { steps, .. } = outcome;
    let settled = outcome.settled.map_or_else(|| "never".to_owned(), |number| number.to_string());
    let bits = outcome.differs.map_or_else(|| "same".to_owned(), |number| format!("DIFFER from {number}"));
    let [planned, left, moved, kept] =
        [steps.planned, steps.left, steps.moved, steps.kept].map(|count| count.to_string());
    line([
        name,
        &format!("{:.0}", outcome.plain.as_secs_f64() * 1e3),
        &settled,
        &spread(outcome.first),
        &spread(outcome.last),
        &format!("{:.3}", outcome.peak),
        &outcome.above.map_or_else(|| "-".to_owned(), |above| above.to_string()),
        promise(outcome.promise),
        &outcome.plans.to_string(),
        &format!("{:.2}", outcome.reckoned),
        &planned,
        &left,
        &moved,
        &kept,
        &bits,
    ]);
    if let Some((number, failure)) = &outcome.failure {
        println!("    ERROR in iteration {number}, {failure}");
    }
    if outcome.is_astray {
        println!("    weights are not finite: the bits say little");
    }
    for warning in &outcome.warnings {
        println!("    warning of the last step: {warning}");
    }
}

/// Prints how many programs settled, kept their promise and have the same bits.
pub(crate) fn foot(outcomes: &[Outcome]) {
    let all = outcomes.len();
    let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| is(outcome)).count();
    println!("\nsettled       {} of {all}", count(|outcome| outcome.settled.is_some()));
    println!("promise kept  {} of {all}", count(|outcome| outcome.promise == Promise::Kept));
    println!("withdrawn     {}", count(|outcome| outcome.promise == Promise::Withdrawn));
    println!("same bits     {} of {all}", count(|outcome| outcome.differs.is_none()));
    println!("errors        {}", count(|outcome| outcome.failure.is_some()));
}

fn line(cells: [&str; 15]) {
    let [
        name,
        ms,
        settled,
        first,
        last,
        peak,
        above,
        promise,
        plans,
        reckoned,
        planned,
        left,
        moved,
        kept,
        bits,
    ] = cells;
    println!(
        "{name:<24} {ms:>5} {settled:>7}  {first:<16}  {last:<16} {peak:>6} {above:>5}  {promise:<9} {plans:>5} {reckoned:>8} {planned:>7} {left:>4} {moved:>5} \
         {kept:>4}  {bits}"
    );
}

fn promise(promise: Promise) -> &'static str {
    match promise {
        Promise::Kept => "kept",
        Promise::Withdrawn => "withdrawn",
        Promise::Broken => "broken",
    }
}

fn spread(Spread { low, median, high }: Spread) -> String {
    format!("{median:.2} ({low:.2}-{high:.2})")
}
