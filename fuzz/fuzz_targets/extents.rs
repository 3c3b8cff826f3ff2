//! Whatever is taken and given back in whatever order, a spill file's space is what a plain record of its blocks says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_store::fuzzing::{SpaceStep, compare_space};

/// In steps and in blocks: more only take longer.
const LONGEST: usize = 64;
const LARGEST: u64 = 64;

fuzz_target!(|bytes: &[u8]| {
    let (steps, _) = bytes.as_chunks::<2>();
    compare_space(steps.iter().take(LONGEST).map(|&[what, number]| {
        let number = u64::from(number);
        match what % 8 {
            0 => SpaceStep::Grow((number % LARGEST) as usize),
            // Up to a third of the largest file, and rarely whole blocks.
            1..4 => SpaceStep::Take(number * 331),
            4..7 => SpaceStep::GiveBack(number as usize),
            // Up to numbers whose whole blocks overflow.
            _ if number >= 192 => SpaceStep::Take(u64::MAX - (u64::from(what) << (number % 16))),
            _ => SpaceStep::Shrink,
        }
    }));
});
