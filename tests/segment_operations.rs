//! Segments of which recorded operations make again all that they saved: their functions are not called again.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaf, leaves, parity, randn};
use ssdtrain::{Adaptive, Backward, ErrorKind, Keep, Step, StepReport, TensorCache, remat, segment};
use tch::{Kind, TchError, Tensor};

type Outcome = Result<Tensor, TchError>;

const RETAIN: Backward = Backward { retain_graph: true, create_graph: false };

/// An input and two weights.
fn sources() -> Vec<Tensor> {
    tch::manual_seed(5);
    vec![randn(&[32, 32]), randn(&[32, 32]), randn(&[32, 32])]
}

/// The gradients without a cache.
fn expected(sources: &[Tensor], f: fn(&[Tensor]) -> Outcome) -> Vec<Tensor> {
    let plain = leaves(sources);
    tch::manual_seed(7);
    f(&plain).unwrap().sum(Kind::Float).backward();
    grads(&plain)
}

/// The gradients of a step in which `f` is a segment whose input is the double of the first leaf, how often it was called, and the report.
fn in_segment(
    cache: &TensorCache,
    inputs: &[Tensor],
    f: fn(&[Tensor]) -> Outcome,
    backward: impl FnOnce(&Step<'_>, &Tensor) -> ssdtrain::Result<()>,
) -> (ssdtrain::Result<Vec<Tensor>>, usize, StepReport) {
    tch::manual_seed(7);
    let calls = Arc::new(AtomicUsize::new(0));
    let step = cache.step();
    let (counting, held) = (Arc::clone(&calls), inputs[1..].iter().map(Tensor::shallow_clone));
    let held: Vec<Tensor> = held.collect();
    let function = move |x: &Tensor| {
        counting.fetch_add(1, Ordering::Relaxed);
        let all: Vec<Tensor> = std::iter::once(x).chain(&held).map(Tensor::shallow_clone).collect();
        f(&all)
    };
    let loss = segment("s", &(&inputs[0] * 1.0), function).unwrap().sum(Kind::Float);
    let outcome = backward(&step, &loss);
    drop(loss);
    let report = step.finish().unwrap();
    assert_nothing_held(cache);
    (outcome.map(|()| grads(inputs)), calls.load(Ordering::Relaxed), report)
}

/// How often the function of a segment is called, which has the gradients that it has without a cache.
fn calls(f: fn(&[Tensor]) -> Outcome) -> (usize, StepReport) {
    let (cache, sources) = (everything().build().unwrap(), sources());
    let (gradients, calls, report) =
        in_segment(&cache, &leaves(&sources), f, |step, loss| step.backward(loss));
    assert_same_bits("gradients", &expected(&sources, f), &gradients.unwrap());
    assert!(report.reruns.count > 0, "{report:?}");
    (calls, report)
}

fn block(x: &[Tensor]) -> Outcome {
    let y = x[0].f_matmul(&x[1])?.f_tanh()?.f_mul(&x[2])?.f_exp()?.f_sin()?;
    y.f_matmul(&x[1])?.f_square()
}

#[test]
fn operations_make_again_what_a_segment_saved() {
    assert_eq!(calls(block).0, 1);
    // What no operation saves is made on the way.
    assert_eq!(calls(|x| x[0].f_neg()?.f_add_scalar(3.0)?.f_sin()?.f_neg()?.f_exp()).0, 1);
    // An attention saves the logarithms of its sums, too.
    let attends = |x: &[Tensor]| {
        let [q, k, v] = [0, 1, 2].map(|of| x[of].view([1, 2, 16, 32]));
        let y = Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false)?;
        y.f_sin()?.f_square()
    };
    assert_eq!(calls(attends).0, 1);
}

#[test]
fn the_function_is_called_again_for_anything_else_and_makes_all_of_it() {
    let odd: [fn(&[Tensor]) -> Outcome; 3] = [
        |x| x[0].f_matmul(&x[1])?.f_tanh()?.f_dropout(0.5, true)?.f_matmul(&x[2])?.f_sin()?.f_exp(),
        // Nothing saves the numbers themselves.
        |x| {
            let noise = randn(&[32, 32]);
            x[0].f_tanh()?.f_add(&noise)?.f_sin()?.f_exp()
        },
        // Nor what tch writes through an address.
        |x| {
            let halves = Tensor::from_slice(&[0.5_f32; 32]);
            x[0].f_tanh()?.f_add(&halves)?.f_sin()?.f_exp()
        },
    ];
    for f in odd {
        let (calls, report) = calls(f);
        assert_eq!((calls, report.reruns.count), (2, 1), "{report:?}");
    }
}

