//! The state that recomputation needs: random numbers, the thread's modes, and whether a tensor has the same layout
//! as before.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::mem::ManuallyDrop;

use ssdtrain_libtorch::{CpuAutocast, Modes, RandomState, is_recording, layout, version};
use tch::{Device, Kind, Tensor, no_grad};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn bump(t: &Tensor) {
    drop(no_grad(|| t.shallow_clone().f_add_scalar_(1.0).unwrap()));
}

#[test]
fn restored_generators_draw_the_same_numbers() {
    // After an odd count of normal numbers the generator has one in store, which is part of its state.
    drop(Tensor::randn([3], F32));
    let state = RandomState::of(&[Device::Cpu]).unwrap();
    assert!(state == RandomState::of(&[]).unwrap());
    let draw = || {
        [Tensor::randn([5], F32), Tensor::rand([700], F32), Tensor::randn([5], (Kind::Double, Device::Cpu))]
    };
    let first = draw();
    assert!(state != RandomState::of(&[]).unwrap());
    state.restore().unwrap();
    assert!(state == RandomState::of(&[]).unwrap());
    assert_eq!(first, draw());
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    assert!(RandomState::of(&[Device::Cuda(4000)]).is_err());
}

/// Whether autocast is on for the calling thread's GPU operations; tch offers no such query for the CPU.
fn casts() -> bool {
    // SAFETY: reads a flag of the thread. It is a bool there, so no more than the lowest byte is set.
    (unsafe { torch_sys::at_autocast_is_enabled() }) & 0xff != 0
}

/// Turns autocast on or off for the calling thread; `tch::autocast` does nothing without a GPU.
fn set_casts(on: bool) {
    // SAFETY: sets a flag of the thread.
    unsafe { torch_sys::at_autocast_set_enabled(on.into()) };
}

#[test]
fn modes_are_those_of_the_thread_that_was_asked() {
    set_casts(true);
    let modes = Modes::of_thread().unwrap();
    set_casts(false);
    {
        let _off = tch::no_grad_guard();
        let entered = modes.enter().unwrap();
        assert!(is_recording() && casts());
        drop(entered);
        assert!(!is_recording() && !casts());
    }
    let on_another = std::thread::Builder::new().spawn(move || {
        let before = casts();
        let _entered = modes.enter().unwrap();
        (before, casts())
    });
    assert_eq!(on_another.unwrap().join().unwrap(), (false, true));
}

#[test]
fn layouts_differ_by_kind_size_stride_and_offset() {
    let x = Tensor::zeros([6, 6], F32);
    let of = |t: &Tensor| layout(t).unwrap();
    assert_eq!(of(&x), of(&Tensor::ones([6, 6], F32)));
    let others = [
        x.to_kind(Kind::Int),
        x.narrow(0, 0, 3),
        x.narrow(0, 3, 3),
        x.narrow(1, 0, 3),
        x.narrow(0, 0, 3).transpose(0, 1),
        x.view([36]),
        x.view([4, 9]),
    ];
    let mut seen: Vec<u64> = others.iter().chain([&x]).map(of).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), others.len() + 1);
    assert_eq!(layout(&Tensor::new()), None);
    assert_eq!(layout(&x.to_sparse_sparse_dim(2)), None);
}

#[test]
fn the_version_counts_changes_in_place() {
    let x = Tensor::zeros([4], F32);
    let before = version(&x).unwrap();
    bump(&x);
    assert_eq!(version(&x.view([2, 2])), Some(before + 1));
}

/// As `tch::autocast` leaves them when what it runs panics.
#[test]
fn autocast_regions_left_open_within_modes_are_closed() {
    let (x, weight) = (Tensor::randn([4, 4], F32), Tensor::randn([4, 4], F32).set_requires_grad(true));
    let product = || {
        let _region = CpuAutocast::enter();
        x.matmul(&weight)
    };
    let entered = Modes::of_thread().unwrap().enter().unwrap();
    let _left_open = ManuallyDrop::new(CpuAutocast::enter());
    drop(entered);
    let before = product();
    bump(&weight);
    assert!(!before.equal(&product()), "the weight that the region has cast is that of the next one");
}
