//! Bytes that are held stay where they are, whatever happens to their storage.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use ssdtrain_libtorch::{Block, Storage, install_cpu_allocator, memory};
use tch::{Device, Kind, Tensor};

#[test]
fn held_bytes_outlast_a_resize_and_go_with_their_last_holder() {
    install_cpu_allocator();
    for elements in [256, 1 << 18] {
        let mut t = Tensor::full([elements], 7.0, (Kind::Float, Device::Cpu));
        let block = Block::of(Storage::of(&t).unwrap());
        assert!(block.is_current());
        assert_eq!(block.bytes(), elements as u64 * 4);
        drop(t.resize_([4 * elements]));
        assert!(!block.is_current());
        // These would take the memory if it were free.
        let others: Vec<_> = (0..8).map(|_| Tensor::zeros([elements], (Kind::Float, Device::Cpu))).collect();
        let other = block.clone();
        drop(block);
        // SAFETY: the block is held, and is that long.
        let bytes = unsafe { std::slice::from_raw_parts(other.data().cast::<f32>(), elements as usize) };
        assert!(bytes.iter().all(|value| *value == 7.0));
        drop((t, others));
        let held = memory(Device::Cpu).allocated;
        let (now, then) = (other.storage().bytes(), other.bytes());
        drop(other);
        assert_eq!(memory(Device::Cpu).allocated, held - now - then);
    }
}
