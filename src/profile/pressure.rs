//! What operations of a profiled step would have needed, had there been memory for it.

use ssdtrain_libtorch as torch;
use ssdtrain_store::sync::Mutex;
use tch::Device;

/// The peak of a device that would have come about, had nothing been freed for want of memory since [`restart`](Pressure::restart).
pub(crate) struct Pressure {
    device: Device,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    /// Allocated bytes when something was to be freed last.
    allocated: u64,
    /// Bytes that were freed.
    freed: u64,
    /// The peak that would have come about until the last of them were.
    wanted: u64,
    /// The highest peak that did come about.
    highest: u64,
}

impl Pressure {
    pub(super) fn new(device: Device) -> Pressure {
        Pressure { device, book: Mutex::default() }
    }

    /// Something is about to be freed. The device's peak begins anew.
    pub(crate) fn begins(&self) {
        let mut book = self.book.lock();
        let torch::MemoryStats { allocated, peak, .. } = torch::memory(self.device);
        torch::reset_peak(self.device);
        book.begins(allocated, peak);
    }

    /// It has been freed.
    pub(crate) fn ends(&self) {
        self.book.lock().ends(torch::memory(self.device).allocated);
    }

    /// The peak that would have come about, if `peak` did.
    pub(super) fn wanted(&self, peak: u64) -> u64 {
        self.book.lock().wanted(peak)
    }

    /// What was freed so far concerns nobody any more. Returns the highest peak that came about, before the device's last began.
    pub(super) fn restart(&self) -> u64 {
        let mut book = self.book.lock();
        *book = Book { highest: book.highest, ..Book::default() };
        book.highest
    }
}

impl Book {
    fn begins(&mut self, allocated: u64, peak: u64) {
        self.wanted = self.wanted(peak);
        self.highest = self.highest.max(peak);
        self.allocated = allocated;
    }

    fn ends(&mut self, allocated: u64) {
        self.freed += self.allocated.saturating_sub(allocated);
    }

    fn wanted(&self, peak: u64) -> u64 {
        self.wanted.max(peak + self.freed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_before_something_was_freed_is_no_higher_for_it() {
        let mut book = Book::default();
        book.begins(80, 90);
        book.ends(30);
        assert_eq!(book.wanted(60), 110, "it needed 20 more than there were");
        assert_eq!(book.wanted(30), 90);
        book.begins(50, 60);
        book.ends(20);
        assert_eq!((book.wanted(20), book.wanted(40)), (110, 120));
        assert_eq!(book.highest, 90);
    }
}
