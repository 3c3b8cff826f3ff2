//! What one step shows, save by save: the profile from which a plan is made.
//!
//! A [`Probe`] takes notes while the step runs: when each storage was saved and asked for, by the device's time, and how much memory was
//! allocated in between. `analysis` turns the notes into a [`Workload`](ssdtrain_plan::Workload) once the device has finished the step.

mod analysis;
mod family;
mod lineage;
mod pressure;
mod stalls;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Clock, Storage};
use ssdtrain_plan::{Save, StepProfile};
use ssdtrain_store::sync::Mutex;
use tch::Device;

use self::analysis::{Note, Notes, Step};
pub(crate) use self::lineage::{Identity, Operation, Origin, Read};
use self::lineage::{Lineage, Segment};
pub(crate) use self::pressure::Pressure;
use crate::trace::{Stamp, Trace};

/// What sending a storage off a device takes of the program's thread, and fetching it back (`cost_of_a_step` in the GPU tests).
const MOVE: Duration = Duration::from_micros(30);

/// What stands for the thread with this number; from the 64th on they share one.
fn bit(strand: u32) -> u64 {
    1 << strand.min(63)
}

/// Takes notes of one step, up to the end of its first backward. The first micro-batch stands for the others.
pub(crate) struct Probe {
    /// How many steps of the cache were profiled up to this one.
    number: u64,
    trace: Arc<Trace>,
    clock: Arc<OperationClock>,
    /// The trace's position when the step began.
    position: u64,
    device: Device,
    /// Allocated bytes when the step began.
    allocated: u64,
    begun: Stamp,
    pressure: Arc<Pressure>,
    book: Mutex<Book>,
    /// What is computed again instead of saved.
    computed_again: Mutex<Vec<Arc<dyn ComputedAgain>>>,
    /// Those that the program may let go of. Like what is stored, they stay until the next note: what is freed in between would be missing in
    /// the peak.
    held: Mutex<Vec<Storage>>,
    /// Whether the first backward has ended.
    closed: AtomicBool,
    /// Whether a backward runs whose end the step will report.
    within: AtomicBool,
    /// The threads of which something was asked for since the last backward ended, a bit for each.
    asking: AtomicU64,
    /// Whether something was saved since then.
    saving: AtomicBool,
}

#[derive(Default)]
struct Book {
    notes: Vec<Taken>,
    /// The most allocated bytes so far.
    peak: u64,
    /// The number of backwards that each followed a forward of their own.
    micro_batches: u32,
    /// Allocated bytes when each of the first two micro-batches first saved something.
    at_first_save: Vec<u64>,
    /// The end of the last backward, and the point at which the step had nothing left to compute.
    ended: Option<Stamp>,
    computed: Option<Stamp>,
}

/// A note that the device may not have reached yet.
struct Taken {
    note: Note,
    /// Where it was asked for, before it was served.
    before: Option<Stamp>,
    stamp: Stamp,
    peak: u64,
    allocated: u64,
    alive: Alive,
    source: Source,
}

/// What is known of how something that is saved was made.
#[derive(Default)]
pub(crate) struct Source {
    /// By an operation that the program marked.
    pub(crate) recipe: Option<Arc<RecipeTiming>>,
    /// By recorded operations.
    pub(crate) origin: Option<Origin>,
    /// Within a segment.
    pub(crate) segment: Option<Arc<SegmentTiming>>,
}

/// The times of recorded operations.
pub(crate) struct OperationClock {
    trace: Arc<Trace>,
    stamps: Mutex<Vec<Stamp>>,
}

impl Clock for OperationClock {
    /// The number of stamps so far, with this one.
    fn stamp(&self) -> u64 {
        let stamp = self.trace.stamp();
        let mut stamps = self.stamps.lock();
        stamps.push(stamp);
        stamps.len() as u64
    }
}

/// When a marked result was computed.
pub(crate) struct RecipeTiming {
    pub(crate) from: Stamp,
    pub(crate) to: Stamp,
    /// The note of its first input, if that was saved.
    pub(crate) first: usize,
}

