//! Tracks which GPU memory is live, and which of it is registered.
//!
//! The book knows nothing about CUDA or cuFile: it says what has to be done next, and is told when that is done.
//! Every change of a segment's state has a single owner, so a registration is never made twice and never outlives its
//! memory.
//!
//! ```text
//! allocated ─────────────────► Waiting ─take─► Registering ─┬─► Registered ─leave─► Deregistering ─► gone
//! mapped ─► NoAccess ─granted─────┘                         └─► Refused ─leave─► gone
//! ```
//!
//! A segment that leaves while it is waiting is removed at once, and was never registered.

use std::collections::{BTreeMap, BTreeSet};

/// How memory was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Allocated by itself: `cudaMalloc`, `cuMemAlloc`.
    Plain,
    /// From a stream-ordered pool: `cudaMallocAsync`.
    Pool,
    /// Mapped into reserved addresses: `cuMemMap`. It is usable once access to it has been granted.
    Mapped,
}

/// A range of GPU memory that is allocated or mapped in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its first address.
    pub start: u64,
    /// Its length in bytes.
    pub bytes: usize,
    /// How it was created.
    pub kind: Kind,
    /// The CUDA context of the thread that made the memory accessible: a handle that the book only stores, 0 if there
    /// was none.
    pub context: usize,
    /// Distinguishes it from other segments that have the same addresses before or after it.
    number: u64,
}

/// What has to be done before memory may be freed or unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The book has nothing more in that range: continue.
    Done,
    /// A segment was removed; ask again.
    Gone,
    /// Another thread is registering or deregistering a segment there: wait until it is done, then ask again.
    Busy,
    /// Deregister this one, report that with [`Book::deregistered`], then ask again.
    Deregister(Segment),
}

/// The book's counters. C reads them as the beginning of `struct ssdtrain_malloc_hook_stats`, so the order must not
/// change.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Segments that were allocated or mapped.
    pub allocations: u64,
    /// Segments that were freed or unmapped.
    pub frees: u64,
    /// Frees of memory that is not in the book, because it is older than the book or came from elsewhere.
    pub unknown_frees: u64,
    /// Registrations that were accepted.
    pub registrations: u64,
    /// Registrations that were undone.
    pub deregistrations: u64,
    /// Registrations that were refused.
    pub refusals: u64,
    /// Segments that are live now.
    pub live: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Segments that are registered now.
    pub registered: u64,
    /// Their bytes.
    pub registered_bytes: u64,
}

/// The live segments by their first address.
#[derive(Debug, Default)]
pub struct Book {
    segments: BTreeMap<u64, (Segment, State)>,
    /// The first addresses of the segments whose state is [`State::Waiting`].
    waiting: BTreeSet<u64>,
    counts: Counts,
    next: u64,
    open: bool,
    /// Memory of a pool was refused. All such memory is alike, so the rest counts as refused without being tried.
    pools_refused: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Mapped, and not accessible yet.
    NoAccess,
    /// Waiting to be registered.
    Waiting,
    /// A thread is registering it.
    Registering,
    Registered,
    /// A thread is deregistering it.
    Deregistering,
    /// It stays live without a registration, which is not tried again.
    Refused,
}

impl Book {
    /// A closed, empty book.
    pub const fn new() -> Book {
        let counts = Counts {
            allocations: 0,
            frees: 0,
            unknown_frees: 0,
            registrations: 0,
            deregistrations: 0,
            refusals: 0,
            live: 0,
            live_bytes: 0,
            registered: 0,
            registered_bytes: 0,
        };
        Book {
            segments: BTreeMap::new(),
            waiting: BTreeSet::new(),
            counts,
            next: 0,
            open: false,
            pools_refused: false,
        }
    }

    /// From now on segments are recorded.
    pub fn open(&mut self) {
        self.open = true;
    }

    /// From now on nothing is recorded, and everything in the book is removed. Returns the segments that the caller
    /// has to deregister, calling [`Book::deregistered`] after each. Segments that other threads are busy with are
    /// removed when those are done.
    pub fn close(&mut self) -> Vec<Segment> {
        self.open = false;
        self.waiting.clear();
        let mut registered = Vec::new();
        for (segment, state) in self.segments.values_mut() {
            if *state == State::Registered {
                *state = State::Deregistering;
                registered.push(*segment);
            }
        }
        self.segments.retain(|_, (_, state)| state.is_busy());
        registered
    }

    /// Whether no segment is in the book.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Whether a segment is waiting to be registered.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether every segment that can be registered has been, or was refused.
    pub fn is_settled(&self) -> bool {
        !self.is_waiting() && self.segments.values().all(|(_, state)| *state != State::Registering)
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        let mut counts = self.counts;
        for (segment, state) in self.segments.values() {
            let bytes = segment.bytes as u64;
            counts.live += 1;
            counts.live_bytes += bytes;
            if matches!(state, State::Registered | State::Deregistering) {
                counts.registered += 1;
                counts.registered_bytes += bytes;
            }
        }
        counts
    }

