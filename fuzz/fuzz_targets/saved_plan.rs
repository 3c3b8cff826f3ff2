//! Whatever a file says, it is refused as a plan or steps can follow it.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use ssdtrain_plan::{
    Adherence, Auto, Followed, Goal, Observation, Outset, Policy, Release, Resources, SavedPlan, Saves,
    ScopeId, Today,
};

/// Longer texts only take longer.
const LENGTH: usize = 1 << 15;
/// How the steps follow the plan, one after another.
const HOW: [Adherence; 6] = [
    Adherence::Whole(1),
    Adherence::Part,
    Adherence::Larger,
    Adherence::Altered,
    Adherence::Whole(2),
    Adherence::Lost,
];

fuzz_target!(|text: &[u8]| {
    let Some(text) = text.get(..text.len().min(LENGTH)) else { return };
    let Ok(saved) = serde_json::from_slice::<SavedPlan>(text) else { return };
    for release in [Release::InStreamOrder, Release::WhenStored] {
        let resources = Resources { host_pool: 1 << 20, disk: 1 << 30, release };
        let mut auto = Auto::new(Goal::overhead(0.02)).starting_with(saved.clone());
        for (step, how) in (1..).zip(HOW.into_iter().cycle()).take(12) {
            let provide = |bytes: u64| bytes < 1 << 30;
            let scope = |_: &str| ScopeId::default();
            let today = Today::default();
            let outset =
                Outset { step, resources, today, free: &|| u64::MAX, provide: &provide, scope: &scope };
            let plan = auto.begin(&outset);
            let followed = match &plan.saves {
                Saves::Scheduled { courses, .. } => {
                    let course = step as usize % courses.len();
                    Some(Followed { size: step as f64 / 4.0, ..Followed::new(course, how) })
                }
                _ => None,
            };
            let wall = Duration::from_millis(100 + step);
            let (written, read) = (Some(1e9), Some(1e9));
            let observed =
                Observation { step, wall, peak: 1 << 30, written, read, followed, ..Observation::default() };
            auto.end(&plan, observed);
            drop(auto.report(followed.map_or(0, |followed| followed.course), &|_| String::new()));
        }
    }
});
