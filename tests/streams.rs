//! A device is told of every use of memory that may belong to another of its streams.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;

use common::{assert_nothing_held, assert_same_bits, grads, leaves, randn, staged_in_memory};
use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{
    Backward, DeviceCall, DeviceFaults, Error, ErrorKind, Offload, StepReport, TensorCache, segment,
};
use tch::{Kind, Tensor};

const USE: Option<DeviceCall> = Some(DeviceCall::RecordUse);

/// A program, whether it has a plan that computes again what can be, and how often the device is told of a use in forward and in backward.
type Program = (fn(&[Tensor]) -> Tensor, bool, [u64; 2]);

/// The first saves three results in its segment; backward reads its input and saves the three once more. The other reads three
/// results again.
const PROGRAMS: [Program; 2] = [(within_a_segment, false, [9, 4]), (recorded, true, [9, 3])];

/// A cache whose device counts what it is told, and refuses to be told.
fn cache(is_planned: bool) -> (TensorCache, Arc<DeviceFaults>) {
    let faults = Arc::new(DeviceFaults::default());
    let builder = staged_in_memory().device_faults(&faults);
    let builder = match is_planned {
        true => builder.policy(InTurn::new(Offload::default(), vec![Placement::Recompute])),
        false => builder.fuse_reruns(false),
    };
    (builder.build().unwrap(), faults)
}

fn sources() -> Vec<Tensor> {
    (0..2).map(|_| randn(&[64, 64])).collect()
}

/// Saves three results of its own.
fn within_a_segment(x: &[Tensor]) -> Tensor {
    let y = segment("three", &x[0], |x| x.f_exp()?.f_sin()?.f_square()).unwrap();
    (y * &x[1]).sum(Kind::Float)
}

/// Two results that are computed again from the product, which is moved.
fn recorded(x: &[Tensor]) -> Tensor {
    let product = x[0].matmul(&x[1]);
    product.sin().cos().sum(Kind::Float) + product.square().sum(Kind::Float)
}

fn expected(sources: &[Tensor], f: fn(&[Tensor]) -> Tensor) -> Vec<Tensor> {
    let plain = leaves(sources);
    f(&plain).backward();
    grads(&plain)
}

/// One step, up to the end of its backward. `forward_ends` comes before that.
fn step(
    cache: &TensorCache,
    sources: &[Tensor],
    f: fn(&[Tensor]) -> Tensor,
    forward_ends: impl FnOnce(),
) -> (Result<Vec<Tensor>, Error>, StepReport) {
    let inputs = leaves(sources);
    let step = cache.step();
    let loss = f(&inputs);
    step.flush();
    forward_ends();
    let outcome = step.backward_with(&loss, Backward::default());
    drop(loss);
    let report = step.finish();
    (outcome.map(|()| grads(&inputs)), report.unwrap())
}

#[test]
fn a_device_is_told_of_each_use() {
    for (f, is_planned, told) in PROGRAMS {
        let (cache, faults) = cache(is_planned);
        let sources = sources();
        let mut forward = 0;
        let (got, report) = step(&cache, &sources, f, || forward = faults.calls(USE));
        assert_same_bits("gradients", &expected(&sources, f), &got.unwrap());
        assert!(report.reruns.bytes > 0, "something was computed again");
        assert_eq!([forward, faults.calls(USE) - forward], told);
        assert_nothing_held(&cache);
    }
}

/// Where the device cannot be told, tensors stay in the graph. Backward, which cannot go on without, says why.
#[test]
fn a_device_that_cannot_be_told_of_a_use() {
    for (f, is_planned, _) in PROGRAMS {
        let (cache, faults) = cache(is_planned);
        let sources = sources();
        let expected = expected(&sources, f);
        faults.inject(USE, 0, u64::MAX);
        let (got, report) = step(&cache, &sources, f, || ());
        assert_same_bits("all in the graph", &expected, &got.unwrap());
        assert_eq!((report.recomputed.bytes, report.offloaded.bytes), (0, 0), "{report}");
        faults.heal();
        let (got, _) = step(&cache, &sources, f, || faults.inject(USE, 0, u64::MAX));
        let error = got.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device, "{error}");
        assert!(error.to_string().contains(DeviceFaults::WORDS), "{error}");
        faults.heal();
        let (got, _) = step(&cache, &sources, f, || ());
        assert_same_bits("the next one", &expected, &got.unwrap());
        assert_nothing_held(&cache);
    }
}
