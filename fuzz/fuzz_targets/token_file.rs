//! Whatever a token file holds, and whatever is drawn from it, batches are what it has or an error, and never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_models::fuzzing::{Drawing, draw_tokens};

fuzz_target!(|input: (u16, u8, u8, u8, u64, u8, &[u8])| {
    let (vocab, held_out, rows, block, seed, spread, bytes) = input;
    let drawing = Drawing {
        vocab: usize::from(vocab),
        // Also shares that are refused.
        held_out: f64::from(held_out) / 200.0,
        // More only take longer.
        rows: usize::from(rows % 16),
        block: usize::from(block),
        seed,
        spread: usize::from(spread),
    };
    drop(draw_tokens(bytes, &drawing));
});
