//! A step of 24 layers under ever smaller budgets: what leaves the device, and what that costs.

use std::time::Duration;

use bytesize::ByteSize;
use ssdtrain_plan::{Activation, Caps, Frontier, Goal, Machine, Placement, Workload};

fn main() {
    let ms = Duration::from_millis;
    let activation =
        Activation { bytes: 1 << 30, forward: ms(25), backward: ms(50), ..Activation::default() };
    let step = Workload { activations: vec![activation; 24], rest: ms(40), ..Workload::default() };
    let machine = Machine {
        copy_out: 25e9,
        copy_in: 25e9,
        disk_write: 6e9,
        disk_read: 6e9,
        host_pool: 8 << 30,
        ..Machine::default()
    };
    let frontier = Frontier::new(&step, &machine, Caps::default());
    println!("{:>10} {:>10} {:>9} {:>9} {:>10}", "budget", "peak", "to host", "to disk", "step");
    for budget in [24, 16, 12, 8, 6, 4, 2].map(|gib| gib << 30) {
        match frontier.plan(Goal::budget(budget)) {
            Ok(plan) => {
                let placed = |at| plan.placements.iter().filter(|placement| **placement == at).count();
                let (host, disk) = (placed(Placement::Host), placed(Placement::Disk));
                let (peak, took) = (ByteSize(plan.prediction.peak()), plan.prediction.step);
                println!("{:>10} {peak:>10} {host:>9} {disk:>9} {took:>10.1?}", ByteSize(budget));
            }
            Err(out_of_reach) => println!("{:>10} {out_of_reach}", ByteSize(budget)),
        }
    }
}
