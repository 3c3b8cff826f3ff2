//! Where a test runs, and what the tests share.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use ssdtrain::{Offload, TensorCache, TensorCacheBuilder};
use ssdtrain_libtorch as torch;
use tch::{Cuda, Device, Kind, Tensor};

/// A device that no other test uses at the same time: memory peaks and random numbers belong to the process.
pub(crate) struct Lab {
    pub(crate) device: Device,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Lab {
    /// The first GPU; the test fails if there is none.
    pub(crate) fn gpu() -> Lab {
        let alone = ALONE.lock();
        if let Err(reason) = cuda() {
            panic!("this test needs a GPU: {reason}");
        }
        Lab { device: Device::Cuda(0), _alone: alone }
    }

    /// The CPU, with threads that copy in place of a GPU.
    pub(crate) fn simulated() -> Lab {
        let alone = ALONE.lock();
        // If there is CUDA nevertheless, libtorch must know before it looks for the first time.
        drop(cuda());
        ssdtrain::resolve_math_kernels().unwrap();
        Lab { device: Device::Cpu, _alone: alone }
    }

    pub(crate) fn is_gpu(&self) -> bool {
        self.device.is_cuda()
    }

    /// A quantity that suits the device.
    pub(crate) fn suited<T>(&self, gpu: T, simulated: T) -> T {
        if self.is_gpu() { gpu } else { simulated }
    }

    /// Describes a cache that moves everything from the device, whatever its size.
    pub(crate) fn cache(&self) -> TensorCacheBuilder {
        let builder = TensorCache::builder().policy(Offload::default()).device(self.device).min_bytes(0);
        if self.is_gpu() { builder } else { builder.simulated_device(Duration::from_micros(50)) }
    }

    pub(crate) fn randn(&self, shape: &[i64]) -> Tensor {
        Tensor::randn(shape, (Kind::Float, self.device))
    }

    pub(crate) fn allocated(&self) -> u64 {
        torch::memory(self.device).allocated
    }

    /// Asserts that `body` leaves as much memory allocated on the device as before. It runs twice, since libtorch's
    /// workspaces are created in the first run and stay.
    pub(crate) fn leaves_no_memory(&self, body: impl Fn()) {
        body();
        let before = self.allocated();
        body();
        let left = || self.allocated().saturating_sub(before);
        assert!(soon(|| left() == 0), "{} bytes are left on the device", left());
    }
}

/// Loads CUDA and makes it deterministic: once, and before anything else asks libtorch for CUDA.
fn cuda() -> Result<(), String> {
    static CUDA: OnceLock<Result<(), String>> = OnceLock::new();
    let load = || {
        torch::load_cuda()?;
        torch::make_deterministic().map_err(|error| error.to_string())?;
        if Cuda::device_count() > 0 { Ok(()) } else { Err("libtorch sees no CUDA device".to_owned()) }
    };
    CUDA.get_or_init(load).clone()
}

/// Waits for something that another thread is about to do: autograd's thread for the device may hold the end of a
/// graph a little longer.
fn soon(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !condition() && start.elapsed() < Duration::from_secs(10) {
        thread::yield_now();
    }
    condition()
}

/// Asserts that nothing is left in the cache or in its spill files.
pub(crate) fn assert_nothing_held(cache: &TensorCache) {
    let nothing = || {
        let held = cache.held();
        (held.entries, held.tapes, held.device_bytes) == (0, 0, 0)
            && cache.store_stats().is_none_or(|stats| stats.reserved_bytes == 0)
    };
    assert!(soon(nothing), "{:?} and {:?} are left", cache.held(), cache.store_stats());
}

/// A separate leaf with the values of `source`.
pub(crate) fn leaf(source: &Tensor) -> Tensor {
    let leaf = source.copy();
    if leaf.is_floating_point() { leaf.set_requires_grad(true) } else { leaf }
}

pub(crate) fn leaves(sources: &[Tensor]) -> Vec<Tensor> {
    sources.iter().map(leaf).collect()
}

/// The gradient with respect to a single leaf of the result of `forward`, without a cache.
pub(crate) fn plain_gradient(source: &Tensor, forward: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let x = leaf(source);
    forward(&x).backward();
    x.grad()
}

/// Compares bits: NaN equals itself, and 0 differs from -0.
pub(crate) fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let bytes = |t: &Tensor| t.detach().contiguous().flatten(0, -1).view_dtype(Kind::Uint8);
    if !(a.defined() && b.defined()) {
        return a.defined() == b.defined();
    }
    a.kind() == b.kind() && a.size() == b.size() && bytes(a).equal(&bytes(b))
}

pub(crate) fn assert_same_bits(what: &str, expected: &[Tensor], got: &[Tensor]) {
    assert_eq!(expected.len(), got.len(), "{what}");
    let pairs = || expected.iter().zip(got);
    let Some(index) = pairs().position(|(expected, got)| !same_bits(expected, got)) else { return };
    let differences: Vec<_> = pairs().map(|(expected, got)| difference(expected, got)).collect();
    panic!("{what}: other bits in tensor {index}\n{}", differences.join("\n"));
}

/// How far apart two tensors are: rounding looks different from another tensor's bytes.
fn difference(expected: &Tensor, got: &Tensor) -> String {
    if !(expected.defined() && got.defined()) || expected.size() != got.size() {
        return format!("{got:?} instead of {expected:?}");
    }
    let wide = |t: &Tensor| t.detach().to_kind(Kind::Double).flatten(0, -1);
    let (expected, got) = (wide(expected), wide(got));
    let differing = expected.ne_tensor(&got).nonzero().flatten(0, -1);
    let count = differing.size()[0];
    if count == 0 {
        return "equal values".to_owned();
    }
    let (first, last) = (differing.int64_value(&[0]), differing.int64_value(&[-1]));
    let most = (&expected - &got).abs().max().double_value(&[]);
    let largest = expected.abs().max().double_value(&[]);
    let numel = expected.numel();
    format!(
        "{count} of {numel} differ, from {first} to {last}, by up to {most:e} where up to {largest:e} is expected"
    )
}

pub(crate) fn grads(leaves: &[Tensor]) -> Vec<Tensor> {
    leaves.iter().map(Tensor::grad).collect()
}
