//! Whatever a token file holds, drawing batches from it is an answer and never a panic.
#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use ssdtrain_models::TokenSet;
use tch::Device;

fuzz_target!(|input: (u16, u8, Vec<u8>)| {
    let (vocab, block, bytes) = input;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("train.bin");
    fs::write(&path, bytes).expect("a file");
    let Ok(tokens) = TokenSet::open_bin(&path, usize::from(vocab)) else { return };
    if let Ok(mut batches) = tokens.random_batches(2, usize::from(block), 1, Device::Cpu) {
        drop(batches.draw());
    }
});
