//! An operation that saves its own result keeps no cycle alive. The count covers the whole process, so this file has
//! one test.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{everything, leaf, randn};
use ssdtrain::{Keep, TensorCache, TensorCacheBuilder};
use ssdtrain_libtorch::memory;
use tch::Device;
use tch::Kind;

/// Bytes still allocated after graphs were built and dropped, some after a backward and some without.
fn left(builder: TensorCacheBuilder) -> u64 {
    let cache = builder.build().unwrap();
    let before = memory(Device::Cpu).allocated;
    let x = leaf(&randn(&[64, 64]));
    for index in 0..20 {
        let step = cache.step();
        // exp, tanh and sigmoid save what they return.
        let loss = x.exp().tanh().sigmoid().sum(Kind::Float);
        if index % 2 == 0 {
            step.backward(&loss).unwrap();
        }
        drop(loss);
        step.finish().unwrap();
    }
    drop(x);
    memory(Device::Cpu).allocated - before
}

#[test]
fn a_kept_result_of_an_operation_is_freed_with_its_graph() {
    assert_eq!(left(TensorCache::builder().policy(Keep)), 0, "kept by policy");
    assert_eq!(left(everything().min_bytes(1 << 30)), 0, "kept because small");
    assert_eq!(left(everything()), 0, "moved");
}
