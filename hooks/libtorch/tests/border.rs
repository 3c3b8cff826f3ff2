//! The border between Rust and C++: what is saved, what comes back, and errors in both directions.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ssdtrain_libtorch::{
    Active, Handle, Packed, SavedTensor, SavedTensorHooks, SavedVariable, Storage, activate, backward,
    install,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// What the test hooks do with each saved tensor.
#[derive(Clone, Copy, PartialEq)]
enum Act {
    Keep,
    /// Serve the storage itself.
    Hold,
    /// Serve a copy of the bytes.
    Copy,
    Stop,
    FailPack,
    PanicPack,
    FailUnpack,
    PanicUnpack,
}

#[derive(Default)]
struct Counts {
    packed: AtomicUsize,
    alive: AtomicUsize,
}

struct TestHooks {
    act: Act,
    counts: Arc<Counts>,
}

struct Held {
    act: Act,
    storage: Storage,
    counts: Arc<Counts>,
}

impl SavedTensorHooks for TestHooks {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        self.counts.packed.fetch_add(1, Ordering::SeqCst);
        match self.act {
            Act::Keep => Ok(Packed::Keep),
            Act::Stop => Ok(Packed::Stop),
            Act::FailPack => Err("refused to pack".to_owned()),
            Act::PanicPack => panic!("panicked while packing"),
            act => {
                let storage = saved.storage().expect("an eligible tensor");
                self.counts.alive.fetch_add(1, Ordering::SeqCst);
                Ok(Packed::Handle(Box::new(Held { act, storage, counts: Arc::clone(&self.counts) })))
            }
        }
    }
}

