//! What the cache costs the host. Printed, not judged.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use ssdtrain::{Bytes, Policy, TensorCache};
use tch::{Cuda, Kind, Tensor};

use crate::lab::{Lab, leaf};

on_both!(cost_of_pack_and_unpack);

/// Few enough that the thread never runs into the limit of what may be queued on a stream.
const STORAGES: u64 = 8;
/// Rounds before the first that counts.
const WARM_UP: usize = 3;

/// The difference that a cache makes to the time a thread needs to queue forward and backward, for each tensor that it moves.
///
/// The ways take turns, and each is compared with the one without a cache of the same round.
fn cost_of_pack_and_unpack(lab: &Lab) {
    let width: i64 = lab.suited(4096, 256);
    let storage = (width * width * 4) as u64;
    let keep = TensorCache::builder().device(lab.device).policy(Policy::Keep).build().unwrap();
    let offload = lab.cache().host_pool(STORAGES * storage).device_budget(1).prefetch(0).build().unwrap();
    let x = leaf(&lab.randn(&[width, width]));
    let through = |cache: &TensorCache, moved: u64| {
        let step = cache.step();
        let time = queued(lab, &x, |loss| step.backward(loss).unwrap());
        let report = step.finish().unwrap();
        assert!(report.loaded.count >= moved, "{report}");
        time
    };
    let (mut plain, mut kept, mut offloaded) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + lab.suited(200, 3) {
        let mut times = [0.0; 3];
        for way in (0..3).map(|turn| (round + turn) % 3) {
            // The second time counts: what the way before left behind is no longer in its way.
            for _ in 0..2 {
                times[way] = match way {
                    0 => queued(lab, &x, Tensor::backward),
                    1 => through(&keep, 0),
                    _ => through(&offload, STORAGES - 1),
                } / STORAGES as f64;
            }
        }
        if round >= WARM_UP {
            plain.push(times[0]);
            kept.push(times[1] - times[0]);
            offloaded.push(times[2] - times[0]);
        }
    }
    let rounds = plain.len();
    // libtest would keep a println to itself.
    let line = format!(
        "\npack and unpack of a tensor of {}, host time: {:.2} us kept, {:.2} us offloaded, beside {:.2} us without a \
         cache (medians of {rounds} rounds of {STORAGES} tensors)\n",
        Bytes(storage),
        median(kept),
        median(offloaded),
        median(plain),
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
