//! Whatever a file says, it is refused as a plan or steps can follow it.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use ssdtrain::plan::{
    Adherence, Auto, Goal, Observation, Outset, Policy, Release, Resources, SavedPlan, Saves, ScopeId,
};

/// Longer texts only take longer.
const LENGTH: usize = 1 << 15;

fuzz_target!(|text: &[u8]| {
    let Some(text) = text.get(..text.len().min(LENGTH)) else { return };
    let Ok(saved) = serde_json::from_slice::<SavedPlan>(text) else { return };
    for release in [Release::InStreamOrder, Release::WhenStored] {
        let resources = Resources { host_pool: 1 << 20, disk: 1 << 30, release };
        let mut auto = Auto::new(Goal::overhead(0.02)).starting_with(saved.clone());
        for step in 1..=20 {
            let outset = Outset { step, resources, free: &|| u64::MAX, scope: &|_| ScopeId::default() };
            let plan = auto.begin(&outset);
            let followed = matches!(plan.saves, Saves::Scheduled { .. }).then_some(Adherence::Whole(1));
            let wall = Duration::from_millis(100 + step);
            let (written, read) = (Some(1e9), Some(1e9));
            auto.end(
                &plan,
                Observation { step, wall, peak: 1 << 30, written, read, followed, ..Observation::default() },
            );
            let _report = auto.report(&|_| String::new());
        }
    }
});
