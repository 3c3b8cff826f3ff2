//! Models of the links that move bytes, one transfer after another. Times are in seconds since the step began.

use std::collections::VecDeque;

/// Transfers of one direction, in the order in which they are queued.
#[derive(Debug)]
pub(super) struct Link {
    bytes_per_s: f64,
    free: f64,
}

/// A disk. A read goes before queued writes, but waits for a write that has begun.
#[derive(Debug)]
pub(super) struct Disk {
    write: f64,
    read: f64,
    free: f64,
    /// Writes that have not begun: number, bytes, and the earliest time at which they can begin.
    waiting: VecDeque<(usize, u64, f64)>,
    /// Writes that have begun: number and end time. They run one after another, so they are in that order.
    begun: VecDeque<(usize, f64)>,
    /// No write begins or ends before this time.
    quiet_until: f64,
}

impl Link {
    pub(super) fn new(bytes_per_s: f64) -> Link {
        Link { bytes_per_s, free: 0.0 }
    }

    /// Queues a transfer that can begin at `ready`, and returns when it ends.
    pub(super) fn transfer(&mut self, bytes: u64, ready: f64) -> f64 {
        self.free = self.free.max(ready) + bytes as f64 / self.bytes_per_s;
        self.free
    }
}

impl Disk {
    pub(super) fn new(write: f64, read: f64) -> Disk {
        let (waiting, begun) = (VecDeque::new(), VecDeque::new());
        Disk { write, read, free: 0.0, waiting, begun, quiet_until: f64::INFINITY }
    }

    /// Queues a write that can begin at `ready`. The numbers must increase.
    pub(super) fn write(&mut self, which: usize, bytes: u64, ready: f64) {
        self.waiting.push_back((which, bytes, ready));
        self.quiet_until = self.quiet_until.min(self.free.max(ready));
    }

    /// Drops a write that has not begun.
    pub(super) fn cancel(&mut self, which: usize) {
        // Usually the write is the last one in the queue, or not in it.
        if self.waiting.back().is_none_or(|(last, ..)| *last < which) {
            return;
        }
        if let Ok(place) = self.waiting.binary_search_by_key(&which, |(other, ..)| *other) {
            self.waiting.remove(place);
        }
    }

    /// Reads at `now`, and returns when the read ends. Later calls must not refer to an earlier time.
    pub(super) fn read(&mut self, bytes: u64, now: f64) -> f64 {
        self.begin_writes(|start| start < now);
        self.free = self.free.max(now) + bytes as f64 / self.read;
        self.free
    }

    /// The next of the writes that have ended at `now`; each is reported once.
    pub(super) fn written_by(&mut self, now: f64) -> Option<usize> {
        if now < self.quiet_until {
            return None;
        }
        self.begin_writes(|start| start <= now);
        let written = self.begun.pop_front_if(|(_, end)| *end <= now).map(|(which, _)| which);
        let begins = self.waiting.front().map(|(_, _, ready)| self.free.max(*ready));
        let ends = self.begun.front().map(|(_, end)| *end);
        self.quiet_until = begins.into_iter().chain(ends).fold(f64::INFINITY, f64::min);
        written
    }

    /// When the next write ends; `None` if there are no writes.
    pub(super) fn next_written(&mut self) -> Option<f64> {
        if self.begun.is_empty() {
            let mut first = true;
            self.begin_writes(|_| std::mem::take(&mut first));
        }
        self.begun.front().map(|(_, end)| *end)
    }

    fn begin_writes(&mut self, mut may_begin: impl FnMut(f64) -> bool) {
        while let Some(&(which, bytes, ready)) = self.waiting.front() {
            let start = self.free.max(ready);
            if !may_begin(start) {
                return;
            }
            self.waiting.pop_front();
            self.free = start + bytes as f64 / self.write;
            self.begun.push_back((which, self.free));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(disk: &mut Disk, now: f64) -> Vec<usize> {
        std::iter::from_fn(|| disk.written_by(now)).collect()
    }

    #[test]
    fn transfers_of_a_lane_follow_each_other() {
        let mut link = Link::new(10.0);
        assert_eq!([link.transfer(10, 0.0), link.transfer(10, 0.0), link.transfer(10, 5.0)], [1.0, 2.0, 6.0]);
    }

    #[test]
    fn a_read_goes_before_the_writes_that_wait() {
        let mut disk = Disk::new(10.0, 10.0);
        for which in 0..3 {
            disk.write(which, 10, 0.0);
        }
        assert_eq!(disk.read(10, 0.5), 2.0, "after the write under way");
        assert_eq!(written(&mut disk, 2.5), [0]);
        assert_eq!(disk.next_written(), Some(3.0));
        assert_eq!(written(&mut disk, 4.0), [1, 2]);
        assert_eq!(disk.next_written(), None);
    }

    #[test]
    fn a_write_that_has_begun_cannot_be_dropped() {
        let mut disk = Disk::new(10.0, 10.0);
        (0..3).for_each(|which| disk.write(which, 10, 0.0));
        assert_eq!(written(&mut disk, 0.5), [0; 0]);
        (0..2).for_each(|which| disk.cancel(which));
        assert_eq!(written(&mut disk, 1.9), [0]);
        assert_eq!(disk.read(10, 1.9), 3.0, "after the third, which has begun");
    }
}
