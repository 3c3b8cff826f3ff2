//! A process that is forked off with a cache open neither hangs nor touches what is its parent's.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{self, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use common::chain::{self, chain};
use common::{F32, assert_nothing_held, assert_same_bits, everything, grads, leaf, randn};
use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::store::HistoryFile;
use ssdtrain::{
    BackendKind, ErrorKind, IoPath, MIB, Metrics, Offload, Step, TensorCache, TensorCacheBuilder, Verify,
    resolve_math_kernels, scope, segment,
};
use tch::{Kind, Tensor};

/// Seconds after which a child that hangs is killed.
const PATIENCE: u32 = 60;

/// The child's number in its parent, and `None` in the child.
fn fork() -> Option<libc::pid_t> {
    // SAFETY: a plain system call. The library is to make it safe to compute in the child.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: a plain system call.
            unsafe { libc::alarm(PATIENCE) };
            None
        }
        child => Some(child),
    }
}

/// Whether this does not panic.
fn passes(body: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(body)).is_ok()
}

/// Ends the child, as programs end.
fn end(passed: bool) -> ! {
    process::exit(i32::from(!passed))
}

fn assert_passed(child: libc::pid_t) {
    assert!(child > 0, "the process cannot fork");
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(
        (waited, status),
        (child, 0),
        "14 is the status of a child that hangs, 256 of one that panics"
    );
}

/// Some of what a step saves has to leave, however fast backward begins.
fn moving() -> TensorCacheBuilder {
    everything().policy(Offload::default().device_budget(4 * MIB))
}

/// Slow enough that transfers are under way during a fork.
fn slow() -> TensorCacheBuilder {
    moving().disk_rate(64 * MIB)
}

/// Forks within a step, when all of it is saved and transfers are under way.
fn forks(cache: TensorCache) {
    tch::set_num_threads(1);
    let expected = chain::expected();
    let x = chain::input();
    let meter = cache.meter();
    let step = cache.step();
    let loss = chain(&x);
    let Some(child) = fork() else {
        let in_step = passes(|| {
            assert_eq!(meter.read(), Metrics::default(), "what the parent's cache does is not known here");
            let error = step.backward(&loss).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Forked, "{error}");
            assert!(error.to_string().contains("the process that this one was forked from"), "{error}");
            goes_on_in_the_step(&step);
            assert_eq!(step.finish().unwrap_err().kind(), ErrorKind::Forked);
            drop((loss, x));
        });
        let after_it = passes(|| {
            goes_on_with_the_cache(&cache, &expected);
            drop(cache);
            builds_its_own(&expected);
        });
        end(in_step && after_it)
    };
    assert_passed(child);
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap();
    assert_same_bits("the parent's step", &expected, &grads(&[x]));
    let x = chain::input();
    let report = chain::step(&cache, &x);
    assert!(report.offloaded.bytes > 0, "{report}");
    assert_eq!(meter.read().steps.unplanned, 2);
    assert_same_bits("the parent's next step", &expected, &grads(&[x]));
    assert_nothing_held(&cache);
}

/// What a child computes within the step of its parent is saved as without a cache.
fn goes_on_in_the_step(step: &Step<'_>) {
    let _scope = scope("child");
    let handle = step.handle();
    let _entered = handle.enter();
    step.micro_batch(1);
    step.flush();
    let x = chain::input();
    let y = segment("s", &x, |x| Ok(x.sin())).unwrap();
    step.backward(&y.sum(Kind::Float)).unwrap();
    assert_same_bits("the child's part of a step", &[x.detach().cos()], &grads(&[x]));
}

fn goes_on_with_the_cache(cache: &TensorCache, expected: &[Tensor]) {
    let x = chain::input();
    let before = cache.metrics();
    let report = chain::step(cache, &x);
    let after = cache.metrics();
    assert_eq!((before.steps.unplanned, after.steps.unplanned, after.activity.saved.count), (0, 1, 0));
    assert_same_bits("the child's step", expected, &grads(&[x]));
    assert_eq!((report.saved.count, report.offloaded.bytes), (0, 0));
    assert!(report.warnings.iter().any(|warning| warning.contains("forked off")), "{:?}", report.warnings);
    assert!(cache.store_stats().is_none() && cache.plan().is_none() && !format!("{cache:?}").is_empty());
    assert_eq!((cache.pinned_bytes(), cache.pause().pinned_bytes, cache.held().entries), (0, 0, 0));
}

