//! What a thread computes while it ends, in the destructors of its own values: its hooks are gone, and writes are still seen.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::Mutex;
use ssdtrain_libtorch::{
    Hooks, Packed, SavedTensor, SavedTensorHooks, Storage, StorageId, Watch, WriteObserver, activate,
    install, is_active, observe_writes,
};
use tch::{Device, Kind, Tensor};

#[derive(Default)]
struct Asked(AtomicU32);

impl SavedTensorHooks for Asked {
    fn pack(&self, _: &SavedTensor<'_>) -> Result<Packed, String> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(Packed::Pass)
    }
}

struct Nobody;

impl WriteObserver for Nobody {
    fn written(&self, _: StorageId) {}
}

/// Saves a tensor, and changes one. Returns whether the change was seen.
fn compute() -> bool {
    let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    drop(&x * &x);
    let y = Tensor::ones([4], (Kind::Float, Device::Cpu));
    let watch = Watch::new(&Storage::of(&y).unwrap());
    drop(y.shallow_clone().f_add_scalar_(1.0).unwrap());
    watch.is_written()
}

/// Computes when it is dropped, and tells what was seen then.
struct Late(Arc<Mutex<Option<(bool, bool)>>>);

impl Drop for Late {
    fn drop(&mut self) {
        *self.0.lock() = Some((compute(), is_active()));
    }
}

thread_local! {
    static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
}

#[test]
fn hooks_that_were_never_taken_off_end_with_their_thread() {
    install().unwrap();
    let observer: Arc<dyn WriteObserver> = Arc::new(Nobody);
    observe_writes(Arc::downgrade(&observer) as Weak<dyn WriteObserver>).unwrap();
    let (asked, seen) = (Arc::new(Asked::default()), Arc::default());
    let (hooks, late) = (Arc::clone(&asked) as Hooks, Late(Arc::clone(&seen)));
    let work = move || {
        // What a thread has first ends last.
        LATE.set(Some(late));
        let _never_dropped = ManuallyDrop::new(activate(hooks));
        assert!(compute());
    };
    thread::Builder::new().spawn(work).unwrap().join().unwrap();
    assert_eq!(*seen.lock(), Some((true, false)));
    assert_eq!(asked.0.load(Ordering::Relaxed), 2, "both factors, once");
}
