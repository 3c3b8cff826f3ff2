//! How much may be on the device, in the terms of the cache.

use ssdtrain_plan::{Budgets, Headroom, Room};
use tch::Device;

use crate::cache::{Cache, Limits};
use crate::mem::free_memory;

/// The limits for a step with this room, on a device whose stores in flight have at most this many bytes.
pub(super) fn limits(room: Room, cache: &Cache, device: Device, stores_in_flight: u64) -> Limits {
    match room {
        Room::Within(Budgets { device_budget, backward_budget, prefetch, .. }) => {
            Limits { device_budget, backward_budget, prefetch, stores_in_flight, late: false }
        }
        Room::Fitting(headroom) => {
            let bytes = match headroom {
                Headroom::Bytes(bytes) => bytes,
                // Half of the free memory is left, because the rest of a step needs a part of it.
                Headroom::Free => cache.held().2.saturating_add(free_memory(device) / 2),
            };
            let prefetch = bytes / 2;
            Limits { device_budget: bytes, backward_budget: bytes, prefetch, stores_in_flight, late: true }
        }
    }
}
