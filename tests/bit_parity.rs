//! Gradients with the cache have the same bits as gradients without it, whatever shape a saved tensor has.

mod common;

use common::{everything, grads, leaf, leaves, parity, randn, same_bits};
use ssdtrain::Offload;
use tch::{Kind, Tensor};

fn scalar(t: &Tensor) -> Tensor {
    t.to_kind(Kind::Float).square().sum(Kind::Float)
}

#[test]
fn an_activation_comes_back_from_the_disk() {
    let report = parity(&[randn(&[300, 70])], |x| scalar(&(&x[0] * 2.0).tanh().exp()));
    assert!(report.loaded.count > 0, "{report:?}");
}

#[test]
fn large_aligned_storages_come_back_from_the_disk() {
    let report = parity(&[randn(&[256, 1024]), randn(&[1024, 512])], |x| {
        scalar(&x[0].gelu("tanh").matmul(&x[1]).sigmoid())
    });
    assert!(report.loaded.bytes >= 1 << 20, "{report:?}");
}

#[test]
fn views_and_storage_offsets() {
    parity(&[randn(&[64, 96])], |x| {
        let y = &x[0] * 3.0;
        let part = y.narrow(0, 5, 40).narrow(1, 7, 30);
        scalar(&(part.exp() * y.narrow(0, 20, 40).narrow(1, 0, 30)))
    });
}

#[test]
fn transposes() {
    parity(&[randn(&[40, 60]), randn(&[40, 50])], |x| {
        let y = x[0].tanh();
        scalar(&y.transpose(0, 1).matmul(&x[1].sigmoid()))
    });
}

#[test]
fn overlapping_views() {
    parity(&[randn(&[1000])], |x| {
        let y = x[0].exp();
        let windows = y.unfold(0, 10, 3);
        scalar(&(windows.shallow_clone() * windows.flip([1])))
    });
}

#[test]
fn expanded_views() {
    parity(&[randn(&[1, 80]), randn(&[50, 80])], |x| {
        let row = x[0].exp().expand([50, 80], false);
        scalar(&(row * x[1].tanh()))
    });
}

#[test]
fn equal_shape_chunks_of_one_storage() {
    let report = parity(&[randn(&[128, 512])], |x| {
        let both = (&x[0] * 1.5).chunk(2, -1);
        scalar(&(both[0].silu() * &both[1]))
    });
    assert!(report.deduplicated.count >= 1, "both chunks are views of one storage: {report:?}");
}

#[test]
fn zero_size_and_scalar_tensors() {
    parity(&[randn(&[0, 5]), randn(&[]), randn(&[20])], |x| {
        let empty = x[0].exp().sum(Kind::Float);
        let one = x[1].exp();
        scalar(&(x[2].tanh() * one)) + empty
    });
}

#[test]
fn every_floating_kind() {
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half] {
        parity(&[randn(&[64, 64]).to_kind(kind)], |x| scalar(&(&x[0] * 2.0).tanh().exp()));
    }
}

#[test]
fn indices_and_masks() {
    let indices = Tensor::randint(40, [200], (Kind::Int64, tch::Device::Cpu));
    let mask = randn(&[200, 16]).gt(0.0);
    let report = parity(&[randn(&[40, 16]), indices, mask], |x| {
        let rows = x[0].tanh().index_select(0, &(&x[1] + 0));
        scalar(&rows.masked_fill(&x[2].logical_not(), 0.5).exp())
    });
    assert!(report.offloaded.count >= 3, "the index and the mask are saved too: {report:?}");
}

#[test]
fn a_tensor_saved_twice_is_stored_once() {
    let report = parity(&[randn(&[100, 100])], |x| {
        let y = &x[0] + 1.0;
        scalar(&(y.sin() + y.cos() + y.square()))
    });
    assert!(report.deduplicated.count >= 1, "{report:?}");
    assert!(report.offloaded.count < report.saved.count, "{report:?}");
}

#[test]
fn a_tensor_that_is_still_alive_is_forwarded() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[128, 128]));
    let step = cache.step();
    let y = &x * 2.0;
    let loss = scalar(&y.sin());
    step.flush();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert!(report.forwarded.bytes == 128 * 128 * 4, "y is alive: {report:?}");

    let plain = leaf(&x.detach());
    scalar(&(&plain * 2.0).sin()).backward();
    assert!(same_bits(&plain.grad(), &x.grad()));
}

