//! Results of recorded operations, computed again without marks: the same bits as without a cache, whatever the program does meanwhile.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::collections::HashMap;

use common::{F32, assert_nothing_held, assert_same_bits, everything, grads, leaf, leaves, randn, staged};
use ssdtrain::plan::{
    Course, Headroom, InTurn, Observation, Outset, Placement, PlannedSave, Position, Saves, Schedule,
    ScopeId, StepPlan,
};
use ssdtrain::{Backward, Offload, Policy, StepReport, TensorCacheBuilder, Verify};
use tch::{Device, Kind, Tensor, no_grad};

/// Computes again whatever can be, and moves everything else.
fn again(builder: TensorCacheBuilder) -> TensorCacheBuilder {
    again_within(builder, Offload::default())
}

fn again_within(builder: TensorCacheBuilder, policy: Offload) -> TensorCacheBuilder {
    builder.policy(InTurn::new(policy, [Placement::Recompute]))
}

/// Runs `f` without a cache and with caches that compute again what they can: the gradients have the same bits. Returns the report of
/// the first cache's step.
fn parity(sources: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) -> StepReport {
    let plain = leaves(sources);
    tch::manual_seed(7);
    f(&plain).backward();
    let expected = grads(&plain);
    let builders = [
        ("disk", again(everything())),
        ("host pool", again_within(staged(), Offload::default().device_budget(1 << 20))),
        ("host pool, no budget", again_within(staged(), Offload::default().device_budget(1).prefetch(0))),
        ("small ones kept", again(everything().min_bytes(256))),
        (
            "every other one",
            everything().policy(InTurn::new(Offload::default(), [Placement::Recompute, Placement::Disk])),
        ),
    ];
    let reports = builders.map(|(way, builder)| {
        let cache = builder.build().unwrap();
        let inputs = leaves(sources);
        tch::manual_seed(7);
        let step = cache.step();
        let loss = f(&inputs);
        step.flush();
        step.backward(&loss).unwrap();
        let report = step.finish().unwrap();
        drop(loss);
        assert_same_bits(way, &expected, &grads(&inputs));
        assert_nothing_held(&cache);
        report
    });
    reports.into_iter().next().unwrap()
}

/// A norm as a user writes it.
fn rms_norm(x: &Tensor, weight: &Tensor) -> Tensor {
    let y = x.to_kind(Kind::Float);
    let scale = (y.square().mean_dim(-1, true, Kind::Float) + 1e-5).rsqrt();
    (y * scale).to_kind(x.kind()) * weight
}

#[test]
fn a_norm_and_a_gate_of_plain_operations() {
    let sources = [randn(&[16, 32]), randn(&[32]), randn(&[32, 64]), randn(&[32, 64]), randn(&[64, 32])];
    let report = parity(&sources, |t| {
        let t: Vec<Tensor> = t.iter().map(|t| t.to_kind(Kind::BFloat16)).collect();
        let y = rms_norm(&t[0], &t[1]);
        let y = y.matmul(&t[2]).silu() * y.matmul(&t[3]);
        let y = rms_norm(&(&t[0] + y.matmul(&t[4])), &t[1]);
        y.to_kind(Kind::Float).square().sum(Kind::Float)
    });
    assert!(report.recomputed.count > 8, "{report:?}");
    assert!(report.reruns.bytes > 0, "{report:?}");
}

#[test]
fn a_long_chain_takes_no_deep_stack() {
    let work = || {
        parity(&[randn(&[64])], |t| {
            let y = (0..20_000).fold(t[0].sin(), |y, _| y.sin());
            y.sum(Kind::Float)
        });
    };
    std::thread::Builder::new().stack_size(1 << 20).spawn(work).unwrap().join().unwrap();
}

