//! Programs as users write them, with whatever can be computed again: buffers that outlive an iteration, shapes that depend on data,
//! modules of TorchScript, segments beside plain operations, and backward on another thread.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{F32, assert_nothing_held, assert_same_bits, everything, grads, leaves, randn, staged};
use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{Offload, TensorCacheBuilder, remat, segment};
use tch::{CModule, Kind, Tensor, no_grad};

const NONE: Option<&Tensor> = None;

fn in_turn<const N: usize>(builder: TensorCacheBuilder, placements: [Placement; N]) -> TensorCacheBuilder {
    builder.policy(InTurn::new(Offload::default(), placements))
}

/// Runs `f`, which returns a loss and what else it has computed, without a cache and with caches: all of it and the gradients have the
/// same bits.
fn parity(sources: &[Tensor], f: impl Fn(&[Tensor]) -> (Tensor, Vec<Tensor>)) {
    let run = |builder: Option<TensorCacheBuilder>| {
        let inputs = leaves(sources);
        let cache = builder.map(|builder| builder.build().unwrap());
        tch::manual_seed(7);
        let step = cache.as_ref().map(|cache| cache.step());
        let (loss, mut results) = f(&inputs);
        match &step {
            Some(step) => step.backward(&loss).unwrap(),
            None => loss.backward(),
        }
        drop(loss);
        if let Some(step) = step {
            let report = step.finish().unwrap();
            assert!(report.recomputed.count > 0, "{report:?}");
        }
        results.extend(grads(&inputs));
        let results = results.iter().map(Tensor::detach).collect::<Vec<_>>();
        cache.iter().for_each(assert_nothing_held);
        results
    };
    let expected = run(None);
    let builders = [
        ("all", in_turn(everything(), [Placement::Recompute])),
        ("every other", in_turn(everything(), [Placement::Disk, Placement::Recompute])),
        ("every third", in_turn(everything(), [Placement::Keep, Placement::Recompute, Placement::Disk])),
        ("host pool", in_turn(staged(), [Placement::Recompute])),
    ];
    for (way, builder) in builders {
        assert_same_bits(way, &expected, &run(Some(builder)));
    }
}

#[test]
fn buffers_that_are_updated_in_each_iteration() {
    // The power iteration of a spectral norm, and a code book that follows its inputs.
    parity(&[randn(&[16, 32]), randn(&[32, 24])], |t| {
        let (direction, book) = (Tensor::ones([32], F32), randn(&[10, 24]));
        let mut loss = t[0].sum(Kind::Float);
        for _ in 0..3 {
            let (left, right) = no_grad(|| {
                let right = t[1].tr().mv(&direction);
                let right = &right / right.norm();
                let left = t[1].mv(&right);
                direction.shallow_clone().copy_(&(&left / left.norm()));
                (direction.copy(), right)
            });
            let y = t[0].sin().matmul(&(&t[1] / left.dot(&t[1].mv(&right)))).tanh();
            let nearest = y.matmul(&book.tr()).argmax(1, false);
            let code = &y + (book.index_select(0, &nearest) - &y).detach();
            loss += code.exp().sum(Kind::Float);
            no_grad(|| {
                let ones = nearest.one_hot(10).to_kind(Kind::Float);
                drop(book.shallow_clone().lerp_(&ones.tr().matmul(&y), 0.1));
            });
        }
        (loss, vec![direction, book])
    });
}

#[test]
fn states_written_into_a_buffer() {
    parity(&[randn(&[6, 4, 8]), randn(&[8, 8])], |t| {
        let (all, past) = (Tensor::zeros([6, 4, 8], F32), Tensor::zeros([6, 4, 8], F32));
        let mut state = Tensor::zeros([4, 8], F32);
        let mut loss = t[0].sum(Kind::Float);
        for i in 0..6 {
            state = (t[0].get(i).sin() + state.matmul(&t[1])).tanh();
            all.get(i).copy_(&state);
            no_grad(|| past.get(i).copy_(&state));
            let seen = past.narrow(0, 0, i + 1).copy().mean_dim(0, false, Kind::Float);
            loss += (seen.exp() * &state).sin().sum(Kind::Float);
        }
        (loss + all.exp().square().sum(Kind::Float), vec![past])
    });
}

