//! Pointwise operations that backward computes again as one kernel have the bits of the single operations, and take less time.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{ErrorKind, KIB, MIB, Offload, StepReport, TensorCache, TensorCacheBuilder};
use ssdtrain_libtorch::SavedVariable;
use tch::{Cuda, Kind, Tensor, nn, no_grad};

use crate::lab::{Lab, assert_nothing_held, assert_same_bits, grads, leaves};

on_both!(
    chains_have_the_bits_of_single_operations,
    norms_have_the_bits_of_single_operations,
    chains_read_what_leaves_held_before_they_were_written,
    chains_of_many_sizes_have_the_bits_of_single_operations,
);
on_the_gpu_only!(
    chains_of_odd_values,
    results_of_all_values_are_looked_up,
    chains_take_less_time_than_single_operations,
    a_kernel_is_not_compared_for_longer_than_the_limit,
);

type Function = fn(&[Tensor]) -> Tensor;

/// Norms, whose statistics stay: each takes rows and a vector.
const NORMS: [(&str, Function); 4] = [
    ("a layer norm", |t| t[0].layer_norm([WIDTH], Some(&t[2]), Some(&(&t[2] * 0.5)), 1e-5, true)),
    ("a layer norm and its activation", |t| {
        let y = (&t[0] + 0.5).layer_norm([WIDTH], Some(&t[2]), Some(&(&t[2] * 0.5)), 1e-5, true);
        (y * 1.5).gelu("none").tanh()
    }),
    ("a batch norm of rows", |t| batch_norm(&t[0], &t[2]).relu()),
    ("a batch norm of large and of small images", |t| {
        let rows = t[0].size()[0];
        let large = batch_norm(
            &t[0].view([1, 4, rows, WIDTH / 4]).expand([16, 4, rows, WIDTH / 4], false).contiguous(),
            &t[2].narrow(0, 0, 4),
        );
        let small = batch_norm(&t[0].view([rows, WIDTH / 16, 4, 4]), &t[2].narrow(0, 0, WIDTH / 16));
        large.relu().sum(Kind::Float) + small.relu().square().sum(Kind::Float)
    }),
];

fn batch_norm(x: &Tensor, weight: &Tensor) -> Tensor {
    let [mean, deviation] = [Tensor::zeros_like(weight), Tensor::ones_like(weight)];
    x.batch_norm(Some(weight), Some(&(weight * 0.5)), Some(&mean), Some(&deviation), true, 0.1, 1e-5, true)
}

/// Rows of a width that is a multiple of what a thread reads at once.
const WIDTH: i64 = 256;
/// How often a step is repeated until its kernels are there.
const PATIENCE: Duration = Duration::from_secs(20);

/// A policy under which everything is computed again that can be.
fn recompute() -> InTurn<Offload> {
    InTurn::new(Offload::default(), [Placement::Recompute])
}

fn again(lab: &Lab) -> TensorCacheBuilder {
    lab.cache().host_pool(64 * MIB).policy(recompute())
}

fn norm(x: &Tensor, weight: &Tensor) -> Tensor {
    let y = x.to_kind(Kind::Float);
    let scale = (y.square().mean_dim(-1, true, Kind::Float) + 1e-5).rsqrt();
    (y * scale).to_kind(x.kind()) * weight
}