/// When a segment was computed, and what it needs to be computed again.
pub(crate) struct SegmentTiming {
    pub(crate) from: Stamp,
    /// Empty as long as it is not known that it can be computed again.
    pub(crate) to: OnceLock<Stamp>,
    /// The bytes besides saved storages that were on the device when it began.
    pub(crate) beside: u64,
    pub(crate) reads: Vec<Read>,
    /// What its inputs were made by.
    pub(crate) operations: Vec<Operation>,
}

impl SegmentTiming {
    /// `None` if it cannot be computed again, or the device has not come to its end.
    fn segment(&self) -> Option<Segment> {
        let time = self.to.get()?.reach()?.at.saturating_duration_since(self.from.reach()?.at);
        let number = std::ptr::from_ref(self).addr();
        let (reads, operations) = (self.reads.clone(), self.operations.clone());
        Some(Segment { number, reads, operations, time, beside: self.beside })
    }
}

/// A result that is computed again when it is asked for, of which the cache knows nothing.
pub(crate) trait ComputedAgain: Send + Sync {
    /// `None` if it is not on the device.
    fn on_device(&self) -> Option<OnDevice>;
}

/// A result that is on the device.
pub(crate) struct OnDevice {
    pub(crate) storage: Storage,
    /// Whether it would still be there if nothing but the program held it.
    pub(crate) is_in_use: bool,
    /// Whether nothing has asked for it yet.
    pub(crate) is_new: bool,
}

/// The saved storages that are on the device.
#[derive(Debug, Default)]
pub(crate) struct Alive {
    pub(crate) bytes: u64,
    /// The serial numbers of the entries among them that would still be there if the cache held nothing: those that the program holds.
    pub(crate) in_use: Vec<u64>,
}

/// The beginning of an event that is to be noted.
pub(crate) struct Begun {
    stamp: Stamp,
    /// The most allocated bytes since the last one, and how many it would have been, had there been memory for it.
    peak: u64,
    wanted: u64,
}

impl Probe {
    /// Begins to take notes of the step that begins now.
    pub(crate) fn begin(trace: &Arc<Trace>, device: Device) -> Probe {
        Probe {
            number: trace.resume(),
            position: trace.position(),
            device,
            allocated: torch::memory(device).allocated,
            begun: trace.stamp(),
            clock: Arc::new(OperationClock { trace: Arc::clone(trace), stamps: Mutex::default() }),
            trace: Arc::clone(trace),
            pressure: Arc::new(Pressure::new(device)),
            book: Mutex::default(),
            computed_again: Mutex::default(),
            held: Mutex::default(),
            closed: AtomicBool::new(false),
            within: AtomicBool::new(false),
            asking: AtomicU64::new(0),
            saving: AtomicBool::new(false),
        }
    }

    /// Whether no later step has begun to be profiled, which then has the trace and the cache to itself.
    pub(crate) fn is_latest(&self) -> bool {
        self.number == self.trace.resumed()
    }

    /// Ends the recording, unless a later step has begun to be profiled.
    pub(crate) fn pause(&self) {
        self.trace.pause_if(|resumed| resumed == self.number);
    }

    /// Times the operations that are recorded.
    pub(crate) fn clock(&self) -> Arc<OperationClock> {
        Arc::clone(&self.clock)
    }

    /// A tensor is being saved; `None` if no more notes are taken.
    pub(crate) fn saves(&self) -> Option<Begun> {
        if !self.saving.swap(true, Ordering::AcqRel) {
            let mut book = self.book.lock();
            if book.at_first_save.len() < 2 {
                book.at_first_save.push(torch::memory(self.device).allocated);
            }
        }
        self.now()
    }

    /// A tensor is being asked for that the thread with this number has saved; `None` if no more notes are taken.
    pub(crate) fn asks(&self, strand: u32) -> Option<Begun> {
        self.asking.fetch_or(bit(strand), Ordering::AcqRel);
        self.now()
    }

