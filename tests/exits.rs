//! A process with transfers under way ends, however it ends.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::env;
use std::process::{self, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use common::{everything, leaf, randn};
use ssdtrain::{BackendKind, IoPath, MIB, TensorCache, Verify};
use tch::{Kind, Tensor};

/// How the process of [`ends`] is to end, and which way its bytes go.
const HOW: &str = "EXITS_HOW";
const WAY: &str = "EXITS_WAY";
/// What is saved, in bytes and in tensors. At [`RATE`] it would be written in minutes.
const SAVED: i64 = 32 * MIB as i64;
const TENSORS: i64 = 32;
const RATE: u64 = 64 << 10;
/// Less than that takes, and more than a process takes to start on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A cache whose bytes go a way of this name; `None` if the kernel refuses io_uring.
fn cache(way: &str) -> Option<TensorCache> {
    let builder = everything().disk_rate(RATE);
    match way {
        "memory" => Some(builder.backend(BackendKind::Memory).build().unwrap()),
        "pool" => Some(builder.backend(BackendKind::Pool).build().unwrap()),
        "uring" => builder.backend(BackendKind::Uring).build().ok(),
        "encrypted" => Some(builder.encrypt(true).build().unwrap()),
        "staged" => Some(builder.simulated_device(Duration::ZERO).host_pool(8 * MIB).build().unwrap()),
        "direct" => {
            let builder = builder.simulated_device(Duration::ZERO).path(IoPath::Direct).verify(Verify::Off);
            Some(builder.build().unwrap())
        }
        other => panic!("no way {other}"),
    }
}

/// Saves tensors, and returns what keeps them saved.
fn save(x: &Tensor) -> Tensor {
    (0..TENSORS).fold(x.sum(Kind::Float), |sum, _| sum + x.exp().sum(Kind::Float))
}

/// What [`a_process_ends_whatever_is_under_way`] runs in a process of its own.
#[test]
fn ends() {
    let (Ok(how), Ok(way)) = (env::var(HOW), env::var(WAY)) else { return };
    let Some(cache) = cache(&way) else { process::exit(77) };
    let x = leaf(&randn(&[SAVED / TENSORS / 4]));
    if how == "other thread" {
        let cache: &'static TensorCache = Box::leak(Box::new(cache));
        let (saved, told) = channel();
        let hold = move || {
            let _step = cache.step();
            let _loss = save(&x);
            saved.send(()).unwrap();
            loop {
                thread::park();
            }
        };
        thread::Builder::new().spawn(hold).unwrap();
        return told.recv().unwrap();
    }
    let step = cache.step();
    let loss = save(&x);
    let stats = cache.store_stats().unwrap();
    assert!(stats.bytes_written < SAVED as u64 / 2, "{stats:?}");
    match how.as_str() {
        "exit" => process::exit(7),
        "panic" => panic!("on purpose"),
        "return" => drop((loss, step)),
        other => panic!("no end {other}"),
    }
}

#[test]
fn a_process_ends_whatever_is_under_way() {
    for way in ["memory", "pool", "uring", "encrypted", "staged", "direct"] {
        for (how, code) in [("exit", 7), ("panic", 101), ("return", 0), ("other thread", 0)] {
            let mut child = Command::new(env::current_exe().unwrap());
            child
                .args(["--exact", "ends"])
                .env(HOW, how)
                .env(WAY, way)
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let start = Instant::now();
            let ended = child.status().unwrap().code();
            if ended == Some(77) {
                eprintln!("skipped: {way} is refused here");
                break;
            }
            assert_eq!(ended, Some(code), "{way}, {how}");
            assert!(start.elapsed() < PATIENCE, "{way}, {how}: {:?}", start.elapsed());
        }
    }
}
