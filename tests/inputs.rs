//! Segments with several inputs: each has the gradient of a plain call, and its bytes are the cache's.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use common::{everything, leaf, parity, randn};
use ssdtrain::{KIB, Offload, Verify, segment};
use tch::{Device, Kind, TchError, Tensor};

type Outcome = Result<Tensor, TchError>;

fn scalar(t: &Tensor) -> Tensor {
    t.square().sum(Kind::Float)
}

/// Cross-attention without heads: saves both inputs, and what it makes of them.
fn attend([x, y]: [&Tensor; 2]) -> Outcome {
    let weights = x.f_matmul(&y.f_transpose(0, 1)?)?.f_softmax(-1, Kind::Float)?;
    weights.f_dropout(0.2, true)?.f_matmul(y)?.f_add(x)
}

#[test]
fn gradients_flow_to_each() {
    let report = parity(&[randn(&[32, 32]), randn(&[32, 32])], |t| {
        let [x, y] = [&t[0] * 2.0, t[1].tanh()];
        let first = segment("first", [&x, &y], attend).unwrap();
        scalar(&segment("second", [&first, &y], attend).unwrap())
    });
    assert_eq!(report.reruns.count, 2, "{report:?}");
}

#[test]
fn their_number_may_vary() {
    parity(&[randn(&[16, 16])], |t| {
        let all: Vec<Tensor> = (1..4).map(|scale| &t[0] * scale).collect();
        let all: Vec<&Tensor> = all.iter().collect();
        let sum = segment("sum", &all[..], |all| {
            all[1..].iter().try_fold(all[0].f_exp()?, |sum, x| sum.f_mul(&x.f_tanh()?))
        });
        scalar(&sum.unwrap())
    });
}

#[test]
fn one_tensor_may_be_given_twice() {
    parity(&[randn(&[32, 32])], |t| {
        let x = &t[0] * 2.0;
        scalar(&segment("s", [&x, &x], attend).unwrap())
    });
}

#[test]
fn some_may_need_no_gradient() {
    let tokens = Tensor::randint(40, [30], (Kind::Int64, Device::Cpu));
    parity(&[randn(&[40, 16]), tokens, randn(&[30, 16])], |t| {
        let (ids, table, mask) = (&t[1] + 0, &t[0] * 1.0, (&t[2] * 1.0).detach());
        let y = segment("embed", [&ids, &table, &mask], |[ids, table, mask]| {
            table.f_index_select(0, ids)?.f_tanh()?.f_mul(&mask.f_sigmoid()?)?.f_exp()
        });
        scalar(&(y.unwrap() * &t[2]))
    });
}

#[test]
fn they_may_be_views_of_one_storage() {
    parity(&[randn(&[32, 64])], |t| {
        let parts = (&t[0] * 2.0).chunk(2, 1);
        let turned = parts[0].transpose(0, 1);
        let y = segment("s", [&parts[0], &parts[1]], attend).unwrap();
        scalar(&segment("t", [&y, &turned], attend).unwrap())
    });
}

#[test]
fn one_may_be_returned_as_it_is() {
    parity(&[randn(&[32, 32]), randn(&[32, 32])], |t| {
        let [x, y] = [&t[0] * 2.0, t[1].tanh()];
        let same = segment("same", [&x, &y], |[x, y]| {
            drop(x.f_matmul(&y.f_exp()?)?);
            Ok(y.shallow_clone())
        });
        scalar(&(same.unwrap().sin() * x))
    });
}

#[test]
fn without_any_it_is_a_plain_call() {
    parity(&[randn(&[8, 8])], |t| {
        let x = t[0].shallow_clone();
        scalar(&segment("none", [], move |[]| x.f_exp()?.f_sin()).unwrap())
    });
}

/// Of four segments of two inputs, one of which all have in common, the cache writes the inputs and nothing else, each once.
#[test]
fn their_bytes_are_the_caches() {
    let cache = everything()
        .verify(Verify::Off)
        .policy(Offload::default().device_budget(64 * KIB).prefetch(0))
        .build()
        .unwrap();
    let (x, table) = (leaf(&randn(&[256, 256])), leaf(&randn(&[256, 256])));
    let step = cache.step();
    let loss = {
        let table = table.tanh();
        let y = (0..4).fold(&x * 0.1, |y, _| {
            segment("s", [&y, &table], |[y, table]| y.f_mul(table)?.f_tanh()?.f_sin()).unwrap()
        });
        y.sum(Kind::Float)
    };
    step.backward(&loss).unwrap();
    drop(loss);
    let report = step.finish().unwrap();
    let bytes = 256 * 256 * 4;
    assert_eq!(report.recomputed.bytes, 4 * bytes, "{report:?}");
    assert!(report.offloaded.bytes <= 5 * bytes, "{report:?}");
    assert!(report.loaded.bytes >= 4 * bytes, "{report:?}");
}
