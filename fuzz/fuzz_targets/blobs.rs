//! Whatever is reserved and freed in whatever order, blobs never reach beyond the cap, and all of it comes back.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use ssdtrain_store::{BackendKind, Store, StoreConfig};

const CAP: u64 = 256 << 10;
/// In steps: more only take longer.
const LONGEST: usize = 64;

/// One for all executions, each of which leaves it as empty as it was: to start and to end its threads takes longer than the steps.
static STORE: LazyLock<Store> = LazyLock::new(|| {
    let config = StoreConfig { backend: BackendKind::Memory, cap_bytes: CAP, ..StoreConfig::default() };
    Store::open(config).expect("a store in memory")
});

fuzz_target!(|bytes: &[u8]| {
    let store = &*STORE;
    let mut blobs = Vec::new();
    let (steps, _) = bytes.as_chunks::<3>();
    for &[what, high, low] in steps.iter().take(LONGEST) {
        let number = u64::from(u16::from_be_bytes([high, low]));
        match what % 8 {
            0..4 => blobs.extend(store.reserve(number)),
            4 => drop(store.shrink()),
            _ if blobs.is_empty() => {}
            _ => drop(blobs.swap_remove(number as usize % blobs.len())),
        }
        let taken: u64 = blobs.iter().map(|blob| blob.padded_len()).sum();
        let stats = store.stats();
        assert!(taken <= stats.file_bytes && stats.file_bytes <= CAP);
        assert_eq!(stats.reserved_bytes, taken);
    }
    blobs.clear();
    store.shrink();
    assert_eq!((store.stats().reserved_bytes, store.stats().file_bytes), (0, 0));
});
