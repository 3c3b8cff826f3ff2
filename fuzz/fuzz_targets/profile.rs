//! Whatever a file says, it is refused as a profile or can be planned with.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_plan::{Caps, Frontier, Goal, Profile};

/// More activations than this only take longer.
const ACTIVATIONS: usize = 64;

fuzz_target!(|text: &[u8]| {
    let Ok(read) = serde_json::from_slice::<Profile>(text) else { return };
    if read.workload.activations.len() > ACTIVATIONS {
        return;
    }
    let frontier = Frontier::new(&read.workload, &read.machine, Caps::default());
    for goal in [Goal::budget(1 << 30), Goal::overhead(0.02)] {
        if let Err(out_of_reach) = frontier.plan(goal) {
            assert_eq!(out_of_reach.peak, frontier.lowest().prediction.peak());
        }
    }
});
