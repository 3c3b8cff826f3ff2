//! Networks that make something.

use ssdtrain::Backward;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

use crate::layers::{FLOAT, INDEX, draw, linear, perceptron};
use crate::program::{Named, Program, Result, Running};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] = &[
    ("vae", vae),
    ("diffusion", diffusion),
    ("gan-in-turn", || gan(false)),
    ("gan-in-one-step", || gan(true)),
    ("two-losses", two_losses),
];

const WIDTH: i64 = 512;
const ROWS: i64 = 1024;

/// A variational autoencoder.
fn vae() -> Result<Program> {
    const CODE: i64 = 32;
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let encoder = perceptron(&(&root / "encoder"), &[WIDTH, 384, 256, 2 * CODE]);
    let decoder = perceptron(&(&root / "decoder"), &[CODE, 256, 384, WIDTH]);
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    let data = Tensor::rand([8 * ROWS, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let x = draw(&data, 2 * ROWS);
        session.step(|step| {
            let code = encoder.forward(&x).chunk(2, 1);
            let (mean, spread) = (&code[0], &code[1]);
            let drawn = mean + (spread * 0.5).exp() * mean.randn_like();
            let none = None::<&Tensor>;
            let rebuilt =
                decoder.forward(&drawn).binary_cross_entropy_with_logits(&x, none, none, Reduction::Mean);
            let divergence = (mean.square() + spread.exp() - spread - 1.0).mean(Kind::Float) * 0.5;
            let loss = rebuilt + divergence * 0.01;
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// Predicts the noise in what was mixed with it, given how much there is.
fn diffusion() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let conv = |name: &str, inputs: i64, outputs: i64| {
        nn::conv2d(&root / name, inputs, outputs, 3, nn::ConvConfig { padding: 1, ..Default::default() })
    };
    let (first, last) = (conv("first", 3, 32), conv("last", 32, 3));
    let layers: Vec<_> = (0..4)
        .map(|index| {
            let path = &root / index;
            let norm = nn::group_norm(&path / "norm", 8, 32, Default::default());
            (norm, linear(&path / "time", 64, 32), conv(&format!("conv{index}"), 32, 32))
        })
        .collect();
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    Program::new(vs, move |_, session| {
        let images = Tensor::rand([20, 3, 32, 32], FLOAT) * 2.0 - 1.0;
        session.step(|step| {
            let time = Tensor::randint(1000, [20], INDEX).to_kind(Kind::Float) / 1000.0;
            let noise = images.randn_like();
            let share = (&time * std::f64::consts::FRAC_PI_2).cos().view([20, 1, 1, 1]);
            let rest: Tensor = 1.0 - share.square();
            let mixed = &images * &share + &noise * rest.sqrt();
            let waves = time.unsqueeze(1) * Tensor::arange(32, FLOAT).exp2().clamp_max(1000.0).unsqueeze(0);
            let embedding = Tensor::cat(&[waves.sin(), waves.cos()], 1);
            let x = layers.iter().fold(first.forward(&mixed), |x, (norm, time, conv)| {
                let shift = time.forward(&embedding).unsqueeze(2).unsqueeze(3);
                &x + conv.forward(&(norm.forward(&x) + shift).silu())
            });
            let loss = last.forward(&x.silu()).mse_loss(&noise, Reduction::Mean);
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// A generator and a discriminator: each in a step of its own, or both in one.
fn gan(is_one_step: bool) -> Result<Program> {
    const CODE: i64 = 64;
    let stores = vec![nn::VarStore::new(Device::Cpu), nn::VarStore::new(Device::Cpu)];
    let generator = perceptron(&stores[0].root(), &[CODE, 384, 384, WIDTH]);
    let critic = perceptron(&stores[1].root(), &[WIDTH, 384, 384, 1]);
    let mut of_generator = nn::Adam::default().beta1(0.5).build(&stores[0], 2e-4)?;
    let mut of_critic = nn::Adam::default().beta1(0.5).build(&stores[1], 2e-4)?;
    let data = Tensor::randn([8 * ROWS, WIDTH], FLOAT);
    let judged = |logits: Tensor, is_real: f64| {
        let none = None::<&Tensor>;
        let truth = Tensor::full_like(&logits, is_real);
        logits.binary_cross_entropy_with_logits(&truth, none, none, Reduction::Mean)
    };
    Program::of(stores, move |_, session| {
        let real = draw(&data, ROWS);
        let mut learn = |step: &Running<'_>| {
            let fake = generator.forward(&Tensor::randn([ROWS, CODE], FLOAT)).detach();
            let loss = judged(critic.forward(&real), 0.9) + judged(critic.forward(&fake), 0.0);
            of_critic.zero_grad();
            step.backward(&loss)?;
            of_critic.step();
            Ok(())
        };
        let mut make = |step: &Running<'_>| {
            let fake = generator.forward(&Tensor::randn([ROWS, CODE], FLOAT));
            let loss = judged(critic.forward(&fake), 1.0);
            of_generator.zero_grad();
            step.backward(&loss)?;
            of_generator.step();
            Ok(())
        };
        if is_one_step {
            return session.step(|step| learn(step).and_then(|()| make(step)));
        }
        session.step(&mut learn)?;
        session.step(&mut make)
    })
}

/// Two losses of one graph, whose backward passes come one after the other.
fn two_losses() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let trunk = perceptron(&(&root / "trunk"), &[WIDTH, 384, 384, 384]);
    let (near, far) = (perceptron(&(&root / "near"), &[384, 384, WIDTH]), linear(&root / "far", 384, 10));
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let data = Tensor::randn([8 * ROWS, WIDTH], FLOAT);
    Program::new(vs, move |_, session| {
        let x = draw(&data, ROWS * 3 / 4);
        session.step(|step| {
            let hidden = trunk.forward(&x).silu();
            let rebuilt = near.forward(&hidden).mse_loss(&x, Reduction::Mean);
            let named = far.forward(&hidden).cross_entropy_for_logits(&x.narrow(1, 0, 10).argmax(1, false));
            optimizer.zero_grad();
            step.backward_with(&rebuilt, Backward { retain_graph: true, ..Backward::default() })?;
            step.backward(&named)?;
            optimizer.step();
            Ok(())
        })
    })
}