#[test]
fn views_of_one_storage_come_back_as_views_of_one_storage() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss = {
        let both = (&x * 2.0).chunk(2, 0);
        scalar(&(&both[0] * &both[1]))
    };
    step.flush();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert_eq!(report.loaded.count, report.offloaded.count, "each storage was loaded once: {report:?}");
}

#[test]
fn dropout_with_the_same_seed() {
    parity(&[randn(&[128, 256])], |x| scalar(&x[0].dropout(0.3, true).gelu("tanh").dropout(0.1, true)));
}

#[test]
fn no_grad_regions_save_nothing() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    drop(tch::no_grad(|| scalar(&x.exp())));
    let report = step.finish().unwrap();
    assert_eq!(report.saved.count, 0);
}

#[test]
fn fused_attention() {
    parity(&[randn(&[2, 4, 64, 32]), randn(&[2, 4, 64, 32]), randn(&[2, 4, 64, 32])], |x| {
        let [q, k, v] = [0, 1, 2].map(|i| x[i].tanh());
        scalar(&Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false))
    });
}

#[test]
fn layer_norm_embedding_and_cross_entropy() {
    let tokens = Tensor::randint(50, [8, 32], (Kind::Int64, tch::Device::Cpu));
    parity(&[randn(&[50, 48]), randn(&[48]), randn(&[48]), tokens], |x| {
        let h = Tensor::embedding(&x[0], &x[3], -1, false, false);
        let h = h.layer_norm([48], Some(&x[1]), Some(&x[2]), 1e-5, true);
        let logits = h.matmul(&x[0].transpose(0, 1));
        logits.view([-1, 50]).cross_entropy_for_logits(&x[3].view([-1]))
    });
}

#[test]
fn gradients_accumulate_over_micro_batches() {
    let weight = randn(&[64, 64]);
    let batches: Vec<Tensor> = (0..3).map(|_| randn(&[32, 64])).collect();
    let forward = |w: &Tensor, x: &Tensor| scalar(&x.matmul(w).tanh().exp());

    let plain = leaf(&weight);
    for x in &batches {
        forward(&plain, x).backward();
    }
    let cache = everything().build().unwrap();
    let cached = leaf(&weight);
    let step = cache.step();
    for (index, x) in batches.iter().enumerate() {
        step.micro_batch(index);
        step.backward(&forward(&cached, x)).unwrap();
    }
    step.finish().unwrap();
    assert!(same_bits(&plain.grad(), &cached.grad()));
}

#[test]
fn several_micro_batches_may_be_open_at_once() {
    let sources = [randn(&[64, 64]), randn(&[64, 64])];
    let forward = |x: &Tensor| scalar(&(x * 2.0).tanh().exp());
    let plain = leaves(&sources);
    for x in &plain {
        forward(x).backward();
    }
    let cache = everything().build().unwrap();
    let cached = leaves(&sources);
    let step = cache.step();
    let losses: Vec<Tensor> = cached
        .iter()
        .enumerate()
        .map(|(index, x)| {
            step.micro_batch(index);
            forward(x)
        })
        .collect();
    step.flush();
    for (index, loss) in losses.iter().enumerate() {
        step.micro_batch(index);
        step.backward(loss).unwrap();
    }
    step.finish().unwrap();
    common::assert_same_bits("micro-batches", &grads(&plain), &grads(&cached));
}

#[test]
fn the_smallest_budget_and_no_prefetch_change_no_bit() {
    let source = randn(&[512, 512]);
    let forward = |x: &Tensor| (0..8).fold(x * 1.01, |y, _| (y * 1.01).tanh().exp() * 0.3).sum(Kind::Float);
    let plain = leaf(&source);
    forward(&plain).backward();
    let cache = everything().policy(Offload::default().device_budget(1).prefetch(0)).build().unwrap();
    let cached = leaf(&source);
    let step = cache.step();
    step.backward(&forward(&cached)).unwrap();
    step.finish().unwrap();
    assert!(same_bits(&plain.grad(), &cached.grad()));
}