#[test]
fn tokens_routed_to_experts() {
    parity(&[randn(&[40, 16]), randn(&[16, 4]), randn(&[4, 16, 32]), randn(&[4, 32, 16])], |t| {
        let x = t[0].sin();
        let (weights, experts) = x.matmul(&t[1]).softmax(-1, Kind::Float).topk(2, -1, true, true);
        let mut y = Tensor::zeros_like(&x);
        for expert in 0..4 {
            let chosen = experts.eq(expert).nonzero();
            let (token, slot) = (chosen.select(1, 0), chosen.select(1, 1));
            if token.numel() > 0 {
                let inner = x.index_select(0, &token).matmul(&t[2].get(expert)).silu();
                let weight = weights.index(&[Some(&token), Some(&slot)]).unsqueeze(1);
                y = y.index_add(0, &token, &(inner.matmul(&t[3].get(expert)) * weight));
            }
        }
        (y.tanh().exp().sum(Kind::Float), vec![y])
    });
}

#[test]
fn a_module_of_torchscript() {
    let mut layer = |t: &[Tensor]| {
        let y = (t[0].matmul(&t[1]) + &t[2]).gelu("none");
        vec![((&y * y.sigmoid()).tanh() + y.exp()).softmax(-1, Kind::Float) + y.relu()]
    };
    let sources = [randn(&[16, 32]), randn(&[32, 32]) * 0.2, randn(&[32])];
    let traced = CModule::create_by_tracing("layer", "forward", &sources, &mut layer).unwrap();
    let run = |t: &[Tensor]| {
        let layer = |y| traced.forward_ts(&[y, t[1].shallow_clone(), t[2].shallow_clone()]).unwrap();
        (0..3).fold(t[0].sin(), |y, _| layer(y)).exp().sum(Kind::Float)
    };
    // The first calls are profiled by TorchScript, and others are compiled from that.
    (0..3).for_each(|_| run(&leaves(&sources)).backward());
    parity(&sources, |t| (run(t), Vec::new()));
}

#[test]
fn segments_beside_operations_on_record() {
    parity(&[randn(&[8, 6, 5, 5]), randn(&[6, 6, 3, 3]), randn(&[6])], |t| {
        let (mean, variance) = (Tensor::zeros([6], F32), Tensor::ones([6], F32));
        let mut y = t[0].sin();
        for block in 0..3 {
            let x = (&y * 1.5).exp().tanh();
            let [filter, weight, mean_of, variance_of] =
                [&t[1], &t[2], &mean, &variance].map(Tensor::shallow_clone);
            let z = segment(&format!("block.{block}"), &x, move |x| {
                let y = x.f_conv2d(&filter, NONE, [1, 1], [1, 1], [1, 1], 1)?;
                let (mean, variance) = (Some(&mean_of), Some(&variance_of));
                let y = y.f_batch_norm(Some(&weight), NONE, mean, variance, true, 0.1, 1e-5, false)?;
                y.f_gelu("none")?.f_dropout(0.2, true)
            });
            let z = remat(&[&z.unwrap()], |z| z[0].f_silu()).unwrap();
            let moved = (z * &x + (&mean * 0.1).view([1, 6, 1, 1])).sigmoid();
            let trains = block == 1;
            y = moved.batch_norm(NONE, NONE, Some(&mean), Some(&variance), trains, 0.1, 1e-5, false);
        }
        ((y.exp() * y.dropout(0.3, true)).sum(Kind::Float), vec![mean, variance])
    });
}

#[test]
fn backward_beside_the_next_micro_batch() {
    // Backward begins the numbers of operations anew, while another thread is recording.
    parity(&[randn(&[64, 64]), randn(&[64, 64]) * 0.1], |t| {
        let loss_of = |batch: i64| {
            let mut y = &t[0] * (1.0 + 0.1 * batch as f64);
            for _ in 0..8 {
                let z = y.matmul(&t[1]).gelu("none").layer_norm([64], NONE, NONE, 1e-5, false);
                y = z * y.sigmoid();
            }
            y.square().sum(Kind::Float)
        };
        let mut gradients = Vec::new();
        let mut before = loss_of(0);
        for batch in 1..6 {
            let inputs = [t[0].shallow_clone(), t[1].shallow_clone()];
            let work = move || Tensor::run_backward(&[&before], &inputs, false, false);
            let backward = std::thread::Builder::new().spawn(work).unwrap();
            before = loss_of(batch);
            gradients.extend(backward.join().unwrap());
        }
        (before, gradients)
    });
}