/// Each takes rows, a square matrix, a vector, and rows transposed.
const FUNCTIONS: [(&str, Function); 12] = [
    ("a gate", |t| (&t[0] * 1.5).silu() * (&t[0] + &t[3].transpose(0, 1))),
    ("a norm", |t| norm(&(&t[0] + 0.25), &t[2]).sigmoid()),
    ("gelu", |t| (&t[0] * 3.0).gelu("none").tanh()),
    ("gelu by tangent", |t| (&t[0] * 3.0).gelu("tanh").exp()),
    ("expanded and strided", |t| ((&t[0] + &t[2]).exp() * t[3].transpose(0, 1)).relu().sqrt() * &t[0]),
    ("columns", |t| (t[0].slice(1, 3, WIDTH - 6, 1) * 2.0).neg().exp().sigmoid()),
    ("a quotient", |t| (&t[0] / 3.0).exp() / ((&t[3].transpose(0, 1) - &t[0]).square() + 1.0)),
    ("sums of products", |t| {
        let y = (&t[0] * &t[2]).f_add(&(&t[0] * 0.3)).unwrap();
        (&y - &t[0] * &y).exp()
    }),
    ("widened", |t| (t[0].to_kind(Kind::Float).exp() * &t[2]).reciprocal().tanh()),
    ("narrowed", |t| {
        (t[0].to_kind(Kind::Float) * 1.25).to_kind(Kind::Half).silu().to_kind(Kind::BFloat16).exp()
    }),
    ("transposed", |t| (t[3].transpose(0, 1).exp() * &t[0]).sigmoid().transpose(0, 1).tanh().abs().sqrt()),
    ("branches", |t| {
        let (y, z) = ((&t[0] * 0.5).exp(), (&t[0] * 2.0).sigmoid());
        (1.0f64 - &y * &z).tanh() * (&y - z).exp()
    }),
];

fn sources(lab: &Lab, rows: i64, kind: Kind) -> Vec<Tensor> {
    tch::manual_seed(1);
    let shapes: [&[i64]; 4] = [&[rows, WIDTH], &[WIDTH, WIDTH], &[WIDTH], &[WIDTH, rows]];
    shapes.map(|shape| lab.randn(shape).to_kind(kind)).into()
}

fn loss(y: &Tensor) -> Tensor {
    // Saves what it squares.
    y.to_kind(Kind::Float).square().sum(Kind::Float)
}

fn step(
    cache: &TensorCache,
    sources: &[Tensor],
    f: impl Fn(&[Tensor]) -> Tensor,
) -> (Vec<Tensor>, StepReport) {
    let inputs = leaves(sources);
    let step = cache.step();
    let loss = f(&inputs);
    step.backward(&loss).unwrap();
    drop(loss);
    (grads(&inputs), step.finish().unwrap())
}

/// Steps with the same bits as without a cache, until a step has run kernels, if the device has any.
fn parity(lab: &Lab, what: &str, cache: &TensorCache, sources: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) {
    let plain = leaves(sources);
    f(&plain).backward();
    let start = Instant::now();
    loop {
        let (gradients, report) = step(cache, sources, &f);
        assert_same_bits(what, &grads(&plain), &gradients);
        assert_nothing_held(cache);
        assert!(report.reruns.count > 0, "{what}: {report}");
        if report.fused.count > 0 || !lab.is_gpu() {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: no kernel is used");
    }
    // And once more.
    let (gradients, _) = step(cache, sources, f);
    assert_same_bits(what, &grads(&plain), &gradients);
}

fn chains_have_the_bits_of_single_operations(lab: &Lab) {
    for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
        let sources = sources(lab, lab.suited(1024, 16), kind);
        for (name, f) in FUNCTIONS {
            let cache = again(lab).build().unwrap();
            parity(lab, &format!("{name}, {kind:?}"), &cache, &sources, |t| loss(&f(t)));
        }
    }
}

fn norms_have_the_bits_of_single_operations(lab: &Lab) {
    for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
        let sources = sources(lab, lab.suited(1024, 16), kind);
        for (name, f) in NORMS {
            // The statistics stay, which have at most a number for each row.
            let cache = again(lab).min_bytes(lab.suited(64, 4) * KIB).build().unwrap();
            parity(lab, &format!("{name}, {kind:?}"), &cache, &sources, |t| loss(&f(t)));
        }
    }
}

