//! The activation peak of segments, as counted by the allocator. The count covers the whole process, so this file has
//! one test.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use common::{everything, leaf, randn};
use ssdtrain::{Keep, MIB, Offload, TensorCache, TensorCacheBuilder, remat, segment};
use tch::{Kind, TchError, Tensor};

/// Saves four tensors of 1 MiB.
fn layers(x: &Tensor) -> Result<Tensor, TchError> {
    (0..4).try_fold(x.shallow_clone(), |y, _| y.f_mul_scalar(1.01)?.f_sin())
}

fn recipes(x: &Tensor) -> Result<Tensor, TchError> {
    (0..2).try_fold(x.shallow_clone(), |y, _| remat(&[&y.f_sin()?], |y| y[0].f_gelu("tanh"))?.f_cos())
}

fn peak(builder: TensorCacheBuilder, layer: impl Fn(&Tensor) -> Result<Tensor, TchError>) -> u64 {
    let cache = builder.build().unwrap();
    let x = leaf(&randn(&[1024, 256]));
    let step = cache.step();
    let loss = (0..8).try_fold(&x * 1.0, |y, _| layer(&y)).unwrap().sum(Kind::Float);
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap().act_peak_bytes
}

#[test]
fn the_activation_peak_falls_to_inputs_and_one_segment() {
    let keep = || TensorCache::builder().policy(Keep);
    let offload = || everything().policy(Offload::default().device_budget(2 * MIB).prefetch(MIB));
    let segments = |x: &Tensor| segment("layers", x, layers);

    let plain = peak(keep(), layers);
    assert!(plain >= 32 * MIB, "{plain}");
    // Eight inputs, the four tensors of one segment, and the working memory of one operation and its gradient.
    let recomputed = peak(keep(), segments);
    assert!(recomputed <= 16 * MIB, "{recomputed}");
    // The inputs are on the disk.
    let both = peak(offload(), segments);
    assert!(both <= 10 * MIB, "{both}");

    // Two of six tensors have recipes.
    let plain =
        peak(keep(), |x| (0..2).try_fold(x.shallow_clone(), |y, _| y.f_sin()?.f_gelu("tanh")?.f_cos()));
    let cheap = peak(keep(), recipes);
    assert!(cheap + 12 * MIB <= plain, "{cheap} and {plain}");
}
