//! Which GPU memory is live, and which of it is registered.
//!
//! The book knows nothing of CUDA or cuFile: it says what has to be done next, and is told when it is done. Every change of a
//! segment's state has one owner, so that a registration is never made twice and never outlives its memory.
//!
//! ```text
//! allocated ─────────────────► Waiting ─take─► Registering ─┬─► Registered ─leave─► Deregistering ─► gone
//! mapped ─► NoAccess ─granted─────┘                         └─► Refused ─leave─► gone
//! ```
//!
//! What leaves while it waits is gone at once, and was never registered.

use std::collections::{BTreeMap, BTreeSet};

/// How memory came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Allocated by itself: `cudaMalloc`, `cuMemAlloc`.
    Plain,
    /// From a stream-ordered pool: `cudaMallocAsync`.
    Pool,
    /// Mapped into reserved addresses: `cuMemMap`. It is of use once access to it is granted.
    Mapped,
}

/// A range of GPU memory that is allocated or mapped in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its first address.
    pub start: u64,
    /// How long it is.
    pub bytes: usize,
    /// How it came to be.
    pub kind: Kind,
    /// What the thread had as its CUDA context that made it accessible: a handle that the book only keeps, 0 if there was none.
    pub context: usize,
    /// Tells it from others that have the same addresses before or after it.
    number: u64,
}

/// What is to be done before memory may be freed or unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The book has nothing more in that range: go on.
    Done,
    /// A segment was struck out; ask again.
    Gone,
    /// Another thread registers or deregisters a segment there: wait until it is done, then ask again.
    Busy,
    /// Deregister this one, say so with [`Book::deregistered`], then ask again.
    Deregister(Segment),
}

/// What the book has counted. C reads it as the beginning of `struct ssdtrain_malloc_hook_stats`, so the order stays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Segments that were allocated or mapped.
    pub allocations: u64,
    /// Segments that were freed or unmapped.
    pub frees: u64,
    /// Frees of memory that is not in the book, as it is older than the book or came from elsewhere.
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
    /// The first addresses of those whose state is [`State::Waiting`].
    waiting: BTreeSet<u64>,
    counts: Counts,
    next: u64,
    open: bool,
    /// Memory of a pool was refused. It is all of one kind, so the rest counts as refused without being tried.
    pools_refused: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Mapped, and not accessible yet.
    NoAccess,
    /// To be registered.
    Waiting,
    /// A thread registers it now.
    Registering,
    Registered,
    /// A thread deregisters it now.
    Deregistering,
    /// It stays live without a registration; it is not tried again.
    Refused,
}

impl Book {
    /// A book that is closed and empty.
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

    /// From now on segments are entered.
    pub fn open(&mut self) {
        self.open = true;
    }

    /// From now on nothing is entered, and what is in the book leaves it. Returns what the caller has to deregister, each with
    /// [`Book::deregistered`] after it; what other threads are busy with leaves when they are done.
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

    /// Whether a segment waits for its registration.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether every segment that can be registered is, or was refused.
    pub fn is_settled(&self) -> bool {
        !self.is_waiting() && self.segments.values().all(|(_, state)| *state != State::Registering)
    }

    /// What was counted so far.
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

    /// Enters memory that was allocated (then it waits for its registration) or mapped (then it waits for access).
    ///
    /// False if it is not entered: it is empty, the book is closed, or another segment has some of these addresses. Ask
    /// [`Book::leave`] first, which strikes out segments whose end was never seen.
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

    /// Access to a range was granted by a thread with this context: the mappings that lie in it wait for their registration now.
    ///
    /// Each mapping is registered by itself, as each may be unmapped by itself.
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

    /// A segment that waits for its registration, for the caller to register. [`Book::settle`] follows.
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

    /// A segment that was taken is registered, or refused. True if the book was closed meanwhile: the caller has to deregister
    /// it and call [`Book::deregistered`].
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

    /// Whether memory that starts here may be freed. Frees of memory that is not in the book are counted and may go on.
    pub fn free(&mut self, start: u64) -> Leave {
        if self.segments.contains_key(&start) {
            return self.leave(start, 1, true);
        }
        self.counts.unknown_frees += 1;
        Leave::Done
    }

    /// Whether the memory of a range may be given up. `seen` says that this is because it is freed or unmapped, which is
    /// counted, and not because others have its addresses now.
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

    /// The segment with all of these bytes, if it is registered.
    pub fn registered(&self, start: u64, bytes: usize) -> Option<Segment> {
        let (_, (segment, state)) = self.segments.range(..=start).next_back()?;
        let end = start.saturating_add(bytes as u64);
        (*state == State::Registered && end <= segment.end()).then_some(*segment)
    }

    /// A segment that was to be deregistered is, and leaves the book.
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

    /// Where the first segment starts that has an address of the range.
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
