//! Pointwise operations that backward computes again on the CPU, tile by tile: the bits are those of the single operations.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaves, randn, staged};
use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{KIB, Offload, StepReport, TensorCache, TensorCacheBuilder, Verify};
use tch::{Kind, Tensor, get_num_threads, no_grad, set_num_threads};

type Function = fn(&[Tensor]) -> Tensor;

/// Columns of most tensors here, with which all operations are known.
const WIDTH: i64 = 256;
const KINDS: [Kind; 3] = [Kind::BFloat16, Kind::Half, Kind::Float];

/// Computes again whatever can be, in small tiles.
fn again() -> TensorCacheBuilder {
    recompute(everything()).tile_bytes(64 * KIB)
}

fn recompute(builder: TensorCacheBuilder) -> TensorCacheBuilder {
    builder.policy(InTurn::new(Offload::default(), [Placement::Recompute]))
}

fn norm(x: &Tensor, weight: &Tensor) -> Tensor {
    let y = x.to_kind(Kind::Float);
    let scale = (y.square().mean_dim(-1, true, Kind::Float) + 1e-5).rsqrt();
    (y * scale).to_kind(x.kind()) * weight
}

/// Each takes rows, columns of twice as many, a vector, and rows of one element.
const FUNCTIONS: [(&str, Function); 12] = [
    ("a gate", |t| (&t[0] * 1.5).silu() * (&t[0] + 0.5)),
    ("a norm", |t| norm(&(&t[0] + 0.25), &t[2]).sigmoid()),
    ("gelu", |t| (&t[0] * 3.0).gelu("none").tanh()),
    ("gelu by tangent", |t| (&t[0] * 3.0).gelu("tanh").exp()),
    ("expanded", |t| ((&t[0] + &t[2]).exp() * &t[3]).relu().sqrt() * &t[0]),
    ("halves of rows", |t| {
        let halves = (&t[1] + 1.0).chunk(2, 1);
        (halves[0].silu() * &halves[1]).tanh().exp()
    }),
    ("a quotient", |t| (&t[0] / 3.0).exp() / ((&t[3] - &t[0]).square() + 1.0)),
    ("sums of products", |t| {
        let y = (&t[0] * &t[2]).f_add(&(&t[0] * 0.3)).unwrap();
        (&y - &t[0] * &y).exp()
    }),
    ("widened", |t| (t[0].to_kind(Kind::Float).exp() * 0.3).reciprocal().tanh()),
    ("narrowed", |t| {
        (t[0].to_kind(Kind::Float) * 1.25).to_kind(Kind::Half).silu().to_kind(Kind::BFloat16).exp()
    }),
    ("transposed", |t| (t[0].transpose(0, 1).exp() * &t[2].unsqueeze(1)).sigmoid().neg().tanh().abs().sqrt()),
    ("branches", |t| {
        let (y, z) = ((&t[0] * 0.5).exp(), (&t[0] * 2.0).sigmoid());
        (1.0f64 - &y * &z).tanh() * (&y - z).exp()
    }),
];

