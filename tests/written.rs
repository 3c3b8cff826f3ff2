//! Storages that are written to after something in them was saved: pieces with version counters of their own, and
//! `Tensor::data`.

mod common;

use common::{F32, assert_nothing_held, everything, leaf, leaves, parity, randn, same_bits};
use ssdtrain::{Offload, Verify, remat, segment};
use tch::nn::{self, Module, RNN, RNNConfig};
use tch::{Device, Kind, Tensor};

fn pieces(x: &Tensor, between: impl Fn()) -> Tensor {
    let mut parts = (x * 1.0).unsafe_chunk(2, 1);
    let a = parts[0].sigmoid_();
    between();
    let b = parts[1].sigmoid_();
    (a * b).sum(Kind::Float)
}

#[test]
fn pieces_of_a_storage_that_are_changed_one_after_another() {
    parity(&[randn(&[64, 512])], |x| pieces(&x[0], || ()));
}

/// The first piece is below the device when the second is changed.
#[test]
fn a_piece_that_is_changed_when_another_has_left() {
    let source = randn(&[64, 512]);
    let plain = leaf(&source);
    pieces(&plain, || ()).backward();
    for builder in [everything(), everything().verify(Verify::Off), common::staged(), common::direct()] {
        let cache = builder.build().unwrap();
        let x = leaf(&source);
        let step = cache.step();
        let loss = pieces(&x, || step.flush());
        step.flush();
        step.backward(&loss).unwrap();
        drop(loss);
        let report = step.finish().unwrap();
        assert!(same_bits(&plain.grad(), &x.grad()));
        assert!(report.kept.written.count > 0, "{:?}", report.kept);
        assert_nothing_held(&cache);
    }
}

#[test]
fn pieces_of_a_marked_result() {
    let run = |x: &Tensor| {
        let y = remat(&[x], |x| (x[0] + 1.0).f_relu_()).unwrap();
        let mut parts = y.unsafe_chunk(2, 1);
        drop(y);
        let (a, b) = (parts[0].sigmoid_(), parts[1].sigmoid_());
        (a * b).sum(Kind::Float)
    };
    parity(&[randn(&[64, 512])], |x| run(&x[0]));
}

/// In plain autograd both saves have the new bytes.
#[test]
fn what_is_written_through_data_is_what_both_saves_have() {
    for flush in [false, true] {
        let source = randn(&[64, 64]);
        let run = |w: &Tensor, between: &dyn Fn()| {
            let v = w * 1.0;
            let first = (&v * &v).sum(Kind::Float);
            between();
            drop(v.data().fill_(3.0));
            let second = (&v * &v).sum(Kind::Float);
            between();
            first + second
        };
        let plain = leaf(&source);
        run(&plain, &|| ()).backward();
        let cache = everything().build().unwrap();
        let w = leaf(&source);
        let step = cache.step();
        let loss = run(&w, &|| {
            if flush {
                step.flush();
            }
        });
        step.backward(&loss).unwrap();
        step.finish().unwrap();
        assert!(same_bits(&plain.grad(), &w.grad()), "flush {flush}");
    }
}

#[test]
fn gru_in_a_segment() {
    let vs = nn::VarStore::new(Device::Cpu);
    let net = nn::gru(vs.root(), 24, 48, RNNConfig::default());
    let net = std::sync::Arc::new(parking_lot::Mutex::new(net));
    parity(&[randn(&[4, 12, 24])], |x| {
        let net = std::sync::Arc::clone(&net);
        let y = segment("gru", &x[0], move |x| Ok(net.lock().seq(x).0)).unwrap();
        y.square().mean(Kind::Float)
    });
}

// ---- what is not worth moving ----

#[test]
fn a_small_view_does_not_take_its_storage_along() {
    let data = randn(&[6000, 784]);
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 784, 64, Default::default());
    let cache = everything().parameters(&vs).build().unwrap();
    let step = cache.step();
    let loss = layer.forward(&data.narrow(0, 0, 64)).square().mean(Kind::Float);
    step.flush();
    step.backward(&loss).unwrap();
    drop(loss);
    let report = step.finish().unwrap();
    assert!(report.offloaded.bytes < 1 << 20, "{report}");
    assert!(report.kept.parts.count > 0, "{:?}", report.kept);
}

#[test]
fn views_that_are_most_of_a_storage_take_it_along() {
    let x = leaf(&randn(&[16, 1024]));
    let cache = everything().build().unwrap();
    let step = cache.step();
    let loss = {
        let y = &x * 1.0;
        let parts = (0..16).map(|i| y.narrow(0, i, 1).square().sum(Kind::Float));
        parts.fold(Tensor::zeros([], F32), |sum, part| sum + part)
    };
    step.flush();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert_eq!(report.offloaded.bytes, 16 * 1024 * 4, "{report}");
}

#[test]
fn what_the_program_holds_stays_from_the_second_step_on() {
    let (table, sources) = (randn(&[64, 64]), [randn(&[64, 64])]);
    let cache = everything().policy(Offload::default()).build().unwrap();
    let held = |number: u64| {
        let x = leaves(&sources);
        let step = cache.step();
        let loss = (&x[0] * &table).sum(Kind::Float);
        step.flush();
        step.backward(&loss).unwrap();
        let report = step.finish().unwrap();
        assert_eq!(report.step, number);
        report.kept.held.bytes
    };
    assert_eq!([held(1), held(2), held(3)], [0, 64 * 64 * 4, 64 * 64 * 4]);
}
