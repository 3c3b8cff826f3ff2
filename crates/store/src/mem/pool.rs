//! Pinned host memory that never fragments.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::sync::Mutex;
use bytesize::ByteSize;

use super::mapping::{HUGE, Mapping};
use super::runs::Runs;
use super::{IoBuf, parts};
use crate::error::{Error, ErrorKind, Result};

/// The granularity of a [`HostPool`], in bytes.
pub const PAGE: usize = 64 << 10;

/// Makes host memory known to a device, which can then copy from and to it without the processor's help.
pub trait Pin: Send + Sync {
    /// Pins `bytes` at `memory`. The error says why it failed.
    ///
    /// # Safety
    ///
    /// The memory is mapped, and stays so until it has been unpinned.
    unsafe fn pin(&self, memory: NonNull<u8>, bytes: usize) -> Result<(), String>;

    /// Undoes [`pin`](Pin::pin); it waits until the device has finished with the memory. Failures are logged.
    ///
    /// # Safety
    ///
    /// Exactly this range was pinned, has not been unpinned since, and is still mapped.
    unsafe fn unpin(&self, memory: NonNull<u8>, bytes: usize);

    /// The NUMA node whose memory is nearest to the device, if that matters.
    fn node(&self) -> Option<u32> {
        None
    }
}

/// Pinned host memory, handed out in [`Slot`]s. A cheap handle: clones share one pool.
///
/// A slot can take any free pages, so there is room for it as long as enough pages are free. The memory is unpinned
/// and unmapped when the last handle and the last slot are dropped.
#[derive(Clone)]
pub struct HostPool {
    shared: Arc<Shared>,
}

struct Shared {
    cap: u64,
    pin: Arc<dyn Pin>,
    /// Held while the pool grows, which may take seconds; slots are still taken and freed meanwhile.
    growing: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Runs,
    regions: Vec<Region>,
    /// The number of pages of all regions.
    pages: usize,
    /// The number of the next page to be added. Pages are numbered from the first region on, and no number is given twice.
    next: usize,
}

/// What a pool no longer has. It is unpinned and unmapped when this is dropped, which may wait until the device has finished with it.
#[must_use]
pub struct Shrunk(Vec<Region>);

impl Shrunk {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|region| region.mapping.len() as u64).sum()
    }
}

/// A pinned mapping.
struct Region {
    first_page: usize,
    mapping: Mapping,
    pin: Arc<dyn Pin>,
}

impl HostPool {
    /// An empty pool of at most `cap_bytes`, rounded down to a multiple of 2 MiB.
    pub fn new(cap_bytes: u64, pin: Arc<dyn Pin>) -> HostPool {
        let cap = cap_bytes / HUGE as u64 * HUGE as u64;
        HostPool { shared: Arc::new(Shared { cap, pin, growing: Mutex::default(), state: Mutex::default() }) }
    }

    /// Maps and pins `bytes` more, rounded up to a multiple of 2 MiB, as far as possible of the [node](Pin::node) nearest to
    /// the device. This is slow, so do it at the start rather than in a step.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NoSpace`] if the pool would exceed its cap or the system has no such memory,
    /// [`ErrorKind::Config`] if the memory cannot be pinned. The pool is then unchanged.
    pub fn grow(&self, bytes: u64) -> Result<()> {
        let Shared { cap, pin, growing, state } = &*self.shared;
        let _alone = growing.lock();
        let capacity = self.capacity();
        let rounded =
            bytes.checked_next_multiple_of(HUGE as u64).filter(|&rounded| rounded <= cap - capacity);
        let Some(bytes) = rounded.and_then(|rounded| usize::try_from(rounded).ok()) else {
            let (bytes, capacity, cap) = (ByteSize(bytes), ByteSize(capacity), ByteSize(*cap));
            let message = format!(
                "the host pool has {capacity} and cannot grow by {bytes}: its cap is {cap}; raise the cap"
            );
            return Err(Error::new(ErrorKind::NoSpace, message));
        };
        if bytes == 0 {
            return Ok(());
        }
        let mapping = Mapping::new(bytes, pin.node()).map_err(|error| {
            let message = format!(
                "no memory for {} more of the host pool, which has {}; lower its cap or free memory",
                ByteSize(bytes as u64),
                ByteSize(capacity)
            );
            Error::io(ErrorKind::NoSpace, message, error)
        })?;
        let region = Region::pinned(mapping, pin)?;
        state.lock().add(region);
        Ok(())
    }

    /// Takes what was added by one [`grow`](HostPool::grow) and is all free out of the pool.
    pub fn shrink(&self) -> Shrunk {
        Shrunk(self.shared.state.lock().take_free_regions())
    }

