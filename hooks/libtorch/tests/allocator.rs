//! The CPU allocator. Its counts cover the whole process, so the tests take turns.

use std::fs;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use ssdtrain_libtorch::{
    Ceiling, Reliever, Storage, end_step, install_cpu_allocator, limit_cpu_memory, memory, relieve_with,
    reset_peak, trim, without_relief,
};
use tch::{Device, Kind, Tensor};

const MIB: i64 = 1 << 20;

static TURN: Mutex<()> = Mutex::new(());

/// Reserves the allocator for this test, with nothing free.
fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock();
    install_cpu_allocator();
    trim();
    reset_peak(Device::Cpu);
    turn
}

fn tensor(bytes: i64) -> Tensor {
    Tensor::zeros([bytes], (Kind::Uint8, Device::Cpu))
}

fn reserved() -> i64 {
    memory(Device::Cpu).reserved as i64
}

#[test]
fn large_tensors_are_aligned_and_all_bytes_are_counted() {
    let _turn = turn();
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
            assert!(storage.capacity() < bytes as u64 + 4096, "{bytes}");
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
}

#[test]
fn small_blocks_are_given_back_too() {
    let _turn = turn();
    let mut tensors: Vec<_> = (0..4_000).map(|_| tensor(32 << 10)).collect();
    let all = resident();
    // The last block stays, so that none before it is at the end of what the C library has.
    let last = tensors.pop();
    tensors.clear();
    trim();
    assert!(all - resident() > 64 * MIB, "{all} bytes, and {} later", resident());
    drop(last);
}

/// Bytes of this process in memory; 0 if the system does not say.
fn resident() -> i64 {
    let sizes = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = sizes.split_whitespace().nth(1).and_then(|pages| pages.parse::<i64>().ok());
    pages.unwrap_or_default() * 4096
}

#[test]
fn what_another_allocator_made_ends_where_it_ends() {
    let _turn = turn();
    // Memory owned by Rust, which libtorch only borrows.
    let numbers = vec![1_u8; 100_000];
    // SAFETY: the numbers outlive the tensor, and nobody writes to them.
    let foreign = unsafe { Tensor::from_blob(numbers.as_ptr(), &[100_000], &[1], Kind::Uint8, Device::Cpu) };
    assert_eq!(Storage::of(&foreign).expect("a storage").capacity(), 100_000);
    drop(foreign);
}

#[test]
fn free_memory_serves_tensors_of_all_sizes() {
    let _turn = turn();
    let start = reserved();
    for size in 0..8 {
        let tensors: Vec<_> = (0..32).map(|_| tensor((4 * 8 + size * 4) * MIB / 8)).collect();
        drop(tensors);
    }
    let most = 32 * 8 * MIB;
    assert!(reserved() - start <= most * 9 / 8, "{} MiB for at most 256", (reserved() - start) / MIB);
}

/// Blocks that stay, and between them free ranges of half the size that is requested next.
#[test]
fn gaps_too_small_for_what_is_asked_are_given_back() {
    let _turn = turn();
    let start = reserved();
    let mut tensors: Vec<_> = (0..64).map(|_| Some(tensor(4 * MIB))).collect();
    tensors.iter_mut().step_by(2).for_each(|tensor| *tensor = None);
    let larger: Vec<_> = (0..16).map(|_| tensor(8 * MIB)).collect();
    assert!(reserved() - start < 64 * 4 * MIB * 5 / 4, "{} MiB for 256", (reserved() - start) / MIB);
    let held = tensors.iter().flatten().chain(&larger);
    assert!(held.map(|held| held.sum(Kind::Int64)).all(|sum| sum.int64_value(&[]) == 0), "nothing overlaps");
}

#[test]
fn what_later_steps_do_not_need_is_given_back() {
    let _turn = turn();
    let start = reserved();
    let step = |bytes| {
        let tensors: Vec<_> = (0..16).map(|_| tensor(bytes)).collect();
        drop(tensors);
        end_step();
        reserved() - start
    };
    assert!(step(16 * MIB) >= 256 * MIB, "the next step may need as much");
    assert!(step(MIB) >= 192 * MIB, "and so may one that comes soon");
    for _ in 0..32 {
        step(MIB);
    }
    assert!(step(MIB) <= 32 * MIB, "{} MiB for steps of 16", step(MIB) / MIB);
    assert!(step(16 * MIB) >= 256 * MIB, "and there is more when it is needed");
}

