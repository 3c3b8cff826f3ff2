//! What the cache costs the host. Printed, not judged.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use ssdtrain::{Bytes, Policy, TensorCache};
use tch::{Cuda, Kind, Tensor};

use crate::lab::{Lab, leaf};

on_both!(cost_of_pack_and_unpack);

/// Few enough that the thread never runs into the limit of what may be queued on a stream.
const STORAGES: u64 = 8;

/// The difference that the cache makes to the time a thread needs to queue forward and backward, for each tensor that it moves.
fn cost_of_pack_and_unpack(lab: &Lab) {
    let width: i64 = lab.suited(4096, 256);
    let storage = (width * width * 4) as u64;
    let keep = TensorCache::builder().device(lab.device).policy(Policy::Keep).build().unwrap();
    let offload = lab.cache().host_pool(STORAGES * storage).device_budget(1).prefetch(0).build().unwrap();
    let x = leaf(&lab.randn(&[width, width]));
    let (mut plain, mut kept, mut offloaded) = (Vec::new(), Vec::new(), Vec::new());
    let steps = lab.suited(25, 3);
    for _ in 0..steps {
        plain.push(queued(lab, &x, |loss| loss.backward()));
        let step = keep.step();
        kept.push(queued(lab, &x, |loss| step.backward(loss).unwrap()));
        step.finish().unwrap();
        let step = offload.step();
        offloaded.push(queued(lab, &x, |loss| step.backward(loss).unwrap()));
        let report = step.finish().unwrap();
        assert!(report.loaded.count >= STORAGES - 1, "{report}");
    }
    let plain = median(plain);
    let [kept, offloaded] = [kept, offloaded].map(|times| (median(times) - plain) / STORAGES as f64);
    // libtest would keep a println to itself.
    let line = format!(
        "\npack and unpack of a tensor of {}, host time: {kept:.2} us kept, {offloaded:.2} us offloaded \
         (medians of {steps} steps of {STORAGES} tensors, beside {:.2} us each without a cache)\n",
        Bytes(storage),
        plain / STORAGES as f64,
    );
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Time that the calling thread needs for forward and backward, in microseconds. The device starts with nothing to do.
fn queued(lab: &Lab, x: &Tensor, backward: impl Fn(&Tensor)) -> f64 {
    let synchronize = || {
        if lab.is_gpu() {
            Cuda::synchronize(0)
        }
    };
    synchronize();
    let start = Instant::now();
    backward(&(0..STORAGES).fold(x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float));
    let time = start.elapsed();
    synchronize();
    micros(time)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