    /// Takes memory for `bytes`, padded to whole pages of [`PAGE`]; `None` if fewer are free now. Its contents are
    /// arbitrary.
    pub fn take(&self, bytes: u64) -> Option<Slot> {
        let pages = usize::try_from(bytes.div_ceil(PAGE as u64)).ok()?;
        let mut state = self.shared.state.lock();
        let runs = state.free.take(pages)?;
        let mut start = 0;
        let locate = |run: &Range<usize>| {
            let piece = Piece { start, memory: state.address(run.start) };
            start += run.len() * PAGE;
            piece
        };
        let pieces = runs.iter().map(locate).collect();
        drop(state);
        Some(Slot { pool: Arc::clone(&self.shared), bytes, runs, pieces, capacity: pages * PAGE })
    }

    /// Bytes of the pool, in use or free; all of them are pinned.
    pub fn capacity(&self) -> u64 {
        (self.shared.state.lock().pages * PAGE) as u64
    }

    /// Bytes that are free now; a slot of that size can be taken.
    pub fn free_bytes(&self) -> u64 {
        (self.shared.state.lock().free.free() * PAGE) as u64
    }

    /// Bytes that slots have now.
    pub fn used_bytes(&self) -> u64 {
        let state = self.shared.state.lock();
        ((state.pages - state.free.free()) * PAGE) as u64
    }

    /// Bytes that the pool can grow to.
    pub fn cap(&self) -> u64 {
        self.shared.cap
    }

    /// How many times memory was pinned that is still pinned: once each time the pool grew.
    pub fn pins(&self) -> u64 {
        self.shared.state.lock().regions.len() as u64
    }
}

impl State {
    fn add(&mut self, mut region: Region) {
        region.first_page = self.next;
        let pages = region.pages();
        (self.pages, self.next) = (self.pages + pages.len(), pages.end);
        self.free.add(pages);
        self.regions.push(region);
    }

    fn take_free_regions(&mut self) -> Vec<Region> {
        let free = &mut self.free;
        let gone: Vec<Region> = self.regions.extract_if(.., |region| free.remove(&region.pages())).collect();
        self.pages -= gone.iter().map(|region| region.pages().len()).sum::<usize>();
        gone
    }

    /// The address of a page.
    fn address(&self, page: usize) -> NonNull<u8> {
        let region = &self.regions[self.regions.partition_point(|region| region.first_page <= page) - 1];
        region.mapping.at((page - region.first_page) * PAGE)
    }
}

impl Region {
    fn pages(&self) -> Range<usize> {
        self.first_page..self.first_page + self.mapping.len() / PAGE
    }

