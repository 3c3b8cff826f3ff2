//! Whatever a checkpoint file holds, opening and restoring it is an answer and never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_models::fuzzing::read_checkpoint;

fuzz_target!(|bytes: &[u8]| drop(read_checkpoint(bytes)));
