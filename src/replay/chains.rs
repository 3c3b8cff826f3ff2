//! The kernels of chains: made in the background, and trusted once they made the bits of the single operations.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ssdtrain_store::contained;

use crate::device::{Compiler, Kernel};
use crate::fusion::Chain;
use crate::sync::{Mutex, Sender, Thread, channel};

/// The chains of one device.
pub(crate) struct Chains {
    device: usize,
    known: Arc<Mutex<HashMap<Chain, Known>>>,
    worker: Mutex<Option<Worker>>,
    /// Nothing more is compiled.
    is_over: Arc<AtomicBool>,
    /// A chain waited for its kernel, or was compared with it, since this was asked last.
    was_settling: AtomicBool,
}

enum Known {
    /// It is being compiled.
    Waiting,
    /// For these numbers of elements it made the bits of the single operations.
    Ready(Arc<Kernel>, HashSet<u64>),
    /// It cannot be compiled, or made other bits.
    Refused,
}

/// How a chain is to run.
pub(super) enum Way {
    /// One operation after another, for now.
    Single,
    /// One operation after another for good.
    Refused,
    /// So, and then the kernel's bits are to be compared.
    Compared(Arc<Kernel>),
    Kernel(Arc<Kernel>),
}

/// A thread that compiles.
struct Worker {
    /// `None` ends the thread.
    given: Sender<Option<Chain>>,
    thread: Thread,
}

impl Chains {
    pub(crate) fn new(device: usize) -> Chains {
        Chains {
            device,
            known: Arc::default(),
            worker: Mutex::new(None),
            is_over: Arc::default(),
            was_settling: AtomicBool::new(false),
        }
    }

    /// Whether there may be kernels: false once it is known that they cannot be compiled.
    pub(super) fn is_able(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// The number of the CUDA device.
    pub(super) fn device(&self) -> usize {
        self.device
    }

    /// How a chain of this many elements is to run. One that is new is compiled meanwhile.
    pub(super) fn way(&self, chain: &Chain, count: u64) -> Way {
        {
            let mut known = self.known.lock();
            match known.get(chain) {
                Some(Known::Ready(kernel, same)) if same.contains(&count) => {
                    return Way::Kernel(Arc::clone(kernel));
                }
                Some(Known::Ready(kernel, _)) => {
                    self.was_settling.store(true, Ordering::Relaxed);
                    return Way::Compared(Arc::clone(kernel));
                }
                Some(Known::Waiting) => return Way::Single,
                Some(Known::Refused) => return Way::Refused,
                None => drop(known.insert(chain.clone(), Known::Waiting)),
            }
        }
        self.was_settling.store(true, Ordering::Relaxed);
        self.ask_for(chain);
        Way::Single
    }

    /// Whether kernels are being made, or were made or compared since this was asked last. Steps take longer then.
    pub(crate) fn were_settling(&self) -> bool {
        let was_settling = self.was_settling.swap(false, Ordering::Relaxed);
        let is_able = self.is_able();
        was_settling || is_able && self.known.lock().values().any(|known| matches!(known, Known::Waiting))
    }

    /// The outcome of the comparison.
    pub(super) fn is_compared(&self, chain: &Chain, count: u64, is_same: bool) {
        if !is_same {
            return self.refuse(chain, "it gave other bits than they do");
        }
        if let Some(Known::Ready(_, same)) = self.known.lock().get_mut(chain) {
            same.insert(count);
        }
    }

    /// From now on, the chain runs as its [alternative](Chain::alternative), or as single operations.
    pub(super) fn refuse(&self, chain: &Chain, reason: &str) {
        if chain.alternative().is_none() {
            tracing::warn!(reason, ?chain, "a kernel is not used: its operations run one after another");
        }
        drop(self.known.lock().insert(chain.clone(), Known::Refused));
    }

    fn ask_for(&self, chain: &Chain) {
        let mut worker = self.worker.lock();
        if worker.is_none() {
            match Worker::start(self.device, Arc::clone(&self.known), Arc::clone(&self.is_over)) {
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

impl Drop for Chains {
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
    fn start(
        device: usize,
        known: Arc<Mutex<HashMap<Chain, Known>>>,
        is_over: Arc<AtomicBool>,
    ) -> io::Result<Worker> {
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
                    let made = match compiler.compile(&chain) {
                        Ok(kernel) => Known::Ready(kernel, HashSet::new()),
                        Err(error) => {
                            tracing::warn!(%error, "a kernel was not made: its operations run one after another");
                            Known::Refused
                        }
                    };
                    drop(known.lock().insert(chain, made));
                });
            }
        })?;
        Ok(Worker { given, thread })
    }
}
