//! What a thread computes while it ends, in the destructors of its own values: its hooks and recordings are gone, and writes are still seen.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::Mutex;
use ssdtrain_libtorch::{
    Hooks, Packed, Reads, Recording, SavedTensor, SavedTensorHooks, SavedVariable, Storage, StorageId, Watch,
    WriteObserver, activate, install, is_active, observe_writes,
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

/// Does something when it is dropped.
struct Late(Option<Box<dyn FnOnce() + Send>>);

impl Drop for Late {
    fn drop(&mut self) {
        self.0.take().unwrap()();
    }
}

thread_local! {
    static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
}

/// Runs a thread that does one thing, and another while it ends: what the other returns.
fn at_the_end<T: Send + 'static>(
    work: impl FnOnce() + Send + 'static,
    late: impl FnOnce() -> T + Send + 'static,
) -> T {
    let seen = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&seen);
    let work = move || {
        // What a thread has first ends last.
        LATE.set(Some(Late(Some(Box::new(move || *tell.lock() = Some(late()))))));
        work();
    };
    thread::Builder::new().spawn(work).unwrap().join().unwrap();
    seen.lock().take().unwrap()
}

#[test]
fn hooks_that_were_never_taken_off_end_with_their_thread() {
    install().unwrap();
    let observer: Arc<dyn WriteObserver> = Arc::new(Nobody);
    observe_writes(Arc::downgrade(&observer) as Weak<dyn WriteObserver>).unwrap();
    let asked = Arc::new(Asked::default());
    let hooks = Arc::clone(&asked) as Hooks;
    let work = move || {
        let _never_dropped = ManuallyDrop::new(activate(hooks));
        assert!(compute());
    };
    assert_eq!(at_the_end(work, || (compute(), is_active())), (true, false));
    assert_eq!(asked.0.load(Ordering::Relaxed), 2, "both factors, once");
}

#[test]
fn recordings_that_were_never_ended_end_with_their_thread() {
    let recording = Arc::new(Recording::new(None).unwrap());
    let (alive, x) = (Arc::downgrade(&recording), Tensor::ones([4], (Kind::Float, Device::Cpu)));
    let y = x.shallow_clone();
    let work = move || {
        let _never_dropped = ManuallyDrop::new(recording.record());
        drop(x.f_sin().unwrap());
    };
    let sum = at_the_end(work, move || y.f_exp().unwrap().f_sum(Kind::Float).unwrap().double_value(&[]));
    assert!((sum - 4.0 * 1_f64.exp()).abs() < 1e-5, "{sum}");
    assert!(alive.upgrade().is_none(), "nobody records any more");
}

#[test]
fn hooks_and_recordings_of_a_thread_that_ends_do_nothing() {
    let asked = Arc::new(Asked::default());
    let hooks = Arc::clone(&asked) as Hooks;
    let recording = Arc::new(Recording::new(None).unwrap());
    let (hooks_of_work, recorded) = (Arc::clone(&hooks), Arc::clone(&recording));
    let work = move || drop((activate(hooks_of_work), recorded.record()));
    let late = move || {
        let _hooks = (activate(hooks), recording.record());
        compute()
    };
    at_the_end(work, late);
    assert_eq!(asked.0.load(Ordering::Relaxed), 0);
}

#[test]
fn what_a_thread_that_ends_reads_is_not_noted() {
    fn reads() -> Option<String> {
        let reading = match Reads::begin() {
            Ok(reading) => reading,
            Err(error) => return Some(error.0),
        };
        drop(Tensor::ones([4], (Kind::Float, Device::Cpu)).f_sin().unwrap());
        drop(reading.end());
        None
    }
    install().unwrap();
    let error = at_the_end(|| assert_eq!(reads(), None), reads);
    assert!(error.as_ref().is_some_and(|error| error.contains("the thread ends")), "{error:?}");
}

#[test]
fn errors_of_a_thread_that_ends_have_their_text() {
    fn fails() -> String {
        let outside = SavedVariable::new(&Tensor::ones([4], (Kind::Float, Device::Cpu)));
        outside.err().map(|error| error.0).unwrap_or_default()
    }
    install().unwrap();
    let early = Arc::new(Mutex::new(String::new()));
    let tell = Arc::clone(&early);
    let late = at_the_end(move || *tell.lock() = fails(), fails);
    let early = early.lock();
    assert!(early.len() > 40 && early.starts_with(&late[..40]), "{early:?}: {late:?}");
}
