//! Measures the time to plan a step of 10,000 saved storages, with as many results that are not saved between them.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use ssdtrain_plan::{Activation, Caps, Frontier, Goal, Machine, Recompute, Role, Workload};

/// Residual blocks: in each, a chain of operations whose results are saved, every other one through a result that is
/// not, and the sum with the block's input, which is spare.
fn blocks(saved: usize) -> Workload {
    let micros = Duration::from_micros;
    let mut activations: Vec<Activation> = Vec::new();
    let mut add = |role: Role, time: u64, inputs: &[usize]| {
        let index = activations.len();
        let number = index as u64;
        activations.push(Activation {
            role,
            bytes: (1 + number % 7) << 20,
            forward: micros(time + number % 13),
            backward: if role == Role::Saved { micros(3 * time + number % 17) } else { Duration::ZERO },
            forward_extra: 1 << 20,
            backward_extra: 4 << 20,
            in_use_until: index + 1,
            in_use_with: index % 3,
            traffic: None,
            recompute: Some(Recompute { time: micros(time + number % 13), inputs: inputs.to_vec() }),
        });
        index
    };
    let mut x = add(Role::Spare, 20, &[]);
    for _ in 0..saved / 10 {
        let mut last = x;
        for nth in 0..10 {
            // A product of matrices now and then, and element-wise operations.
            let time = if nth % 4 == 0 { 300 } else { 20 };
            let through = if nth == 9 { last } else { add(Role::Fleeting, 20, &[last]) };
            last = add(Role::Saved, time, &[through, last]);
        }
        x = add(Role::Spare, 20, &[x, last]);
    }
    Workload { activations, turn: micros(500), rest: micros(5000), ..Workload::default() }
}

fn plan(c: &mut Criterion) {
    let work = blocks(10_000);
    let machine = Machine {
        copy_out: 25e9,
        copy_in: 25e9,
        disk_write: 3e9,
        disk_read: 3e9,
        host_pool: 16 << 30,
        ..Machine::default()
    };
    c.bench_function("collect_10000", |b| b.iter(|| Frontier::new(&work, &machine, Caps::default())));
    for (name, goal) in [
        ("plan_10000", Goal::budget(8 << 30)),
        ("plan_10000_overhead", Goal::overhead(0.01)),
        ("plan_10000_longer", Goal::overhead(0.1)),
    ] {
        c.bench_function(name, |b| b.iter(|| Frontier::new(&work, &machine, Caps::default()).plan(goal)));
    }
}

criterion_group!(benches, plan);
criterion_main!(benches);
