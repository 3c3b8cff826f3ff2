//! Recurrent nets, whose cells on the CPU change pieces of one storage one after another: training has the same bits
//! as without a cache, on every path that the bytes take.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{assert_nothing_held, assert_same_bits, direct, everything, grads, leaf, randn, staged};
use ssdtrain::{BackendKind, Offload, TensorCacheBuilder, Verify};
use tch::nn::{self, OptimizerConfig, RNN, RNNConfig, VarStore};
use tch::{Device, Kind, Tensor};

const INPUTS: i64 = 12;
const HIDDEN: i64 = 16;
/// The output width of a cell with a projection.
const PROJECTED: i64 = 8;
const ROWS: i64 = 4;
const TOKENS: i64 = 6;

#[derive(Clone, Copy, Debug)]
enum Cell {
    Gru,
    Lstm,
    /// Uses libtorch's own function: tch has no such layer.
    ProjectedLstm,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    cell: Cell,
    kind: Kind,
    layers: i64,
    bidirectional: bool,
}

impl Case {
    fn directions(&self) -> i64 {
        1 + i64::from(self.bidirectional)
    }

    fn zeros(&self, width: i64) -> Tensor {
        Tensor::zeros([self.layers * self.directions(), ROWS, width], (self.kind, Device::Cpu))
    }

    /// The net of this case, with its weights in `vs`.
    fn net(self, vs: &mut VarStore) -> Box<dyn Fn(&Tensor) -> Tensor> {
        let config =
            RNNConfig { num_layers: self.layers, bidirectional: self.bidirectional, ..RNNConfig::default() };
        let net: Box<dyn Fn(&Tensor) -> Tensor> = match self.cell {
            Cell::Gru => {
                let net = nn::gru(vs.root(), INPUTS, HIDDEN, config);
                Box::new(move |x| net.seq_init(x, &nn::GRUState(self.zeros(HIDDEN))).0)
            }
            Cell::Lstm => {
                let net = nn::lstm(vs.root(), INPUTS, HIDDEN, config);
                let state = move || nn::LSTMState((self.zeros(HIDDEN), self.zeros(HIDDEN)));
                Box::new(move |x| net.seq_init(x, &state()).0)
            }
            Cell::ProjectedLstm => return self.projected(vs),
        };
        if self.kind == Kind::Double {
            vs.double();
        }
        net
    }

    fn projected(self, vs: &mut VarStore) -> Box<dyn Fn(&Tensor) -> Tensor> {
        let mut shapes = Vec::new();
        for layer in 0..self.layers {
            let inputs = if layer == 0 { INPUTS } else { PROJECTED * self.directions() };
            for _ in 0..self.directions() {
                let (gates, none) = (4 * HIDDEN, 0);
                shapes.extend([
                    [gates, inputs],
                    [gates, PROJECTED],
                    [gates, none],
                    [gates, none],
                    [PROJECTED, HIDDEN],
                ]);
            }
        }
        for (index, shape) in shapes.iter().enumerate() {
            let shape = if shape[1] == 0 { &shape[..1] } else { &shape[..] };
            drop(vs.root().randn(&format!("weight{index:03}"), shape, 0.0, 0.2));
        }
        if self.kind == Kind::Double {
            vs.double();
        }
        let weights = weights(vs);
        Box::new(move |x| {
            let state = [self.zeros(PROJECTED), self.zeros(HIDDEN)];
            x.lstm(&state, &weights, true, self.layers, 0.0, true, self.bidirectional, true).0
        })
    }

