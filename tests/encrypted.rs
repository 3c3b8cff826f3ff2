//! What is spilled can be encrypted: the disk has nothing of it, steps keep their bits, and what was changed is an error.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::chain::{ZeroGrad, chain, expected, input, step};
use common::{F32, assert_nothing_held, assert_same_bits, direct, everything, grads, leaf, staged};
use ssdtrain::store::{Direction, Fault, Faulty, Pool, Store, StoreConfig};
use ssdtrain::{
    BackendKind, ErrorKind, IoPath, MIB, Offload, StepReport, TensorCache, TensorCacheBuilder, Verify,
};
use tch::{Kind, Tensor};

/// A value whose bytes are found again, and those bytes several times.
const TELLING: f32 = 1.234_567_9;
const REPEATED: usize = 16;

fn telling() -> Vec<u8> {
    TELLING.to_ne_bytes().repeat(REPEATED)
}

/// The spill file in `directory`. It has no name, but this process has it open.
fn spill_file(directory: &Path) -> PathBuf {
    let directory = directory.canonicalize().unwrap();
    let open = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let is_below = |path: &PathBuf| fs::read_link(path).is_ok_and(|file| file.starts_with(&directory));
    open.into_iter().find(is_below).expect("the spill file is open")
}

fn in_directory(directory: &Path) -> TensorCacheBuilder {
    TensorCache::builder().policy(Offload::default()).min_bytes(0).disk_cap(64 * MIB).spill_to(directory)
}

/// Saves a tensor full of the telling value.
fn forward(x: &Tensor) -> Tensor {
    (x * Tensor::full([256, 1024], f64::from(TELLING), F32)).sum(Kind::Float)
}

/// A step without surprises.
fn trains(cache: &TensorCache) -> StepReport {
    let x = input();
    let report = step(cache, &x);
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    report
}

#[test]
fn gradients_have_the_bits_of_training_without_encryption_whichever_way_bytes_take() {
    let small = || Offload::default().device_budget(MIB);
    let ways = [
        ("disk", everything()),
        ("disk, nothing verified", everything().verify(Verify::Off)),
        ("pool", everything().backend(BackendKind::Pool)),
        ("memory", everything().backend(BackendKind::Memory)),
        ("two files", everything().spill_to(std::env::temp_dir())),
        ("host pool and disk", staged().host_pool(4 * MIB)),
        ("bounce buffer and disk", staged().host_pool(0).least_staging(4 * MIB)),
    ];
    for (way, builder) in ways {
        let cache = builder.policy(small()).encrypt(true).build().unwrap();
        let x = input();
        for _ in 0..2 {
            x.zero_grad_if_any();
            let report = step(&cache, &x);
            assert_same_bits(way, &expected(), &grads(std::slice::from_ref(&x)));
            assert!(report.to_string().contains("encrypted"), "{way}: {report}");
            assert!(report.checked.bytes > 0 && report.unchecked.bytes == 0, "{way}: {report}");
            assert_nothing_held(&cache);
        }
        assert!(cache.route().to_string().contains("encrypted spill files"), "{way}");
    }
}

#[test]
fn the_spill_file_has_nothing_of_a_tensor() {
    for encrypt in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let cache = in_directory(directory.path()).encrypt(encrypt).build().unwrap();
        let x = leaf(&Tensor::ones([256, 1024], F32));
        let step = cache.step();
        let loss = forward(&x);
        step.flush();
        let (mut spilled, told) = (vec![0; 2 * MIB as usize], telling());
        File::open(spill_file(directory.path())).unwrap().read_exact_at(&mut spilled, 0).unwrap();
        let found = spilled.chunks_exact(told.len()).any(|bytes| bytes == told);
        assert_eq!(found, !encrypt);
        step.backward(&loss).unwrap();
        let gradient: f32 = x.grad().max().try_into().unwrap();
        assert_eq!(gradient.to_bits(), TELLING.to_bits());
        step.finish().unwrap();
    }
}

