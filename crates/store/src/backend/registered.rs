//! GPU memory that is registered with cuFile, which moves bytes directly into registered memory and through bounce
//! buffers into any other.
//!
//! The unit of registration is a whole segment of the program's allocator. This module is told about segments by the
//! [`Gpu`], and registers a segment when the first of its bytes is moved. If the malloc hook is preloaded and on, it
//! registers segments instead. Transfers name a segment by its first byte, as cuFile requires. Memory that cuFile
//! refuses to register is moved all the same.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use crate::sync::Mutex;
use cufile_sys::{Buffer, Driver};

use super::malloc_hook::MallocHook;
use crate::gpu::{Gpu, SegmentWatcher};

/// The registered memory of one GPU, and how transfers address it.
pub(super) struct Registered(Who);

enum Who {
    /// The preloaded library, which registers whatever is allocated while it is on.
    MallocHook(MallocHook),
    Allocator(Arc<Book>),
    Nobody(String),
}

/// The live segments of this process.
pub(super) struct Segments {
    /// First address to length in bytes. Addresses are unique across all devices.
    live: Mutex<BTreeMap<usize, usize>>,
    books: Mutex<Vec<Weak<Book>>>,
    watched: OnceLock<Result<(), String>>,
}

/// The buffers registered with one driver.
struct Book {
    driver: Driver,
    segments: &'static Segments,
    /// By first address; `None` if cuFile has refused to register it.
    buffers: Mutex<BTreeMap<usize, Option<Buffer>>>,
}

static SEGMENTS: Segments = Segments::new();

impl Registered {
    /// Registers memory with `driver`, if there is anything here that reports segments.
    pub(super) fn with(driver: &Driver, gpu: &dyn Gpu) -> Registered {
        if let Some(hook) = MallocHook::find() {
            return Registered(Who::MallocHook(hook));
        }
        let watched = SEGMENTS.watched.get_or_init(|| gpu.watch(&SEGMENTS));
        Registered(match watched {
            Ok(()) => Who::Allocator(SEGMENTS.book(driver)),
            Err(reason) => Who::Nobody(reason.clone()),
        })
    }

    /// The distance of these bytes from the start of the registered segment that contains them; 0 if none does. The
    /// memory must be in use.
    pub(super) fn offset(&self, address: usize, bytes: usize) -> usize {
        let start = match &self.0 {
            Who::MallocHook(hook) => hook.segment_of(address, bytes),
            Who::Allocator(book) => book.registered(address, bytes),
            Who::Nobody(_) => None,
        };
        start.map_or(0, |start| address - start)
    }
}

impl fmt::Display for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Who::MallocHook(_) => f.write_str("GPU memory registered by the malloc hook"),
            Who::Allocator(book) => book.fmt(f),
            Who::Nobody(reason) => write!(f, "GPU memory not registered: {reason}"),
        }
    }
}

impl Segments {
    pub(super) const fn new() -> Segments {
        Segments {
            live: Mutex::new(BTreeMap::new()),
            books: Mutex::new(Vec::new()),
            watched: OnceLock::new(),
        }
    }

    fn book(&'static self, driver: &Driver) -> Arc<Book> {
        let book = Arc::new(Book { driver: driver.clone(), segments: self, buffers: Mutex::default() });
        let mut books = self.books.lock();
        books.retain(|book| book.strong_count() > 0);
        books.push(Arc::downgrade(&book));
        book
    }

    /// The segment that contains these bytes: its start and its length.
    fn of(&self, address: usize, bytes: usize) -> Option<(usize, usize)> {
        let live = self.live.lock();
        let (start, all) = live.range(..=address).next_back()?;
        (address - start + bytes <= *all).then_some((*start, *all))
    }
}

impl SegmentWatcher for Segments {
    fn came(&self, start: usize, bytes: usize) {
        self.live.lock().insert(start, bytes);
    }

