//! A tier that moves one word of each storage when it is told to.

use std::sync::Arc;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_plan::Release;
use ssdtrain_store::Store;
use ssdtrain_store::sync::Mutex;

use super::TableSettings;
use crate::error::{Completion, Error, Result};
use crate::telemetry::{Counters, ScopeId, StallCause};
use crate::tier::{Here, Parcel, Room, RoomListener, Tier};

/// What lies below the table.
pub(super) struct Below {
    settings: TableSettings,
    state: Mutex<State>,
}

struct State {
    /// Bytes that there is still room for.
    room: u64,
    /// Transfers that were handed over, the oldest first.
    transfers: Vec<Transfer>,
    /// Whether the device refuses to wait for transfers.
    refuses_order: bool,
}

/// The place of one entry's word.
struct Place {
    below: Arc<Below>,
    bytes: u64,
    state: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    reserved: bool,
    word: Option<u64>,
}

/// A transfer that has not ended.
struct Transfer {
    place: Arc<Place>,
    moves: Moves,
    done: Completion,
}

enum Moves {
    Out(Block),
    In(Storage),
}

impl Below {
    pub(super) fn new(settings: TableSettings) -> Arc<Below> {
        let state = State { room: settings.room, transfers: Vec::new(), refuses_order: false };
        Arc::new(Below { settings, state: Mutex::new(state) })
    }

    pub(super) fn refuse_order(&self, refuses: bool) {
        self.state.lock().refuses_order = refuses;
    }

    /// Whether everything that was reserved is free again.
    pub(super) fn is_empty(&self) -> bool {
        self.is_idle() && self.state.lock().room == self.settings.room
    }

    /// Whether no transfer is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.state.lock().transfers.is_empty()
    }

    /// Ends a transfer, counted round from the oldest. False if there is none.
    pub(super) fn ends(&self, index: usize, succeeds: bool) -> bool {
        let transfer = {
            let transfers = &mut self.state.lock().transfers;
            if transfers.is_empty() {
                return false;
            }
            transfers.remove(index % transfers.len())
        };
        let is_store = matches!(transfer.moves, Moves::Out(_));
        if !succeeds {
            transfer.done.call(Err(Error::torch("on purpose")));
            return true;
        }
        transfer.place.moves(&transfer.moves);
        let Transfer { moves, done, .. } = transfer;
        drop(moves);
        if is_store && self.settings.in_stream_order {
            done.dismiss()
        } else {
            done.call(Ok(()))
        }
        true
    }
}

impl Place {
    fn moves(&self, moves: &Moves) {
        let word = &mut self.state.lock().word;
        match moves {
            Moves::Out(from) => *word = Some(super::word(from.storage())),
            Moves::In(into) => super::set_word(into, word.expect("what is loaded was stored")),
        }
    }
}

impl Tier for Below {
    fn parcel(self: Arc<Self>, bytes: u64, _scope: ScopeId, _here: &Here) -> Result<Arc<dyn Parcel>> {
        Ok(Arc::new(Place { below: self, bytes, state: Mutex::default() }))
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        Storage::allocate(bytes).map_err(Error::torch)
    }

    fn release(&self) -> Release {
        if self.settings.in_stream_order { Release::InStreamOrder } else { Release::WhenStored }
    }

    fn on_room(&self, _listener: &Arc<RoomListener>) {}

    fn begin_step(&self) {}

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn settle(&self) {}

    fn store(&self) -> Option<&Store> {
        None
    }

    fn path(&self) -> String {
        "a record's".to_owned()
    }
}

impl Parcel for Place {
    fn of_any_stream(&self) {}

    fn reserve(&self) -> Room {
        let mut contents = self.state.lock();
        let state = &mut *self.below.state.lock();
        if contents.reserved {
            return Room::Reserved;
        }
        match state.room.checked_sub(self.bytes) {
            Some(left) => {
                (state.room, contents.reserved) = (left, true);
                Room::Reserved
            }
            None if state.transfers.is_empty() => Room::None,
            None => Room::Later,
        }
    }

    fn store(self: Arc<Self>, from: Block, done: Completion) {
        let below = Arc::clone(&self.below);
        below.state.lock().transfers.push(Transfer { place: self, moves: Moves::Out(from), done });
    }

    fn load(self: Arc<Self>, into: Storage, _here: &Here, done: Completion) {
        let below = Arc::clone(&self.below);
        below.state.lock().transfers.push(Transfer { place: self, moves: Moves::In(into), done });
    }

    fn bring_near(self: Arc<Self>) -> bool {
        true
    }

    /// What the device queue has before this comes first: this parcel's store, where storages leave in stream order.
    fn order(
        &self,
        _of: Option<&Storage>,
        _cause: Option<StallCause>,
        _counters: &Arc<Counters>,
        _here: &Here,
    ) -> Result<()> {
        let mut state = self.below.state.lock();
        if state.refuses_order {
            return Err(Error::torch("on purpose"));
        }
        let is_own = |transfer: &Transfer| {
            std::ptr::eq(Arc::as_ptr(&transfer.place), self) && matches!(transfer.moves, Moves::Out(_))
        };
        let own = state.transfers.iter().position(is_own).map(|index| state.transfers.remove(index));
        drop(state);
        if let Some(Transfer { place, moves, done }) = own {
            place.moves(&moves);
            done.dismiss();
        }
        Ok(())
    }

    fn may_evict(&self) -> bool {
        self.below.settings.evicts
    }

    fn abandon(&self, _of: Option<&Storage>) {}
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.state.get_mut().reserved {
            self.below.state.lock().room += self.bytes;
        }
    }
}