fn builds_its_own(expected: &[Tensor]) {
    let cache = moving().build().unwrap();
    let x = chain::input();
    assert!(chain::step(&cache, &x).offloaded.bytes > 0);
    assert_same_bits("a step under the child's own cache", expected, &grads(&[x]));
    assert_nothing_held(&cache);
}

#[test]
fn with_spill_files_and_io_uring() {
    match slow().backend(BackendKind::Uring).build() {
        Ok(cache) => forks(cache),
        Err(error) => eprintln!("skipped: {error}"),
    }
}

#[test]
fn with_spill_files_and_threads() {
    forks(slow().backend(BackendKind::Pool).build().unwrap());
}

#[test]
fn with_spill_files_in_memory() {
    forks(slow().backend(BackendKind::Memory).build().unwrap());
}

#[test]
fn with_encrypted_spill_files() {
    forks(slow().encrypt(true).build().unwrap());
}

#[test]
fn with_a_host_pool_and_a_trace() {
    forks(slow().simulated_device(Duration::ZERO).host_pool(8 * MIB).trace(true).build().unwrap());
}

#[test]
fn straight_from_a_device_to_the_disk() {
    let direct = slow().simulated_device(Duration::ZERO).path(IoPath::Direct).verify(Verify::Off);
    forks(direct.build().unwrap());
}

#[test]
fn with_operations_on_record() {
    forks(
        everything()
            .policy(InTurn::new(
                Offload::default().device_budget(4 * MIB),
                [Placement::Recompute, Placement::Disk],
            ))
            .build()
            .unwrap(),
    );
}

#[test]
fn a_tensor_outlives_its_cache_in_both() {
    tch::set_num_threads(1);
    let expected = chain::expected();
    let x = chain::input();
    let cache = slow().build().unwrap();
    let step = cache.step();
    let loss = chain(&x);
    step.finish().unwrap();
    drop(cache);
    let Some(child) = fork() else { end(passes(|| drop(loss))) };
    assert_passed(child);
    loss.backward();
    assert_same_bits("after the cache", &expected, &grads(&[x]));
}

#[test]
fn a_cache_that_holds_nothing_is_dropped_in_a_child() {
    let cached = [
        moving().backend(BackendKind::Pool).build(),
        moving().backend(BackendKind::Auto).build(),
        slow().simulated_device(Duration::ZERO).host_pool(8 * MIB).build(),
    ];
    tch::set_num_threads(1);
    for cache in cached {
        let cache = cache.unwrap();
        chain::step(&cache, &chain::input());
        let Some(child) = fork() else { end(passes(|| drop(cache))) };
        assert_passed(child);
        assert!(chain::step(&cache, &chain::input()).offloaded.bytes > 0);
    }
}

#[test]
fn what_was_written_to_the_disks_is_counted_by_the_parent_alone() {
    tch::set_num_threads(1);
    let state = tempfile::tempdir().unwrap();
    let file = HistoryFile::within(state.path());
    let cache = moving().disk_history(state.path()).build().unwrap();
    let report = chain::step(&cache, &chain::input());
    let Some(child) = fork() else {
        end(passes(|| {
            cache.step().finish().unwrap();
            drop(cache);
        }))
    };
    assert_passed(child);
    assert!(!file.path().exists());
    let on_disk = !report.disks.is_empty();
    drop(cache);
    assert_eq!(file.path().exists(), on_disk);
}

#[test]
fn a_program_that_is_started_inherits_nothing() {
    let inherited = || {
        let listed = Command::new("ls").arg("/proc/self/fd").output().unwrap();
        String::from_utf8(listed.stdout).unwrap()
    };
    let before = inherited();
    for backend in [BackendKind::Auto, BackendKind::Pool, BackendKind::Memory] {
        let _cache = moving().backend(backend).build().unwrap();
        assert_eq!(inherited(), before, "{backend:?}");
    }
}

