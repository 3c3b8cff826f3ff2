//! The cache's cost to the host. It is printed, not judged.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use ssdtrain::{Keep, Offload, Step, TensorCache};
use ssdtrain_libtorch::SavedVariable;
use tch::{Cuda, Kind, Tensor};

use crate::lab::{Lab, leaf};

on_both!(cost_of_a_step, cost_of_pack_and_unpack);

/// Few enough that the thread never reaches the limit of what may be queued on a stream.
const STORAGES: u64 = 8;
/// Rounds before the first that counts.
const WARM_UP: usize = 3;

/// Time inside pack, unpack and release for tensors that leave the device and come back, each called the way an
/// autograd node would.
fn cost_of_pack_and_unpack(lab: &Lab) {
    let cache = offloading(lab);
    let shape = [width(lab); 2];
    let (mut pack, mut unpack, mut release) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + lab.suited(200, 3) {
        let step = cache.step();
        let tensors: Vec<Tensor> = (0..STORAGES).map(|_| lab.randn(&shape)).collect();
        synchronize(lab);
        let start = Instant::now();
        let saved: Vec<_> = tensors.into_iter().map(|tensor| SavedVariable::new(&tensor).unwrap()).collect();
        let packed = start.elapsed();
        synchronize(lab);
        let start = Instant::now();
        let back: Vec<_> = saved.iter().rev().map(|saved| saved.unpack().unwrap()).collect();
        let unpacked = start.elapsed();
        let start = Instant::now();
        drop(saved);
        let released = start.elapsed();
        drop(back);
        assert_moved(step);
        if round >= WARM_UP {
            pack.push(each(packed));
            unpack.push(each(unpacked));
            release.push(each(released));
        }
    }
    let both: Vec<f64> = pack.iter().zip(&unpack).map(|(pack, unpack)| pack + unpack).collect();
    say(&format!(
        "host time of a tensor of {}: pack and unpack {:.2} us ({:.2} and {:.2}), release {:.2} us (medians of {} rounds of \
         {STORAGES} tensors)",
        storage(lab),
        median(both.clone()),
        median(pack),
        median(unpack),
        median(release),
        both.len(),
    ));
}

/// How much a cache adds to the time a thread needs to queue forward and backward, per tensor that it moves.
///
/// The variants take turns, and each is compared with the one without a cache from the same round.
fn cost_of_a_step(lab: &Lab) {
    let keep = TensorCache::builder().device(lab.device).policy(Keep).build().unwrap();
    let offload = offloading(lab);
    let x = leaf(&lab.randn(&[width(lab); 2]));
    let through = |cache: &TensorCache, moves: bool| {
        let step = cache.step();
        let time = queued(lab, &x, |loss| step.backward(loss).unwrap());
        if moves {
            assert_moved(step)
        } else {
            drop(step.finish().unwrap())
        }
        time
    };
    let (mut plain, mut kept, mut offloaded) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + lab.suited(200, 3) {
        let mut times = [0.0; 3];
        for way in (0..3).map(|turn| (round + turn) % 3) {
            // The second time counts: by then, what the previous variant left behind does not interfere.
            for _ in 0..2 {
                times[way] = match way {
                    0 => queued(lab, &x, Tensor::backward),
                    1 => through(&keep, false),
                    _ => through(&offload, true),
                };
            }
        }
        if round >= WARM_UP {
            plain.push(times[0]);
            kept.push(times[1] - times[0]);
            offloaded.push(times[2] - times[0]);
        }
    }
    let rounds = plain.len();
    say(&format!(
        "host time of forward and backward for each tensor of {}: {:.2} us more where it is kept, {:.2} us more where it is \
         offloaded, beside {:.2} us without a cache (medians of {rounds} rounds of {STORAGES} tensors)",
        storage(lab),
        median(kept),
        median(offloaded),
        median(plain),
    ));
}

/// A cache that moves everything out at once, and brings it back when it is asked for.
fn offloading(lab: &Lab) -> TensorCache {
    lab.cache()
        .host_pool(STORAGES * storage(lab).0)
        .policy(Offload::default().device_budget(1).prefetch(0))
        .build()
        .unwrap()
}

fn width(lab: &Lab) -> i64 {
    lab.suited(4096, 256)
}

fn storage(lab: &Lab) -> ByteSize {
    ByteSize((width(lab) * width(lab) * 4) as u64)
}

/// The tensor saved last may still be on the device when it is asked for.
fn assert_moved(step: Step<'_>) {
    let report = step.finish().unwrap();
    assert!(report.loaded.count >= STORAGES - 1, "{report}");
}

/// Time that the calling thread needs for forward and backward. The device is idle at the start.
fn queued(lab: &Lab, x: &Tensor, backward: impl Fn(&Tensor)) -> f64 {
    synchronize(lab);
    let start = Instant::now();
    backward(&(0..STORAGES).fold(x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float));
    let time = start.elapsed();
    synchronize(lab);
    each(time)
}

fn synchronize(lab: &Lab) {
    if lab.is_gpu() {
        Cuda::synchronize(0)
    }
}

/// Microseconds per tensor.
fn each(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6 / STORAGES as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Bypasses libtest, which would capture a println.
fn say(line: &str) {
    io::stderr().write_all(format!("\n{line}\n").as_bytes()).unwrap();
}