    fn pinned(mapping: Mapping, pin: &Arc<dyn Pin>) -> Result<Region> {
        // SAFETY: the mapping belongs to the region, which unpins it before it is unmapped.
        match unsafe { pin.pin(mapping.at(0), mapping.len()) } {
            Ok(()) => Ok(Region { first_page: 0, mapping, pin: Arc::clone(pin) }),
            Err(reason) => {
                let message = format!(
                    "{} of the host pool could not be pinned: {reason}; raise the limit of locked memory \
                     (ulimit -l), or lower the pool's cap",
                    ByteSize(mapping.len() as u64)
                );
                Err(Error::new(ErrorKind::Config, message))
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `pinned` pinned this range, nothing has unpinned it since, and the mapping is dropped after this.
        unsafe { self.pin.unpin(self.mapping.at(0), self.mapping.len()) };
    }
}

/// Pages of a [`HostPool`] that hold one value; they are returned on drop.
///
/// Its bytes are reachable only through raw pointers. Whoever holds the slot ensures that transfers, and copies from
/// and to it, do not conflict with each other and have ended when it is dropped.
pub struct Slot {
    pool: Arc<Shared>,
    bytes: u64,
    runs: Vec<Range<usize>>,
    /// The addresses of the runs, in the same order.
    pieces: Vec<Piece>,
    capacity: usize,
}

struct Piece {
    /// Bytes of the slot that come before it.
    start: usize,
    memory: NonNull<u8>,
}

// SAFETY: the pages are the slot's alone until it is dropped, and memory belongs to no thread.
unsafe impl Send for Slot {}
// SAFETY: through `&Slot` only addresses and lengths are reachable.
unsafe impl Sync for Slot {}

impl Slot {
    /// Payload bytes: what was asked for.
    pub fn payload_len(&self) -> u64 {
        self.bytes
    }

    /// The contiguous parts of the payload, in order: the address and length of each.
    pub fn parts(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        // The payload is no longer than the capacity, which is a usize.
        parts(self, usize::try_from(self.bytes).unwrap_or(self.capacity))
    }
}

// SAFETY: the pages are mapped for as long as the pool exists, which the slot keeps alive; they are the slot's alone
// until its drop, and nothing but its holder reaches them.
unsafe impl IoBuf for Slot {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        let next = self.pieces.partition_point(|piece| piece.start <= offset);
        let piece = &self.pieces[next - 1];
        let end = self.pieces.get(next).map_or(self.capacity, |next| next.start);
        (piece.memory.as_ptr().wrapping_add(offset - piece.start), end - offset)
    }

    fn len(&self) -> usize {
        self.capacity
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.pool.state.lock().free.give(&self.runs);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Records what is pinned, and can be made to refuse.
    #[derive(Default)]
    struct Recorder {
        pinned: Mutex<Vec<(usize, usize)>>,
        refusal: Mutex<Option<String>>,
    }

    impl Pin for Recorder {
        unsafe fn pin(&self, memory: NonNull<u8>, bytes: usize) -> Result<(), String> {
            if let Some(reason) = &*self.refusal.lock() {
                return Err(reason.clone());
            }
            self.pinned.lock().push((memory.addr().get(), bytes));
            Ok(())
        }

        unsafe fn unpin(&self, memory: NonNull<u8>, bytes: usize) {
            // SAFETY: what is unpinned is still mapped, and nobody uses it any more.
            unsafe { memory.write_volatile(1) };
            let mut pinned = self.pinned.lock();
            let index = pinned.iter().position(|&range| range == (memory.addr().get(), bytes));
            pinned.remove(index.expect("what is unpinned was pinned"));
        }
    }

    impl Recorder {
        fn pinned_bytes(&self) -> u64 {
            self.pinned.lock().iter().map(|&(_, bytes)| bytes as u64).sum()
        }
    }

    const STEP: u64 = HUGE as u64;
    const PAGE_BYTES: u64 = PAGE as u64;

    fn pool(cap: u64) -> (HostPool, Arc<Recorder>) {
        let recorder = Arc::new(Recorder::default());
        (HostPool::new(cap, Arc::<Recorder>::clone(&recorder)), recorder)
    }

    #[test]
    fn it_grows_by_whole_huge_pages_up_to_its_cap() {
        let (pool, recorder) = pool(3 * STEP + 5);
        assert_eq!((pool.cap(), pool.capacity(), pool.pins()), (3 * STEP, 0, 0));
        pool.grow(0).unwrap();
        pool.grow(1).unwrap();
        assert_eq!((pool.capacity(), pool.free_bytes(), pool.pins()), (STEP, STEP, 1));
        for bytes in [2 * STEP + 1, u64::MAX] {
            let error = pool.grow(bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            assert!(error.to_string().contains("its cap is 6.0 MiB"), "{error}");
        }
        pool.grow(2 * STEP).unwrap();
        assert_eq!((pool.capacity(), recorder.pinned_bytes(), pool.pins()), (3 * STEP, 3 * STEP, 2));
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let (pool, recorder) = pool(u64::MAX);
        let error = pool.grow(1 << 60).unwrap_err();
        assert_eq!((error.kind(), pool.capacity(), recorder.pinned_bytes()), (ErrorKind::NoSpace, 0, 0));
    }

    #[test]
    fn memory_that_cannot_be_pinned_is_an_error_and_the_pool_is_as_before() {
        let (pool, recorder) = pool(4 * STEP);
        pool.grow(STEP).unwrap();
        *recorder.refusal.lock() = Some("too much is locked".to_owned());
        let error = pool.grow(STEP).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        let message = error.to_string();
        assert!(message.contains("2.0 MiB") && message.contains("too much is locked; raise"), "{message}");
        assert_eq!((pool.capacity(), pool.free_bytes(), pool.pins()), (STEP, STEP, 1));
        *recorder.refusal.lock() = None;
        pool.grow(3 * STEP).unwrap();
        assert_eq!(pool.free_bytes(), 4 * STEP);
    }

    #[test]
    fn a_slot_is_padded_to_pages_and_gives_them_back() {
        let (pool, _) = pool(STEP);
        pool.grow(STEP).unwrap();
        for (bytes, pages) in
            [(0, 0), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2), (STEP, STEP / PAGE_BYTES)]
        {
            let slot = pool.take(bytes).unwrap();
            assert_eq!((slot.payload_len(), slot.len() as u64), (bytes, pages * PAGE_BYTES));
            assert_eq!(slot.parts().map(|(_, len)| len as u64).sum::<u64>(), bytes);
            assert_eq!(pool.free_bytes(), STEP - pages * PAGE_BYTES);
            drop(slot);
            assert_eq!(pool.free_bytes(), STEP);
        }
        for bytes in [STEP + 1, u64::MAX] {
            assert!(pool.take(bytes).is_none());
        }
    }

    #[test]
    fn all_that_is_free_can_be_taken_however_scattered() {
        let (pool, _) = pool(2 * STEP);
        pool.grow(STEP).unwrap();
        pool.grow(STEP).unwrap();
        let mut slots: Vec<_> = std::iter::from_fn(|| pool.take(PAGE_BYTES)).collect();
        assert_eq!(slots.len() as u64, 2 * STEP / PAGE_BYTES);
        let mut index = 0;
        slots.retain(|_| {
            index += 1;
            index % 2 == 0
        });
        let scattered = pool.take(pool.free_bytes()).unwrap();
        assert_eq!((scattered.payload_len(), pool.free_bytes()), (STEP, 0));
        let mut pages: Vec<_> = slots.iter().chain([&scattered]).flat_map(Slot::parts).collect();
        pages.sort_unstable();
        assert!(pages.iter().all(|&(memory, len)| memory.addr() % PAGE == 0 && len == PAGE));
        assert!(pages.windows(2).all(|pair| pair[0].0 < pair[1].0), "no page is handed out twice");
        assert_eq!(pages.len() as u64, 2 * STEP / PAGE_BYTES);
    }

    #[test]
    fn a_part_begins_anywhere_and_ends_with_its_run() {
        let (pool, _) = pool(2 * STEP);
        pool.grow(STEP).unwrap();
        pool.grow(STEP).unwrap();
        // Two regions never form one part, even where they happen to be adjacent.
        let slot = pool.take(STEP + 1).unwrap();
        let parts: Vec<_> = slot.parts().collect();
        assert_eq!(parts.iter().map(|part| part.1).collect::<Vec<_>>(), [HUGE, 1]);
        assert_eq!(slot.part(HUGE - 1), (parts[0].0.wrapping_add(HUGE - 1), 1));
        assert_eq!(slot.part(HUGE), (parts[1].0, PAGE));
        assert_eq!(slot.part(HUGE + 5), (parts[1].0.wrapping_add(5), PAGE - 5));
    }

    #[test]
    fn memory_is_unpinned_with_the_last_handle_or_slot() {
        let (pool, recorder) = pool(STEP);
        pool.grow(STEP).unwrap();
        let (other, slot) = (pool.clone(), pool.take(1).unwrap());
        drop(pool);
        assert_eq!(other.free_bytes(), STEP - PAGE_BYTES);
        drop(other);
        assert_eq!(recorder.pinned_bytes(), STEP);
        drop(slot);
        assert_eq!(recorder.pinned_bytes(), 0);
    }

    #[test]
    fn what_is_all_free_is_given_back_and_what_grows_later_is_as_good() {
        let (pool, recorder) = pool(4 * STEP);
        for bytes in [2 * STEP, STEP, STEP] {
            pool.grow(bytes).unwrap();
        }
        let [first, second] = [2 * STEP, 1].map(|bytes| pool.take(bytes).unwrap());
        assert_eq!((pool.shrink().bytes(), pool.shrink().bytes()), (STEP, 0));
        drop(first);
        assert_eq!(pool.shrink().bytes(), 2 * STEP);
        assert_eq!((pool.capacity(), pool.free_bytes(), pool.pins()), (STEP, STEP - PAGE_BYTES, 1));
        assert_eq!(pool.used_bytes(), PAGE_BYTES);
        assert_eq!(recorder.pinned_bytes(), STEP);
        pool.grow(3 * STEP).unwrap();
        let third = pool.take(4 * STEP - PAGE_BYTES).unwrap();
        let parts = [&second, &third]
            .map(|slot| slot.parts().map(|(memory, len)| memory.addr()..memory.addr() + len));
        let mut parts: Vec<_> = parts.into_iter().flatten().collect();
        parts.sort_unstable_by_key(|part| part.start);
        assert!(parts.windows(2).all(|pair| pair[0].end <= pair[1].start), "no page is handed out twice");
        drop((second, third));
        assert_eq!(pool.shrink().bytes(), 4 * STEP);
        assert_eq!((pool.capacity(), recorder.pinned_bytes()), (0, 0));
    }

    #[test]
    fn threads_may_take_give_and_grow_at_once() {
        let (pool, _) = pool(8 * STEP);
        thread::scope(|scope| {
            for seed in 1..=4_u64 {
                let pool = &pool;
                scope.spawn(move || {
                    for step in 0..200 {
                        if step % 100 == 0 {
                            pool.grow(STEP).unwrap();
                        }
                        let Some(slot) = pool.take(1 + step * seed * 7_919 % STEP) else { continue };
                        for (memory, len) in slot.parts() {
                            // SAFETY: the part is `len` bytes long, and the slot is this thread's alone.
                            unsafe { memory.write_bytes(seed as u8, len) };
                        }
                        for (memory, len) in slot.parts() {
                            // SAFETY: as above.
                            let bytes = unsafe { std::slice::from_raw_parts(memory, len) };
                            assert!(bytes.iter().all(|&byte| u64::from(byte) == seed));
                        }
                    }
                });
            }
        });
        assert_eq!((pool.capacity(), pool.free_bytes(), pool.pins()), (8 * STEP, 8 * STEP, 8));
    }
}