impl Handle for Held {
    fn unpack(&self) -> Result<Storage, String> {
        match self.act {
            Act::FailUnpack => Err("refused to unpack".to_owned()),
            Act::PanicUnpack => panic!("panicked while unpacking"),
            Act::Copy => {
                let copy = Storage::allocate(self.storage.bytes()).map_err(|error| error.to_string())?;
                let bytes = usize::try_from(self.storage.bytes()).expect("fits");
                // SAFETY: both storages hold `bytes` bytes and are alive; the new one overlaps nothing.
                unsafe {
                    copy.data()
                        .cast::<u8>()
                        .copy_from_nonoverlapping(self.storage.data().cast::<u8>(), bytes);
                }
                Ok(copy)
            }
            _ => Ok(self.storage.clone()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.counts.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

fn hooks(act: Act) -> (Active, Arc<Counts>) {
    install().expect("hooks can be installed");
    let counts = Arc::new(Counts::default());
    (activate(Arc::new(TestHooks { act, counts: Arc::clone(&counts) })), counts)
}

fn leaf(n: i64) -> Tensor {
    Tensor::randn([n], F32).set_requires_grad(true)
}

fn loss(x: &Tensor) -> Tensor {
    (x * 2.0).sin().sum(Kind::Float)
}

#[test]
fn gradients_are_right_whatever_the_hooks_hold() {
    for act in [Act::Keep, Act::Hold, Act::Copy] {
        let x = leaf(100);
        let (active, counts) = hooks(act);
        let loss = loss(&x);
        drop(active);
        assert!(counts.packed.load(Ordering::SeqCst) >= 1);
        backward(&loss, false, false).expect("backward");
        let expected = (&x.detach() * 2.0).cos() * 2.0;
        assert!(x.grad().allclose(&expected, 1e-6, 1e-6, false));
        drop(loss);
        assert_eq!(counts.alive.load(Ordering::SeqCst), 0, "every handle was released");
    }
}

#[test]
fn nothing_is_asked_without_active_hooks() {
    let (active, counts) = hooks(Act::Keep);
    drop(active);
    drop(loss(&leaf(10)));
    assert_eq!(counts.packed.load(Ordering::SeqCst), 0);
}

#[test]
fn active_hooks_nest() {
    let (outer, outer_counts) = hooks(Act::Keep);
    {
        let (_inner, inner_counts) = hooks(Act::Keep);
        drop(loss(&leaf(10)));
        assert!(inner_counts.packed.load(Ordering::SeqCst) > 0);
        assert_eq!(outer_counts.packed.load(Ordering::SeqCst), 0);
    }
    drop(loss(&leaf(10)));
    assert!(outer_counts.packed.load(Ordering::SeqCst) > 0);
    drop(outer);
}

/// Hooks that pass every tensor on to others. Hooks that take none are not asked unless nobody else is left.
struct Others {
    takes: bool,
    packed: AtomicUsize,
}

impl SavedTensorHooks for Others {
    fn takes(&self, _saved: &SavedTensor<'_>) -> bool {
        self.takes
    }

    fn pack(&self, _saved: &SavedTensor<'_>) -> Result<Packed, String> {
        self.packed.fetch_add(1, Ordering::SeqCst);
        Ok(Packed::Pass)
    }
}

#[test]
fn what_hooks_leave_to_others_is_for_the_next_older_ones_that_are_still_there() {
    let others = [true, false].map(|takes| Arc::new(Others { takes, packed: AtomicUsize::new(0) }));
    let (taker, counts) = hooks(Act::Keep);
    let (between, unasked) = hooks(Act::Keep);
    let _others = others.each_ref().map(|hooks| activate(Arc::clone(hooks) as _));
    // Those in between are dropped first.
    drop(between);
    drop(round_trip(&leaf(10)));
    assert_eq!(counts.packed.load(Ordering::SeqCst), 1);
    assert_eq!(unasked.packed.load(Ordering::SeqCst), 0);
    let asked = others.each_ref().map(|hooks| hooks.packed.load(Ordering::SeqCst));
    assert_eq!(asked, [1, 0]);
    // Nobody decides: the tensor is kept.
    drop(taker);
    let x = leaf(10);
    assert!(round_trip(&x).equal(&x));
    assert_eq!(counts.packed.load(Ordering::SeqCst), 1);
}

#[test]
fn an_error_or_a_panic_while_packing_comes_out_of_the_operation() {
    for (act, text) in [(Act::FailPack, "refused to pack"), (Act::PanicPack, "panicked while packing")] {
        let x = leaf(10);
        let (_active, _counts) = hooks(act);
        let error = x.f_sin().expect_err("the operation fails").to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_stop_comes_out_of_the_operation_without_a_backtrace() {
    let x = leaf(10);
    let (_active, _counts) = hooks(Act::Stop);
    let error = x.f_sin().expect_err("the operation fails").to_string();
    assert!(error.contains("ends this function here") && !error.contains("frame #"), "{error}");
    assert!(SavedVariable::new(&x).is_err());
}

#[test]
fn an_error_or_a_panic_while_unpacking_comes_out_of_backward() {
    for (act, text) in
        [(Act::FailUnpack, "refused to unpack"), (Act::PanicUnpack, "panicked while unpacking")]
    {
        let x = leaf(10);
        let (active, counts) = hooks(act);
        let loss = loss(&x);
        drop(active);
        let error = backward(&loss, false, false).expect_err("backward fails").to_string();
        assert!(error.contains(text), "{error}");
        assert!(!error.contains("frame #"), "no C++ backtrace: {error}");
        drop(loss);
        assert_eq!(counts.alive.load(Ordering::SeqCst), 0, "failing leaks nothing");
    }
}

#[test]
fn an_error_of_libtorch_comes_back_as_a_value() {
    let not_scalar = leaf(10) * 2.0;
    let error = backward(&not_scalar, false, false).expect_err("not a scalar").to_string();
    assert!(error.contains("scalar"), "{error}");
}

#[test]
fn a_second_backward_through_a_freed_graph_is_an_error() {
    let (active, _counts) = hooks(Act::Copy);
    let loss = loss(&leaf(10));
    drop(active);
    backward(&loss, false, false).expect("the first one");
    let error = backward(&loss, false, false).expect_err("the graph is gone").to_string();
    assert!(error.contains("second time"), "{error}");
}

fn round_trip(tensor: &Tensor) -> Tensor {
    SavedVariable::new(tensor).expect("saved").unpack().expect("back")
}

#[test]
fn a_view_is_rebuilt_as_it_was() {
    let (_active, _counts) = hooks(Act::Copy);
    let base = Tensor::randn([20, 30], F32);
    let view = base.narrow(0, 3, 10).transpose(0, 1);
    let back = round_trip(&view);
    assert_eq!((back.size(), back.stride(), back.kind()), (view.size(), view.stride(), view.kind()));
    assert!(back.equal(&view));
}

#[test]
fn sparse_tensors_are_not_eligible() {
    struct Eligible(AtomicUsize);
    impl SavedTensorHooks for Eligible {
        fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
            self.0.fetch_add(usize::from(saved.eligible()), Ordering::SeqCst);
            assert_eq!(saved.eligible(), saved.storage_id().is_some());
            Ok(Packed::Keep)
        }
    }
    install().expect("hooks can be installed");
    let hooks = Arc::new(Eligible(AtomicUsize::new(0)));
    let _active = activate(Arc::clone(&hooks) as _);
    let sparse = Tensor::eye(4, F32).to_sparse(None, None::<i64>, None::<i64>);
    drop(round_trip(&sparse));
    assert_eq!(hooks.0.load(Ordering::SeqCst), 0);
    drop(round_trip(&Tensor::eye(4, F32)));
    assert_eq!(hooks.0.load(Ordering::SeqCst), 1);
}

#[test]
fn a_weak_reference_holds_the_address_but_not_the_bytes() {
    let tensor = Tensor::randn([1000], F32);
    let storage = Storage::of(&tensor).expect("a storage");
    let weak = storage.downgrade();
    assert_eq!(weak.id(), storage.id());
    assert!(weak.upgrade().is_some());
    drop((tensor, storage));
    assert!(weak.upgrade().is_none());
}
