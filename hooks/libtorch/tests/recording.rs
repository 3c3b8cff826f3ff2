//! Operations on record: what is recorded, and that it can be repeated with the same bits.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::Arc;

use parking_lot::Mutex;
use ssdtrain_libtorch::{Packed, Recorded, Recording, SavedTensor, SavedTensorHooks, Storage, activate};
use tch::{Device, Kind, Tensor, no_grad};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn recording() -> Arc<Recording> {
    Arc::new(Recording::new(None).unwrap())
}

fn x() -> Tensor {
    Tensor::randn([8, 16], F32).set_requires_grad(true)
}

/// The operation that made the result of `compute`, which is recorded.
fn maker(
    recording: &Arc<Recording>,
    compute: impl FnOnce() -> Tensor,
) -> (Tensor, Option<(Recorded, usize)>) {
    let result = {
        let _recording = recording.record();
        compute()
    };
    let storage = Storage::of(&result).unwrap();
    let maker = recording.maker(&storage);
    (result, maker)
}

/// Runs an operation again with what it read, which is made again if it is gone, and returns what it makes.
fn again(recorded: &Recorded, recording: &Recording) -> Vec<Storage> {
    let read = recorded.read().enumerate().map(|(index, read)| {
        read.unwritten().unwrap_or_else(|| {
            let (maker, made) = recorded.maker(index, recording).unwrap();
            again(&maker, recording).swap_remove(made)
        })
    });
    recorded.repeat(&read.collect::<Vec<_>>()).unwrap()
}

fn bytes(storage: &Storage) -> &[u8] {
    // SAFETY: the storage is borrowed, on the CPU, and nothing writes to it.
    unsafe { std::slice::from_raw_parts(storage.data().cast(), usize::try_from(storage.bytes()).unwrap()) }
}

#[test]
fn what_is_repeated_has_the_same_bits() {
    type Compute = fn(&Tensor) -> Tensor;
    let operations: [(&str, Compute); 15] = [
        ("aten::silu", |x| x.silu()),
        ("aten::silu", |x| no_grad(|| x.silu())),
        ("aten::mul", |x| x * x.sigmoid()),
        ("aten::mul", |x| x * 3.0),
        ("aten::add", |x| x + x.transpose(0, 1).contiguous().view([8, 16])),
        ("aten::gelu", |x| x.gelu("tanh")),
        ("aten::_to_copy", |x| x.to_kind(Kind::BFloat16)),
        ("aten::rsqrt", |x| (x * x).mean_dim(-1, true, Kind::Float).rsqrt()),
        ("aten::_softmax", |x| x.softmax(-1, Kind::Float)),
        ("aten::cat", |x| Tensor::cat(&[x, &x.neg()], -1)),
        ("aten::native_layer_norm", |x| x.layer_norm([16], None::<&Tensor>, None::<&Tensor>, 1e-5, false)),
        ("aten::mm", |x| x.matmul(&x.transpose(0, 1))),
        ("aten::masked_fill", |x| x.masked_fill(&x.gt(0.0), 2.0)),
        ("aten::clone", |x| x.narrow(1, 3, 5).transpose(0, 1).contiguous()),
        ("aten::embedding", |x| Tensor::embedding(x, &Tensor::from_slice(&[3_i64, 1, 3]), -1, false, false)),
    ];
    let recording = recording();
    for (name, compute) in operations {
        let x = x();
        let (result, maker) = maker(&recording, || compute(&x));
        let (recorded, made) = maker.expect(name);
        assert_eq!(recorded.name(), name);
        let first = Storage::of(&result).unwrap();
        let again = again(&recorded, &recording);
        assert_ne!(again[made].id(), first.id(), "{name}");
        assert_eq!(bytes(&again[made]), bytes(&first), "{name}");
    }
}

