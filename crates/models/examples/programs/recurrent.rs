//! Networks that go from step to step: through time, through a tree, through a graph.

use tch::nn::{self, Module, OptimizerConfig, RNN};
use tch::{Device, Kind, Reduction, Tensor};

use crate::layers::{FLOAT, INDEX, draw, linear, perceptron};
use crate::program::{Named, Program, Result};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] = &[
    ("lstm", lstm),
    ("gru", gru),
    ("rnn-any-length", rnn),
    ("episodes", episodes),
    ("tree", tree),
    ("graph", graph),
];

const WIDTH: i64 = 192;
const BATCH: i64 = 64;

/// The length of this iteration, drawn from a range.
fn drawn(low: i64, high: i64) -> Result<i64> {
    Ok(i64::try_from(Tensor::randint_low(low, high, [1], INDEX))?)
}

fn lstm() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let config = nn::RNNConfig { num_layers: 2, dropout: 0.1, ..Default::default() };
    let layers = nn::lstm(&root / "lstm", 64, WIDTH, config);
    let head = linear(&root / "head", WIDTH, 64);
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    Program::new(vs, move |_, session| {
        let series = Tensor::randn([BATCH / 2, 33, 64], FLOAT);
        session.step(|step| {
            let (states, _) = layers.seq(&series.narrow(1, 0, 32));
            let loss = head.forward(&states).mse_loss(&series.narrow(1, 1, 32), Reduction::Mean);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.clip_grad_norm(1.0);
            optimizer.step();
            Ok(())
        })
    })
}

fn gru() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let config = nn::RNNConfig { bidirectional: true, ..Default::default() };
    let layer = nn::gru(&root / "gru", 64, WIDTH, config);
    let head = linear(&root / "head", 2 * WIDTH, 20);
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    Program::new(vs, move |_, session| {
        let (series, labels) = (Tensor::randn([BATCH, 32, 64], FLOAT), Tensor::randint(20, [BATCH], INDEX));
        session.step(|step| {
            let (states, _) = layer.seq(&series);
            let pooled = states.amax([1i64], false);
            let loss = head.forward(&pooled).cross_entropy_for_logits(&labels);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A recurrent cell in a loop, for as many time steps as each batch has.
fn rnn() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let inner = linear(&root / "inner", WIDTH, WIDTH);
    let outer = linear(&root / "outer", 64, WIDTH);
    let gate = linear(&root / "gate", 64 + WIDTH, WIDTH);
    let head = linear(&root / "head", WIDTH, 64);
    let mut optimizer = nn::RmsProp::default().build(&vs, 1e-4)?;
    Program::new(vs, move |_, session| {
        let length = drawn(12, 40)?;
        let series = Tensor::randn([length + 1, 2 * BATCH, 64], FLOAT);
        session.step(|step| {
            let mut state = Tensor::zeros([2 * BATCH, WIDTH], FLOAT);
            let mut losses = Vec::new();
            for time in 0..length {
                let x = series.get(time);
                let keep = gate.forward(&Tensor::cat(&[&x, &state], 1)).sigmoid();
                let fresh = (inner.forward(&state) + outer.forward(&x)).tanh();
                state = &keep * state + (1.0 - &keep) * fresh;
                losses.push(head.forward(&state).mse_loss(&series.get(time + 1), Reduction::Mean));
            }
            let loss = Tensor::stack(&losses, 0).mean(Kind::Float);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A policy acts in many games at once until an episode ends, and learns from what it got.
fn episodes() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let policy = perceptron(&vs.root(), &[64, 256, 256, 8]);
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    let world = Tensor::randn([8, 64, 64], FLOAT) / 8.0;
    Program::new(vs, move |_, session| {
        let length = drawn(6, 24)?;
        session.step(|step| {
            let mut state = Tensor::randn([4 * BATCH, 64], FLOAT);
            let (mut chances, mut rewards) = (Vec::new(), Vec::new());
            for _ in 0..length {
                let choice = policy.forward(&state).log_softmax(-1, Kind::Float);
                let action = tch::no_grad(|| choice.exp().multinomial(1, false));
                chances.push(choice.gather(1, &action, false).squeeze_dim(1));
                // The world knows of no gradients.
                state = tch::no_grad(|| {
                    let moved = world.index_select(0, &action.squeeze_dim(1)).matmul(&state.unsqueeze(2));
                    moved.squeeze_dim(2).tanh()
                });
                rewards.push(state.select(1, 0));
            }
            let returns = Tensor::stack(&rewards, 0).flip([0i64]).cumsum(0, Kind::Float).flip([0i64]);
            let loss =
                -(Tensor::stack(&chances, 0) * (&returns - returns.mean(Kind::Float))).mean(Kind::Float);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A random binary tree, whose nodes are computed from their children.
fn tree() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let join = perceptron(&(&root / "join"), &[2 * WIDTH, 2 * WIDTH, WIDTH]);
    let head = linear(&root / "head", WIDTH, 10);
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    let words = Tensor::randn([1000, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let leaves = drawn(10, 24)?;
        let labels = Tensor::randint(10, [2 * BATCH], INDEX);
        session.step(|step| {
            let top = grow(leaves, &|| draw(&words, 2 * BATCH), &join)?;
            let loss = head.forward(&top).cross_entropy_for_logits(&labels);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A tree with this many leaves.
fn grow(leaves: i64, leaf: &dyn Fn() -> Tensor, join: &nn::Sequential) -> Result<Tensor> {
    if leaves == 1 {
        return Ok(leaf());
    }
    let left = drawn(1, leaves)?;
    let children = [grow(left, leaf, join)?, grow(leaves - left, leaf, join)?];
    Ok(join.forward(&Tensor::cat(&children, 1)).tanh())
}

/// Messages along the edges of a graph, which has other nodes and edges each time.
fn graph() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let layers: Vec<_> = (0..3)
        .map(|index| {
            let path = &root / index;
            (linear(&path / "message", 2 * WIDTH, WIDTH), linear(&path / "update", 2 * WIDTH, WIDTH))
        })
        .collect();
    let head = linear(&root / "head", WIDTH, 10);
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    Program::new(vs, move |_, session| {
        let (nodes, edges) = (drawn(400, 600)?, drawn(1600, 2400)?);
        let [from, to] = [(); 2].map(|()| Tensor::randint(nodes, [edges], INDEX));
        let (features, labels) = (Tensor::randn([nodes, WIDTH], FLOAT), Tensor::randint(10, [nodes], INDEX));
        session.step(|step| {
            let mut x = features.shallow_clone();
            for (message, update) in &layers {
                let ends = Tensor::cat(&[x.index_select(0, &from), x.index_select(0, &to)], 1);
                let messages = message.forward(&ends).leaky_relu();
                let index = to.unsqueeze(1).expand_as(&messages);
                let sums = x.zeros_like().scatter_add(0, &index, &messages);
                x = (update.forward(&Tensor::cat(&[&x, &sums], 1)) + &x).elu();
            }
            let loss = head.forward(&x).cross_entropy_for_logits(&labels);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}
