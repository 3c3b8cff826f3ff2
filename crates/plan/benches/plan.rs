//! Measures the time to plan a step of 10,000 storages.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use ssdtrain_plan::{Activation, Caps, Frontier, Goal, Machine, Recompute, Workload};

fn plan(c: &mut Criterion) {
    let micros = Duration::from_micros;
    let activation = |index: u64| Activation {
        bytes: (1 + index % 7) << 20,
        forward: micros(100 + index % 13),
        backward: micros(200 + index % 17),
        forward_extra: 1 << 20,
        backward_extra: 4 << 20,
        in_use_until: index as usize + 1,
        in_use_with: index as usize % 3,
        recompute: index
            .is_multiple_of(3)
            .then_some(Recompute { time: micros(20), since: index.saturating_sub(1) as usize }),
    };
    let activations: Vec<Activation> = (0..10_000).map(activation).collect();
    let work = Workload { activations, turn: micros(500), rest: micros(5000), turn_extra: 0 };
    let machine = Machine {
        copy_out: 25e9,
        copy_in: 25e9,
        disk_write: 3e9,
        disk_read: 3e9,
        host_pool: 16 << 30,
        ..Machine::default()
    };
    for (name, goal) in [("plan_10000", Goal::budget(8 << 30)), ("plan_10000_overhead", Goal::overhead(0.01))]
    {
        c.bench_function(name, |b| b.iter(|| Frontier::new(&work, &machine, Caps::default()).plan(goal)));
    }
}

criterion_group!(benches, plan);
criterion_main!(benches);