#[test]
fn what_an_operation_read_may_be_changed_afterwards() {
    // Neither add nor exp saves what it reads, so plain autograd allows this.
    parity(&[randn(&[32, 32])], |t| {
        let x = &t[0] * 2.0;
        let y = (&x + 1.0).exp();
        let z = x.exp();
        drop(no_grad(|| x.detach().fill_(3.0)));
        (y * z).sum(Kind::Float)
    });
    parity(&[randn(&[32, 32])], |t| {
        let mut x = t[0].neg();
        let mut sum = x.zeros_like();
        for _ in 0..4 {
            sum += x.exp();
            x = x.f_add_scalar_(0.5).unwrap();
        }
        sum.sum(Kind::Float)
    });
}

#[test]
fn a_result_that_is_changed_without_its_version_has_its_new_contents() {
    // As in plain autograd: `data` has a version counter of its own.
    parity(&[randn(&[32, 32])], |t| {
        let y = t[0].sin();
        let z = &y * &y;
        drop(y.data().fill_(2.0));
        z.sum(Kind::Float)
    });
}

#[test]
fn others_that_were_made_from_it_have_the_old_ones() {
    parity(&[randn(&[32, 32])], |t| {
        let y = t[0].neg();
        let z = y.exp();
        drop(y.data().fill_(2.0));
        z.square().sum(Kind::Float)
    });
}

#[test]
fn parameters_that_backward_changes_were_read_before() {
    let run = |cached: bool| {
        let (x, w) = (randn(&[16, 16]) * 0.0 + 0.5, (randn(&[16, 16]) * 0.0 + 0.25).set_requires_grad(true));
        let cache = again(everything()).build().unwrap();
        let step = cached.then(|| cache.step());
        // The graph of the second use runs first, and the weight is changed in between.
        let first = (&x * &w).exp().sum(Kind::Float);
        let second = (&x + &w).exp().sum(Kind::Float);
        second.backward();
        drop(no_grad(|| w.data().fill_(0.75)));
        first.backward();
        drop(step);
        w.grad()
    };
    assert_same_bits("a changed weight", &[run(false)], &[run(true)]);
}

#[test]
fn what_the_program_changes_once_the_step_is_gone_was_read_before() {
    let run = |cached: bool| {
        // Small enough to stay where it is.
        let (x, w) = (randn(&[16, 64]) * 0.0 + 0.5, (randn(&[64]) * 0.0 + 0.25).set_requires_grad(true));
        let cache = again(everything()).min_bytes(1024).build().unwrap();
        let step = cached.then(|| cache.step());
        let first = (&x * &w).exp().sum(Kind::Float);
        let report = step.map(|step| step.finish().unwrap());
        assert!(report.is_none_or(|report| report.recomputed.count > 0));
        // Nothing of that step is left but its graph.
        drop(cache.step());
        drop(no_grad(|| w.data().fill_(0.75)));
        first.backward();
        w.grad()
    };
    assert_same_bits("a changed weight", &[run(false)], &[run(true)]);
}

#[test]
fn a_graph_that_is_kept_serves_again() {
    let sources = [randn(&[16, 32])];
    let f = |t: &[Tensor]| (t[0].sin().exp() * t[0].cos()).sum(Kind::Float);
    let plain = leaves(&sources);
    let loss = f(&plain);
    Tensor::run_backward(&[&loss], &[&plain[0]], true, false);
    loss.backward();
    f(&plain).backward();
    let cache = again(everything()).build().unwrap();
    let inputs = leaves(&sources);
    let step = cache.step();
    let loss = f(&inputs);
    step.backward_with(&loss, Backward { retain_graph: true, ..Backward::default() }).unwrap();
    step.backward(&loss).unwrap();
    step.finish().unwrap();
    drop(loss);
    assert_same_bits("twice", &grads(&plain), &grads(&inputs));
    assert_nothing_held(&cache);
}

#[test]
fn backward_of_backward() {
    let sources = [randn(&[16, 32])];
    let f = |t: &[Tensor]| {
        let loss = (t[0].sin() * t[0].sigmoid()).sum(Kind::Float);
        Tensor::run_backward(&[&loss], &[&t[0]], true, true).remove(0).square().sum(Kind::Float)
    };
    parity(&sources, f);
}

