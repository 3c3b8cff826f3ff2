//! Whatever is taken and given back in whatever order, a host pool's pages are what a plain record of them says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_store::fuzzing::{RunsStep, compare_runs};

/// In steps and in pages: more only take longer.
const LONGEST: usize = 64;
const MOST_ADDED: usize = 12;

fuzz_target!(|bytes: &[u8]| {
    let (steps, _) = bytes.as_chunks::<2>();
    compare_runs(steps.iter().take(LONGEST).map(|&[what, number]| {
        let number = usize::from(number);
        match what % 8 {
            0 => RunsStep::Add(number % MOST_ADDED),
            1 => RunsStep::Remove(number),
            2..5 => RunsStep::Take(number % (3 * MOST_ADDED)),
            _ => RunsStep::Give(number),
        }
    }));
});