    /// Weights and gradients after this many steps, in a cache if there is one.
    fn train(self, steps: usize, builder: Option<TensorCacheBuilder>) -> Vec<Tensor> {
        tch::manual_seed(1);
        let mut vs = VarStore::new(Device::Cpu);
        let net = self.net(&mut vs);
        let mut optimizer = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&vs, 0.05).unwrap();
        let sources: Vec<Tensor> =
            (0..4).map(|_| randn(&[ROWS, TOKENS, INPUTS]).to_kind(self.kind)).collect();
        let cache = builder.map(|builder| builder.min_bytes(1).parameters(&vs).build().unwrap());
        let mut last = Vec::new();
        for number in 0..steps {
            let x = leaf(&sources[number % sources.len()]);
            optimizer.zero_grad();
            let loss = |x: &Tensor| net(x).square().mean(self.kind);
            match &cache {
                Some(cache) => {
                    let step = cache.step();
                    let loss = loss(&x);
                    if number % 2 == 1 {
                        step.flush();
                    }
                    step.backward(&loss).unwrap();
                    drop(loss);
                    step.finish().unwrap();
                    assert_nothing_held(cache);
                }
                None => loss(&x).backward(),
            }
            optimizer.step();
            last = vec![x.grad()];
        }
        let weights = weights(&vs);
        last.into_iter().chain(grads(&weights)).chain(weights).collect()
    }

    /// Trains with caches of every kind, and without one.
    fn check(self, steps: usize) {
        let expected = self.train(steps, None);
        assert!(expected.iter().all(|tensor| tensor.isfinite().all().int64_value(&[]) == 1), "{self:?}");
        let disk = |backend| everything().backend(backend);
        let ways: [(&str, TensorCacheBuilder); 8] = [
            ("io_uring or what there is", disk(BackendKind::Auto)),
            ("the same, not verified", disk(BackendKind::Auto).verify(Verify::Off)),
            ("threads", disk(BackendKind::Pool)),
            ("threads, not verified", disk(BackendKind::Pool).verify(Verify::Off)),
            ("memory", disk(BackendKind::Memory)),
            ("host pool and disk", staged().policy(Offload::default().device_budget(1))),
            (
                "no host pool, not verified",
                staged().host_pool(0).policy(Offload::default().device_budget(1)).verify(Verify::Off),
            ),
            ("straight to the disk", direct().policy(Offload::default().device_budget(1))),
        ];
        for (way, builder) in ways {
            let got = self.train(steps, Some(builder));
            assert_same_bits(&format!("{self:?}, {way}"), &expected, &got);
        }
    }
}

/// In the order of their names.
fn weights(vs: &VarStore) -> Vec<Tensor> {
    let mut named: Vec<_> = vs.variables().into_iter().collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    named.into_iter().map(|(_, weight)| weight).collect()
}

#[test]
fn nets_are_trained_with_the_same_bits() {
    for (cell, kind, layers) in
        [(Cell::Gru, Kind::Float, 2), (Cell::Lstm, Kind::Double, 1), (Cell::ProjectedLstm, Kind::Float, 2)]
    {
        Case { cell, kind, layers, bidirectional: true }.check(4);
    }
}

// ---- every kind of net, for two hundred steps ----

fn check_all(cell: Cell, kind: Kind) {
    for bidirectional in [false, true] {
        for layers in 1..=3 {
            let case = Case { cell, kind, layers, bidirectional };
            case.check(200);
            println!("{case:?}: the same bits");
        }
    }
}

#[test]
#[ignore = "takes minutes: run it after a change to what is saved"]
fn two_hundred_steps_of_gru() {
    check_all(Cell::Gru, Kind::Float);
}

#[test]
#[ignore = "takes minutes: run it after a change to what is saved"]
fn two_hundred_steps_of_gru_in_64_bits() {
    check_all(Cell::Gru, Kind::Double);
}

#[test]
#[ignore = "takes minutes: run it after a change to what is saved"]
fn two_hundred_steps_of_lstm() {
    check_all(Cell::Lstm, Kind::Float);
}

#[test]
#[ignore = "takes minutes: run it after a change to what is saved"]
fn two_hundred_steps_of_lstm_in_64_bits() {
    check_all(Cell::Lstm, Kind::Double);
}

#[test]
#[ignore = "takes minutes: run it after a change to what is saved"]
fn two_hundred_steps_of_lstm_with_projections() {
    check_all(Cell::ProjectedLstm, Kind::Float);
}

#[test]
#[ignore = "takes minutes: run it after a change to what is saved"]
fn two_hundred_steps_of_lstm_with_projections_in_64_bits() {
    check_all(Cell::ProjectedLstm, Kind::Double);
}