#[test]
fn several_results_of_one_operation() {
    parity(&[randn(&[16, 32]), randn(&[32])], |t| {
        let y = t[0].neg().layer_norm([32], Some(&t[1]), None::<&Tensor>, 1e-5, false);
        let (value, _) = y.max_dim(1, false);
        value.exp().sum(Kind::Float)
    });
}

#[test]
fn what_several_results_are_computed_from_comes_back_once() {
    let report = parity(&[randn(&[32, 32]), randn(&[32, 32]), randn(&[32, 32])], |t| {
        // The sums do not save it, and nothing computes it.
        let x = Tensor::from_slice(&[0.5_f32; 1024]).view([32, 32]);
        t.iter().fold(Tensor::from(0.0_f32), |sum, t| sum + (t + &x).exp().sum(Kind::Float))
    });
    assert_eq!((report.reruns.count, report.loaded.count), (3, 1), "{report:?}");
}

#[test]
fn what_lies_between_the_uses_of_what_is_read_twice_is_loaded_ahead() {
    let sources: Vec<Tensor> = (0..8).map(|_| randn(&[32, 32])).collect();
    let report = parity(&sources, |t| {
        let data = |share: f32| Tensor::from_slice(&[share; 1024]).view([32, 32]);
        let x = data(0.5);
        let first = (&t[0] + &x).exp().sum(Kind::Float);
        let between = |sum, t: &Tensor| sum + (t * data(0.25)).sum(Kind::Float);
        t[1..7].iter().fold(first, between) + (&x + &t[7]).exp().sum(Kind::Float)
    });
    assert_eq!((report.loaded.count, report.load_misses.count), (7, 1), "{report:?}");
}

#[test]
fn a_graph_that_is_dropped_holds_nothing() {
    let cache = again(everything()).build().unwrap();
    let x = randn(&[32, 32]).set_requires_grad(true);
    let step = cache.step();
    let loss = x.sin().exp().cos().sum(Kind::Float);
    step.finish().unwrap();
    drop(loss);
    assert_nothing_held(&cache);
}

#[test]
fn micro_batches_each_have_their_own_operations() {
    let sources = [randn(&[16, 32])];
    let f = |t: &[Tensor]| (t[0].sin().exp() * t[0].cos()).sum(Kind::Float);
    let (plain, inputs) = (leaves(&sources), leaves(&sources));
    let cache = again(everything()).build().unwrap();
    let step = cache.step();
    for _ in 0..3 {
        f(&plain).backward();
        step.backward(&f(&inputs)).unwrap();
    }
    let report = step.finish().unwrap();
    assert!(report.recomputed.count >= 3, "{report:?}");
    assert_same_bits("three", &grads(&plain), &grads(&inputs));
    assert_nothing_held(&cache);
}

#[test]
fn threads_share_what_is_recorded() {
    let sources = [randn(&[16, 32])];
    let f = |x: &Tensor, y: &Tensor| (y.exp() * x.cos()).sum(Kind::Float);
    let plain = leaves(&sources);
    f(&plain[0], &plain[0].sin()).backward();
    let inputs = leaves(&sources);
    let cache = again(everything()).build().unwrap();
    let step = cache.step();
    let (x, y) = (inputs[0].shallow_clone(), inputs[0].sin());
    let handle = step.handle();
    let work = move || {
        let _entered = handle.enter();
        f(&x, &y)
    };
    let loss = std::thread::Builder::new().spawn(work).unwrap().join().unwrap();
    step.backward(&loss).unwrap();
    drop(loss);
    // Waits for what is being stored.
    step.finish().unwrap();
    assert_same_bits("another thread", &grads(&plain), &grads(&inputs));
    assert_nothing_held(&cache);
}

#[test]
fn what_is_written_through_an_address_is_found_by_verify() {
    let cache = again(everything()).build().unwrap();
    let x = randn(&[32, 32]).set_requires_grad(true);
    let step = cache.step();
    let y = &x + 1.0;
    let z = y.exp();
    let loss = z.sum(Kind::Float);
    drop(z);
    let mut data = vec![0.0_f32; 1024];
    y.copy_data(&mut data, 1024);
    // SAFETY: the tensor is alive, of this size, and nothing else uses it.
    unsafe { std::slice::from_raw_parts_mut(y.data_ptr().cast::<f32>(), 1024) }.fill(7.0);
    let failure = step.backward(&loss).unwrap_err();
    assert!(failure.to_string().contains("verify(Verify::Full)"), "{failure}");
}