    /// Records memory that was allocated (it then waits to be registered) or mapped (it then waits for access).
    ///
    /// Returns false if it is not recorded: it is empty, the book is closed, or another segment has some of these
    /// addresses. Call [`Book::leave`] first, which removes segments whose end was never seen.
    pub fn enter(&mut self, start: u64, bytes: usize, kind: Kind, context: usize) -> bool {
        let end = start.saturating_add(bytes as u64);
        if !self.open || start == 0 || start == end || self.first_in(start, end).is_some() {
            return false;
        }
        let state = match kind {
            Kind::Mapped => State::NoAccess,
            Kind::Pool if self.pools_refused => State::Refused,
            Kind::Pool | Kind::Plain => State::Waiting,
        };
        self.next += 1;
        self.counts.allocations += 1;
        self.segments.insert(start, (Segment { start, bytes, kind, context, number: self.next }, state));
        match state {
            State::Waiting => drop(self.waiting.insert(start)),
            State::Refused => self.counts.refusals += 1,
            _ => {}
        }
        true
    }

    /// Access to a range was granted by a thread with this context: the mappings within it now wait to be registered.
    ///
    /// Each mapping is registered separately, because each may be unmapped separately.
    pub fn granted(&mut self, start: u64, bytes: usize, context: usize) {
        let end = start.saturating_add(bytes as u64);
        for (segment, state) in self.segments.range_mut(start..end).map(|(_, entry)| entry) {
            if *state == State::NoAccess && segment.end() <= end {
                segment.context = context;
                *state = State::Waiting;
                self.waiting.insert(segment.start);
            }
        }
    }

    /// A segment that is waiting to be registered, for the caller to register. [`Book::settle`] must follow.
    pub fn take(&mut self) -> Option<Segment> {
        while let Some(start) = self.waiting.pop_first() {
            let (segment, state) = self.segments.get_mut(&start)?;
            if !(segment.kind == Kind::Pool && self.pools_refused) {
                *state = State::Registering;
                return Some(*segment);
            }
            *state = State::Refused;
            self.counts.refusals += 1;
        }
        None
    }

    /// A segment that was taken has been registered, or was refused. Returns true if the book was closed meanwhile:
    /// the caller then has to deregister it and call [`Book::deregistered`].
    pub fn settle(&mut self, segment: Segment, registered: bool) -> bool {
        let counter = if registered { &mut self.counts.registrations } else { &mut self.counts.refusals };
        *counter += 1;
        self.pools_refused |= segment.kind == Kind::Pool && !registered;
        let open = self.open;
        let Some(state) = self.state_of(segment) else { return registered };
        *state = match (registered, open) {
            (true, true) => State::Registered,
            (true, false) => State::Deregistering,
            (false, _) => State::Refused,
        };
        if !open && !registered {
            self.segments.remove(&segment.start);
        }
        registered && !open
    }

    /// Whether memory that starts here may be freed. Frees of memory that is not in the book are counted and may
    /// proceed.
    pub fn free(&mut self, start: u64) -> Leave {
        if self.segments.contains_key(&start) {
            return self.leave(start, 1, true);
        }
        self.counts.unknown_frees += 1;
        Leave::Done
    }

    /// Whether the memory of a range may be given up. `seen` says that it is being freed or unmapped, which is
    /// counted, rather than that its addresses now belong to others.
    pub fn leave(&mut self, start: u64, bytes: usize, seen: bool) -> Leave {
        let end = start.saturating_add(bytes as u64);
        let Some(first) = self.first_in(start, end) else { return Leave::Done };
        let Some((segment, state)) = self.segments.get_mut(&first) else { return Leave::Done };
        if state.is_busy() {
            return Leave::Busy;
        }
        self.counts.frees += u64::from(seen);
        if *state == State::Registered {
            *state = State::Deregistering;
            return Leave::Deregister(*segment);
        }
        self.waiting.remove(&first);
        self.segments.remove(&first);
        Leave::Gone
    }

    /// The segment that contains all of these bytes, if it is registered.
    pub fn registered(&self, start: u64, bytes: usize) -> Option<Segment> {
        let (_, (segment, state)) = self.segments.range(..=start).next_back()?;
        let end = start.saturating_add(bytes as u64);
        (*state == State::Registered && end <= segment.end()).then_some(*segment)
    }

    /// A segment that had to be deregistered has been, and is removed from the book.
    pub fn deregistered(&mut self, segment: Segment) {
        if self.state_of(segment).is_some() {
            self.segments.remove(&segment.start);
        }
        self.counts.deregistrations += 1;
    }

    fn state_of(&mut self, segment: Segment) -> Option<&mut State> {
        let (found, state) = self.segments.get_mut(&segment.start)?;
        (found.number == segment.number).then_some(state)
    }

    /// Where the first segment that has an address in the range starts.
    fn first_in(&self, start: u64, end: u64) -> Option<u64> {
        let before =
            self.segments.range(..start).next_back().filter(|(_, (segment, _))| segment.end() > start);
        before.or_else(|| self.segments.range(start..end).next()).map(|(first, _)| *first)
    }
}

impl Segment {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes as u64)
    }
}

impl State {
    fn is_busy(self) -> bool {
        matches!(self, State::Registering | State::Deregistering)
    }
}
