//! Chains that run as one: trusted once they made the bits of the single operations.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tch::Device;

use super::kernels::Kernels;
use crate::device::{Joined, Size, Tiles};
use crate::fusion::{self, Chain, Pointwise};
use crate::sync::Mutex;
use crate::units::MIB;

/// What a tile takes of the caches, with all that is read and made of it. Smaller ones stay nearer to the processor, but each time one
/// begins, its inputs come from memory without having been fetched ahead.
const TILE_BYTES: u64 = 2 * MIB;

/// A kernel that made the right bits in so many sizes is not compared in others.
const TRUSTED: usize = 3;

/// The chains of one device.
pub(crate) struct Chains {
    device: Device,
    /// How long a comparison waits for it.
    limit: Duration,
    known: Arc<Mutex<HashMap<Chain, Known>>>,
    means: Means,
    /// A chain waited for its kernel, or was compared, since this was asked last.
    was_settling: AtomicBool,
}

/// How a chain becomes one.
enum Means {
    /// On a GPU, it is compiled.
    Kernels(Kernels),
    /// On the CPU, it runs in tiles that take so many bytes; if `is_timed`, only where that takes less time.
    Tiles { bytes: u64, is_timed: bool },
}

enum Known {
    /// It is being compiled.
    Waiting,
    /// For these sizes it made the bits of the single operations.
    Ready(Arc<dyn Joined>, HashMap<Size, Trial>),
    /// It cannot run as one, or made other bits.
    Refused,
}

/// What became of a chain of one size.
enum Trial {
    /// Its time is still to be compared: the first run of anything takes longer than others.
    Same,
    /// It runs as one.
    Joined,
    /// That takes longer than one operation after another.
    Slower,
}

/// How a chain is to run.
pub(super) enum Way {
    /// One operation after another, for now.
    Single,
    /// One operation after another for good.
    Refused,
    /// So, and then the bits are to be compared.
    Compared(Arc<dyn Joined>),
    Joined(Arc<dyn Joined>),
}

impl Chains {
    /// Those of a device, which is waited for up to `limit`. On the CPU, tiles of `tile_bytes` are used whether or not that takes less
    /// time.
    pub(crate) fn new(device: Device, limit: Duration, tile_bytes: Option<u64>) -> Chains {
        let known: Arc<Mutex<HashMap<Chain, Known>>> = Arc::default();
        let means = match device {
            Device::Cuda(index) => {
                let known = Arc::clone(&known);
                Means::Kernels(Kernels::new(index, move |chain, kernel| {
                    let made = match kernel {
                        Some(kernel) => Known::Ready(kernel, HashMap::new()),
                        None => Known::Refused,
                    };
                    drop(known.lock().insert(chain, made));
                }))
            }
            _ => Means::Tiles { bytes: tile_bytes.unwrap_or(TILE_BYTES), is_timed: tile_bytes.is_none() },
        };
        Chains { device, limit, known, means, was_settling: AtomicBool::new(false) }
    }

    /// Whether chains may run as one: false once it is known that none can be compiled.
    pub(crate) fn is_able(&self) -> bool {
        match &self.means {
            Means::Kernels(kernels) => kernels.is_able(),
            Means::Tiles { .. } => true,
        }
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// How a chain of this size is to run. One that is new on a GPU is compiled meanwhile.
    pub(super) fn way(&self, chain: &Chain, size: Size) -> Way {
        let mut known = self.known.lock();
        if let Means::Tiles { bytes, .. } = &self.means
            && !known.contains_key(chain)
        {
            let tiles = Tiles::new(chain.clone(), *bytes);
            known.insert(chain.clone(), Known::Ready(Arc::new(tiles), HashMap::new()));
        }
        match known.get(chain) {
            Some(Known::Ready(joined, trials)) => match trials.get(&size) {
                Some(Trial::Joined) => return Way::Joined(Arc::clone(joined)),
                Some(Trial::Slower) => return Way::Single,
                None if !joined.takes(size) => return Way::Single,
                None if self.is_trusted(chain, trials) => return Way::Joined(Arc::clone(joined)),
                None | Some(Trial::Same) => {
                    self.was_settling.store(true, Ordering::Relaxed);
                    return Way::Compared(Arc::clone(joined));
                }
            },
            Some(Known::Waiting) => return Way::Single,
            Some(Known::Refused) => return Way::Refused,
            None => drop(known.insert(chain.clone(), Known::Waiting)),
        }
        drop(known);
        self.was_settling.store(true, Ordering::Relaxed);
        if let Means::Kernels(kernels) = &self.means {
            kernels.ask_for(chain);
        }
        Way::Single
    }

    /// Whether a chain that made the right bits in the sizes that were tried makes them in any. On a GPU, libtorch computes each element by
    /// itself and alike in all sizes, as does a kernel of ours; only the kernels of batch norms are chosen by size. On the CPU, what
    /// computes an element depends on where the ends of loops are.
    fn is_trusted(&self, chain: &Chain, trials: &HashMap<Size, Trial>) -> bool {
        matches!(self.means, Means::Kernels(_)) && trials.len() >= TRUSTED && !chain.has_batch_norm()
    }

    /// Whether chains are being compiled, or were compiled or compared since this was asked last. Steps take longer then.
    pub(crate) fn were_settling(&self) -> bool {
        let was_settling = self.was_settling.swap(false, Ordering::Relaxed);
        let is_able = self.is_able();
        was_settling || is_able && self.known.lock().values().any(|known| matches!(known, Known::Waiting))
    }

    /// Whether an operation is worth a kernel even by itself: that of a norm spares a pass for its statistics, and one with a table computes
    /// nothing.
    pub(super) fn is_shorter(&self, known: &Pointwise) -> bool {
        let has_tables = || matches!(&self.means, Means::Kernels(kernels) if kernels.have_tables());
        !known.statistics.is_empty() || (fusion::is_table(known) && has_tables())
    }

    /// The bytes that an operation reads and writes by itself, as far as that takes its time and running it with others spares it.
    pub(super) fn traffic(&self, known: &Pointwise, threads: Option<NonZeroU32>) -> Option<u64> {
        match &self.means {
            Means::Kernels(kernels) => kernels.is_able().then(|| known.traffic()),
            Means::Tiles { bytes, .. } => {
                let is_divided =
                    Tiles::new(fusion::alone(known), *bytes).takes(Size { count: known.count, threads });
                // To hand something over in the caches takes about a third of the time.
                (is_divided && known.function.is_light()).then(|| known.traffic() * 3 / 2)
            }
        }
    }

    /// The outcome of the comparison, and the times of the single operations and of all together.
    pub(super) fn is_compared(&self, chain: &Chain, size: Size, is_same: bool, times: [Duration; 2]) {
        if !is_same {
            return self.refuse(chain, "they gave other bits together");
        }
        if let Some(Known::Ready(_, trials)) = self.known.lock().get_mut(chain) {
            let is_timed = matches!(self.means, Means::Tiles { is_timed: true, .. });
            let trial = match trials.get(&size) {
                None if is_timed => Trial::Same,
                _ if is_timed && times[1] >= times[0] => Trial::Slower,
                _ => Trial::Joined,
            };
            trials.insert(size, trial);
        }
    }

    /// From now on, the chain runs as its [alternative](Chain::alternative), or as single operations.
    pub(super) fn refuse(&self, chain: &Chain, reason: &str) {
        if chain.alternative().is_none() {
            tracing::warn!(reason, ?chain, "operations that are computed again run one after another");
        }
        drop(self.known.lock().insert(chain.clone(), Known::Refused));
    }
}
