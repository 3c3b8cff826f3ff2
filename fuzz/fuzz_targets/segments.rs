//! Whatever memory comes and goes in whatever order, registrations follow it.
#![no_main]

#[path = "../../hooks/malloc/tests/world/mod.rs"]
mod world;

use libfuzzer_sys::fuzz_target;

use self::world::{Event, World};

/// In steps: more only take longer.
const LONGEST: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let mut world = World::new();
    let (steps, _) = bytes.as_chunks::<3>();
    for &[what, page, pages] in steps.iter().take(LONGEST) {
        let (page, few, many) = (u64::from(page % 48), 1 + u64::from(pages % 8), 1 + u64::from(pages % 29));
        world.run(match what % 16 {
            0..4 => Event::Allocate { page, pages: few, pool: pages >= 128 },
            4..8 => Event::Register { accept: pages < 224 },
            8..10 => Event::Free { page },
            10..12 => Event::Map { page, pages: few },
            12 => Event::Grant { page, pages: many },
            13 => Event::Unmap { page, pages: many },
            14 => Event::Lose { page },
            _ => Event::Reopen,
        });
    }
    world.finish();
});