fn chains_read_what_leaves_held_before_they_were_written(lab: &Lab) {
    let sources = sources(lab, lab.suited(1024, 16), Kind::BFloat16);
    let cache = again(lab).build().unwrap();
    parity(lab, "a leaf that is written", &cache, &sources, |t| {
        let x = &t[0] * 2.0;
        let y = ((&x + 1.0) * 0.5).sigmoid().tanh();
        // Neither sums nor exp save what they read, so plain autograd allows that it is written.
        let z = x.exp();
        drop(no_grad(|| x.detach().fill_(3.0)));
        loss(&(y * z))
    });
}

/// The kernels of most are compared for the first sizes only.
fn chains_of_many_sizes_have_the_bits_of_single_operations(lab: &Lab) {
    let same = |name: &str, f: Function, cache: &TensorCache, sizes: &[i64]| {
        for &rows in sizes {
            let sources = sources(lab, rows, Kind::BFloat16);
            parity(lab, &format!("{name}, {rows} rows"), cache, &sources, |t| loss(&f(t)));
        }
    };
    let large = lab.suited(4000, 40);
    for (name, f) in FUNCTIONS {
        same(name, f, &again(lab).build().unwrap(), &[256, 96, 33, 1, 64, 130, large + 99, 2, 256]);
    }
    for (name, f) in NORMS {
        // The statistics stay.
        let cache = again(lab).min_bytes(16 * KIB).build().unwrap();
        same(name, f, &cache, &[256, 96, 33, 64, 130, large, 200, 256]);
    }
}

/// Not numbers, infinite ones, zeros of both signs and ones close to them.
fn chains_of_odd_values(lab: &Lab) {
    for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
        let mut sources = sources(lab, 64, kind);
        let odd = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            -0.0,
            1e-40,
            -1e-40,
            1e-7,
            3e38,
            -3e38,
            6e4,
            88.8,
        ];
        let odd = Tensor::from_slice(&odd).to_device(lab.device).to_kind(kind).repeat([64 * WIDTH / 12 + 1]);
        sources[0] = odd.narrow(0, 0, 64 * WIDTH).view([64, WIDTH]);
        for (name, f) in FUNCTIONS {
            let cache = again(lab).build().unwrap();
            parity(lab, &format!("odd values: {name}, {kind:?}"), &cache, &sources, |t| loss(&f(t)));
        }
    }
}

/// So many elements that results are looked up: all values that 16 bits have, also where they end within what a thread reads at once.
fn results_of_all_values_are_looked_up(lab: &Lab) {
    for kind in [Kind::BFloat16, Kind::Half] {
        let all = Tensor::arange(1 << 16, (Kind::Int, lab.device)).to_kind(Kind::Int16).view_dtype(kind);
        for count in [1_i64 << 24, (1 << 24) + 16_387] {
            let values = all.repeat([(count >> 16) + 1]).narrow(0, 0, count).contiguous();
            for (name, f) in [
                ("gelu", (|x: &Tensor| x.gelu("none")) as fn(&Tensor) -> Tensor),
                ("gelu by tangent", |x| x.gelu("tanh")),
                ("gelu and more", |x| x.gelu("none").relu().neg()),
            ] {
                let cache = again(lab).build().unwrap();
                let f = |t: &[Tensor]| {
                    let y = f(&t[0]);
                    (&y * &y).sum(Kind::Float)
                };
                parity(
                    lab,
                    &format!("{name} of {count} elements, {kind:?}"),
                    &cache,
                    std::slice::from_ref(&values),
                    f,
                );
            }
        }
    }
}