    fn goes(&self, start: usize) {
        self.live.lock().remove(&start);
        let books: Vec<Arc<Book>> = self.books.lock().iter().filter_map(Weak::upgrade).collect();
        for book in books {
            // Deregistered before this returns, and only then is the memory freed.
            let buffer = book.buffers.lock().remove(&start);
            drop(buffer);
        }
    }
}

impl Book {
    /// The start of the registered segment that contains these bytes. It is registered now if that was not tried
    /// before.
    fn registered(&self, address: usize, bytes: usize) -> Option<usize> {
        let (start, bytes) = self.segments.of(address, bytes)?;
        let mut buffers = self.buffers.lock();
        let buffer = buffers.entry(start).or_insert_with(|| self.register(start, bytes));
        buffer.is_some().then_some(start)
    }

    fn register(&self, start: usize, bytes: usize) -> Option<Buffer> {
        // SAFETY: the segment has a byte that is in use, so it is not freed now; before it is freed, `goes` drops the
        // buffer.
        let outcome = unsafe { self.driver.register_buffer(start as *const _, bytes) };
        outcome
            .inspect_err(|error| tracing::debug!(%error, "cuFile moves a segment's bytes by bounce buffers"))
            .ok()
    }
}

impl fmt::Display for Book {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let buffers = self.buffers.lock();
        let refused = buffers.values().filter(|buffer| buffer.is_none()).count();
        f.write_str("GPU memory registered as its allocator tells")?;
        if refused > 0 { write!(f, " ({refused} of {} segments refused)", buffers.len()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite::stand_in::StandIn;
    use super::*;

    fn book(stand_in: &StandIn) -> (&'static Segments, Arc<Book>) {
        let segments: &'static Segments = Box::leak(Box::new(Segments::new()));
        (segments, segments.book(&stand_in.driver()))
    }

    #[test]
    fn a_segment_is_registered_with_its_first_transfer_and_deregistered_before_it_is_freed() {
        let stand_in = StandIn::new();
        let (segments, book) = book(&stand_in);
        segments.came(4096, 8192);
        segments.came(4096, 8192);
        assert_eq!(stand_in.count("cuFileBufRegister"), 0);
        let registered = Registered(Who::Allocator(Arc::clone(&book)));
        assert_eq!([4096, 5000, 12_287].map(|at| registered.offset(at, 1)), [0, 904, 8191]);
        assert_eq!([4095, 12_287].map(|at| registered.offset(at, 2)), [0, 0]);
        assert_eq!((stand_in.count("cuFileBufRegister"), stand_in.count("cuFileBufDeregister")), (1, 0));
        segments.goes(4096);
        assert_eq!(stand_in.count("cuFileBufDeregister"), 1);
        assert_eq!(registered.offset(5000, 1), 0);
        drop((registered, book));
        stand_in.assert_nothing_is_left();
    }

    #[test]
    fn addresses_that_are_used_again_are_registered_again() {
        let stand_in = StandIn::new();
        let (segments, book) = book(&stand_in);
        for bytes in [4096, 1 << 20] {
            segments.came(4096, bytes);
            assert_eq!(book.registered(4096, 1), Some(4096));
            segments.goes(4096);
        }
        assert_eq!(stand_in.count("cuFileBufRegister"), 2);
    }

    #[test]
    fn what_is_refused_is_moved_all_the_same_not_asked_again_and_told() {
        let stand_in = StandIn::new();
        let (segments, book) = book(&stand_in);
        stand_in.fail("cuFileBufRegister", 5027);
        segments.came(4096, 4096);
        let registered = Registered(Who::Allocator(book));
        assert_eq!([registered.offset(5000, 1), registered.offset(5000, 1)], [0, 0]);
        assert_eq!(stand_in.count("cuFileBufRegister"), 1);
        assert!(registered.to_string().contains("1 of 1 segments refused"), "{registered}");
    }

    #[test]
    fn nothing_stays_registered_after_the_backend() {
        let stand_in = StandIn::new();
        let (segments, first) = book(&stand_in);
        segments.came(4096, 4096);
        first.registered(4096, 1);
        drop(first);
        stand_in.assert_nothing_is_left();
        segments.goes(4096);
    }
}