    fn now(&self) -> Option<Begun> {
        let open = !self.closed.load(Ordering::Acquire);
        open.then(|| {
            let peak = torch::memory(self.device).peak;
            Begun { stamp: self.trace.stamp(), peak, wanted: self.pressure.wanted(peak) }
        })
    }

    /// A result is computed again instead of saved. Returns a number for it that no entry of the cache has.
    pub(crate) fn computes_again(&self, result: Arc<dyn ComputedAgain>) -> u64 {
        let mut all = self.computed_again.lock();
        all.push(result);
        u64::MAX - all.len() as u64
    }

    /// With what is computed again, as far as it is on the device.
    fn with_computed(&self, mut alive: Alive) -> Alive {
        // A storage may be freed meanwhile, which is done without the lock.
        self.let_go();
        let all = self.computed_again.lock().clone();
        let mut held = Vec::new();
        for (number, result) in all.iter().enumerate() {
            let Some(OnDevice { storage, is_in_use, is_new }) = result.on_device() else { continue };
            alive.bytes += storage.bytes();
            alive.in_use.extend(is_in_use.then_some(u64::MAX - 1 - number as u64));
            held.extend(is_new.then_some(storage));
        }
        *self.held.lock() = held;
        alive
    }

    /// What was held for the last note is the program's alone.
    fn let_go(&self) {
        let gone = std::mem::take(&mut *self.held.lock());
        // Freed without the lock.
        drop(gone);
    }

    /// Notes the save that began at `begun`, with what is on the device after it.
    pub(crate) fn saved(&self, begun: Begun, save: Save, source: Source, alive: Alive) {
        self.take(Note::Saved(save), None, begun, source, alive);
    }

    /// Notes that what was asked for at `begun` is on the device.
    pub(crate) fn asked(&self, begun: Begun, entry: u64, alive: Alive) {
        self.served(Note::Asked(entry), begun, alive);
    }

    /// The same of the result with this number, which is computed again if need be.
    pub(crate) fn computed(&self, begun: Begun, number: u64, alive: Alive) {
        self.served(Note::Computed(number), begun, alive);
    }

    fn served(&self, note: Note, begun: Begun, alive: Alive) {
        let (before, served) = (Some(begun.stamp), Begun { stamp: self.trace.stamp(), ..begun });
        self.take(note, before, served, Source::default(), alive);
    }

    fn take(&self, note: Note, before: Option<Stamp>, begun: Begun, source: Source, alive: Alive) {
        let Begun { stamp, peak, wanted } = begun;
        let alive = self.with_computed(alive);
        let mut book = self.book.lock();
        let memory = torch::memory(self.device);
        book.peak = book.peak.max(peak).max(memory.peak);
        // What a load needed is the cache's.
        book.peak = book.peak.max(self.pressure.restart());
        let allocated = memory.allocated;
        book.notes.push(Taken { note, before, stamp, peak: wanted, allocated, alive, source });
        torch::reset_peak(self.device);
    }

    /// Told of what is freed because there is no memory for something else.
    pub(crate) fn pressure(&self) -> &Arc<Pressure> {
        &self.pressure
    }

    /// The number of notes taken so far.
    pub(crate) fn notes(&self) -> usize {
        self.book.lock().notes.len()
    }

    /// The bytes on the device now, besides those that were there when the step began and what is saved.
    pub(crate) fn beside(&self, alive: Alive) -> u64 {
        let alive = self.with_computed(alive);
        torch::memory(self.device).allocated.saturating_sub(self.allocated).saturating_sub(alive.bytes)
    }

    /// The point that the computation has reached.
    pub(crate) fn stamp(&self) -> Stamp {
        self.trace.stamp()
    }

    /// A backward begins whose end will be reported.
    pub(crate) fn backward_begins(&self) {
        self.within.store(true, Ordering::Release);
    }

    /// Whether a save of this thread now belongs to another micro-batch, after a backward whose end nobody reported.
    pub(crate) fn begins_again(&self, strand: u32) -> bool {
        !self.within.load(Ordering::Acquire) && self.asking.load(Ordering::Acquire) & bit(strand) != 0
    }

