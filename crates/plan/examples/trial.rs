use ssdtrain_plan::*;
use std::error::Error;
const MIB: f64 = (1_u64 << 20) as f64;
fn main() -> Result<(), Box<dyn Error>> {
    let a: Vec<String> = std::env::args().skip(1).collect();
    let saved: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&a[0])?)?;
    let Profile { workload, machine, .. } = serde_json::from_value(saved["profile"].clone())?;
    let overhead: f64 = a[1].parse()?;
    let start = std::time::Instant::now();
    let plan = Frontier::new(&workload, &machine, Caps::default()).plan(Goal::overhead(overhead))?;
    let p = plan.prediction;
    let sum = |w: Placement| {
        workload
            .activations
            .iter()
            .zip(&plan.placements)
            .filter(|(x, q)| **q == w && x.role != Role::Fleeting)
            .map(|(x, _)| x.bytes)
            .sum::<u64>() as f64
            / MIB
    };
    println!(
        "{:?} step {:.2} of {:.2} = {:.4}; peak {:.0} (f {:.0} b {:.0}) rec {:.2} stall {:.2?} moving {:.2} out {:.0} keep {:.0} host {:.0} budgets {:.0} {:.0}",
        start.elapsed(),
        p.step.as_secs_f64() * 1e3,
        workload.computed().as_secs_f64() * 1e3,
        p.step.as_secs_f64() / workload.computed().as_secs_f64(),
        p.peak() as f64 / MIB,
        p.forward_peak as f64 / MIB,
        p.backward_peak as f64 / MIB,
        p.recomputed.as_secs_f64() * 1e3,
        p.stall,
        p.moving.as_secs_f64() * 1e3,
        p.copied_out as f64 / MIB,
        sum(Placement::Keep),
        sum(Placement::Host),
        plan.budgets.device_budget as f64 / MIB,
        plan.budgets.backward_budget as f64 / MIB
    );
    let samples = workload.samples(&plan.placements, &machine, &plan.budgets);
    if a.len() > 2 {
        for s in &samples {
            println!(
                "{:?} {:.1} bytes {:.0} kept {:.0} moving {:.0} extra {:.0} again {:.0}",
                s.moment,
                s.at.as_secs_f64() * 1e3,
                s.bytes as f64 / MIB,
                s.kept as f64 / MIB,
                s.moving as f64 / MIB,
                s.extra as f64 / MIB,
                (s.bytes - s.kept - s.moving - s.extra) as f64 / MIB
            );
        }
        for (i, (x, q)) in workload.activations.iter().zip(&plan.placements).enumerate() {
            println!(
                "{i} {:?} {:.0} MiB fwd {:.2} bwd {:.2} fx {:.0} bx {:.0} {q:?} until {} with {}",
                x.role,
                x.bytes as f64 / MIB,
                x.forward.as_secs_f64() * 1e3,
                x.backward.as_secs_f64() * 1e3,
                x.forward_extra as f64 / MIB,
                x.backward_extra as f64 / MIB,
                x.in_use_until as i64,
                x.in_use_with
            );
        }
    }
    Ok(())
}