#[test]
fn any_thread_may_free() {
    let _turn = turn();
    let start = memory(Device::Cpu);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let mut made: Vec<Tensor> = Vec::new();
                for index in 0..200 {
                    let bytes = 60_000 + (index * 7919 + thread * 104_729) % (3 * MIB);
                    made.push(Tensor::full([bytes], thread, (Kind::Uint8, Device::Cpu)));
                    if index % 3 == 2 {
                        let old = made.swap_remove(index as usize % made.len());
                        let check = move || assert!(bool::try_from(old.eq(thread).all()).expect("a flag"));
                        scope.spawn(check).join().expect("its own bytes");
                    }
                    if index % 50 == 49 {
                        end_step();
                    }
                }
                made.iter().for_each(|old| assert!(bool::try_from(old.eq(thread).all()).expect("a flag")));
            });
        }
    });
    trim();
    assert_eq!(memory(Device::Cpu).allocated, start.allocated);
    assert!(memory(Device::Cpu).reserved <= start.reserved + 4 * MIB as u64);
}

/// Frees tensors that it holds, one at a time.
struct Hoard(Mutex<Vec<Tensor>>);

impl Reliever for Hoard {
    fn relieve(self: Arc<Self>, bytes: u64) -> u64 {
        let one = self.0.lock().pop();
        assert!(bytes >= MIB as u64);
        one.map_or(0, |tensor| tensor.numel() as u64)
    }
}

#[test]
fn an_allocation_that_fails_asks_for_memory_and_is_tried_again_while_some_is_freed() {
    let _turn = turn();
    let hoard = Arc::new(Hoard(Mutex::new((0..3).map(|_| tensor(MIB)).collect())));
    let weak: Weak<dyn Reliever> = Arc::downgrade(&(Arc::clone(&hoard) as Arc<dyn Reliever>));
    relieve_with(Device::Cpu, weak).expect("the CPU asks");
    let left = || hoard.0.lock().len();
    limit_cpu_memory(memory(Device::Cpu).allocated);
    let allocate = |bytes: i64| Storage::allocate(bytes as u64);
    let one = allocate(MIB);
    assert!(one.is_ok() && left() == 2);
    assert!(without_relief(|| allocate(MIB)).is_err(), "nobody is asked");
    assert_eq!(left(), 2);
    let two = allocate(2 * MIB);
    assert!(two.is_ok() && left() == 0, "each has a part of it");
    let error = allocate(MIB).expect_err("nothing is left").to_string();
    assert!(error.contains("out of memory"), "{error}");
    limit_cpu_memory(u64::MAX);
    assert!(allocate(MIB).is_ok());
}

/// Frees what it holds, a megabyte at a time, and notes how much it was asked for.
struct Asked(Mutex<Vec<Tensor>>, Mutex<Vec<u64>>);

impl Reliever for Asked {
    fn relieve(self: Arc<Self>, bytes: u64) -> u64 {
        self.1.lock().push(bytes);
        let one = self.0.lock().pop();
        one.map_or(0, |tensor| tensor.numel() as u64)
    }
}

#[test]
fn an_allocation_above_a_ceiling_has_memory_freed_first_and_is_made_in_any_case() {
    let _turn = turn();
    install_cpu_allocator();
    let asked = Arc::new(Asked(Mutex::new((0..3).map(|_| tensor(MIB)).collect()), Mutex::default()));
    let weak: Weak<dyn Reliever> = Arc::downgrade(&(Arc::clone(&asked) as Arc<dyn Reliever>));
    relieve_with(Device::Cpu, weak).expect("the CPU asks");
    let (left, mib) = (|| asked.0.lock().len(), MIB as u64);
    let mut all = Vec::new();
    let mut allocates = |bytes: u64| {
        all.push(Storage::allocate(bytes).expect("there is memory"));
        std::mem::take(&mut *asked.1.lock())
    };
    let (before, times) = (memory(Device::Cpu).allocated, Ceiling::asked(Device::Cpu));
    let higher = Ceiling::new(Device::Cpu, before + 100 * mib);
    let ceiling = Ceiling::new(Device::Cpu, before + mib);
    assert_eq!(allocates(mib), [0_u64; 0]);
    assert_eq!((allocates(mib), left()), (vec![mib], 2));
    assert!(without_relief(|| Storage::allocate(1)).is_err() && asked.1.lock().is_empty(), "nobody is asked");
    assert_eq!((allocates(2 * mib), left()), (vec![2 * mib, mib], 0));
    assert_eq!(memory(Device::Cpu).allocated, before + mib, "it was kept to");
    // It gets 8 MiB too high, and may get 10.
    assert_eq!(allocates(8 * mib), [8 * mib]);
    assert_eq!(allocates(2 * mib), [0_u64; 0]);
    assert_eq!(allocates(1), [1]);
    assert_eq!(Ceiling::asked(Device::Cpu) - times, 4);
    drop(ceiling);
    assert_eq!(allocates(50 * mib), [0_u64; 0], "the other one is higher");
    drop(higher);
    assert_eq!(allocates(50 * mib), [0_u64; 0]);
}
