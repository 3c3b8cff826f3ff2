//! Forward: storages are saved, and leave as late as possible.

use super::{At, Run, StallCause, forget};
use crate::{Activation, Moment, Placement, Release};

impl Run<'_> {
    pub(super) fn save(&mut self, index: usize) {
        let Activation { bytes, forward, forward_extra, .. } = self.activations[index];
        self.saving = index;
        self.note_written();
        // Its memory is allocated before it is computed.
        let activations = self.activations;
        self.in_use.retain(|&other| activations[other].in_use_until >= index);
        let in_use: u64 = self.in_use.iter().map(|&other| activations[other].bytes).sum();
        let all = self.on_device + in_use + bytes + forward_extra;
        self.note_bytes(Moment::Forward(index), all, forward_extra);
        self.compute(forward);
        self.note_written();
        if self.placement(index) == Placement::Recompute {
            self.hold(index);
            return;
        }
        while self.on_device + self.left_in_use() + bytes > self.budgets.device_budget
            && self.frees()
            && self.let_go()
        {}
        self.on_device += bytes;
        self.places[index].at = At::Device;
        if self.placement(index) == Placement::Keep {
            return;
        }
        match self.machine.release {
            Release::WhenStored | Release::OnceWritten => {
                self.releasing.push_back(index);
                self.disk.write(index, bytes, self.now);
                self.move_bytes(bytes);
            }
            Release::InStreamOrder => {
                if self.make_room(bytes) {
                    self.copy_out(index);
                }
            }
        }
    }

    pub(super) fn copy_out(&mut self, index: usize) {
        let bytes = self.activations[index].bytes;
        self.take_host(index);
        let ends = self.copies_out.transfer(bytes, self.now);
        self.places[index].copied = Some(ends);
        self.move_bytes(bytes);
        self.releasing.push_back(index);
        self.prediction.copied_out += bytes;
        if self.placement(index) == Placement::Disk {
            self.disk.write(index, bytes, ends);
        }
    }

    /// Waits until the oldest storage that is leaving may be released; false if none is leaving.
    pub(super) fn let_go(&mut self) -> bool {
        if self.machine.release == Release::WhenStored {
            let Some(written) = self.disk.next_written() else { return false };
            self.wait_until(written, StallCause::DeviceBudget);
            self.note_written();
            return true;
        }
        let Some(oldest) = self.releasing.front().copied() else { return false };
        while self.machine.release == Release::OnceWritten && self.places[oldest].copied.is_none() {
            let Some(written) = self.disk.next_written() else { return false };
            self.wait_until(written, StallCause::DeviceBudget);
            self.note_written();
        }
        self.releasing.pop_front();
        let copied = self.places[oldest].copied.unwrap_or(self.now);
        self.wait_until(copied, StallCause::DeviceBudget);
        self.leave(oldest);
        true
    }

    pub(super) fn leave(&mut self, index: usize) {
        if self.activations[index].in_use_until >= self.saving {
            self.hold(index);
        }
        // It may have been passed while it was there.
        if self.machine.release == Release::WhenStored && index < self.asked {
            self.loading_from = self.loading_from.max(index + 1);
        }
        self.places[index].at = At::Below;
        self.on_device -= self.activations[index].bytes;
    }

    /// Bytes that have left but that the program still holds. They count in the budget where storages leave only as fast as the disk
    /// takes them, so that the budget is kept however fast that is.
    fn left_in_use(&self) -> u64 {
        if self.machine.release != Release::WhenStored {
            return 0;
        }
        let left = self.in_use.iter().filter(|&&other| self.places[other].at == At::Below);
        left.map(|&other| self.activations[other].bytes).sum()
    }

    /// Whether anything that is leaving frees its memory then. What autograd does not save is counted besides for as long as it is used.
    fn frees(&self) -> bool {
        let is_over = |other: &usize| {
            let other = &self.activations[*other];
            !other.is_saved() || other.in_use_until < self.saving
        };
        self.machine.release != Release::WhenStored || self.releasing.iter().any(is_over)
    }

    /// The program holds an activation that is not on the device for the cache. What autograd does not save is part of
    /// what the program needs besides.
    fn hold(&mut self, index: usize) {
        self.in_use.extend(self.activations[index].is_saved().then_some(index));
    }

    /// Waits until there is room in host memory; false if waiting will not make any.
    pub(super) fn make_room(&mut self, bytes: u64) -> bool {
        loop {
            self.note_written();
            while !self.fits_host(bytes) {
                let Some(oldest) = self.clean.pop_front() else { break };
                self.give_host(oldest);
            }
            if self.fits_host(bytes) {
                return true;
            }
            let Some(written) = self.disk.next_written() else { return false };
            self.wait_until(written, StallCause::HostPool);
        }
    }

    /// A storage that is larger than the whole pool passes through it alone.
    pub(super) fn fits_host(&self, bytes: u64) -> bool {
        self.in_host == 0 || self.in_host.saturating_add(bytes) <= self.machine.host_pool
    }

    pub(super) fn note_written(&mut self) {
        while let Some(index) = self.disk.written_by(self.now) {
            self.prediction.written += self.activations[index].bytes;
            if self.places[index].in_host {
                self.clean.push_back(index);
            }
            match self.machine.release {
                Release::WhenStored if self.places[index].at == At::Device => {
                    forget(&mut self.releasing, index);
                    self.leave(index);
                }
                Release::OnceWritten => self.places[index].copied = Some(self.now),
                Release::WhenStored | Release::InStreamOrder => {}
            }
        }
    }

    pub(super) fn take_host(&mut self, index: usize) {
        self.places[index].in_host = true;
        self.in_host += self.activations[index].bytes;
        self.prediction.host_peak = self.prediction.host_peak.max(self.in_host);
    }

    pub(super) fn give_host(&mut self, index: usize) {
        if std::mem::take(&mut self.places[index].in_host) {
            self.in_host -= self.activations[index].bytes;
        }
    }
}