    /// A backward has ended.
    pub(crate) fn backward_ended(&self) {
        self.within.store(false, Ordering::Release);
        self.asking.store(0, Ordering::Release);
        let ended = self.trace.stamp();
        let closed = self.closed.swap(true, Ordering::AcqRel);
        self.let_go();
        let mut book = self.book.lock();
        // A second backward of the same graph does not count as another micro-batch.
        book.micro_batches += u32::from(self.saving.swap(false, Ordering::AcqRel));
        let torch::MemoryStats { allocated, peak, .. } = torch::memory(self.device);
        book.peak = book.peak.max(peak);
        if !closed {
            book.notes.push(Taken {
                before: None,
                note: Note::Ended,
                stamp: self.trace.stamp(),
                peak: self.pressure.wanted(peak),
                allocated,
                alive: Alive::default(),
                source: Source::default(),
            });
        }
        book.ended = Some(ended);
    }

    /// Everything is computed: from now on the step waits only for transfers.
    pub(crate) fn all_computed(&self) {
        if self.asking.load(Ordering::Acquire) != 0 {
            self.backward_ended();
        }
        let stamp = self.trace.stamp();
        self.book.lock().computed = Some(stamp);
    }

    /// The highest number of allocated bytes seen.
    pub(crate) fn peak(&self) -> u64 {
        let highest = self.pressure.restart();
        self.book.lock().peak.max(highest)
    }

    /// The step has ended. `None` if it has not shown enough for a plan.
    pub(crate) fn end(&self) -> Option<StepProfile> {
        let moves = self.trace.moves(self.position);
        let book = std::mem::take(&mut *self.book.lock());
        let end = book.computed?.reach()?;
        let stamps = std::mem::take(&mut *self.clock.stamps.lock());
        let stamp = |number: u64| stamps.get(usize::try_from(number).ok()?.checked_sub(1)?);
        let took = |operation: &Operation| {
            let (begun, ended) = operation.stamps;
            stalls::took(stamp(begun)?, stamp(ended)?, &moves.host_stalls)
        };
        let mut lineage = Lineage::default();
        let notes = book.notes.into_iter().map(|taken| {
            let Taken { note, before, stamp, peak, allocated, alive, source } = taken;
            let Source { recipe, origin, segment } = source;
            if let Note::Saved(save) = note {
                if let Some(origin) = origin {
                    lineage.add(save.entry, origin, took);
                }
                if let Some(segment) = segment.and_then(|timing| timing.segment()) {
                    lineage.add_within(save.entry, segment, took);
                }
            }
            let recipe = match recipe {
                Some(timing) => {
                    let took = timing.to.reach()?.at.saturating_duration_since(timing.from.reach()?.at);
                    Some((took, timing.first))
                }
                None => None,
            };
            let before = match before {
                Some(before) => Some(before.reach()?),
                None => None,
            };
            Some(Notes {
                note,
                before,
                reached: stamp.reach()?,
                peak: peak.saturating_sub(self.allocated),
                beside: allocated.saturating_sub(self.allocated).saturating_sub(alive.bytes),
                alive,
                recipe,
            })
        });
        let notes: Vec<Notes> = notes.collect::<Option<_>>()?;
        lineage.shorten();
        let rest = end.at.saturating_duration_since(book.ended?.reach()?.at);
        // What is allocated beyond the first micro-batch's beginning when the second begins.
        let left = match book.at_first_save[..] {
            [first, second] => second.saturating_sub(first),
            _ => 0,
        };
        let micro_batches = book.micro_batches;
        // There is a stamp before and one after each.
        let operations = stamps.len() / 2;
        let rest = rest / micro_batches.max(1);
        let each_move = if self.device.is_cuda() { MOVE } else { Duration::ZERO };
        let came_by = stamps.iter().filter_map(Stamp::reach).collect();
        Step { begun: self.begun.reach()?, notes, lineage, operations, each_move, left, rest, moves, came_by }
            .profile(micro_batches)
    }
}
