//! The CPU allocator. Its counts are the process's, so this file has one test.

use ssdtrain_libtorch::{Storage, install_cpu_allocator, memory, reset_peak, trim};
use tch::{Device, Kind, Tensor};

#[test]
fn large_tensors_are_aligned_and_all_bytes_are_counted() {
    let before = Tensor::zeros([100_000], (Kind::Uint8, Device::Cpu));
    install_cpu_allocator();
    let start = memory(Device::Cpu);

    let mut tensors = Vec::new();
    for bytes in [1, 64, 65_535, 65_536, 65_537, 1_000_000, 5_000_000, 64 << 20] {
        let tensor = Tensor::zeros([bytes], (Kind::Uint8, Device::Cpu));
        let storage = Storage::of(&tensor).expect("a storage");
        assert_eq!(storage.bytes(), bytes as u64);
        assert!(storage.capacity() >= bytes as u64);
        assert_eq!(storage.data().addr() % 64, 0);
        if bytes >= 65_536 {
            assert_eq!((storage.data().addr() % 4096, storage.capacity() % 4096), (0, 0), "{bytes}");
            assert!(storage.capacity() <= bytes as u64 * 9 / 8 + 4096, "{bytes}");
        }
        tensors.push(tensor);
    }
    let sum: u64 = tensors.iter().map(|t| t.numel() as u64).sum();
    assert_eq!(memory(Device::Cpu).allocated - start.allocated, sum);
    assert_eq!(memory(Device::Cpu).peak, memory(Device::Cpu).allocated);

    tensors.truncate(7);
    assert_eq!(memory(Device::Cpu).peak - memory(Device::Cpu).allocated, 64 << 20, "the peak stays");
    reset_peak(Device::Cpu);
    assert_eq!(memory(Device::Cpu).peak, memory(Device::Cpu).allocated);

    let resized = tensors.pop().expect("a tensor").resize_([3_000_000]);
    let storage = Storage::of(&resized).expect("a storage");
    assert_eq!(storage.data().addr() % 4096, 0, "also after a resize");
    drop((storage, resized));

    tensors.clear();
    assert_eq!(memory(Device::Cpu).allocated, start.allocated);
    assert!(memory(Device::Cpu).reserved >= 64 << 20, "freed blocks are kept for reuse");
    let held = Tensor::ones([200_000], (Kind::Uint8, Device::Cpu));
    trim();
    assert!(memory(Device::Cpu).reserved < 64 << 20, "and can be given back");
    assert_eq!(held.sum(Kind::Int64).int64_value(&[]), 200_000, "but not from under a tensor");
    drop(held);

    let old = Storage::of(&before).expect("a storage");
    assert_eq!(old.capacity(), 100_000, "storages of another allocator end where they end");
}