fn sources(rows: i64, width: i64, kind: Kind) -> Vec<Tensor> {
    tch::manual_seed(1);
    let shapes: [&[i64]; 4] = [&[rows, width], &[rows, 2 * width], &[width], &[rows, 1]];
    shapes.map(|shape| randn(shape).to_kind(kind)).into()
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

/// Three steps with the same bits as without a cache. Returns how many chains were joined; in the first they are compared.
fn parity(what: &str, cache: &TensorCache, sources: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) -> u64 {
    let plain = leaves(sources);
    f(&plain).backward();
    let expected = grads(&plain);
    let joined = [(); 3].map(|()| {
        let (gradients, report) = step(cache, sources, &f);
        assert_same_bits(what, &expected, &gradients);
        assert_nothing_held(cache);
        assert!(report.reruns.count > 0, "{what}: {report}");
        report.fused.count
    });
    joined.iter().sum()
}

/// How many threads operations have until this is dropped.
struct Threads(i32);

impl Threads {
    fn set(threads: i32) -> Threads {
        let before = Threads(get_num_threads());
        set_num_threads(threads);
        before
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        set_num_threads(self.0);
    }
}

#[test]
fn chains_have_the_bits_of_single_operations() {
    for (threads, kind) in [1, 2, 3].into_iter().flat_map(|threads| KINDS.map(|kind| (threads, kind))) {
        let _threads = Threads::set(threads);
        let sources = sources(384, WIDTH, kind);
        for (name, f) in FUNCTIONS {
            let what = format!("{name}, {kind:?}, {threads} threads");
            let cache = again().build().unwrap();
            let joined = parity(&what, &cache, &sources, |t| loss(&f(t)));
            assert!(joined > 0, "{what}: no chain is joined");
        }
    }
}

#[test]
fn odd_sizes_have_them_whether_or_not_they_are_joined() {
    // Rows and shares of threads end within a vector, or hold no whole one.
    for (rows, width) in [(301, 263), (33_001, 2), (40, 40), (1, 1500), (3, 5)] {
        for threads in [1, 2] {
            let _threads = Threads::set(threads);
            for kind in KINDS {
                let sources = sources(rows, width, kind);
                let cache = again().tile_bytes(1).build().unwrap();
                for (name, f) in FUNCTIONS {
                    let what = format!("{name}, {rows} x {width} of {kind:?}, {threads} threads");
                    parity(&what, &cache, &sources, |t| loss(&f(t)));
                }
            }
        }
    }
}

#[test]
fn shares_that_end_within_a_vector_are_joined_where_nothing_has_rows() {
    let _threads = Threads::set(2);
    for kind in KINDS {
        let sources = sources(1001, 263, kind);
        let cache = again().build().unwrap();
        let joined =
            parity(&format!("{kind:?}"), &cache, &sources, |t| loss(&((&t[0] * 1.5).silu() * &t[0]).tanh()));
        assert!(joined > 0, "{kind:?}");
    }
}

/// Not numbers, infinite ones, zeros of both signs and ones close to them.
#[test]
fn odd_values() {
    let odd = [
        f32::NAN,
        -f32::NAN,
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
    for kind in KINDS {
        let mut sources = sources(386, WIDTH, kind);
        let all = Tensor::from_slice(&odd).to_kind(kind).repeat([386 * WIDTH / 13 + 1]);
        sources[0] = all.narrow(0, 0, 386 * WIDTH).view([386, WIDTH]);
        for (name, f) in FUNCTIONS {
            let what = format!("odd values: {name}, {kind:?}");
            let cache = again().build().unwrap();
            assert!(parity(&what, &cache, &sources, |t| loss(&f(t))) > 0, "{what}");
        }
    }
}

#[test]
fn other_numbers_of_threads_are_compared_anew() {
    let sources = sources(384, WIDTH, Kind::BFloat16);
    let cache = again().build().unwrap();
    let f = |t: &[Tensor]| loss(&((&t[0] * 1.5).silu() * &t[2]).tanh());
    // With the threads of forward, whatever there are in backward.
    for (forward, backward) in [(1, 3), (2, 1), (3, 2), (1, 2), (2, 3)] {
        let _threads = Threads::set(forward);
        let plain = leaves(&sources);
        let loss = f(&plain);
        set_num_threads(backward);
        loss.backward();
        for joined in [false, true] {
            let inputs = leaves(&sources);
            set_num_threads(forward);
            let step = cache.step();
            let loss = f(&inputs);
            set_num_threads(backward);
            step.backward(&loss).unwrap();
            drop(loss);
            let report = step.finish().unwrap();
            let what = format!("{forward} threads, {backward} in backward");
            assert_same_bits(&what, &grads(&plain), &grads(&inputs));
            assert_eq!(get_num_threads(), backward, "{what}");
            assert!(report.fused.count > 0 || !joined, "{what}: {report}");
        }
    }
}

#[test]
fn operations_of_several_numbers_of_threads_are_not_one_chain() {
    let _threads = Threads::set(2);
    let sources = sources(384, WIDTH, Kind::Float);
    let cache = again().build().unwrap();
    parity("several numbers of threads", &cache, &sources, |t| {
        set_num_threads(1);
        let y = (&t[0] * 1.5).silu().tanh();
        set_num_threads(2);
        loss(&(y.sigmoid() * &t[2]))
    });
}

#[test]
fn chains_read_what_leaves_held_before_they_were_written() {
    let sources = sources(384, WIDTH, Kind::BFloat16);
    let cache = again().build().unwrap();
    let joined = parity("a leaf that is written", &cache, &sources, |t| {
        let x = &t[0] * 2.0;
        let y = ((&x + 1.0) * 0.5).sigmoid().tanh();
        // Neither sums nor exp save what they read, so plain autograd allows that it is written.
        let z = x.exp();
        drop(no_grad(|| x.detach().fill_(3.0)));
        loss(&(y * z))
    });
    assert!(joined > 0);
}

#[test]
fn a_result_that_is_read_within_and_outside_of_a_chain_is_made() {
    let sources = sources(384, WIDTH, Kind::Float);
    for builder in [again(), recompute(staged()).tile_bytes(64 * KIB)] {
        let cache = builder.build().unwrap();
        let joined = parity("several results", &cache, &sources, |t| {
            let y = (&t[0] * 0.5).tanh();
            let z = (&y + &t[2]).sigmoid();
            // Products save both.
            loss(&(&y * &z)) + (y.mean_dim(-1, true, Kind::Float) * z.exp()).sum(Kind::Float)
        });
        assert!(joined > 0);
    }
}

#[test]
fn nothing_is_joined_if_that_is_turned_off() {
    let sources = sources(384, WIDTH, Kind::BFloat16);
    let cache = again().fuse_reruns(false).build().unwrap();
    assert_eq!(parity("one after another", &cache, &sources, |t| loss(&norm(&t[0], &t[2]).sigmoid())), 0);
}

#[test]
fn a_norm_of_a_usual_size_is_joined_since_that_is_quicker() {
    // Half the time on a machine with nothing else to do; on others, timings vary.
    let sources = [randn(&[4096, 1408]).to_kind(Kind::BFloat16), randn(&[1408]).to_kind(Kind::BFloat16)];
    let joined = (0..8).any(|_| {
        let cache = recompute(everything()).verify(Verify::Off).build().unwrap();
        parity("a norm", &cache, &sources, |t| loss(&norm(&t[0], &t[1]))) > 0
    });
    assert!(joined);
}
