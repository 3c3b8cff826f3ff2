//! What a step will cost under a placement, before it is tried: a pure model of the device, the copies, the host pool and the disk.
//!
//! A [`Workload`] is a step as it runs with everything kept, a [`Machine`] is what moves bytes, [`Limits`] are the cache's settings.
//! [`Workload::simulate`] goes through forward and backward under one [`Placement`] per entry and tells step time, stalls and peaks. It
//! follows the cache's own rules: storages leave in the order in which they were saved and as late as the device budget allows,
//! loads look ahead by `prefetch` bytes, and the disk serves reads before the writes that wait.
//!
//! A [`Frontier`] does that for every placement worth considering, and [`Frontier::plan`] picks the one that a [`Goal`] asks for.
//! [`Scaling`] tells the same of other sizes of the micro-batch.
//!
//! ```
//! use std::time::Duration;
//!
//! use ssdtrain::plan::{Caps, Entry, Frontier, Goal, Limits, Machine, Placement, Workload};
//!
//! let ms = Duration::from_millis;
//! let entry = Entry { bytes: 1 << 30, forward: ms(25), backward: ms(50), ..Entry::default() };
//! let step = Workload { entries: vec![entry; 8], turn: ms(10), rest: ms(5), ..Workload::default() };
//! let machine = Machine { copy_out: 50e9, copy_in: 50e9, ..Machine::default() };
//! let kept = step.simulate(&[Placement::Keep; 8], &machine, &Limits::default());
//! let limits = Limits { device_budget: 2 << 30, prefetch: 1 << 30, ..Limits::default() };
//! let moved = step.simulate(&[Placement::Host; 8], &machine, &limits);
//! assert_eq!(kept.step, ms(8 * 75 + 15));
//! assert!(moved.step < kept.step + ms(1) && moved.peak() < kept.peak() / 2);
//!
//! let frontier = Frontier::new(&step, &machine, Caps::default());
//! let plan = frontier.plan(Goal::budget(4 << 30)).unwrap();
//! assert_eq!(plan.prediction.step, kept.step, "half the memory for nothing");
//! ```

mod frontier;
mod lanes;
mod scaling;
mod simulate;

use std::time::Duration;

pub use self::frontier::{Caps, Frontier, Goal, OutOfReach, Plan};
pub use self::scaling::Scaling;

/// One micro-batch's step as the device computes it when nothing is moved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// What autograd saves, in the order of saving. Backward asks for it in the reverse order.
    pub entries: Vec<Entry>,
    /// Between the last save and the first time that backward asks for something.
    pub turn: Duration,
    /// Most bytes on the device beside saved storages meanwhile.
    pub turn_extra: u64,
    /// After backward: the optimizer, as a rule.
    pub rest: Duration,
}

/// One storage that autograd saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its size.
    pub bytes: u64,
    /// Time computed since the save before it, or since the step began.
    pub forward: Duration,
    /// Time computed from when backward asks for it to when it asks for the next, or to the end of backward. It is needed for that long.
    pub backward: Duration,
    /// Most bytes on the device beside saved storages during `forward`, this storage not counted.
    pub forward_extra: u64,
    /// The same during `backward`.
    pub backward_extra: u64,
    /// How to compute it again; none if there is no recipe for it.
    pub recompute: Option<Recompute>,
    /// The last entry during whose `forward` the program still holds it: until then it is on the device, wherever it is placed.
    /// [`usize::MAX`] if the program holds it when backward asks for it: such an entry is kept, since moving it frees nothing.
    pub in_use_until: usize,
    /// How many of the entries before it backward asks for while it still uses this one: an operation asks for all it saved before it lets
    /// go of any.
    pub in_use_with: usize,
}

impl Entry {
    /// Whether it can leave the device at all.
    fn is_movable(&self) -> bool {
        self.in_use_until < usize::MAX
    }
}

/// What it takes to compute an entry again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    /// Its time, without that of what it is computed from.
    pub time: Duration,
    /// The first of the entries that it is computed from. Those from there to the entry itself have to be on the device.
    pub since: usize,
}

/// Where an entry is between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// On the device.
    #[default]
    Keep,
    /// In pinned host memory.
    Host,
    /// On the disk, by way of host memory.
    Disk,
    /// Nowhere: computed again. An entry without a recipe is kept.
    Recompute,
}