/// Forks so often while other threads run `others` over and over, and runs `here` in each child.
fn forks_while(times: usize, others: &[&(dyn Fn() + Sync)], here: impl Fn()) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (begun, begins) = channel();
        for other in others {
            let (over, begun) = (&over, begun.clone());
            let again = move || {
                // What libtorch makes at the first use of an operation is made before the first fork: another thread could be making it.
                other();
                other();
                begun.send(()).unwrap();
                while !over.load(Ordering::Relaxed) {
                    other();
                }
            };
            thread::Builder::new().spawn_scoped(scope, again).unwrap();
        }
        let passed = passes(|| {
            others.iter().for_each(|_| begins.recv_timeout(Duration::from_secs(60)).unwrap());
            for _ in 0..times {
                match fork() {
                    Some(child) => assert_passed(child),
                    None => end(passes(&here)),
                }
            }
        });
        over.store(true, Ordering::Relaxed);
        assert!(passed);
    });
}

/// The locks of the process, which other threads hold again and again, are free in a child.
#[test]
fn whatever_other_threads_do_meanwhile() {
    tch::set_num_threads(1);
    let cache = everything().build().unwrap();
    // Takes the allocator's lock and gives it back, most of the time.
    let allocates = || drop(Tensor::empty([64, 512], F32));
    let trains = || {
        let x = leaf(&randn(&[64, 512]));
        let step = cache.step();
        let loss = (0..8).fold(&x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float);
        step.backward(&loss).unwrap();
        drop(loss);
        step.finish().unwrap();
    };
    forks_while(60, &[&allocates, &trains, &trains], || {
        let mut x = Tensor::zeros([64, 512], F32);
        x += 1.0;
        cache.step().finish().unwrap();
    });
}

/// An operation that draws holds its generator's lock until it has drawn everything.
#[test]
fn other_threads_draw_random_numbers_meanwhile() {
    tch::set_num_threads(1);
    let _cache = everything().build().unwrap();
    let draws = || drop(randn(&[64, 512]));
    forks_while(20, &[&draws, &draws], draws);
}

/// A child that ends takes libtorch's operators off their table, in which threads look that compute for the first time.
#[test]
fn other_threads_begin_to_compute_meanwhile() {
    tch::set_num_threads(1);
    let _cache = everything().build().unwrap();
    let begins = || {
        let computes = || resolve_math_kernels().unwrap();
        thread::Builder::new().spawn(computes).unwrap().join().unwrap();
    };
    forks_while(20, &[&begins, &begins], || ());
}

/// Trains a segment that draws, and runs `meanwhile` whenever it is computed.
fn trains_what_drops(cache: &TensorCache, meanwhile: impl Fn() + Send + 'static) {
    let step = cache.step();
    let drops = move |x: &Tensor| {
        meanwhile();
        x.f_sin()?.f_dropout(0.5, true)
    };
    let loss = segment("drops", &chain::input(), drops).unwrap().sum(Kind::Float);
    step.backward(&loss).unwrap();
    drop(loss);
    assert_eq!(step.finish().unwrap().recomputed.count, 1);
}

/// Segments that draw are computed again by one thread at a time.
#[test]
fn another_thread_computes_a_segment_again_meanwhile() {
    tch::set_num_threads(1);
    let cache = everything().build().unwrap();
    let ((begun, begins), (go_on, go)) = (channel(), channel::<()>());
    thread::scope(|scope| {
        let holds_up = move || {
            if begun.send(()).is_ok() {
                go.recv().ok();
            }
        };
        let trains = || trains_what_drops(&cache, holds_up);
        thread::Builder::new().spawn_scoped(scope, trains).unwrap();
        begins.recv().unwrap();
        go_on.send(()).unwrap();
        // Computed again.
        begins.recv().unwrap();
        let Some(child) = fork() else {
            end(passes(|| trains_what_drops(&everything().build().unwrap(), || ())));
        };
        let passed = passes(|| assert_passed(child));
        drop(go_on);
        assert!(passed);
    });
}
