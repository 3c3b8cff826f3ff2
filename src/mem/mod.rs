//! Memory: storages as memory of transfers, and how much memory is available.

mod available;
mod device;
mod storage;

pub(crate) use available::{available_memory, free_memory};
pub(crate) use device::{DeviceBuf, Rest};
pub(crate) use storage::StorageBuf;
