//! What operations write and read, as the observer sees it.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use ssdtrain_libtorch::{Reads, Storage, StorageId, Watch, WriteObserver, observe_writes};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn, no_grad};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[derive(Default)]
struct Heard(Mutex<Vec<StorageId>>);

impl WriteObserver for Heard {
    fn written(&self, storage: StorageId) {
        self.0.lock().push(storage);
    }
}

/// Whether `write` is reported as a write to the storage of `t`.
fn is_seen(t: &Tensor, write: impl FnOnce()) -> bool {
    let heard = Arc::new(Heard::default());
    let observer: Weak<dyn WriteObserver> = Arc::downgrade(&(Arc::clone(&heard) as Arc<dyn WriteObserver>));
    observe_writes(observer).unwrap();
    let storage = Storage::of(t).unwrap();
    let watch = Watch::new(&storage);
    write();
    let told = heard.0.lock().contains(&storage.id());
    assert_eq!(told, watch.is_written());
    told
}

fn x() -> Tensor {
    Tensor::ones([4, 4], F32)
}

#[test]
fn writes_are_seen_whatever_counts_their_versions() {
    let t = x();
    assert!(is_seen(&t, || drop(t.shallow_clone().f_add_scalar_(1.0).unwrap())), "in place");
    assert!(is_seen(&t, || drop(t.data().fill_(3.0))), "through data()");
    assert!(is_seen(&t, || drop(t.select(0, 1).fill_(3.0))), "through a view");
    assert!(
        is_seen(&t, || drop(t.unsafe_chunk(2, 1)[1].sigmoid_())),
        "through a piece with a counter of its own"
    );
    assert!(is_seen(&t, || drop(x().f_add_out(&t, &x()).unwrap())), "as a place for a result");
    assert!(is_seen(&t, || drop(t.shallow_clone().resize_([9, 9]))), "resized");
    let t = x();
    let there = t.shallow_clone();
    let thread = std::thread::Builder::new();
    let on_another = || thread.spawn(move || drop(there.data().fill_(3.0))).unwrap().join().unwrap();
    assert!(is_seen(&t, on_another), "on another thread");
}

#[test]
fn what_is_read_or_seen_in_another_shape_is_not_written() {
    let t = x();
    assert!(!is_seen(&t, || drop(&t + &t)));
    assert!(!is_seen(&t, || drop(t.shallow_clone().unsqueeze_(0))));
    assert!(!is_seen(&t, || drop(t.shallow_clone().set_requires_grad(true))));
    assert!(!is_seen(&t, || drop((&t + 1.0).sigmoid_())));
}

#[test]
fn an_optimizer_of_libtorch_is_seen() {
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[4]);
    let mut opt = nn::Sgd::default().build(&vs, 0.1).unwrap();
    (&w * 2.0).sum(Kind::Float).backward();
    assert!(is_seen(&w, || opt.step()));
}

#[test]
fn statistics_of_batch_norm_are_written_in_training_only() {
    let (mean, var) = (Tensor::zeros([4], F32), Tensor::ones([4], F32));
    let norm = |train: bool| {
        let none = None::<&Tensor>;
        drop(x().batch_norm(none, none, Some(&mean), Some(&var), train, 0.1, 1e-5, false));
    };
    assert!(is_seen(&mean, || norm(true)) && is_seen(&var, || norm(true)));
    assert!(!is_seen(&mean, || norm(false)) && !is_seen(&var, || norm(false)));
}

fn reads_of(f: impl FnOnce()) -> Reads {
    let reading = Reads::begin().unwrap();
    f();
    reading.end().unwrap()
}

#[test]
fn what_was_read_is_checked_and_what_was_made_is_not() {
    let (a, b, other) = (x(), x(), x());
    let mut made = None;
    let reads = reads_of(|| made = Some((&a + &b).exp()));
    drop(other.data().fill_(1.0));
    drop(made.unwrap().fill_(1.0));
    reads.check_unchanged_within().unwrap();
    reads.check_unchanged_since().unwrap();
    drop(b.data().fill_(1.0));
    let error = reads.check_unchanged_since().unwrap_err();
    assert!(error.0.contains("[4, 4]"), "{error}");
    reads.check_unchanged_within().unwrap();
}

#[test]
fn what_a_function_makes_it_may_change() {
    let a = x();
    let reads = reads_of(|| {
        let mut parts = (&a * 2.0).unsafe_chunk(2, 1);
        drop(parts[0].sigmoid_());
        drop(a.masked_fill(&a.gt(0.0), 1.0).relu_());
        let vs = nn::VarStore::new(Device::Cpu);
        let lstm = nn::lstm(vs.root(), 4, 3, nn::RNNConfig::default());
        drop(nn::RNN::seq(&lstm, &a.view([1, 4, 4])));
        no_grad(|| drop(a.layer_norm([4], None::<&Tensor>, None::<&Tensor>, 1e-5, false)));
    });
    reads.check_unchanged_within().unwrap();
}

#[test]
fn what_a_function_changes_that_it_did_not_make_is_told() {
    let (a, counter) = (x(), Tensor::zeros([3], F32));
    let reads =
        reads_of(|| drop((&a + counter.shallow_clone().f_add_scalar_(1.0).unwrap().sum(Kind::Float)).exp()));
    let error = reads.check_unchanged_within().unwrap_err();
    assert!(error.0.contains("[3]"), "{error}");
}

#[test]
fn notes_may_be_nested() {
    let (a, b) = (x(), x());
    let outer = Reads::begin().unwrap();
    let made = &a * 2.0;
    let inner = Reads::begin().unwrap();
    drop(&made + &b);
    let inner = inner.end().unwrap();
    let outer = outer.end().unwrap();
    drop(made.data().fill_(0.0));
    assert!(inner.check_unchanged_since().is_err());
    outer.check_unchanged_since().unwrap();
    drop(b.data().fill_(0.0));
    assert!(outer.check_unchanged_since().is_err());
}

#[test]
fn statistics_are_put_back() {
    let (mean, var) = (Tensor::zeros([4], F32), Tensor::ones([4], F32));
    let norm = || {
        let none = None::<&Tensor>;
        drop((x() + 1.0).batch_norm(none, none, Some(&mean), Some(&var), true, 0.1, 1e-5, false));
    };
    let reads = reads_of(norm);
    reads.check_unchanged_within().unwrap();
    let (first, version) = (mean.copy(), ssdtrain_libtorch::version(&mean));
    let statistics = reads.rewind_statistics().unwrap();
    assert_eq!(mean, Tensor::zeros([4], F32));
    norm();
    statistics.restore(None).unwrap();
    assert_eq!(mean, first);
    assert_eq!(ssdtrain_libtorch::version(&mean), version);
    reads.check_unchanged_since().unwrap();
}
