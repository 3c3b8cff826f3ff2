//! Backward: storages are asked for, and are loaded ahead of that.

use std::time::Duration;

use super::{At, Place, Run, StallCause, forget};
use crate::{Activation, Moment, Release};

impl Run<'_> {
    /// From the last save to the first activation that backward asks for.
    pub(super) fn turn(&mut self, time: Duration, extra: u64) {
        self.note_bytes(Moment::Turn, self.on_device + extra, extra);
        self.compute(time);
    }

    /// Backward asks for an activation, uses it, and releases it.
    pub(super) fn use_again(&mut self, index: usize) {
        let Activation { backward, backward_extra, .. } = self.activations[index];
        self.asked = index;
        self.note_written();
        self.bring(index);
        self.rerun(index, backward_extra);
        self.note_bytes(Moment::Backward(index), self.on_device + backward_extra, backward_extra);
        self.extra_before = backward_extra;
        self.not_early(index);
        self.compute(backward);
        self.use_up(index);
    }

    /// Computes an activation again, with everything for that, if it is not on the device and not below it either.
    fn rerun(&mut self, index: usize, backward_extra: u64) {
        let reruns = self.reruns;
        let Some(run) = reruns.runs().get(self.rerun).filter(|run| run.of == index) else { return };
        self.rerun += 1;
        reruns.leaves(run).iter().for_each(|&leaf| self.bring(leaf));
        // What is needed besides when backward asks is needed both just before and right after.
        let extra = self.extra_before.min(backward_extra);
        self.note_bytes(Moment::Rerun(index), self.on_device + run.peak + extra, extra);
        self.on_device += run.stays;
        self.compute(run.time);
        self.prediction.recomputed += run.time;
        self.prediction.memory_bound += run.memory_bound;
        self.lost += run.time.as_secs_f64();
    }

    /// Waits until an activation is on the device, if it is stored anywhere, and looks ahead from the one that is
    /// asked for.
    fn bring(&mut self, index: usize) {
        let wanted = if self.places[index].at == At::Below { self.activations[index].bytes } else { 0 };
        // Where storages leave when they are stored, backward waits as it begins, and for room for what it loads.
        let waits = self.machine.release != Release::WhenStored || wanted > 0 || !self.has_begun;
        self.has_begun = true;
        while waits
            && self.on_device + wanted > self.budgets.backward_budget
            && self.releasing.front().is_some_and(|oldest| *oldest != index)
            && self.let_go()
        {}
        if self.places[index].at == At::Below {
            self.load(index, false);
        }
        // A queued copy counts as done where the device itself waits for it.
        let done = self.machine.release == Release::InStreamOrder
            || !matches!(self.places[index].at, At::Loading(there) if there > self.now);
        if done {
            self.not_early(index);
        }
        self.look_ahead(self.asked);
        if let At::Loading(there) = self.places[index].at {
            self.wait_until(there, StallCause::Load);
        }
    }

    fn not_early(&mut self, index: usize) {
        if std::mem::take(&mut self.places[index].early) {
            self.early -= self.activations[index].bytes;
        }
    }

    fn use_up(&mut self, index: usize) {
        if !self.reruns.is_late(index) {
            self.release(index);
        }
        while let Some((_, late)) =
            self.reruns.late().get(self.released_late).filter(|(turn, _)| *turn == index).copied()
        {
            self.released_late += 1;
            self.release(late);
        }
        // It leaves the device together with the last activation that it is used with.
        let activations = self.activations;
        let over =
            self.used.extract_if(.., |other| other.saturating_sub(activations[*other].in_use_with) >= index);
        self.on_device -= over.map(|other| activations[other].bytes).sum::<u64>();
    }

    /// Nothing needs an activation any more.
    fn release(&mut self, index: usize) {
        let bytes = self.activations[index].bytes;
        self.not_early(index);
        forget(&mut self.releasing, index);
        self.disk.cancel(index);
        self.give_host(index);
        let place = std::mem::take(&mut self.places[index]);
        self.near -= place.read.map_or(0, |_| bytes);
        match place.at {
            At::Below => {}
            At::Nowhere | At::Device | At::Loading(_) if self.activations[index].is_saved() => {
                self.used.push(index);
            }
            At::Nowhere | At::Device | At::Loading(_) => self.on_device -= bytes,
        }
    }

    fn look_ahead(&mut self, asked: usize) {
        self.loading_from = self.loading_from.min(asked);
        self.reading_from = self.reading_from.min(asked);
        while let Some(next) = self.loading_from.checked_sub(1) {
            let bytes = self.activations[next].bytes;
            if self.places[next].at == At::Below {
                let alone = self.early == 0 && self.budgets.prefetch > 0;
                let ahead = alone || self.early.saturating_add(bytes) <= self.budgets.prefetch;
                if !ahead || self.on_device.saturating_add(bytes) > self.budgets.backward_budget {
                    break;
                }
                self.load(next, true);
            }
            self.loading_from = next;
        }
        while let Some(next) = self.reading_from.min(self.loading_from).checked_sub(1) {
            if !self.read_ahead(next) {
                break;
            }
            self.reading_from = next;
        }
    }

    /// Starts bringing an activation back, from wherever it is.
    fn load(&mut self, index: usize, early: bool) {
        let bytes = self.activations[index].bytes;
        self.note_written();
        let Place { copied, in_host, read, .. } = self.places[index];
        let ready = match read {
            Some(read) => {
                self.near -= bytes;
                read
            }
            None if in_host => copied.unwrap_or(self.now),
            None => self.read(index),
        };
        self.disk.cancel(index);
        self.give_host(index);
        let there = match self.machine.release {
            Release::WhenStored | Release::OnceWritten => ready,
            Release::InStreamOrder => {
                self.prediction.copied_in += bytes;
                self.copies_in.transfer(bytes, ready.max(self.now))
            }
        };
        self.on_device += bytes;
        self.early += if early { bytes } else { 0 };
        self.places[index] = Place { at: At::Loading(there), early, ..Place::default() };
        self.move_bytes(bytes);
    }

    fn read(&mut self, index: usize) -> f64 {
        let bytes = self.activations[index].bytes;
        self.prediction.read += bytes;
        self.disk.read(bytes, self.now)
    }

    /// Reads an activation that is only on the disk. Returns false if there is no room for it yet.
    fn read_ahead(&mut self, index: usize) -> bool {
        let (Place { at, in_host, read, .. }, bytes) = (self.places[index], self.activations[index].bytes);
        if at != At::Below || in_host || read.is_some() || self.machine.release != Release::InStreamOrder {
            return true;
        }
        let ahead = self.near == 0 || self.near.saturating_add(bytes) <= self.budgets.read_ahead;
        if !ahead || !self.fits_host(bytes) {
            return false;
        }
        self.take_host(index);
        let ends = self.read(index);
        self.places[index].read = Some(ends);
        self.near += bytes;
        true
    }
}
