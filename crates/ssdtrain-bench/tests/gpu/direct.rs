//! Directly between the device and the disk: with cuFile on a GPU, whichever path cuFile uses.
//!
//! If the GPU's machine has no udev, the entry for the file system has to be created first: docs/gds.md, "The entry
//! of udev".

use std::collections::BTreeMap;
use std::env;

use parking_lot::Mutex;
use ssdtrain::{ErrorKind, IoPath, KIB, MIB, Offload, PathTrial, TensorCacheBuilder};
use ssdtrain_libtorch::{SavedVariable, SegmentWatcher, memory, watch_segments};
use ssdtrain_store::CuFileMode;
use tch::{Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held};
use crate::parity;
use crate::training;

on_both!(ten_thousand_tensors_come_back, small_mixed_computation, a_gpt_trains_to_the_same_bits);
on_the_gpu_only!(
    the_way_that_is_required_is_the_one_that_was_found,
    the_faster_way_is_taken,
    segments_that_are_told_are_those_of_the_allocator
);

fn direct(lab: &Lab) -> TensorCacheBuilder {
    lab.cache().path(IoPath::Direct).spill_to(env::temp_dir())
}

/// Upper limits in bytes, and how many tensors are above the previous limit and at most this one.
const SIZES: [(u64, usize); 5] =
    [(64 * KIB, 5_000), (MIB, 3_500), (16 * MIB, 1_300), (128 * MIB, 170), (512 * MIB, 30)];
const SMALLEST: u64 = 4 * KIB;
/// Bytes that are on the disk at once.
const GROUP: u64 = 2048 * MIB;

/// Random bytes, with sizes that are not whole blocks except for the first and the last, are written, dropped, read
/// and compared.
fn ten_thousand_tensors_come_back(lab: &Lab) {
    let cache = direct(lab)
        .policy(Offload::default().device_budget(1).prefetch(64 * MIB))
        .disk_cap(GROUP + 1024 * MIB)
        .build()
        .unwrap();
    let (mut group, mut waiting) = (Vec::new(), 0);
    let (mut moved, mut bytes_moved) = (0, 0);
    let mut round_trip = |group: &mut Vec<(i64, i64)>| {
        let step = cache.step();
        let saved: Vec<_> =
            group.iter().map(|tensor| SavedVariable::new(&random(lab, *tensor)).unwrap()).collect();
        step.flush();
        for (tensor, saved) in group.iter().zip(&saved) {
            assert!(saved.unpack().unwrap().equal(&random(lab, *tensor)), "number and bytes: {tensor:?}");
        }
        drop(saved);
        let report = step.finish().unwrap();
        assert_eq!(report.loaded.count, group.len() as u64, "{report}");
        moved += report.loaded.count;
        bytes_moved += report.loaded.bytes;
        group.clear();
    };
    for (number, bytes) in sizes(lab.suited(1, 50)).into_iter().enumerate() {
        if waiting + bytes > GROUP {
            round_trip(&mut group);
            waiting = 0;
        }
        group.push((number as i64, bytes as i64));
        waiting += bytes;
    }
    round_trip(&mut group);
    assert_nothing_held(&cache);
    if lab.is_gpu() {
        assert_eq!(moved, 10_000);
    }
    println!("{moved} tensors, {bytes_moved} bytes, {}", cache.io_path());
}

/// Sizes in an order of their own; only a `fraction`th of them, few enough bytes for a CPU.
fn sizes(fraction: usize) -> Vec<u64> {
    let mut state = 7_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1_u32 << 31)
    };
    let classes = if fraction == 1 { SIZES.len() } else { 2 };
    let mut sizes = Vec::new();
    let mut from = SMALLEST;
    for (to, count) in &SIZES[..classes] {
        let size = |part: f64| (from as f64 * (*to as f64 / from as f64).powf(part)) as u64;
        sizes.extend((0..count / fraction).map(|_| size(random())));
        from = *to;
    }
    sizes[0] = SMALLEST;
    *sizes.last_mut().unwrap() = from;
    let mut order: Vec<(f64, u64)> = sizes.into_iter().map(|size| (random(), size)).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    order.into_iter().map(|(_, size)| size).collect()
}

