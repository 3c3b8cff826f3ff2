//! What one step shows, save by save: the profile that a plan is made of.
//!
//! A [`Probe`] takes notes while the step runs: when each storage was saved and asked for, where the device computes, and how
//! much memory there was between. `analysis` turns the notes into a [`Workload`](ssdtrain_plan::Workload) once the device is through.

mod analysis;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ssdtrain_libtorch as torch;
use tch::Device;

use self::analysis::{Note, Notes, Step};
pub(crate) use self::analysis::{Profile, Save};
use crate::trace::{Stamp, Trace};

/// Takes notes of one step, up to the end of its first backward: the first micro-batch stands for the others.
pub(crate) struct Probe {
    trace: Arc<Trace>,
    /// Where the trace was when the step began.
    position: u64,
    device: Device,
    /// Allocated when the step began.
    allocated: u64,
    begun: Stamp,
    book: Mutex<Book>,
    /// The first backward is over.
    closed: AtomicBool,
    /// One runs that the step will end.
    within: AtomicBool,
    /// Something was asked for since the last backward ended.
    asking: AtomicBool,
    /// Something was saved since then.
    saving: AtomicBool,
}

#[derive(Default)]
struct Book {
    notes: Vec<Taken>,
    /// The most allocated bytes so far.
    peak: u64,
    /// Backwards of which each followed a forward of its own.
    micro_batches: u32,
    /// Allocated bytes when the first micro-batches each saved for the first time.
    at_first_save: Vec<u64>,
    /// The end of the last backward, and where the step had nothing left to compute.
    ended: Option<Stamp>,
    computed: Option<Stamp>,
}

/// A note, before the device is through.
struct Taken {
    note: Note,
    /// When it began to be asked for.
    before: Option<Stamp>,
    stamp: Stamp,
    peak: u64,
    allocated: u64,
    alive: Alive,
    recipe: Option<Arc<RecipeTiming>>,
}

/// How a marked result was computed.
pub(crate) struct RecipeTiming {
    pub(crate) from: Stamp,
    pub(crate) to: Stamp,
    /// The note of its first input, if that was saved.
    pub(crate) first: usize,
}

/// Storages that were saved and are on the device.
#[derive(Debug, Default)]
pub(crate) struct Alive {
    pub(crate) bytes: u64,
    /// The numbers of those entries among them that only the program still holds.
    pub(crate) in_use: Vec<u64>,
}

/// The beginning of something that is to be noted.
pub(crate) struct Begun {
    stamp: Stamp,
    peak: u64,
}

impl Probe {
    /// Notes are taken of the step that begins now.
    pub(crate) fn begin(trace: &Arc<Trace>, device: Device) -> Probe {
        trace.resume();
        Probe {
            position: trace.position(),
            device,
            allocated: torch::memory(device).allocated,
            begun: trace.stamp(),
            trace: Arc::clone(trace),
            book: Mutex::default(),
            closed: AtomicBool::new(false),
            within: AtomicBool::new(false),
            asking: AtomicBool::new(false),
            saving: AtomicBool::new(false),
        }
    }

    /// Something is saved now; none if no more notes are taken.
    pub(crate) fn saves(&self) -> Option<Begun> {
        if !self.saving.swap(true, Ordering::AcqRel) {
            let mut book = self.book.lock();
            if book.at_first_save.len() < 2 {
                book.at_first_save.push(torch::memory(self.device).allocated);
            }
        }
        self.now()
    }

    /// Something is asked for now; none if no more notes are taken.
    pub(crate) fn asks(&self) -> Option<Begun> {
        self.asking.store(true, Ordering::Release);
        self.now()
    }

    fn now(&self) -> Option<Begun> {
        let open = !self.closed.load(Ordering::Acquire);
        open.then(|| Begun { stamp: self.trace.stamp(), peak: torch::memory(self.device).peak })
    }

