//! Whatever a checkpoint file holds, opening it is an answer and never a panic.
#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use ssdtrain_models::Checkpoint;

fuzz_target!(|bytes: &[u8]| {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("checkpoint.safetensors");
    fs::write(&path, bytes).expect("a file");
    drop(Checkpoint::open(&path));
});