#[test]
fn the_number_of_threads_may_change() {
    let before = tch::get_num_threads();
    parity(&[randn(&[64, 640])], |t| {
        tch::set_num_threads(2);
        let y = t[0].sin().sum_dim_intlist(1_i64, true, Kind::Float).exp();
        let z = &t[0] * &y;
        tch::set_num_threads(1);
        z.exp().sum(Kind::Float)
    });
    tch::set_num_threads(before);
}

#[test]
fn data_of_the_program_is_not_made_by_an_operation() {
    // tch makes zeros, and copies the data to where they are.
    parity(&[randn(&[32, 32])], |t| {
        let data: Vec<f32> = (0..1024_u16).map(f32::from).collect();
        let mask = Tensor::from_slice(&data).view([32, 32]);
        let scale = (Tensor::from_slice(&data).view([32, 32]) + 1.0).exp2();
        (t[0].sin() * mask / scale).sum(Kind::Float)
    });
}

#[test]
fn an_operation_in_place_saves_a_copy_of_what_it_changes() {
    let f: [fn(&mut Tensor, &Tensor) -> Tensor; 8] = [
        |y, _| y.sin_(),
        |y, _| y.cos_(),
        |y, _| y.abs_(),
        |y, _| y.pow_(3),
        |y, w| y.g_mul_(w),
        |y, w| y.g_div_(w),
        |y, w| y.atan2_(w),
        |y, w| y.lerp_tensor_(w, w),
    ];
    for f in f {
        parity(&[randn(&[32, 32]), randn(&[32, 32])], |t| {
            let mut y = t[0].neg();
            drop(f(&mut y, &t[1]));
            y.sum(Kind::Float)
        });
    }
}

#[test]
fn kinds_and_shapes_of_all_sorts() {
    let f: [fn(&[Tensor]) -> Tensor; 9] = [
        |t| {
            let z = Tensor::complex(&t[0], &t[1]);
            let z = (&z * z.conj()).exp() * z.conj().sin() + z.imag();
            z.abs().sum(Kind::Float)
        },
        |t| {
            let s = t[0].sum(Kind::Float).tanh();
            let h = t[1].to_kind(Kind::Half) * &s;
            (h.to_kind(Kind::Double) * s.sin()).exp().sum(Kind::Double)
        },
        |t| {
            let y = t[0].slice(0, 0, 1, 1).expand([32, 32], false).sin();
            let z = t[1].slice(0, 3, 3, 1).exp();
            (Tensor::cat(&[&y, &z], 0) * &t[1]).cos().square().sum(Kind::Float)
        },
        |t| {
            let y = t[0].view([2, 8, 16, 4]).permute([0, 3, 1, 2]).sin();
            let z = t[1].view([2, 4, 8, 16]).cos();
            (&y * &z).exp().permute([0, 2, 1, 3]).sigmoid().contiguous().square().sum(Kind::Float)
        },
        |t| {
            let y = t[0].as_strided([30, 32], [31, 1], 5).exp();
            (&y * y.sin()).tanh().sum(Kind::Float)
        },
        |t| {
            let c = t[0].gt(0.0);
            let y = t[0].sin().where_self(&c, &t[1].exp()).masked_fill(&c.logical_not(), 0.5);
            let (v, i) = y.sort(1, true);
            (v.exp() * y.gather(1, &i, false).cos()).sum(Kind::Float)
        },
        |t| {
            let y = t[0].exp();
            for piece in y.unsafe_chunk(4, 1) {
                let mut piece = piece;
                drop(piece.sigmoid_());
            }
            y.unsafe_chunk(4, 1).iter().map(|p| (p * p).sin().sum(Kind::Float)).reduce(|a, b| a + b).unwrap()
        },
        |t| {
            let y = t[0].dropout(0.5, true).exp();
            let z = (&y * t[1].dropout(0.3, true)).softmax(-1, Kind::Float);
            z.square().sum(Kind::Float) + (y.tanh().abs().bernoulli() * &t[1]).exp().sum(Kind::Float)
        },
        |t| {
            let out = t[0].sin().detach();
            let y = t[1].neg();
            let z = y.exp() * t[0].cos();
            no_grad(|| drop(t[0].detach().exp_out(&out)));
            drop(no_grad(|| y.data().resize_([4])));
            (z.exp() * out).sum(Kind::Float)
        },
    ];
    for f in f {
        parity(&[randn(&[32, 32]), randn(&[32, 32])], f);
    }
}

