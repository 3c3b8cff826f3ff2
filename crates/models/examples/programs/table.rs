//! The table: a row for each program, and what all of them come to.

use crate::race::{Aim, Outcome, Spread};

/// Explains and heads the table.
pub(crate) fn head(aim: Aim, steps: usize) {
    let goal = match aim {
        Aim::Overhead(share) => format!("steps at most {:.0} % longer", share * 100.0),
        Aim::Budget(share) => format!("a peak of at most {share} of the highest without the cache"),
    };
    println!("{steps} iterations of each program with the cache and without. Goal: {goal}.");
    println!(
        "ms: an iteration without the cache. settled: after which iteration the plan was settled for good. first 10, last 10: times with \
         the cache\nover those without, medians and quartiles. peak: highest activation peak of the last 10 iterations over the highest \
         without the cache.\nplanned, left, moved, kept: steps that followed a plan, that saved something else, that moved everything, \
         that kept everything.\nbits: weights, buffers and gradients with the cache and without, compared after each iteration.\n"
    );
    println!(
        "{:<26}{:>6} {:>8}  {:<18} {:<18} {:>6} {:<8}{:>8} {:>5} {:>5} {:>5}  bits",
        "program",
        "ms",
        "settled",
        "first 10",
        "last 10",
        "peak",
        "promise",
        "planned",
        "left",
        "moved",
        "kept"
    );
}

/// Prints a program's row, and lines below it for what went wrong.
pub(crate) fn row(name: &str, outcome: &Outcome) {
    let Outcome { steps, .. } = outcome;
    println!(
        "{name:<26}{:>6.0} {:>8}  {:<18} {:<18} {:>6.3} {:<8}{:>8} {:>5} {:>5} {:>5}  {}",
        outcome.plain.as_secs_f64() * 1e3,
        outcome.settled.map_or_else(|| "never".to_owned(), |number| number.to_string()),
        spread(outcome.first),
        spread(outcome.last),
        outcome.peak,
        if outcome.is_promise_kept { "kept" } else { "broken" },
        steps.planned,
        steps.left,
        steps.moved,
        steps.kept,
        outcome.differs.map_or_else(|| "same".to_owned(), |number| format!("DIFFER from iteration {number}")),
    );
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
    println!("promise kept  {} of {all}", count(|outcome| outcome.is_promise_kept));
    println!("same bits     {} of {all}", count(|outcome| outcome.differs.is_none()));
    println!("errors        {}", count(|outcome| outcome.failure.is_some()));
}

fn spread(Spread { low, median, high }: Spread) -> String {
    format!("{median:.2} ({low:.2}-{high:.2})")
}
