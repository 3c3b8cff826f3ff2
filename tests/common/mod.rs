//! What the integration tests share: one computation, run without and with a cache, compared bit for bit.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]
#![allow(dead_code, reason = "every test file uses its own part of this module")]

use ssdtrain::{StepReport, TensorCache, TensorCacheBuilder};
use tch::{Device, Kind, Tensor};

pub(crate) const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A cache that moves everything, whatever its size.
pub(crate) fn everything() -> TensorCacheBuilder {
    TensorCache::builder().spill_to(std::env::temp_dir()).disk_cap(1 << 30).min_bytes(0).verify(true)
}

pub(crate) fn randn(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, F32)
}

/// A leaf of its own with the values of `source`.
pub(crate) fn leaf(source: &Tensor) -> Tensor {
    let leaf = source.copy();
    if leaf.is_floating_point() { leaf.set_requires_grad(true) } else { leaf }
}

pub(crate) fn leaves(sources: &[Tensor]) -> Vec<Tensor> {
    sources.iter().map(leaf).collect()
}

/// The gradients of `leaves`, an undefined one as a zero-size tensor.
pub(crate) fn grads(leaves: &[Tensor]) -> Vec<Tensor> {
    leaves
        .iter()
        .map(|leaf| if leaf.grad().defined() { leaf.grad() } else { Tensor::zeros([0], F32) })
        .collect()
}

/// Compares bytes, so that NaN equals NaN and 0.0 differs from -0.0.
pub(crate) fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let bytes = |t: &Tensor| -> Vec<u8> {
        let flat = t.detach().contiguous().flatten(0, -1).view_dtype(Kind::Uint8);
        Vec::try_from(&flat).unwrap()
    };
    a.size() == b.size() && a.kind() == b.kind() && bytes(a) == bytes(b)
}

pub(crate) fn assert_same_bits(what: &str, expected: &[Tensor], got: &[Tensor]) {
    assert_eq!(expected.len(), got.len());
    for (index, (expected, got)) in expected.iter().zip(got).enumerate() {
        assert!(
            same_bits(expected, got),
            "{what}: tensor {index} differs\nexpected {expected:?}\ngot {got:?}"
        );
    }
}

/// Runs `f` without a cache and then with one whose stores all reach the disk before backward begins, and with one whose backward
/// begins at once; all gradients must have the same bits. Returns the report of the run whose stores were waited for.
pub(crate) fn parity(sources: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) -> StepReport {
    let plain = leaves(sources);
    tch::manual_seed(7);
    f(&plain).backward();
    let expected = grads(&plain);

    let mut flushed = None;
    for flush in [false, true] {
        let cache = everything().build().unwrap();
        let inputs = leaves(sources);
        tch::manual_seed(7);
        let step = cache.step();
        let loss = f(&inputs);
        if flush {
            step.flush();
        }
        step.backward(&loss).unwrap();
        let report = step.finish().unwrap();
        drop(loss);
        assert_same_bits(if flush { "after a flush" } else { "at once" }, &expected, &grads(&inputs));
        assert_nothing_held(&cache);
        if flush {
            flushed = Some(report);
        }
    }
    flushed.unwrap()
}

/// Nothing is left in the cache or in its spill files.
pub(crate) fn assert_nothing_held(cache: &TensorCache) {
    let held = cache.held();
    assert_eq!((held.entries, held.tapes, held.device_bytes), (0, 0, 0), "{held:?}");
    if let Some(stats) = cache.store_stats() {
        assert_eq!(stats.reserved_bytes, 0, "extents are left");
    }
}
