//! Networks for images.

use tch::nn::{self, Module, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::layers::{Block, FLOAT, INDEX, linear, norm, set_trainable};
use crate::program::{Named, Program, Result};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] = &[
    ("conv-net", conv_net),
    ("conv-net-by-tch", conv_net_by_tch),
    ("resnet", || classifier(false, Loop::Plain)),
    ("resnet-stochastic-depth", || classifier(true, Loop::Plain)),
    ("resnet-frozen-stem", || classifier(false, Loop::FrozenUntil(usize::MAX))),
    ("resnet-unfrozen-at-15", || classifier(false, Loop::FrozenUntil(15))),
    ("resnet-small-last-batch", || classifier(false, Loop::SmallBatchEvery(5))),
    ("resnet-evaluated-between", || classifier(false, Loop::EvaluatedBetween)),
    ("resnet-evaluated-within", || classifier(false, Loop::EvaluatedWithin)),
    ("u-net", u_net),
    ("dense-net", dense_net),
    ("vit", vit),
];

const CLASSES: i64 = 10;
const SIDE: i64 = 32;

/// A batch of random images, and their classes.
fn batch(count: i64) -> (Tensor, Tensor) {
    (Tensor::randn([count, 3, SIDE, SIDE], FLOAT), Tensor::randint(CLASSES, [count], INDEX))
}

/// A convolution of 3 × 3 without a bias.
fn conv(vs: nn::Path<'_>, inputs: i64, outputs: i64, stride: i64) -> nn::Conv2D {
    let config = nn::ConvConfig { stride, padding: 1, bias: false, ..Default::default() };
    nn::conv2d(vs, inputs, outputs, 3, config)
}

/// A convolution, a batch norm, and a ReLU in place.
fn unit(vs: &nn::Path<'_>, inputs: i64, outputs: i64, stride: i64) -> nn::SequentialT {
    nn::seq_t()
        .add(conv(vs / "conv", inputs, outputs, stride))
        .add(nn::batch_norm2d(vs / "norm", outputs, Default::default()))
        .add_fn(|x| x.shallow_clone().relu_())
}

/// The mean over an image.
fn pool(x: &Tensor) -> Tensor {
    x.mean_dim([2i64, 3].as_slice(), false, Kind::Float)
}

fn plain_net(vs: &nn::Path<'_>) -> nn::SequentialT {
    nn::seq_t()
        .add(unit(&(vs / 0), 3, 32, 1))
        .add(unit(&(vs / 1), 32, 32, 1))
        .add_fn(|x| x.max_pool2d_default(2))
        .add(unit(&(vs / 2), 32, 64, 1))
        .add(unit(&(vs / 3), 64, 64, 1))
        .add_fn(|x| x.avg_pool2d_default(2))
        .add(unit(&(vs / 4), 64, 128, 1))
        .add_fn(pool)
        .add(linear(vs / "head", 128, CLASSES))
}

fn conv_net() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = plain_net(&vs.root());
    let mut optimizer = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&vs, 0.05)?;
    Program::new(vs, move |_, session| {
        let (images, labels) = batch(24);
        session.step(|step| {
            let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// Backward and optimizer in one call of tch.
fn conv_net_by_tch() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = plain_net(&vs.root());
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    Program::new(vs, move |_, session| {
        let (images, labels) = batch(24);
        session.step(|_| {
            optimizer.backward_step(&model.forward_t(&images, true).cross_entropy_for_logits(&labels));
            Ok(())
        })
    })
}

/// A small residual network, of which `drops` leaves out blocks at random.
fn residual_net(vs: &nn::Path<'_>, drops: bool) -> impl ModuleT + use<> {
    let stem = unit(&(vs / "stem"), 3, 32, 1);
    let widths = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)];
    let blocks: Vec<_> = widths
        .into_iter()
        .enumerate()
        .map(|(index, (inputs, outputs, stride))| residual(&(vs / index), inputs, outputs, stride, drops))
        .collect();
    let head = linear(vs / "head", 128, CLASSES);
    nn::func_t(move |x, train| {
        let x = blocks.iter().fold(stem.forward_t(x, train), |x, block| block.forward_t(&x, train));
        head.forward(&pool(&x))
    })
}

/// Two convolutions, whose result is added to what goes in.
fn residual(vs: &nn::Path<'_>, inputs: i64, outputs: i64, stride: i64, drops: bool) -> impl ModuleT + use<> {
    let first = unit(&(vs / "first"), inputs, outputs, stride);
    let second = conv(vs / "second", outputs, outputs, 1);
    let normed = nn::batch_norm2d(vs / "norm", outputs, Default::default());
    let shortcut = (inputs != outputs).then(|| {
        let config = nn::ConvConfig { stride, bias: false, ..Default::default() };
        nn::conv2d(vs / "shortcut", inputs, outputs, 1, config)
    });
    nn::func_t(move |x, train| {
        let past = shortcut.as_ref().map_or_else(|| x.shallow_clone(), |shortcut| shortcut.forward(x));
        if drops && train && shortcut.is_none() && Tensor::rand([1], FLOAT).double_value(&[0]) < 0.3 {
            return past;
        }
        let y = normed.forward_t(&second.forward(&first.forward_t(x, train)), train);
        (y + past).relu_()
    })
}

/// What a training loop does besides steps that are all alike.
#[derive(Clone, Copy)]
enum Loop {
    Plain,
    /// Stem and first two blocks are not trained before this iteration.
    FrozenUntil(usize),
    SmallBatchEvery(usize),
    /// Every third iteration ends with an evaluation.
    EvaluatedBetween,
    /// Each step begins with an evaluation, whose result weighs the loss.
    EvaluatedWithin,
}

fn classifier(drops: bool, kind: Loop) -> Result<Program> {
    const FIRST: [&str; 3] = ["stem", "0.", "1."];
    let vs = nn::VarStore::new(Device::Cpu);
    let model = residual_net(&vs.root(), drops);
    let mut optimizer = nn::Sgd { momentum: 0.9, wd: 5e-4, ..nn::Sgd::default() }.build(&vs, 0.02)?;
    let variables = vs.variables();
    if let Loop::FrozenUntil(_) = kind {
        set_trainable(&variables, &FIRST, false);
    }
    let evaluate = |model: &dyn ModuleT| {
        let (images, labels) = batch(16);
        tch::no_grad(|| model.forward_t(&images, false).accuracy_for_logits(&labels).double_value(&[]))
    };
    Program::new(vs, move |number, session| {
        if matches!(kind, Loop::FrozenUntil(until) if until == number) {
            set_trainable(&variables, &FIRST, true);
        }
        let small = matches!(kind, Loop::SmallBatchEvery(period) if number.is_multiple_of(period));
        let (images, labels) = batch(if small { 6 } else { 16 });
        session.step(|step| {
            let accuracy = if let Loop::EvaluatedWithin = kind { evaluate(&model) } else { 0.0 };
            let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels) * (1.0 + accuracy);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })?;
        if matches!(kind, Loop::EvaluatedBetween) && number.is_multiple_of(3) {
            evaluate(&model);
        }
        Ok(())
    })
}