    /// What began to be saved then was: the entry of this number. `alive` is on the device now.
    pub(crate) fn saved(&self, begun: Begun, save: Save, recipe: Option<Arc<RecipeTiming>>, alive: Alive) {
        self.take(Note::Saved(save), None, begun, recipe, alive);
    }

    /// What was asked for then is on the device.
    pub(crate) fn asked(&self, begun: Begun, entry: u64, alive: Alive) {
        let (before, served) = (Some(begun.stamp), Begun { stamp: self.trace.stamp(), ..begun });
        self.take(Note::Asked(entry), before, served, None, alive);
    }

    fn take(
        &self,
        note: Note,
        before: Option<Stamp>,
        begun: Begun,
        recipe: Option<Arc<RecipeTiming>>,
        alive: Alive,
    ) {
        let Begun { stamp, peak } = begun;
        let mut book = self.book.lock();
        let memory = torch::memory(self.device);
        book.peak = book.peak.max(peak).max(memory.peak);
        book.notes.push(Taken { note, before, stamp, peak, allocated: memory.allocated, alive, recipe });
        torch::reset_peak(self.device);
    }

    /// Notes taken so far.
    pub(crate) fn notes(&self) -> usize {
        self.book.lock().notes.len()
    }

    /// Where the computation has come to.
    pub(crate) fn stamp(&self) -> Stamp {
        self.trace.stamp()
    }

    /// A backward begins, whose end will be told.
    pub(crate) fn backward_begins(&self) {
        self.within.store(true, Ordering::Release);
    }

    /// Whether a save that comes now is another micro-batch's, after a backward whose end no one has told.
    pub(crate) fn begins_again(&self) -> bool {
        !self.within.load(Ordering::Acquire) && self.asking.load(Ordering::Acquire)
    }

    /// A backward has ended.
    pub(crate) fn backward_ended(&self) {
        self.within.store(false, Ordering::Release);
        self.asking.store(false, Ordering::Release);
        let ended = self.trace.stamp();
        let closed = self.closed.swap(true, Ordering::AcqRel);
        let mut book = self.book.lock();
        // A second backward of one graph is none of another micro-batch.
        book.micro_batches += u32::from(self.saving.swap(false, Ordering::AcqRel));
        let torch::MemoryStats { allocated, peak, .. } = torch::memory(self.device);
        book.peak = book.peak.max(peak);
        if !closed {
            book.notes.push(Taken {
                before: None,
                note: Note::Ended,
                stamp: self.trace.stamp(),
                peak,
                allocated,
                alive: Alive::default(),
                recipe: None,
            });
        }
        book.ended = Some(ended);
    }

    /// All is computed: what the step waits for from now on is transfers.
    pub(crate) fn all_computed(&self) {
        if self.asking.load(Ordering::Acquire) {
            self.backward_ended();
        }
        let stamp = self.trace.stamp();
        self.book.lock().computed = Some(stamp);
    }

    /// The most allocated bytes that were seen.
    pub(crate) fn peak(&self) -> u64 {
        self.book.lock().peak
    }

    /// The step is over. None if it has shown nothing that a plan can be made of.
    pub(crate) fn end(&self) -> Option<Profile> {
        let moves = self.trace.moves(self.position);
        let book = std::mem::take(&mut *self.book.lock());
        let end = book.computed?.reach()?;
        let notes = book.notes.into_iter().map(|taken| {
            let Taken { note, before, stamp, peak, allocated, alive, recipe } = taken;
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
        let rest = end.at.saturating_duration_since(book.ended?.reach()?.at);
        // What there is more when the second micro-batch begins than when the first did.
        let left = match book.at_first_save[..] {
            [first, second] => second.saturating_sub(first),
            _ => 0,
        };
        let micro_batches = book.micro_batches;
        Step { begun: self.begun.reach()?, notes, left, rest: rest / micro_batches.max(1), moves }
            .profile(micro_batches)
    }
}