#[test]
fn batch_norm_is_repeated_and_updates_its_statistics_once() {
    let recording = recording();
    for train in [true, false] {
        let x = Tensor::randn([4, 3, 5, 5], F32).set_requires_grad(true);
        let [weight, bias, mean, var] = [1.0, 2.0, 3.0, 4.0].map(|value| Tensor::full([3], value, F32));
        let (result, maker) = maker(&recording, || {
            x.batch_norm(Some(&weight), Some(&bias), Some(&mean), Some(&var), train, 0.1, 1e-5, false)
        });
        let (recorded, made) = maker.unwrap();
        assert_eq!((recorded.name(), made), ("aten::native_batch_norm", 0));
        let read: Vec<_> = recorded.read().map(|read| read.id()).collect();
        assert_eq!(read.contains(&Storage::of(&mean).map(|mean| mean.id())), !train);
        let updated = [&mean, &var].map(Tensor::copy);
        assert_eq!(bytes(&again(&recorded, &recording)[0]), bytes(&Storage::of(&result).unwrap()));
        assert!(updated[0].equal(&mean) && updated[1].equal(&var), "{mean} {var}");
        assert_eq!(mean.mean(Kind::Float).double_value(&[]) != 3.0, train);
    }
}

#[test]
fn a_chain_is_followed_through_what_is_gone() {
    let recording = recording();
    let x = x();
    let (_result, maker) = maker(&recording, || (&x * 2.0).silu().neg());
    let (neg, _) = maker.unwrap();
    assert!(neg.read().all(|read| read.unwritten().is_none()), "the result of silu is gone");
    let (silu, made) = neg.maker(0, &recording).unwrap();
    assert_eq!((silu.name(), made), ("aten::silu", 0));
    let (mul, _) = silu.maker(0, &recording).unwrap();
    assert_eq!(mul.name(), "aten::mul");
    assert!(mul.maker(0, &recording).is_none(), "x was made before");
    assert_eq!(mul.read().map(|read| read.id()).collect::<Vec<_>>(), [Storage::of(&x).map(|x| x.id())]);
}

#[test]
fn what_may_give_other_bits_is_not_recorded() {
    type Compute = fn(&Tensor) -> Tensor;
    let operations: [(&str, Compute); 9] = [
        ("what is made to be written to", |_| Tensor::from_slice(&[1.0_f32, 2.0])),
        ("random numbers", |x| x.rand_like()),
        ("uninitialised memory", |x| x.empty_like()),
        ("in place", |x| (x * 1.0).relu_()),
        ("in place, with a mask", |x| (x * 1.0).f_masked_fill_(&x.gt(0.0), 1.0).unwrap()),
        ("dropout", |x| x.dropout(0.5, true)),
        ("a place for the result", |x| {
            let out = x.zeros_like();
            drop(no_grad(|| x.f_add_out(&out, x).unwrap()));
            out
        }),
        ("a view of what it reads", |x| x.view([16, 8])),
        ("written since", |x| {
            let y = x.silu();
            drop(y.detach().fill_(1.0));
            y
        }),
    ];
    let recording = recording();
    for (what, compute) in operations {
        let x = x();
        let (_result, maker) = maker(&recording, || compute(&x));
        // Dropout multiplies by what was drawn: that may be repeated.
        let maker = maker.filter(|(recorded, _)| recorded.name() != "aten::mul");
        assert!(maker.is_none(), "{what}: {maker:?}");
    }
}

#[test]
fn what_an_operation_read_is_not_served_once_it_was_written() {
    let recording = recording();
    let (a, b) = (Tensor::ones([64], F32), Tensor::ones([64], F32));
    let (_result, maker) = maker(&recording, || &a * &b);
    let (mul, _) = maker.unwrap();
    drop(b.detach().fill_(2.0));
    let unwritten: Vec<_> = mul.read().map(|read| read.unwritten().is_some()).collect();
    assert_eq!(unwritten, [true, false]);
}

#[test]
fn writes_to_thousands_of_other_storages_leave_what_was_made_known() {
    let recording = recording();
    let ones = || Tensor::ones([8], F32);
    let made: Vec<_> = (0..256).map(|_| maker(&recording, || ones() + 1.0)).collect();
    let others: Vec<_> = (0..4096).map(|_| ones()).collect();
    for other in &others {
        drop(other.detach().fill_(2.0));
    }
    let known = made.iter().filter(|(result, _)| recording.maker(&Storage::of(result).unwrap()).is_some());
    // Storages of two regions of the heap may share a counter.
    assert!(known.count() > 250);
}