/// What is printed is the time of a rerun, of all its operations together.
fn chains_take_less_time_than_single_operations(lab: &Lab) {
    let gate: Function = |t| t[0].silu() * &t[1];
    let output: Function = |t| (t[0].to_kind(Kind::Float) * &t[2]).to_kind(Kind::BFloat16) * &t[3];
    let layer: Function = |t| t[0].layer_norm([4096], Some(&t[3]), Some(&t[3]), 1e-5, true);
    let images: Function = |t| {
        batch_norm(&t[0].to_kind(Kind::Float).view([16_384, 64, 8, 8]), &t[2].view([-1]).narrow(0, 0, 64))
    };
    let mut total = [0.0; 2];
    for (name, f, width, trains) in [
        ("gelu", (|t| t[0].gelu("none")) as Function, 8192, false),
        ("gelu by tangent", |t| t[0].gelu("tanh"), 8192, false),
        ("silu(gate) * up", gate, 14_336, false),
        ("output of a norm", output, 4096, false),
        ("a layer norm", layer, 4096, true),
        ("a batch norm of small images", images, 4096, true),
    ] {
        let vs = nn::VarStore::new(lab.device);
        let rows = 16_384;
        let shapes: [(&str, &[i64], Kind); 4] = [
            ("gate", &[rows, width], Kind::BFloat16),
            ("up", &[rows, width], Kind::BFloat16),
            ("root", &[rows, 1], Kind::Float),
            ("weight", &[width], Kind::BFloat16),
        ];
        let inputs = shapes.map(|(name, shape, kind)| {
            let mut variable = vs.root().zeros_no_train(name, shape);
            variable.set_data(&lab.randn(shape).to_kind(kind));
            // What saves its statistics for backward keeps them.
            variable.set_requires_grad(trains)
        });
        let time = |fuse: bool| {
            let cache = TensorCache::builder()
                .parameters(&vs)
                .host_pool(64 * MIB)
                .min_bytes(MIB)
                .policy(recompute())
                .fuse_reruns(fuse)
                .build()
                .unwrap();
            let rerun = |count: u32| {
                let step = cache.step();
                let saved = SavedVariable::new(&f(&inputs)).unwrap();
                Cuda::synchronize(0);
                let start = Instant::now();
                for _ in 0..count {
                    drop(saved.unpack().unwrap());
                }
                Cuda::synchronize(0);
                let time = start.elapsed().as_secs_f64() * 1e3 / f64::from(count);
                drop(saved);
                (time, step.finish().unwrap())
            };
            let start = Instant::now();
            while fuse && rerun(1).1.fused.count == 0 {
                assert!(start.elapsed() < PATIENCE, "{name}: no kernel is used");
            }
            drop(rerun(20));
            let (time, report) = rerun(50);
            assert_eq!(report.fused.count, if fuse { 50 } else { 0 }, "{report}");
            assert_eq!(report.reruns.count, 50, "{report}");
            time
        };
        let (single, fused) = (time(false), time(true));
        say(&format!(
            "{name}: {fused:.3} ms as one kernel, {single:.3} ms one after another: {:.3}",
            fused / single
        ));
        // An activation alone has nothing to hand over.
        if !name.starts_with("gelu") {
            total[0] += fused;
            total[1] += single;
        }
    }
    say(&format!("the others together: {:.3}", total[0] / total[1]));
    assert!(total[0] < 0.5 * total[1]);
}

fn say(line: &str) {
    writeln!(io::stdout().lock(), "{line}").unwrap();
}

/// A comparison waits for all that was queued before it.
fn a_kernel_is_not_compared_for_longer_than_the_limit(lab: &Lab) {
    let sources = sources(lab, 1024, Kind::BFloat16);
    let f = |t: &[Tensor]| loss(&((&t[0] * 0.75).sigmoid() * (&t[0] - 0.125)).tanh());
    let cache = again(lab).device_timeout(Duration::from_millis(5)).build().unwrap();
    let large = lab.randn(&[8192, 8192]);
    let start = Instant::now();
    let error = loop {
        let inputs = leaves(&sources);
        let step = cache.step();
        let loss = f(&inputs);
        let _long = (0..20).fold(large.shallow_clone(), |product, _| product.matmul(&large) / 100.0);
        match step.backward(&loss) {
            Ok(()) => drop(step.finish().unwrap()),
            Err(error) => break error,
        }
        Cuda::synchronize(0);
        assert!(start.elapsed() < PATIENCE, "no kernel was compared");
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    Cuda::synchronize(0);
    assert_nothing_held(&cache);
    parity(lab, "after a comparison that was given up", &cache, &sources, f);
}
