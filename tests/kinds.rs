//! Steps of several kinds, and steps that are never quite alike, follow plans too, with the bits of steps without a cache.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaves, randn};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Planning, StepReport, TensorCache};
use tch::{Kind, Tensor};

const WIDTH: i64 = 256;
const LAYERS: usize = 6;

fn cache() -> TensorCache {
    // The lowest peak there is.
    everything().policy(Auto::new(Goal::overhead(f64::INFINITY))).build().unwrap()
}

fn sources() -> Vec<Tensor> {
    (0..LAYERS).map(|_| randn(&[WIDTH, WIDTH]) / 16.0).collect()
}

fn layer(x: &Tensor, weight: &Tensor) -> Tensor {
    x.matmul(weight).gelu("tanh")
}

/// A step with the loss that `compute` makes from the weights, and the same without a cache.
fn step(cache: &TensorCache, sources: &[Tensor], compute: impl Fn(&[Tensor]) -> Tensor) -> StepReport {
    let plain = leaves(sources);
    compute(&plain).backward();
    let weights = leaves(sources);
    let step = cache.step();
    let loss = compute(&weights);
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    drop(loss);
    assert_same_bits("a step of any kind", &grads(&plain), &grads(&weights));
    assert_nothing_held(cache);
    report
}

/// From step number `from` on, all follow a plan or are small, but for those that are profiled, at most `profiled` of them, or
/// compared. Some of them move something.
fn assert_planned(reports: &[StepReport], from: usize, profiled: usize) {
    let lines: Vec<_> = reports.iter().map(|report| report.to_string()).collect();
    let count = |planning| reports[from..].iter().filter(|report| report.planning == Some(planning)).count();
    let [compared, again] = [Planning::Compared, Planning::Profiled].map(count);
    let is_planned =
        |report: &&StepReport| matches!(report.planning, Some(Planning::Followed | Planning::Small));
    let planned: Vec<_> = reports[from..].iter().filter(is_planned).collect();
    assert_eq!(planned.len() + compared + again, reports.len() - from, "{}", lines.join("\n"));
    assert!(again <= profiled, "{}", lines.join("\n"));
    let moves = |report: &&StepReport| {
        report.planning == Some(Planning::Followed) && report.offloaded.bytes + report.recomputed.bytes > 0
    };
    assert!(planned.into_iter().any(|report| moves(&report)), "{}", lines.join("\n"));
}

#[test]
fn two_kinds_of_steps_in_turn_have_a_plan_each() {
    let (cache, sources) = (cache(), sources());
    let x = randn(&[512, WIDTH]);
    let one =
        |weights: &[Tensor]| weights.iter().fold(x.shallow_clone(), |y, w| layer(&y, w)).sum(Kind::Float);
    let other = |weights: &[Tensor]| {
        let y = weights.iter().fold(x.narrow(0, 0, 320), |y, w| y.matmul(w).sigmoid() * &y);
        y.square().mean(Kind::Float)
    };
    let reports: Vec<_> = (0..20)
        .map(
            |number| {
                if number % 2 == 0 { step(&cache, &sources, one) } else { step(&cache, &sources, other) }
            },
        )
        .collect();
    assert_planned(&reports, 8, 1);
}

#[test]
fn steps_that_leave_layers_out_or_repeat_them_follow_the_plan() {
    let (cache, sources) = (cache(), sources());
    let x = randn(&[512, WIDTH]);
    let orders: [&[usize]; 4] =
        [&[0, 1, 2, 3, 4, 5], &[0, 2, 3, 5], &[0, 1, 2, 3, 2, 3, 4, 5], &[0, 1, 4, 5]];
    let reports: Vec<_> = (0..24)
        .map(|number| {
            let order = orders[number % 4];
            step(&cache, &sources, |weights| {
                let y = order.iter().fold(x.shallow_clone(), |y, number| {
                    let _scope = ssdtrain::scope(&format!("layer.{number}"));
                    layer(&y, &weights[*number])
                });
                let _scope = ssdtrain::scope("loss");
                // All weights have gradients.
                let others: Vec<_> = weights.iter().map(|weight| weight.square().mean(Kind::Float)).collect();
                y.sum(Kind::Float) + Tensor::stack(&others, 0).sum(Kind::Float)
            })
        })
        .collect();
    assert_planned(&reports, 12, 3);
}

#[test]
fn steps_whose_parts_vary_in_size_follow_the_plan() {
    let (cache, sources) = (cache(), sources());
    let x = randn(&[600, WIDTH]);
    let reports: Vec<_> = (0..24)
        .map(|number| {
            // As many rows as there are, distributed over three experts of two layers in another way each time.
            let first = 120 + (number * 67) % 160;
            let second = 120 + (number * 41) % 160;
            let rows = [first, second, 600 - first - second];
            step(&cache, &sources, |weights| {
                let x = x.sin() * 1.0;
                let mut from = 0;
                let experts = rows.iter().zip(weights.chunks(2)).map(|(rows, weights)| {
                    let part = x.narrow(0, from, *rows).contiguous();
                    from += rows;
                    weights.iter().fold(part, |y, weight| layer(&y, weight))
                });
                Tensor::cat(&experts.collect::<Vec<_>>(), 0).square().mean(Kind::Float)
            })
        })
        .collect();
    assert_planned(&reports, 4, 4);
}

#[test]
fn small_steps_move_nothing_and_are_no_higher_than_the_largest_as_planned() {
    let cache = cache();
    let sources: Vec<_> = (0..LAYERS).map(|_| randn(&[WIDTH])).collect();
    let mut reports: Vec<StepReport> = Vec::new();
    let count = |reports: &[StepReport], planning| {
        reports.iter().rev().take(10).filter(|report| report.planning == Some(planning)).count()
    };
    let is_settled = |reports: &[StepReport]| {
        reports.len() >= 40
            && [Planning::Small, Planning::Followed].iter().all(|one| count(reports, *one) == 5)
    };
    // As long as the disk's speed changes, plans are made anew.
    while reports.len() < 400 && !is_settled(&reports) {
        let x = randn(&[if reports.len().is_multiple_of(2) { 32 } else { 1024 }, WIDTH]);
        reports.push(step(&cache, &sources, |weights| {
            weights.iter().fold(x.shallow_clone(), |y, w| (y * w).tanh()).sum(Kind::Float)
        }));
    }
    let lines: Vec<_> = reports.iter().map(|report| report.to_string()).collect();
    let last = &reports[reports.len() - 10..];
    let of = |planning| last.iter().filter(move |report| report.planning == Some(planning));
    assert!(of(Planning::Small).count() == 5 && of(Planning::Followed).count() == 5, "{}", lines.join("\n"));
    let moved = |report: &StepReport| report.offloaded.count + report.recomputed.count;
    assert!(
        of(Planning::Small).all(|report| moved(report) == 0)
            && of(Planning::Followed).all(|one| moved(one) > 0)
    );
    let highest = of(Planning::Followed).map(|report| report.act_peak_bytes).max();
    assert!(of(Planning::Small).all(|report| Some(report.act_peak_bytes) <= highest), "{}", lines.join("\n"));
}
