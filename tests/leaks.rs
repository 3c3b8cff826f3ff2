//! A thousand steps leave everything as they found it: extents, threads, open files and resident memory. The last
//! three belong to the process, so this file has one test.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::fs;

use common::{assert_nothing_held, everything, randn, soon};
use ssdtrain::TensorCache;
use tch::{Device, Kind, Tensor, nn};

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn steps(cache: &TensorCache, vs: &nn::VarStore, layer: &nn::Linear, x: &Tensor, count: usize) {
    for index in 0..count {
        let step = cache.step();
        let loss = (0..3)
            .fold(x.shallow_clone(), |y, block| {
                let _scope = ssdtrain::scope(&format!("block.{block}"));
                y.apply(layer).gelu("tanh")
            })
            .square()
            .mean(Kind::Float);
        // Some steps wait for the disk, some continue at once, some drop their graph.
        if index % 3 == 0 {
            step.flush();
        }
        if index % 5 != 4 {
            step.backward(&loss).unwrap();
        }
        drop(loss);
        vs.trainable_variables().iter_mut().for_each(|variable| variable.zero_grad());
        step.finish().unwrap();
    }
}

#[test]
fn a_thousand_steps_leave_what_they_found() {
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 128, 128, nn::LinearConfig::default());
    let x = randn(&[256, 128]);
    let files_before = open_files();
    let cache = everything().parameters(&vs).build().unwrap();
    steps(&cache, &vs, &layer, &x, 200);
    let warm = (open_files(), threads(), resident_bytes());

    steps(&cache, &vs, &layer, &x, 1000);

    assert_nothing_held(&cache);
    assert_eq!((open_files(), threads()), (warm.0, warm.1));
    let grown = resident_bytes().saturating_sub(warm.2);
    assert!(grown < 4 << 20, "resident memory grew by {grown} bytes");
    drop(cache);
    assert!(soon(|| open_files() == files_before), "{} files are open, {} were", open_files(), files_before);
    // libtorch's own threads start with the first backward and stay.
    assert!(soon(|| threads() < warm.1), "the I/O thread is gone");
}
