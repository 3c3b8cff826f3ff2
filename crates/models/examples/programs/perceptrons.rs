//! Perceptrons, and what is made of them.

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

use crate::layers::{FLOAT, INDEX, draw, linear, norm, perceptron, set_trainable};
use crate::program::{Named, Program, Result};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] = &[
    ("mlp", mlp),
    ("autoencoder", autoencoder),
    ("in-place", in_place),
    ("multi-task-in-turn", multi_task),
    ("siamese-tied", siamese),
    ("two-towers-contrastive", two_towers),
    ("mixture-of-experts", mixture_of_experts),
    ("early-exit", early_exit),
    ("lora", lora),
    ("embedding-bags", embedding_bags),
];

const WIDTH: i64 = 384;
const ROWS: i64 = 1024;
const CLASSES: i64 = 100;

fn mlp() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = perceptron(&vs.root(), &[WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, CLASSES]);
    let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
    let (data, labels) =
        (Tensor::randn([8 * ROWS, WIDTH], FLOAT), Tensor::randint(CLASSES, [8 * ROWS], INDEX));
    Program::new(vs, move |_, session| {
        let indices = Tensor::randint(8 * ROWS, [ROWS], INDEX);
        let (x, y) = (data.index_select(0, &indices), labels.index_select(0, &indices));
        session.step(|step| {
            let loss = model.forward(&x).cross_entropy_for_logits(&y);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

fn autoencoder() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = perceptron(&vs.root(), &[512, 384, 256, 64, 256, 384, 512]);
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    let data = Tensor::rand([8192, 512], FLOAT);
    Program::new(vs, move |_, session| {
        let x = draw(&data, 1536);
        let noisy = &x + x.randn_like() * 0.1;
        session.step(|step| {
            let loss = model.forward(&noisy).mse_loss(&x, Reduction::Mean);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// Views, and operations that change their operand, wherever autograd allows them.
fn in_place() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let layers: Vec<nn::Linear> = (0..6).map(|index| linear(&vs.root() / index, WIDTH, 2 * WIDTH)).collect();
    let mut optimizer = nn::Sgd::default().build(&vs, 0.02)?;
    let data = Tensor::randn([8 * ROWS, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let target = draw(&data, ROWS / 2);
        session.step(|step| {
            let mut x = target.copy();
            for layer in &layers {
                let both = layer.forward(&x);
                let value = both.narrow(1, 0, WIDTH).relu_();
                let gate = both.narrow(1, WIDTH, WIDTH).sigmoid();
                let mut y = value * gate;
                y += &x;
                x = y.view([ROWS / 4, 2 * WIDTH]).clamp_(-8.0, 8.0).view([ROWS / 2, WIDTH]);
            }
            let loss = (x - &target).square().mean(Kind::Float);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A trunk with three heads, of which each step trains another one.
fn multi_task() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let trunk = perceptron(&(&root / "trunk"), &[WIDTH, WIDTH, WIDTH, WIDTH, WIDTH]);
    let classifier = linear(&root / "classifier", WIDTH, CLASSES);
    let regressor = perceptron(&(&root / "regressor"), &[WIDTH, WIDTH, 1]);
    let decoder = perceptron(&(&root / "decoder"), &[WIDTH, WIDTH, WIDTH]);
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let data = Tensor::randn([8 * ROWS, WIDTH], FLOAT);
    Program::new(vs, move |number, session| {
        let x = draw(&data, ROWS);
        session.step(|step| {
            let hidden = trunk.forward(&x).tanh();
            let loss = match number % 3 {
                0 => classifier
                    .forward(&hidden)
                    .cross_entropy_for_logits(&x.narrow(1, 0, CLASSES).argmax(1, false)),
                1 => regressor.forward(&hidden).mse_loss(&x.narrow(1, 0, 1), Reduction::Mean),
                _ => decoder.forward(&hidden).smooth_l1_loss(&x, Reduction::Mean, 1.0),
            };
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// One network that sees both of a pair.
fn siamese() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = perceptron(&vs.root(), &[WIDTH, WIDTH, WIDTH, WIDTH, 64]);
    let mut optimizer = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&vs, 0.05)?;
    let data = Tensor::randn([8 * ROWS, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let (left, right) = (draw(&data, ROWS * 3 / 4), draw(&data, ROWS * 3 / 4));
        let is_alike = (&left * &right).sum_dim_intlist([1i64].as_slice(), false, Kind::Float).gt(0.0);
        session.step(|step| {
            let apart = (model.forward(&left) - model.forward(&right)).square().sum_dim_intlist(
                [1i64].as_slice(),
                false,
                Kind::Float,
            );
            let near: Tensor = 2.0 - (&apart + 1e-6).sqrt();
            let loss = apart.where_self(&is_alike, &near.relu().square()).mean(Kind::Float);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// Two networks whose outputs for the same item are to be nearer than those of all others.
fn two_towers() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let queries = perceptron(&(&root / "queries"), &[WIDTH, WIDTH, WIDTH, 128]);
    let items = perceptron(&(&root / "items"), &[WIDTH, 2 * WIDTH, WIDTH, 128]);
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let data = Tensor::randn([8 * ROWS, 2 * WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let pairs = draw(&data, ROWS);
        let targets = Tensor::arange(ROWS, INDEX);
        session.step(|step| {
            let unit = |x: Tensor| &x / (x.norm_scalaropt_dim(2.0, [1i64].as_slice(), true) + 1e-6);
            let query = unit(queries.forward(&pairs.narrow(1, 0, WIDTH)));
            let item = unit(items.forward(&pairs.narrow(1, WIDTH, WIDTH)));
            let logits = query.matmul(&item.tr()) * 10.0;
            let loss =
                logits.cross_entropy_for_logits(&targets) + logits.tr().cross_entropy_for_logits(&targets);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// Each row goes to one of four experts, as a gate and chance would have it.
fn mixture_of_experts() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let layers: Vec<_> = (0..3)
        .map(|layer| {
            let path = &root / layer;
            let experts: Vec<_> =
                (0..4).map(|index| perceptron(&(&path / index), &[WIDTH, 2 * WIDTH, WIDTH])).collect();
            (linear(&path / "gate", WIDTH, 4), norm(&path / "norm", WIDTH), experts)
        })
        .collect();
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let data = Tensor::randn([8 * ROWS, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let target = draw(&data, ROWS);
        session.step(|step| {
            let mut x = target.shallow_clone();
            for (gate, norm, experts) in &layers {
                let inputs = norm.forward(&x);
                let shares = gate.forward(&inputs).softmax(-1, Kind::Float);
                let chosen = (&shares + shares.rand_like()).argmax(-1, false);
                let mut y = x.zeros_like();
                for (index, expert) in experts.iter().enumerate() {
                    let rows = chosen.eq(index as i64).nonzero().squeeze_dim(1);
                    let share = shares.select(1, index as i64).index_select(0, &rows).unsqueeze(1);
                    y = y.index_add(0, &rows, &(expert.forward(&inputs.index_select(0, &rows)) * share));
                }
                x = &x + y;
            }
            let loss = x.mse_loss(&target.roll([1i64], [1i64]), Reduction::Mean);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// As many layers as chance would have it, then the head.
fn early_exit() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let layers: Vec<_> = (0..8)
        .map(|index| {
            let path = &root / index;
            (norm(&path / "norm", WIDTH), perceptron(&path, &[WIDTH, WIDTH, WIDTH]))
        })
        .collect();
    let head = linear(&root / "head", WIDTH, CLASSES);
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let data = Tensor::randn([8 * ROWS, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let x = draw(&data, ROWS * 3 / 4);
        let labels = x.narrow(1, 0, CLASSES).argmax(1, false);
        let exit = usize::try_from(i64::try_from(Tensor::randint_low(3, 9, [1], INDEX))?)?;
        session.step(|step| {
            let hidden = layers[..exit]
                .iter()
                .fold(x.shallow_clone(), |x, (norm, layer)| &x + layer.forward(&norm.forward(&x)));
            let loss = head.forward(&hidden).cross_entropy_for_logits(&labels);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// Frozen weights with trained updates of low rank.
fn lora() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let layers: Vec<_> = (0..6)
        .map(|index| {
            let path = &root / index;
            let base = linear(&path / "base", 512, 512);
            let down = path.kaiming_uniform("down", &[8, 512]);
            let up = path.zeros("up", &[512, 8]);
            (base, norm(&path / "norm", 512), down, up)
        })
        .collect();
    set_trainable(&vs.variables(), &["base", "norm"], false);
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let data = Tensor::randn([8 * ROWS, 512], FLOAT);
    Program::new(vs, move |_, session| {
        let x = draw(&data, ROWS);
        session.step(|step| {
            let y = layers.iter().fold(x.shallow_clone(), |x, (base, norm, down, up)| {
                let inputs = norm.forward(&x);
                let update = inputs.dropout(0.05, true).matmul(&down.tr()).matmul(&up.tr());
                &x + (base.forward(&inputs) + update * 2.0).silu()
            });
            let loss = y.mse_loss(&x.flip([1i64]), Reduction::Mean);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A recommender: bags of items, whose embeddings are summed, and a perceptron.
fn embedding_bags() -> Result<Program> {
    const BAG: i64 = 12;
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let tables: Vec<Tensor> =
        (0..4).map(|table| root.randn(&format!("table{table}"), &[5000, 96], 0.0, 0.1)).collect();
    let top = perceptron(&(&root / "top"), &[4 * 96, 768, 384, 384, 1]);
    let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
    Program::new(vs, move |_, session| {
        let items: Vec<Tensor> = tables.iter().map(|_| Tensor::randint(5000, [ROWS * BAG], INDEX)).collect();
        let offsets = Tensor::arange(ROWS, INDEX) * BAG;
        let clicks = Tensor::rand([ROWS, 1], FLOAT).gt(0.5).to_kind(Kind::Float);
        session.step(|step| {
            let bags: Vec<Tensor> = tables
                .iter()
                .zip(&items)
                .map(|(table, items)| {
                    Tensor::embedding_bag(table, items, &offsets, false, 0, false, None::<&Tensor>, false).0
                })
                .collect();
            let logits = top.forward(&Tensor::cat(&bags, 1));
            let none = None::<&Tensor>;
            let loss = logits.binary_cross_entropy_with_logits(&clicks, none, none, Reduction::Mean);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}
