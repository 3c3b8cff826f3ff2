//! What is left of other threads' operations in a process that is forked off.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::Mutex;
use ssdtrain_libtorch::{Reads, Storage, StorageId, Watch, WriteObserver, notice_forks, observe_writes};
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
        // SAFETY: a plain system call; the child uses nothing but libtorch, on its only thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a plain system call.
            unsafe { libc::alarm(60) };
            let passed =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rewinds_and_restores(&mean, &var)));
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(passed.is_err())) };
        }
        drop(go_on);
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0), "14 is the status of a child that hangs");
    });
}