#[test]
fn a_byte_that_was_changed_on_the_disk_is_an_error_and_never_a_tensor() {
    let directory = tempfile::tempdir().unwrap();
    let cache = in_directory(directory.path()).verify(Verify::Off).encrypt(true).build().unwrap();
    let x = leaf(&Tensor::ones([256, 1024], F32));
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    let file: File = OpenOptions::new().read(true).write(true).open(spill_file(directory.path())).unwrap();
    // Whatever was written where, some of it is changed.
    let end = file.metadata().unwrap().len().min(2 * MIB);
    for offset in (5..end).step_by(4096) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    }
    file.sync_all().unwrap();
    let error = step.backward(&loss).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let (message, place) = (error.to_string(), directory.path().display().to_string());
    assert!(message.contains(&place) && message.contains("at offset"), "{message}");
    assert!(message.contains("check the disk"), "{message}");
    drop((step, loss));
    trains(&cache);
    assert_nothing_held(&cache);
}

/// A cache over memory whose backend fails on request.
fn faulty(encrypt: bool) -> (Arc<Faulty>, Store) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, encrypt, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    (backend, store)
}

fn moving() -> TensorCacheBuilder {
    TensorCache::builder().policy(Offload::default()).min_bytes(0)
}

#[test]
fn a_wrong_bit_is_read_again_and_failed_writes_stay_where_they_are() {
    let (backend, store) = faulty(true);
    let cache = TensorCache::with_store(moving().verify(Verify::Off), store).unwrap();
    backend.inject(Direction::Read, Fault::FlippedBit, 0, 2);
    backend.inject(Direction::Write, Fault::Errno(libc::EIO), 1, 2);
    let x = input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    step.backward(&loss).unwrap();
    drop(loss);
    let report = step.finish().unwrap();
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    assert_eq!((report.store_failures.count, cache.store_stats().unwrap().retried), (2, 2), "{report}");
    assert_nothing_held(&cache);
}

#[test]
fn what_would_not_be_encrypted_is_refused() {
    let refused = |builder: TensorCacheBuilder| builder.encrypt(true).build().unwrap_err();
    for error in [refused(direct()), refused(staged().verify(Verify::Off).require_path(IoPath::Direct))] {
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("path(Direct) with encrypt(true)"), "{error}");
    }
    let error = TensorCache::with_store(moving().encrypt(true), faulty(false).1).unwrap_err();
    assert!(error.to_string().contains("over a store that does not encrypt"), "{error}");
    let error =
        TensorCache::with_store(direct(), faulty(true).1).map(|cache| cache.route().to_string()).unwrap_err();
    assert!(error.to_string().contains("path(Direct) with encrypt(true)"), "{error}");
}

#[test]
fn a_way_that_is_free_to_choose_is_not_the_direct_one() {
    let free =
        |encrypt| staged().host_pool(0).path(IoPath::Auto).verify(Verify::Off).encrypt(encrypt).route();
    let (plain, encrypted) = (free(false).unwrap(), free(true).unwrap());
    assert!(plain.why.is_some(), "both were tried: {plain}");
    assert!(encrypted.why.is_none() && encrypted.to_string().starts_with("through pinned"), "{encrypted}");
}

#[test]
fn steps_do_not_take_more_and_more_memory() {
    let cache = moving().backend(BackendKind::Memory).encrypt(true).build().unwrap();
    trains(&cache);
    let before = resident();
    (0..6).for_each(|_| drop(trains(&cache)));
    assert!(resident() < before + 32 * MIB, "{before} bytes, and {} later", resident());
}

#[test]
fn a_pause_counts_the_memory_that_encryption_writes_from() {
    let cache = moving().backend(BackendKind::Memory).encrypt(true).build().unwrap();
    trains(&cache);
    // What libtorch holds is not what is looked for.
    ssdtrain::trim();
    let given_back = cache.pause();
    assert!(given_back.host_bytes >= 8 * MIB, "{given_back:?}");
}

/// Bytes of this process in memory.
fn resident() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