#[test]
fn what_operations_read_may_be_filled_again_during_backward() {
    // Nothing of the batch itself is saved, so another thread may fill it for the next one.
    let work = |cached: bool, batch: &Tensor, w: &Tensor| {
        let cache = again(everything()).verify(Verify::Off).build().unwrap();
        let step = cached.then(|| cache.step());
        drop(no_grad(|| batch.detach().fill_(0.5)));
        let mut loss = Tensor::from(0.0);
        for i in 0..8 {
            loss += ((batch + f64::from(i)).sin() * w).sum(Kind::Float);
        }
        let fill = {
            let batch = batch.shallow_clone();
            move || (0..20_i64).for_each(|i| drop(no_grad(|| batch.detach().fill_(i))))
        };
        let filled = std::thread::Builder::new().spawn(fill).unwrap();
        loss.backward();
        filled.join().unwrap();
        drop(step);
    };
    let batch = randn(&[512, 1024]);
    let source = randn(&[512, 1024]);
    let plain = leaf(&source);
    work(false, &batch, &plain);
    for _ in 0..20 {
        let w = leaf(&source);
        work(true, &batch, &w);
        assert_same_bits("filled meanwhile", &grads(std::slice::from_ref(&plain)), &[w.grad()]);
    }
}

#[test]
fn a_batch_norm_whose_statistics_are_wider_than_its_input() {
    parity(&[randn(&[8, 6, 5, 5])], |t| {
        let (mean, variance) = (Tensor::zeros([6], F32), Tensor::ones([6], F32));
        let x = t[0].to_kind(Kind::BFloat16);
        let none = None::<&Tensor>;
        let y = x.batch_norm(none, none, Some(&mean), Some(&variance), true, 0.1, 1e-5, false);
        y.to_kind(Kind::Float).exp().square().sum(Kind::Float)
    });
}

#[test]
fn memory_that_a_tensor_borrows_may_be_filled_again() {
    // Nothing needs the batch after the sum. It is smaller than what the cache moves, so nothing copies it either.
    let source = randn(&[64, 32]);
    let work = |cached: bool| {
        let cache = again(everything().min_bytes(256)).build().unwrap();
        let step = cached.then(|| cache.step());
        let (x, mut buffer) = (leaf(&source), vec![0.5_f32; 32]);
        // SAFETY: the buffer is of this size and outlives the tensor.
        let batch =
            unsafe { Tensor::from_blob(buffer.as_ptr().cast(), &[32], &[1], Kind::Float, Device::Cpu) };
        let loss = (&x + &batch).exp().sum(Kind::Float);
        drop(batch);
        buffer.fill(9.0);
        loss.backward();
        drop(step);
        x.grad()
    };
    assert_same_bits("filled again", &[work(false)], &[work(true)]);
}

/// Backward of what was saved first leaves everything behind it; that of the other begins above.
#[test]
fn what_lies_below_a_second_loss_is_loaded_ahead() {
    let cache = again(everything()).build().unwrap();
    let inputs: Vec<Tensor> = (0..16).map(|_| leaf(&randn(&[32, 32]))).collect();
    let step = cache.step();
    let data = |share: f64| Tensor::full([32, 32], share, F32);
    let loss = |inputs: &[Tensor]| {
        let exp = |x: &Tensor| (x + data(0.5)).exp().sum(Kind::Float);
        inputs.iter().map(exp).reduce(|sum, next| sum + next).unwrap()
    };
    let (first, second) = (loss(&inputs[..8]), loss(&inputs[8..]));
    step.flush();
    first.backward();
    second.backward();
    let report = step.finish().unwrap();
    assert!(report.loaded.count >= 16 && report.load_misses.count <= 3, "{report:?}");
}