/// What moves bytes, in bytes per second, and where they can stay. By default nothing limits anything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// From the device to the host.
    pub copy_out: f64,
    /// From the host to the device.
    pub copy_in: f64,
    /// From the host to the disk.
    pub disk_write: f64,
    /// From the disk to the host.
    pub disk_read: f64,
    /// Host memory for storages, in bytes. One that is larger goes through it all the same, alone.
    pub host_pool: u64,
    /// When a storage leaves the device.
    pub leaving: Leaving,
}

/// When a storage leaves the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leaving {
    /// As late as the device budget allows, once it is copied to the host: a GPU's.
    #[default]
    InStreamOrder,
    /// As soon as it is on the disk: the CPU's, which has no other host memory. There is no copy then, and no difference
    /// between [`Placement::Host`] and [`Placement::Disk`].
    WhenStored,
    /// As late as the device budget allows, once it is on the disk: a GPU's whose bytes go straight there
    /// ([`IoPath::Direct`](crate::IoPath::Direct)). There is no copy then either, nor host memory.
    OnceWritten,
}

/// The cache's settings, in bytes; see [`TensorCacheBuilder`](crate::TensorCacheBuilder).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Saved storages on the device.
    pub device_budget: u64,
    /// The same once backward has begun.
    pub backward_budget: u64,
    /// Loaded ahead of what backward has asked for.
    pub prefetch: u64,
    /// Read from the disk ahead of the copies to the device.
    pub read_ahead: u64,
}

/// What a step is expected to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// From begin to end.
    pub step: Duration,
    /// Of this, time computed again.
    pub recomputed: Duration,
    /// Time that the device waited, by cause.
    pub stall: Stall,
    /// Most bytes on the device in forward: saved storages and what else forward needs.
    pub forward_peak: u64,
    /// The same in backward.
    pub backward_peak: u64,
    /// Most bytes in host memory.
    pub host_peak: u64,
    /// Bytes copied off the device and back.
    pub copied_out: u64,
    /// Bytes copied back to the device.
    pub copied_in: u64,
    /// Bytes written to the disk.
    pub written: u64,
    /// Bytes read from the disk.
    pub read: u64,
}

/// Time that the device waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Stall {
    /// For a copy to the host, so that the device budget is kept.
    pub device_budget: Duration,
    /// For room in the host pool.
    pub host_pool: Duration,
    /// For what backward asked for.
    pub load: Duration,
}

impl Default for Machine {
    fn default() -> Machine {
        let any = f64::INFINITY;
        Machine {
            copy_out: any,
            copy_in: any,
            disk_write: any,
            disk_read: any,
            host_pool: u64::MAX,
            leaving: Leaving::default(),
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        let any = u64::MAX;
        Limits { device_budget: any, backward_budget: any, prefetch: any, read_ahead: any }
    }
}

impl Prediction {
    /// The activation peak, in bytes.
    pub fn peak(&self) -> u64 {
        self.forward_peak.max(self.backward_peak)
    }
}

impl Stall {
    /// All causes together.
    pub fn total(&self) -> Duration {
        self.device_budget + self.host_pool + self.load
    }
}

impl Workload {
    /// Time computed when nothing is moved and nothing waits.
    pub fn computed(&self) -> Duration {
        let entries: Duration = self.entries.iter().map(|entry| entry.forward + entry.backward).sum();
        entries + self.turn + self.rest
    }

    /// Has everything take so many times as long to compute.
    pub fn pace(&mut self, times: f64) {
        let all = self.entries.iter_mut().flat_map(|entry| {
            let recompute = entry.recompute.iter_mut().map(|recompute| &mut recompute.time);
            [&mut entry.forward, &mut entry.backward].into_iter().chain(recompute)
        });
        all.chain([&mut self.turn, &mut self.rest]).for_each(|time| *time = time.mul_f64(times));
    }

    /// What the step does under one placement per entry. Entries without one are kept.
    pub fn simulate(&self, placements: &[Placement], machine: &Machine, limits: &Limits) -> Prediction {
        simulate::run(self, placements, machine, limits)
    }
}
