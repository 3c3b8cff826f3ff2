//! Backward: storages are asked for, and are loaded ahead of that.

use std::time::Duration;

use super::{At, Place, Run, StallCause};
use crate::{Activation, Recompute, Release};

impl Run<'_> {
    /// From the last save to the first activation that backward asks for.
    pub(super) fn turn(&mut self, time: Duration, extra: u64) {
        self.prediction.backward_peak = self.prediction.backward_peak.max(self.on_device + extra);
        self.compute(time);
    }

    /// Backward asks for an activation, uses it, and releases it.
    pub(super) fn use_again(&mut self, index: usize) {
        let Activation { bytes, backward, backward_extra, recompute, .. } = self.activations[index];
        self.note_written();
        self.bring(index);
        if let (At::Nowhere, Some(Recompute { time, since })) = (self.places[index].at, recompute) {
            (since..index).rev().for_each(|input| self.bring(input));
            self.on_device += bytes;
            self.compute(time);
            self.prediction.recomputed += time;
            self.lost += time.as_secs_f64();
        }
        self.prediction.backward_peak = self.prediction.backward_peak.max(self.on_device + backward_extra);
        self.not_early(index);
        self.compute(backward);
        self.use_up(index);
    }

    /// Waits until an activation is on the device, if it is stored anywhere, and looks ahead from it.
    pub(super) fn bring(&mut self, index: usize) {
        let wanted = if self.places[index].at == At::Below { self.activations[index].bytes } else { 0 };
        while self.machine.release != Release::WhenStored
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
        self.look_ahead(index);
        if let At::Loading(there) = self.places[index].at {
            self.wait_until(there, StallCause::Load);
        }
    }

    pub(super) fn not_early(&mut self, index: usize) {
        if std::mem::take(&mut self.places[index].early) {
            self.early -= self.activations[index].bytes;
        }
    }

    pub(super) fn use_up(&mut self, index: usize) {
        self.places[index].at = At::Nowhere;
        // Everything that was saved after it is gone.
        self.releasing.pop_back_if(|last| *last == index);
        self.disk.cancel(index);
        self.give_host(index);
        // It leaves the device together with the last activation that it is used with.
        self.used.push(index);
        let activations = self.activations;
        let over =
            self.used.extract_if(.., |other| other.saturating_sub(activations[*other].in_use_with) >= index);
        self.on_device -= over.map(|other| activations[other].bytes).sum::<u64>();
    }

    pub(super) fn look_ahead(&mut self, asked: usize) {
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
    pub(super) fn load(&mut self, index: usize, early: bool) {
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
    }

    pub(super) fn read(&mut self, index: usize) -> f64 {
        let bytes = self.activations[index].bytes;
        self.prediction.read += bytes;
        self.disk.read(bytes, self.now)
    }

    /// Reads an activation that is only on the disk. Returns false if there is no room for it yet.
    pub(super) fn read_ahead(&mut self, index: usize) -> bool {
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
