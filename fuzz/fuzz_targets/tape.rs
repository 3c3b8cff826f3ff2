//! Whatever is saved, released and asked for in whatever order, a micro-batch's tape is what a plain record of it says.
#![no_main]

// The crate that has them is linked to libtorch, which they do without.
#[path = "../../src/cache/keys.rs"]
#[allow(dead_code, reason = "a tape takes one of the keys")]
mod keys;
#[path = "../../src/cache/tape.rs"]
#[allow(dead_code, reason = "the table counts what is in the graph")]
mod tape;

use libfuzzer_sys::fuzz_target;

use self::tape::model::{TapeStep, compare};

/// In steps: more only take longer.
const LONGEST: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let (steps, _) = bytes.as_chunks::<2>();
    compare(steps.iter().take(LONGEST).map(|&[what, which]| {
        let which = usize::from(which);
        match what % 11 {
            0..3 => TapeStep::Save,
            3 => TapeStep::Release(which),
            4 => TapeStep::Ask { which, missed: false },
            5 => TapeStep::Ask { which, missed: true },
            6 => TapeStep::LookAhead,
            7 => TapeStep::Left(which),
            8 => TapeStep::ComeTo(which),
            9 => TapeStep::Miss,
            _ => TapeStep::BringNear,
        }
    }));
});