#[test]
fn a_storage_that_was_written_between_two_operations_has_no_maker_for_the_second() {
    let recording = recording();
    let x = x();
    let (_result, maker) = maker(&recording, || {
        let y = &x * 2.0;
        drop(y.detach().fill_(1.0));
        y.silu()
    });
    let (silu, _) = maker.unwrap();
    assert!(silu.maker(0, &recording).is_none());
}

/// The clone is what autograd saves of a tensor that an operation is about to change.
#[test]
fn a_copy_that_is_made_while_its_source_is_being_written_has_no_source() {
    let recording = recording();
    let x = x();
    let _recording = recording.record();
    let mut y = &x * 2.0;
    let hooks = Arc::new(Saves { recording: Arc::clone(&recording), sources: Mutex::default() });
    {
        let _active = activate(Arc::clone(&hooks) as Arc<dyn SavedTensorHooks>);
        drop(y.sin_());
    }
    assert_eq!(*hooks.sources.lock(), [false], "sin_ saves a copy of what it read");
}

/// Notes whether what saved tensors were made from could be saved instead.
struct Saves {
    recording: Arc<Recording>,
    sources: Mutex<Vec<bool>>,
}

impl SavedTensorHooks for Saves {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        if let Some((copy, _)) = saved.storage().and_then(|storage| self.recording.maker(&storage)) {
            self.sources.lock().extend(copy.read().map(|read| read.unwritten().is_some()));
        }
        Ok(Packed::Keep)
    }
}

#[test]
fn the_newest_of_a_threads_recordings_records() {
    let (outer, inner) = (recording(), recording());
    let x = x();
    let of_outer = outer.record();
    let of_inner = inner.record();
    let first = x.silu();
    drop(of_inner);
    let second = x.silu();
    drop(of_outer);
    let third = x.silu();
    let has = |recording: &Recording, t: &Tensor| recording.maker(&Storage::of(t).unwrap()).is_some();
    assert_eq!([&first, &second, &third].map(|t| has(&outer, t)), [false, true, false]);
    assert_eq!([&first, &second, &third].map(|t| has(&inner, t)), [true, false, false]);
}

#[test]
fn backward_is_not_recorded() {
    let recording = recording();
    let x = x();
    let _recording = recording.record();
    let loss = (&x * &x).sum(Kind::Float);
    let gradient = Tensor::run_backward(&[&loss], &[&x], true, true).remove(0);
    assert!(gradient.requires_grad());
    assert!(recording.maker(&Storage::of(&gradient).unwrap()).is_none());
}

#[test]
fn operations_under_autocast_are_recorded_with_what_they_read() {
    let recording = recording();
    let x = x();
    let _autocast = ssdtrain_libtorch::CpuAutocast::enter();
    let (result, maker) = maker(&recording, || x.matmul(&x.transpose(0, 1)));
    assert_eq!(result.kind(), Kind::BFloat16);
    let (product, made) = maker.unwrap();
    let (cast, from) = product.maker(0, &recording).unwrap();
    assert_eq!(cast.name(), "aten::_to_copy");
    let half = again(&cast, &recording).swap_remove(from);
    assert_eq!(
        bytes(&product.repeat(&vec![half; product.read().len()]).unwrap()[made]),
        bytes(&Storage::of(&result).unwrap())
    );
}

#[test]
fn a_repeated_operation_gets_the_storages_it_asks_for() {
    let recording = recording();
    let x = x();
    let (_result, maker) = maker(&recording, || x.silu());
    let failure = maker.unwrap().0.repeat(&[]).unwrap_err();
    assert!(failure.0.contains("0 storages for an operation that read 1"), "{failure}");
}

#[test]
fn of_attention_the_logarithms_of_its_sums_are_made_again_too() {
    let recording = recording();
    let x = Tensor::randn([1, 2, 8, 16], F32).set_requires_grad(true);
    let (output, sums) = {
        let _recording = recording.record();
        Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
            &x,
            &x,
            &x,
            0.0,
            true,
            None::<&Tensor>,
            None,
        )
    };
    let has = |t: &Tensor| recording.maker(&Storage::of(t).unwrap()).is_some();
    assert!(has(&output) && has(&sums));
}