#[test]
fn its_function_goes_once_it_has_returned() {
    let cache = everything().build().unwrap();
    let step = cache.step();
    let (x, held) = (leaf(&randn(&[32, 32])), Arc::new(()));
    let holds = Arc::clone(&held);
    let y = segment("s", &(&x * 2.0), move |x| {
        let _ = &holds;
        x.f_sin()?.f_exp()
    });
    assert_eq!(Arc::strong_count(&held), 1);
    step.backward(&y.unwrap().sum(Kind::Float)).unwrap();
}

#[test]
fn a_retained_graph_serves_two_backwards() {
    let (cache, sources) = (everything().build().unwrap(), sources());
    let twice = |step: &Step<'_>, loss: &Tensor| {
        step.backward_with(loss, RETAIN)?;
        step.backward(loss)
    };
    let (gradients, calls, _) = in_segment(&cache, &leaves(&sources), block, twice);
    let plain = leaves(&sources);
    (0..2).for_each(|_| block(&plain).unwrap().sum(Kind::Float).backward());
    assert_same_bits("twice", &grads(&plain), &gradients.unwrap());
    assert_eq!(calls, 1);
}

/// What an operation reads and autograd does not save may change, as without a cache.
#[test]
fn what_is_only_read_is_read_as_it_was() {
    let (cache, sources) = (everything().build().unwrap(), sources());
    let f = |x: &[Tensor]| x[0].f_add(&x[1])?.f_sin()?.f_square();
    let inputs = leaves(&sources);
    let changed = inputs[1].shallow_clone();
    let (gradients, calls, _) = in_segment(&cache, &inputs, f, move |step, loss| {
        drop(tch::no_grad(|| changed.shallow_clone().fill_(0.0)));
        step.backward(loss)
    });
    assert_same_bits("gradients", &expected(&sources, f), &gradients.unwrap());
    assert_eq!(calls, 1);
}

#[test]
fn what_autograd_saved_of_it_may_not_change() {
    let (cache, sources) = (everything().build().unwrap(), sources());
    let inputs = leaves(&sources);
    let changed = inputs[1].shallow_clone();
    let (outcome, ..) = in_segment(&cache, &inputs, block, move |step, loss| {
        drop(tch::no_grad(|| changed.shallow_clone().fill_(0.0)));
        step.backward(loss)
    });
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::ChangedInPlace);
}

/// Two segments, one of which is nested, after each other.
fn nested(x: &Tensor, calls: &Arc<AtomicUsize>) -> Tensor {
    let counting = Arc::clone(calls);
    let y = segment("outer", x, move |x| {
        counting.fetch_add(1, Ordering::Relaxed);
        let again = Arc::clone(&counting);
        let inner = segment("inner", &x.f_sin()?, move |x| {
            again.fetch_add(1, Ordering::Relaxed);
            x.f_exp()?.f_square()
        });
        inner?.f_tanh()?.f_cos()
    });
    segment("after", &y.unwrap(), |x| x.f_exp()?.f_sin()).unwrap()
}

#[test]
fn segments_may_be_nested() {
    let source = randn(&[64, 64]);
    let plain = leaf(&source);
    (plain.sin().exp().square().tanh().cos().exp().sin()).sum(Kind::Float).backward();
    let cache = everything().build().unwrap();
    let (x, calls) = (leaf(&source), Arc::default());
    let step = cache.step();
    let loss = nested(&x, &calls).sum(Kind::Float);
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap();
    assert_same_bits("nested", &[plain.grad()], &[x.grad()]);
    assert_nothing_held(&cache);
    // The inner one belongs to the outer one, of which it is not known yet what becomes.
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}

