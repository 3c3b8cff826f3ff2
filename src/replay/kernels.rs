//! Kernels of chains, compiled in the background.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ssdtrain_store::contained;

use crate::device::{Compiler, Kernel, has_room_for_tables};
use crate::fusion::Chain;
use crate::sync::{Mutex, Sender, Thread, channel};
use crate::telemetry::events::warn_once;

/// The kernels of one GPU.
pub(super) struct Kernels {
    device: usize,
    give: Arc<Give>,
    worker: Mutex<Option<Worker>>,
    /// Nothing more is compiled.
    is_over: Arc<AtomicBool>,
    /// Whether they can look results up.
    has_tables: OnceLock<bool>,
}

/// Is given the kernel of a chain, or none if it cannot be compiled.
type Give = dyn Fn(Chain, Option<Arc<Kernel>>) + Send + Sync;

/// A thread that compiles.
struct Worker {
    /// `None` ends the thread.
    given: Sender<Option<Chain>>,
    thread: Thread,
}

impl Kernels {
    /// Those of the CUDA device with this number. `give` is called for each chain that was asked for.
    pub(super) fn new(
        device: usize,
        give: impl Fn(Chain, Option<Arc<Kernel>>) + Send + Sync + 'static,
    ) -> Kernels {
        let (worker, is_over, has_tables) = (Mutex::new(None), Arc::default(), OnceLock::new());
        Kernels { device, give: Arc::new(give), worker, is_over, has_tables }
    }

    /// Whether they can look results up.
    pub(super) fn have_tables(&self) -> bool {
        *self.has_tables.get_or_init(|| has_room_for_tables(self.device))
    }

    /// Whether there may be any: false once it is known that they cannot be compiled.
    pub(super) fn is_able(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Has a chain compiled.
    pub(super) fn ask_for(&self, chain: &Chain) {
        let mut worker = self.worker.lock();
        if worker.is_none() {
            match Worker::start(self.device, Arc::clone(&self.give), Arc::clone(&self.is_over)) {
                Ok(started) => *worker = Some(started),
                Err(error) => {
                    return tracing::warn!(%error, "operations that are computed again are not compiled: no thread");
                }
            }
        }
        if let Some(worker) = &*worker {
            // If the thread has ended, the chain waits for ever, and runs as single operations.
            drop(worker.given.send(Some(chain.clone())));
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let Some(Worker { given, thread }) = self.worker.lock().take() else { return };
        self.is_over.store(true, Ordering::Relaxed);
        drop(given.send(None));
        if thread.join().is_err() {
            tracing::error!("the thread that compiles kernels panicked");
        }
    }
}

impl Worker {
    fn start(device: usize, give: Arc<Give>, is_over: Arc<AtomicBool>) -> io::Result<Worker> {
        let (given, asked) = channel::<Option<Chain>>();
        let thread = Thread::start("ssdtrain-nvrtc", move || {
            let compiler = Compiler::open(device);
            if let Err(error) = &compiler {
                tracing::warn!(%error, "operations that are computed again run one after another, not as one kernel");
                is_over.store(true, Ordering::Relaxed);
            }
            while let Ok(Some(chain)) = asked.recv() {
                let Ok(compiler) = &compiler else { continue };
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                // A panic ends only this task, and the chain runs as single operations.
                contained("a compilation", || {
                    let made = compiler.compile(&chain).inspect_err(|error| {
                        warn_once!(%error, "a kernel was not made: its operations run one after another");
                    });
                    give(chain, made.ok());
                });
            }
        })?;
        Ok(Worker { given, thread })
    }
}