#[test]
fn memory_that_a_tensor_borrows_stays_in_the_graph() {
    let cache = everything().build().unwrap();
    let data = vec![0.5_f32; 1024];
    // SAFETY: the data are of this size and outlive the tensor.
    let borrowed =
        unsafe { Tensor::from_blob(data.as_ptr().cast(), &[1024], &[1], Kind::Float, Device::Cpu) };
    let x = leaf(&randn(&[1024]));
    let step = cache.step();
    let loss = (&x * &borrowed).sum(Kind::Float);
    step.flush();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert_eq!((report.offloaded.count, report.kept.ineligible.count), (0, 1), "{report:?}");
}

#[test]
fn what_cannot_be_computed_again_is_looked_at_once() {
    // The noise is gone, and two ways lead from each result to the one before it.
    parity(&[randn(&[60])], |t| {
        let mut held = vec![t[0].neg()];
        for _ in 0..40 {
            let y = &held[held.len() - 1];
            let parts = [y.neg(), y * 0.5, y.rand_like()];
            held.push(Tensor::cat(&parts.map(|part| part.slice(0, 0, 20, 1)), 0));
        }
        held[40].exp().sum(Kind::Float)
    });
}

/// It is asked for in most programs that train convolutional networks, and concerns these on a GPU.
#[test]
fn that_cudnn_may_try_algorithms_does_not_matter_to_products() {
    tch::manual_seed(9);
    let sources = [randn(&[16, 32]), randn(&[32, 32]), randn(&[32, 32])];
    let f = |x: &[Tensor]| {
        tch::Cuda::cudnn_set_benchmark(true);
        let y = x[0].matmul(&x[1]).matmul(&x[2]).tanh();
        tch::Cuda::cudnn_set_benchmark(false);
        y.sum(Kind::Float)
    };
    let report = parity(&sources, f);
    // The first product, which the second saves, and the result of the function.
    assert_eq!(report.recomputed.count, 2, "{report}");
}

/// Its plan computes one save again, and everything that is made before.
#[derive(Clone, Debug)]
struct ComputesAgain(Headroom);

impl Policy for ComputesAgain {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        let at = |index| Position { strand: 0, index };
        let (bytes, scope, placement) = (4 << 16, ScopeId::default(), Placement::Recompute);
        let saves = vec![PlannedSave { bytes, scope, placement, position: at(2), varies: false }];
        let results: HashMap<_, _> = (0..2).map(|index| ((at(index), 0), placement)).collect();
        let courses = vec![Course::new(Schedule::new(saves, results, 0))];
        StepPlan { saves: Saves::Scheduled { courses, unplanned: self.0 }, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, _observed: Observation) {}
}

#[test]
fn what_a_rerun_reads_and_cannot_compute_again_moves_only_where_bytes_have_a_limit() {
    for (unplanned, moved) in [(Headroom::Free, 0), (Headroom::Bytes(0), 1)] {
        let cache = everything().policy(ComputesAgain(unplanned)).build().unwrap();
        let (weight, data) = (leaf(&randn(&[256, 256])), randn(&[256, 256]));
        let step = cache.step();
        let read = data.exp();
        // Now `read` has its bytes, and nothing to be computed from.
        drop(data);
        let loss = (read.sin() * &weight).sum(Kind::Float);
        step.flush();
        step.backward(&loss).unwrap();
        drop(loss);
        let report = step.finish().unwrap();
        assert_same_bits("the gradient", &[read.sin()], &grads(&[weight]));
        assert_eq!((report.recomputed.count, report.offloaded.count), (1, moved), "{report}");
    }
}
