//! What is left of other threads' operations in a process that is forked off.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::Mutex;
use ssdtrain_libtorch::{
    PerProcess, Reads, Storage, StorageId, Watch, WriteObserver, notice_forks, observe_writes,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Holds up the first operation that writes to a storage.
struct HoldsUp {
    storage: StorageId,
    begun: Sender<()>,
    go: Mutex<Receiver<()>>,
}

impl WriteObserver for HoldsUp {
    fn written(&self, storage: StorageId) {
        if storage == self.storage && self.begun.send(()).is_ok() {
            self.go.lock().recv().ok();
        }
    }
}

fn norm(mean: &Tensor, var: &Tensor) {
    let none = None::<&Tensor>;
    drop(Tensor::ones([4, 4], F32).batch_norm(none, none, Some(mean), Some(var), true, 0.1, 1e-5, false));
}

/// As a rerun of batch normalisation does.
fn rewinds_and_restores(mean: &Tensor, var: &Tensor) {
    let reading = Reads::begin().unwrap();
    norm(mean, var);
    let reads = reading.end().unwrap();
    reads.rewind_statistics().unwrap().restore(None).unwrap();
}

/// How a child ends that runs this, on its only thread.
fn status_of_child(run: impl FnOnce()) -> i32 {
    // SAFETY: a plain system call; the child uses nothing but this library and libtorch.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a plain system call.
        unsafe { libc::alarm(60) };
        let passed = catch_unwind(AssertUnwindSafe(run));
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::from(passed.is_err())) };
    }
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    status
}

#[test]
fn a_child_does_not_wait_for_updates_that_other_threads_had_begun() {
    tch::set_num_threads(1);
    let (mean, var) = (Tensor::zeros([4], F32), Tensor::ones([4], F32));
    // Whatever is started once is started by now.
    rewinds_and_restores(&mean, &var);
    notice_forks();
    let storage = Storage::of(&mean).unwrap();
    let _watch = Watch::new(&storage);
    let ((begun, begins), (go_on, go)) = (channel(), channel::<()>());
    let holds_up: Arc<dyn WriteObserver> =
        Arc::new(HoldsUp { storage: storage.id(), begun, go: Mutex::new(go) });
    let observer: Weak<dyn WriteObserver> = Arc::downgrade(&holds_up);
    observe_writes(observer).unwrap();
    thread::scope(|scope| {
        let (mean_there, var_there) = (mean.shallow_clone(), var.shallow_clone());
        scope.spawn(move || norm(&mean_there, &var_there));
        begins.recv().unwrap();
        drop(begins);
        let status = status_of_child(|| rewinds_and_restores(&mean, &var));
        drop(go_on);
        assert_eq!(status, 0, "14 is the status of a child that hangs");
    });
}

#[test]
fn what_another_thread_holds_of_a_process_is_free_in_a_child() {
    static OWN: PerProcess<Mutex<u32>> = PerProcess::new(Mutex::new(1));
    notice_forks();
    let (begun, begins) = channel();
    let (go_on, go) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut own = OWN.here().lock();
            *own += 1;
            begun.send(()).unwrap();
            go.recv().ok();
        });
        begins.recv().unwrap();
        let status = status_of_child(|| {
            *OWN.here().lock() += 3;
            assert_eq!(*OWN.here().lock(), 3, "a child begins with the default");
            let status = status_of_child(|| assert_eq!(*OWN.here().lock(), 0));
            assert_eq!(status, 0, "of a child's child");
        });
        drop(go_on);
        assert_eq!(status, 0, "14 is the status of a child that hangs");
    });
    assert_eq!(*OWN.here().lock(), 2);
}
