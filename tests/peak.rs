//! The activation peak, as counted by the allocator. The count covers the whole process, so this file has one test.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use common::{everything, leaf, randn};
use ssdtrain::{Keep, MIB, Offload, TensorCache, TensorCacheBuilder};
use tch::Kind;

fn peak(builder: TensorCacheBuilder) -> u64 {
    let cache = builder.build().unwrap();
    let x = leaf(&randn(&[1024, 256]));
    let step = cache.step();
    let loss = (0..32).fold(&x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float);
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap().act_peak_bytes
}

#[test]
fn the_activation_peak_falls_to_the_budget() {
    let keep = peak(TensorCache::builder().policy(Keep));
    let offload = peak(everything().policy(Offload::default().device_budget(6 * MIB).prefetch(4 * MIB)));
    assert!(keep >= 32 * MIB, "{keep}");
    // The budget, plus the working memory of one operation and its gradient.
    assert!(offload <= 12 * MIB, "{offload}");
}
