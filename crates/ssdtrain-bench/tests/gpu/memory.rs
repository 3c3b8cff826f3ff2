//! Memory, on the device and pinned: as little as was requested, and the same in every step.

use std::env;

use ssdtrain::{MIB, Offload, TensorCache, TensorCacheBuilder};
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, leaf};

on_both!(
    the_peak_is_the_same_in_every_step_through_the_host_pool,
    the_peak_is_the_same_in_every_step_through_the_disk,
    the_peak_falls_with_the_budget,
    nothing_is_pinned_after_the_first_step,
    the_step_peak_is_the_same_wherever_gradients_are_freed,
    the_time_of_a_launch_is_not_taken_for_that_of_a_step,
);

const STORAGES: u64 = 24;
const WIDTH: i64 = 1024;
const STORAGE: u64 = (WIDTH * WIDTH * 4) as u64;

/// A chain of element-wise operations, each of which saves one storage.
fn chain(x: &Tensor) -> Tensor {
    (0..STORAGES).fold(x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float)
}

/// The activation peaks of `steps` steps.
fn peaks(lab: &Lab, cache: &TensorCache, steps: usize) -> Vec<u64> {
    let x = leaf(&lab.randn(&[WIDTH, WIDTH]));
    let step = || {
        let step = cache.step();
        step.backward(&chain(&x)).unwrap();
        let report = step.finish().unwrap();
        assert_eq!(report.kept.no_room.count, 0, "{report}");
        report.act_peak_bytes
    };
    let peaks = (0..steps).map(|_| step()).collect();
    assert_nothing_held(cache);
    peaks
}

/// The first step shows how much there will be, and creates the gradient; from the third step on all are alike.
fn steady_peaks(lab: &Lab, way: TensorCacheBuilder) {
    let peaks = peaks(
        lab,
        &way.policy(Offload::default().device_budget(6 * STORAGE).prefetch(2 * STORAGE)).build().unwrap(),
        22,
    );
    let (low, high) = (peaks[2..].iter().min().unwrap(), peaks[2..].iter().max().unwrap());
    assert!(high - low <= MIB, "peaks in bytes: {peaks:?}");
}

fn the_peak_is_the_same_in_every_step_through_the_host_pool(lab: &Lab) {
    steady_peaks(lab, lab.cache().host_pool(STORAGES * STORAGE));
}

fn the_peak_is_the_same_in_every_step_through_the_disk(lab: &Lab) {
    steady_peaks(lab, lab.cache().host_pool(6 * STORAGE).spill_to(env::temp_dir()));
}

fn the_peak_falls_with_the_budget(lab: &Lab) {
    let budgets = [STORAGES, 16, 8, 4].map(|storages| storages * STORAGE);
    let peaks = budgets.map(|budget| {
        let cache = lab
            .cache()
            .host_pool(STORAGES * STORAGE)
            .policy(Offload::default().device_budget(budget).prefetch(2 * STORAGE))
            .build();
        *peaks(lab, &cache.unwrap(), 3).last().unwrap()
    });
    assert!(peaks.is_sorted_by(|larger, smaller| larger > smaller), "peaks in bytes: {peaks:?}");
    for (budget, peak) in budgets.into_iter().zip(peaks) {
        // The budget, plus the working memory of one operation and its gradient.
        assert!(peak <= budget + 6 * STORAGE, "budget {budget}, peak {peak}");
    }
}

fn nothing_is_pinned_after_the_first_step(lab: &Lab) {
    let cache =
        lab.cache().policy(Offload::default().device_budget(2 * STORAGE).prefetch(STORAGE)).build().unwrap();
    peaks(lab, &cache, 1);
    let after_first = cache.pinned_bytes();
    assert!(after_first >= (STORAGES - 4) * STORAGE, "{after_first}");
    peaks(lab, &cache, 8);
    assert_eq!(cache.pinned_bytes(), after_first);
}

fn the_step_peak_is_the_same_wherever_gradients_are_freed(lab: &Lab) {
    let third = |within: bool| {
        let vs = VarStore::new(lab.device);
        let config = nn::LinearConfig { bias: false, ..Default::default() };
        let layers: Vec<_> =
            (0..8).map(|layer| nn::linear(vs.root() / layer, WIDTH, WIDTH, config)).collect();
        let mut optimizer = nn::Sgd::default().build(&vs, 1e-3).unwrap();
        let cache =
            lab.cache().policy(Offload::default().device_budget(STORAGE)).parameters(&vs).build().unwrap();
        let x = lab.randn(&[16, WIDTH]);
        let mut steps = (0..3).map(|_| {
            if !within {
                optimizer.zero_grad();
            }
            let step = cache.step();
            if within {
                optimizer.zero_grad();
            }
            let y = layers.iter().fold(x.shallow_clone(), |x, layer| x.apply(layer));
            step.backward(&y.square().sum(Kind::Float)).unwrap();
            optimizer.step();
            step.finish().unwrap()
        });
        steps.nth(2).unwrap()
    };
    let (before, within) = (third(false), third(true));
    assert_eq!(before.step_peak_bytes, before.act_peak_bytes, "{before}");
    assert_eq!(within.step_peak_bytes - within.act_peak_bytes, 8 * STORAGE, "{within}");
    assert!(within.step_peak_bytes.abs_diff(before.step_peak_bytes) <= MIB, "{within}\n{before}");
}

fn the_time_of_a_launch_is_not_taken_for_that_of_a_step(lab: &Lab) {
    let cache = lab
        .cache()
        .host_pool(STORAGES * STORAGE)
        .policy(Offload::default().device_budget(6 * STORAGE))
        .build()
        .unwrap();
    let x = leaf(&lab.randn(&[WIDTH, WIDTH]));
    let step = cache.step();
    step.backward(&chain(&x)).unwrap();
    let report = step.finish().unwrap();
    assert_eq!(report.awaited, !lab.is_gpu(), "{report}");
    assert_eq!(report.to_string().contains("launched in"), lab.is_gpu(), "{report}");
}