/// The bytes for a number: the same whenever they are requested.
fn random(lab: &Lab, (number, bytes): (i64, i64)) -> Tensor {
    tch::manual_seed(number);
    Tensor::randint(256, [bytes], (Kind::Uint8, lab.device))
}

fn small_mixed_computation(lab: &Lab) {
    let ways = vec![
        ("straight, smallest budget", direct(lab).policy(Offload::default().device_budget(1).prefetch(0))),
        ("straight", direct(lab).policy(Offload::default().device_budget(256 * KIB).prefetch(64 * KIB))),
    ];
    parity::agree(lab, parity::SMALL, Kind::Float, ways);
}

fn a_gpt_trains_to_the_same_bits(lab: &Lab) {
    let ways = [
        ("disk, straight", direct(lab).policy(Offload::default().device_budget(1).prefetch(0))),
        (
            "disk, straight, ahead",
            direct(lab).policy(Offload::default().device_budget(2 * MIB).prefetch(512 * KIB)),
        ),
    ];
    training::agree_with_keep(lab, None, ways);
}

/// Compatibility mode is not GPUDirect Storage. Where that is required, it is refused with this reason.
fn the_way_that_is_required_is_the_one_that_was_found(lab: &Lab) {
    let PathTrial { direct: found, .. } = direct(lab).try_paths().unwrap();
    let (mode, _) = found.unwrap();
    let required = direct(lab).require_path(IoPath::Direct).build();
    match mode {
        CuFileMode::Compatibility => {
            let error = required.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unmet);
            assert!(error.to_string().contains("compatibility mode, through host memory"), "{error}");
        }
        _ => assert!(required.unwrap().io_path().contains(&mode.to_string())),
    }
    println!("cuFile: {mode}");
}

fn the_faster_way_is_taken(lab: &Lab) {
    let cache = || lab.cache().spill_to(env::temp_dir()).host_pool(0);
    let PathTrial { direct, staged } = cache().try_paths().unwrap();
    let (direct, staged) = (direct.unwrap().1.both, staged.unwrap().both);
    let path = cache().build().unwrap().io_path();
    assert_eq!(path.starts_with("cuFile"), direct > staged, "{direct} and {staged} bytes a second: {path}");
    println!("bytes a second: {direct:.3e} straight, {staged:.3e} through host memory; {path}");
}

/// Bytes of segments by their first address.
#[derive(Default)]
struct Live(Mutex<BTreeMap<usize, usize>>);

impl SegmentWatcher for Live {
    fn came(&self, device: usize, start: usize, bytes: usize) {
        assert_eq!(device, 0);
        self.0.lock().insert(start, bytes);
    }

    fn goes(&self, _: usize, start: usize) {
        assert!(self.0.lock().remove(&start).is_some());
    }
}

/// A thousand tensors come and go at random, and now and then the allocator returns everything that is free.
fn segments_that_are_told_are_those_of_the_allocator(lab: &Lab) {
    let live: &'static Live = Box::leak(Box::default());
    let _before = lab.randn(&[1 << 20]);
    watch_segments(live).unwrap();
    let told = || live.0.lock().values().sum::<usize>() as u64;
    let (mut kept, mut most, mut freed) = (Vec::new(), 0, false);
    for (number, bytes) in sizes(1).into_iter().take(1000).enumerate() {
        if number % 2 == 0 || kept.is_empty() {
            kept.push(random(lab, (number as i64, bytes as i64)));
        } else {
            drop(kept.swap_remove(bytes as usize % kept.len()));
        }
        if number % 100 == 99 {
            let segments = live.0.lock().len();
            // It is more than exists: the allocator tries again after returning what it can.
            assert!(Tensor::f_empty([1 << 44], (Kind::Uint8, lab.device)).is_err());
            freed |= live.0.lock().len() < segments;
        }
        most = most.max(live.0.lock().len());
        assert_eq!(told(), memory(lab.device).reserved, "after {number} tensors");
    }
    assert!(most > 3 && freed, "of {most} segments none was freed");
}