/// Under a policy that keeps everything, a segment goes back to its own input and not to that of the one before.
#[test]
fn each_segment_goes_back_to_its_own_input() {
    let cache = TensorCache::builder().policy(Keep).min_bytes(0).build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let mut y = &x * 2.0;
    for _ in 0..4 {
        y = segment("s", &y, |x| x.f_neg()?.f_exp()).unwrap();
    }
    let loss = y.sum(Kind::Float);
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    // The result of the last one is still there.
    let reruns = (report.reruns.count, report.reruns.bytes / (64 * 64 * 4));
    assert_eq!(reruns, (3, 3 * 2), "{report:?}");
    assert_eq!(report.offloaded.bytes, 0);
}

/// What goes in leaves the device.
#[test]
fn what_goes_in_is_moved() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss = segment("s", &(&x * 2.0), |x| x.f_sin()?.f_exp()).unwrap().sum(Kind::Float);
    step.flush();
    assert_eq!(cache.held().device_bytes, 0);
    step.backward(&loss).unwrap();
    assert!(step.finish().unwrap().loaded.bytes > 0);
}

/// Two threads run segments of one step.
#[test]
fn threads_have_segments_of_their_own() {
    let sources = sources();
    let expected: Vec<Tensor> = expected(&sources, block);
    let cache = everything().build().unwrap();
    let step = cache.step();
    let handle = step.handle();
    let run = |inputs: Vec<Tensor>| {
        let held: Vec<Tensor> = inputs[1..].iter().map(Tensor::shallow_clone).collect();
        let y = segment("s", &(&inputs[0] * 1.0), move |x| {
            block(&[x.shallow_clone(), held[0].shallow_clone(), held[1].shallow_clone()])
        });
        (y.unwrap().sum(Kind::Float), inputs)
    };
    let made = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (handle, inputs) = (handle.clone(), leaves(&sources));
                scope.spawn(move || {
                    let _entered = handle.enter();
                    run(inputs)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let losses: Tensor = made.iter().map(|(loss, _)| loss).sum();
    step.backward(&losses).unwrap();
    for (_, inputs) in &made {
        assert_same_bits("thread", &expected, &grads(inputs));
    }
}

/// A function of an input and two weights.
type Function = fn(&Tensor, &[Tensor]) -> Outcome;

/// With writes in place, views, other shapes, numbers that are drawn or indices, and what no gradient goes through.
const FUNCTIONS: [Function; 12] = [
    |x, w| {
        let mut y = x.f_sin()?;
        drop(y.f_add_(&w[0])?);
        y.f_exp()?.f_square()
    },
    |x, w| {
        let mut y = x.f_matmul(&w[0])?;
        drop(y.f_relu_()?);
        y.f_matmul(&w[1])?.f_sin()
    },
    |x, w| {
        let mut y = x.f_zeros_like()?;
        y.f_copy_(&x.f_sin()?)?;
        y.f_mul(&w[0])?.f_exp()
    },
    |x, _| Ok(x.shallow_clone()),
    |x, w| x.f_matmul(&w[0])?.f_exp()?.f_narrow(0, 3, 7),
    |x, w| {
        let y = x.f_matmul(&w[0])?.f_chunk(2, 1)?;
        y[0].f_silu()?.f_mul(&y[1])?.f_matmul(&w[1].f_narrow(0, 0, 16)?)?.f_sin()
    },
    |x, w| {
        let y = x.f_matmul(&w[0])?.f_tanh()?;
        y.f_mul(&y)?.f_mul(&y)?.f_sin()
    },
    |x, w| {
        let (mean, scale) = tch::no_grad(|| (x.mean(Kind::Float), w[1].exp()));
        x.f_sub(&mean)?.f_mul(&scale)?.f_sin()?.f_exp()
    },
    |x, w| x.f_mul(&x.f_sin()?.f_detach()?)?.f_matmul(&w[0])?.f_exp(),
    |x, w| {
        let rows = Tensor::from_slice(&[3_i64, 5, 7, 9]);
        x.f_matmul(&w[0])?.f_index_select(0, &rows)?.f_exp()?.f_sin()
    },
    |x, w| {
        let y = x.f_view([1, 1, 32, 32])?.f_conv2d(
            &w[0].f_narrow(0, 0, 3)?.f_narrow(1, 0, 3)?.f_contiguous()?.f_view([1, 1, 3, 3])?,
            None::<&Tensor>,
            [1, 1],
            [1, 1],
            [1, 1],
            1,
        )?;
        y.f_relu()?.f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)?.f_tanh()
    },
    |x, w| x.f_matmul(&w[0])?.f_tanh()?.f_dropout(0.3, true)?.f_matmul(&w[1])?.f_gelu("none")?.f_sin(),
];

#[test]
fn functions_of_all_kinds_have_the_bits_of_a_plain_call() {
    for function in FUNCTIONS {
        parity(&sources(), |x| {
            let held: Vec<Tensor> = x[1..].iter().map(Tensor::shallow_clone).collect();
            let y = segment("s", &(&x[0] * 1.5), move |x| function(x, &held)).unwrap();
            y.sin().sum(Kind::Float)
        });
    }
}

/// What stays on the device once all that is to leave has left, and the report, of a step whose loss `forward` computes of a leaf.
fn moving(x: &Tensor, forward: impl Fn(&Tensor) -> Tensor) -> (u64, StepReport) {
    let cache = everything().build().unwrap();
    let x = leaf(x);
    let step = cache.step();
    let loss = forward(&x).sum(Kind::Float);
    step.flush();
    let held = cache.held().device_bytes;
    step.backward(&loss).unwrap();
    drop(loss);
    (held, step.finish().unwrap())
}

/// An input that is itself computed again is not held, and one of which only a small part goes in stays where it is.
#[test]
fn inputs_are_kept_as_the_step_keeps_them() {
    let (held, _) = moving(&randn(&[64, 64]), |x| {
        let y = remat(&[&x.sin()], |y| y[0].f_gelu("tanh")).unwrap();
        segment("s", &y, |y| y.f_neg()?.f_exp()).unwrap()
    });
    assert_eq!(held, 0);
    let (_, report) = moving(&randn(&[64, 64]), |x| {
        let large = x.detach().copy();
        let part = large.narrow(0, 0, 1);
        segment("s", [&part, x], |[part, x]| x.f_neg()?.f_add(part)?.f_sin()?.f_exp()).unwrap()
    });
    assert_eq!(report.offloaded.bytes, 64 * 64 * 4, "{report:?}");
}

/// What a function captured counts as little as where the function holds it.
#[test]
fn what_it_captured_is_not_in_the_cache() {
    let mask = randn(&[64, 64]);
    let (held, report) = moving(&randn(&[64, 64]), |x| {
        let mask = &mask * 2.0;
        segment("s", &(x * 2.0), move |x| x.f_neg()?.f_add(&mask)?.f_sin()?.f_exp()).unwrap()
    });
    assert_eq!(held, 0);
    assert_eq!(report.deduplicated.count, 0, "{report:?}");
}

/// Branches of what nobody saved compute it once.
#[test]
fn a_segment_runs_again_once_for_all_that_it_saved() {
    let (_, report) = moving(&randn(&[64, 64]), |x| {
        let branches = |x: &Tensor| {
            let y = x.f_neg()?;
            (1..5).map(|times| y.f_mul_scalar(times)?.f_sin()).reduce(|sum, next| sum?.f_add(&next?)).unwrap()
        };
        segment("s", &(x * 2.0), branches).unwrap()
    });
    assert_eq!((report.reruns.count, report.loaded.count), (1, 1), "{report:?}");
}

/// An input of several segments comes back once.
#[test]
fn what_several_segments_share_is_loaded_once() {
    let (_, report) = moving(&randn(&[64, 64]), |x| {
        let memory = x * 2.0;
        (0..4).fold(x * 1.0, |y, _| {
            segment("s", [&y, &memory], |[y, memory]| y.f_neg()?.f_add(memory)?.f_sin()?.f_exp()).unwrap()
        })
    });
    assert!(report.loaded.count <= 4 + 1, "{report:?}");
}

/// Also in a step that is profiled, where everything is recorded.
#[test]
fn functions_are_called_again_where_nothing_is_to_be_fused() {
    let cache = everything().policy(Adaptive::default()).fuse_reruns(false).build().unwrap();
    for step in 1..5 {
        let (_, calls, _) = in_segment(&cache, &leaves(&sources()), block, |step, loss| step.backward(loss));
        assert_eq!(calls, 2, "step {step}");
    }
}
