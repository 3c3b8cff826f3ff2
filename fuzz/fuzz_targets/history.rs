//! Whatever is in the file of the disks' history, it is read without a panic, and what can be read can be written, added to
//! and asked, on whatever day.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_store::Day;
use ssdtrain_store::fuzzing::read_history;

fuzz_target!(|bytes: &[u8]| {
    for today in [0, 20_783, u32::MAX] {
        read_history(bytes, Day(today));
    }
});
