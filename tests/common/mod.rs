//! What the integration tests share: one computation, run without and with a cache, compared bit for bit.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]
#![allow(dead_code, reason = "every test file uses its own part of this module")]

pub(crate) mod chain;
pub(crate) mod sweep;

use std::thread;
use std::time::{Duration, Instant};

use ssdtrain::{IoPath, Offload, StepReport, TensorCache, TensorCacheBuilder, Verify, resolve_math_kernels};
use tch::{Device, Kind, Tensor};

pub(crate) const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A cache that moves everything, whatever its size.
pub(crate) fn everything() -> TensorCacheBuilder {
    let builder = TensorCache::builder().policy(Offload::default()).spill_to(std::env::temp_dir());
    builder.disk_cap(1 << 30).min_bytes(0).verify(Verify::Full)
}

/// The same, where segments call their functions again.
pub(crate) fn calling() -> TensorCacheBuilder {
    everything().fuse_reruns(false)
}

/// Waits for `condition`: an I/O thread may be the last to release a cache, just after its drop has returned.
pub(crate) fn soon(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !condition() && start.elapsed() < Duration::from_secs(10) {
        thread::yield_now();
    }
    condition()
}

pub(crate) fn randn(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, F32)
}

/// A separate leaf with the values of `source`.
pub(crate) fn leaf(source: &Tensor) -> Tensor {
    resolve_math_kernels().unwrap();
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
        let flat = t.detach().to_device(Device::Cpu).contiguous().flatten(0, -1).view_dtype(Kind::Uint8);
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

/// A cache on the path that a GPU's tensors take, with a device made of threads: through a host pool, and on to the
/// disk.
pub(crate) fn staged() -> TensorCacheBuilder {
    everything()
        .simulated_device(Duration::from_micros(50))
        .host_pool(16 << 20)
        .policy(Offload::default().device_budget(1 << 20))
}

/// The same device, whose bytes go directly to the disk.
pub(crate) fn direct() -> TensorCacheBuilder {
    everything()
        .verify(Verify::Off)
        .simulated_device(Duration::from_micros(50))
        .path(IoPath::Direct)
        .policy(Offload::default().device_budget(1 << 20))
}

/// The same without a disk.
pub(crate) fn staged_in_memory() -> TensorCacheBuilder {
    let builder = TensorCache::builder().policy(Offload::default()).min_bytes(0);
    builder.simulated_device(Duration::from_micros(50)).host_pool(64 << 20)
}

/// Runs `f` without a cache and then with caches of every kind: one step whose backward begins at once, and one that
/// waits for its stores. All gradients must have the same bits. Returns the report of the last step.
pub(crate) fn parity(sources: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) -> StepReport {
    let plain = leaves(sources);
    tch::manual_seed(7);
    f(&plain).backward();
    let expected = grads(&plain);

    let builders = [
        ("host pool", staged_in_memory()),
        ("host pool, no budget", staged_in_memory().policy(Offload::default().device_budget(1).prefetch(0))),
        ("host pool and disk", staged()),
        ("bounce buffer and disk", staged().host_pool(0).policy(Offload::default().device_budget(1))),
        ("straight to the disk", direct()),
        ("straight to the disk, no budget", direct().policy(Offload::default().device_budget(1).prefetch(0))),
        ("functions called again", calling()),
        ("disk", everything()),
    ];
    let mut last = None;
    for (way, builder) in builders {
        let cache = builder.build().unwrap();
        for flush in [false, true] {
            let inputs = leaves(sources);
            tch::manual_seed(7);
            let step = cache.step();
            let loss = f(&inputs);
            if flush {
                step.flush();
            }
            step.backward(&loss).unwrap();
            last = Some(step.finish().unwrap());
            drop(loss);
            let when = if flush { "after a flush" } else { "at once" };
            assert_same_bits(&format!("{way}, {when}"), &expected, &grads(&inputs));
            assert_nothing_held(&cache);
        }
    }
    last.unwrap()
}

/// Asserts that nothing is left in the cache or in its spill files.
pub(crate) fn assert_nothing_held(cache: &TensorCache) {
    let held = cache.held();
    assert_eq!((held.entries, held.tapes, held.device_bytes), (0, 0, 0), "{held:?}");
    // A store that is under way when its graph goes leaves its extent when it ends.
    let reserved = || cache.store_stats().map_or(0, |stats| stats.reserved_bytes);
    let since = Instant::now();
    while reserved() > 0 && since.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(reserved(), 0, "extents are left");
}
