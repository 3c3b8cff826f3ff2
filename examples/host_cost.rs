//! What the cache costs the program's own thread, in steps of operations so small that nothing else counts: as without a cache, with what
//! is saved left in the graph, kept in the cache, and kept while operations are recorded, as in steps whose plan recomputes something.
//!
//! `cargo run --release --example host_cost -- [cpu|cuda]`

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ssdtrain::plan::{Goal, Observation, Outset, Placement, Saves, StepPlan};
use ssdtrain::{Auto, Policy, TensorCache};
use tch::{Cuda, Device, Kind, Tensor, set_num_threads};

/// Operations of a step's forward, three in a group, and how often each way takes its turn.
const GROUPS: usize = 400;
const ROUNDS: usize = 101;

/// Steps in which what is saved has the same placements each time.
#[derive(Clone, Debug)]
struct Always(Saves);

impl Policy for Always {
    fn begin(&mut self, _: &Outset<'_>) -> StepPlan {
        StepPlan { saves: self.0.clone(), ..StepPlan::default() }
    }

    fn end(&mut self, _: &StepPlan, _: Observation) {}

    fn is_settled(&self) -> bool {
        true
    }
}

/// One forward and one backward; the time of each.
fn train(
    x: &Tensor,
    weight: &Tensor,
    backward: impl FnOnce(&Tensor) -> Result<(), Box<dyn Error>>,
) -> Result<[Duration; 2], Box<dyn Error>> {
    let begun = Instant::now();
    let mut y = x.shallow_clone();
    for _ in 0..GROUPS {
        y = (y.sigmoid() * weight).tanh();
    }
    let loss = y.sum(Kind::Float);
    let forward = begun.elapsed();
    drop(y);
    backward(&loss)?;
    let both = begun.elapsed();
    Ok([forward, both - forward])
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = match env::args().nth(1).as_deref() {
        None | Some("cpu") => Device::Cpu,
        Some("cuda") => Device::Cuda(0),
        Some(other) => return Err(format!("{other}: give cpu or cuda").into()),
    };
    set_num_threads(1);
    // Recomputing nothing of what these programs save, so that all that is left of it is the recording.
    let recorded: Arc<[Placement]> =
        std::iter::repeat_n(Placement::Keep, 10_000).chain([Placement::Recompute]).collect();
    let builder = || TensorCache::builder().device(device).min_bytes(1).spill_to(env::temp_dir());
    let always = |saves| builder().policy(Always(saves)).build();
    let ways = [
        ("without a cache", None),
        ("left in the graph", Some(always(Saves::Count)?)),
        ("kept in the cache", Some(always(Saves::Keep)?)),
        ("kept, recorded", Some(always(Saves::InTurn(recorded))?)),
        ("a plan that keeps all", Some(builder().policy(Auto::new(Goal::overhead(0.0))).build()?)),
    ];
    let x = Tensor::randn([64, 16], (Kind::Float, device));
    let weight = Tensor::ones([64, 16], (Kind::Float, device)).set_requires_grad(true);
    let mut times = vec![Vec::new(); ways.len()];
    for _ in 0..ROUNDS {
        for ((_, cache), times) in ways.iter().zip(&mut times) {
            if device.is_cuda() {
                Cuda::synchronize(0);
            }
            let begun = Instant::now();
            let [forward, backward] = match cache {
                None => train(&x, &weight, |loss| {
                    loss.backward();
                    Ok(())
                })?,
                Some(cache) => {
                    let step = cache.step();
                    let times = train(&x, &weight, |loss| Ok(step.backward(loss)?))?;
                    step.finish()?;
                    times
                }
            };
            times.push([forward, backward, begun.elapsed() - forward - backward]);
        }
    }
    let operations = 3 * GROUPS;
    println!("{operations} operations in forward, medians of {ROUNDS} steps");
    println!("{:22} {:>12} {:>12} {:>14}", "", "forward, us", "backward, us", "begin, end, us");
    for ((name, _), times) in ways.iter().zip(&times) {
        let [forward, backward, rest] = [0, 1, 2].map(|part| {
            let mut of_part: Vec<f64> = times.iter().map(|times| times[part].as_secs_f64() * 1e6).collect();
            of_part.sort_by(f64::total_cmp);
            of_part[of_part.len() / 2]
        });
        println!("{name:22} {forward:12.0} {backward:12.0} {rest:14.0}");
    }
    Ok(())
}