/// Down and up again, with what was there on the way down put beside what comes up.
fn u_net() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let widths = [24, 48, 96];
    let down: Vec<_> = [(3, 24), (24, 48), (48, 96)]
        .into_iter()
        .enumerate()
        .map(|(level, (inputs, outputs))| unit(&(&root / "down" / level), inputs, outputs, 1))
        .collect();
    let up: Vec<_> = (0..2)
        .map(|level| unit(&(&root / "up" / level), widths[level] + widths[level + 1], widths[level], 1))
        .collect();
    let head = nn::conv2d(&root / "head", 24, CLASSES, 1, Default::default());
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    Program::new(vs, move |_, session| {
        let images = Tensor::randn([14, 3, SIDE, SIDE], FLOAT);
        let classes = Tensor::randint(CLASSES, [14, SIDE, SIDE], INDEX);
        session.step(|step| {
            let top = down[0].forward_t(&images, true);
            let middle = down[1].forward_t(&top.max_pool2d_default(2), true);
            let bottom = down[2].forward_t(&middle.max_pool2d_default(2), true);
            let upward = |x: &Tensor, beside: &Tensor| {
                let side = beside.size()[3];
                Tensor::cat(&[&x.upsample_nearest2d([side, side], None, None), beside], 1)
            };
            let middle = up[1].forward_t(&upward(&bottom, &middle), true);
            let top = up[0].forward_t(&upward(&middle, &top), true);
            let loss = head.forward(&top).cross_entropy_loss::<Tensor>(
                &classes,
                None,
                tch::Reduction::Mean,
                -100,
                0.1,
            );
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// Each layer sees the results of all before it.
fn dense_net() -> Result<Program> {
    const GROWTH: i64 = 16;
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let stem = conv(&root / "stem", 3, 32, 1);
    let layers: Vec<_> = (0..6)
        .map(|index| {
            let path = &root / index;
            let width = 32 + GROWTH * index;
            (
                nn::batch_norm2d(&path / "norm", width, Default::default()),
                conv(&path / "conv", width, GROWTH, 1),
            )
        })
        .collect();
    let head = linear(&root / "head", 32 + 6 * GROWTH, CLASSES);
    let mut optimizer = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&vs, 0.05)?;
    Program::new(vs, move |_, session| {
        let (images, labels) = batch(8);
        session.step(|step| {
            let mut x = stem.forward(&images);
            for (norm, conv) in &layers {
                let more = conv.forward(&norm.forward_t(&x, true).relu());
                x = Tensor::cat(&[x, more], 1);
            }
            let loss = head.forward(&pool(&x)).cross_entropy_for_logits(&labels);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A vision transformer over patches of 4 × 4, with a class token.
fn vit() -> Result<Program> {
    const WIDTH: i64 = 128;
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let patches =
        nn::conv2d(&root / "patches", 3, WIDTH, 4, nn::ConvConfig { stride: 4, ..Default::default() });
    let class = root.zeros("class", &[1, 1, WIDTH]);
    let positions = root.randn("positions", &[1, 65, WIDTH], 0.0, 0.02);
    let blocks: Vec<_> = (0..3).map(|index| Block::new(&(&root / index), WIDTH, false, 0.0)).collect();
    let (norm, head) = (norm(&root / "norm", WIDTH), linear(&root / "head", WIDTH, CLASSES));
    let mut optimizer = nn::AdamW::default().build(&vs, 3e-4)?;
    Program::new(vs, move |_, session| {
        let (images, labels) = batch(14);
        session.step(|step| {
            let x = patches.forward(&images).flatten(2, 3).transpose(1, 2);
            let x = Tensor::cat(&[class.expand([x.size()[0], 1, WIDTH], false), x], 1) + &positions;
            let x = blocks.iter().fold(x, |x, block| block.forward(&x));
            let logits = head.forward(&norm.forward(&x).select(1, 0));
            let loss = logits.cross_entropy_for_logits(&labels);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}
