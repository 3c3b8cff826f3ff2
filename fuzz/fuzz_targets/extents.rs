//! Whatever is reserved and freed in whatever order, blobs never reach beyond the cap, and all of it comes back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain::BackendKind;
use ssdtrain::store::{Store, StoreConfig};

const CAP: u64 = 8 << 20;

fuzz_target!(|operations: Vec<(bool, u32)>| {
    let config = StoreConfig { backend: BackendKind::Memory, cap_bytes: CAP, ..StoreConfig::default() };
    let store = Store::open(config).expect("a store in memory");
    let mut blobs = Vec::new();
    for (reserve, number) in operations {
        if reserve {
            blobs.extend(store.reserve(u64::from(number % (4 << 20))));
        } else if !blobs.is_empty() {
            blobs.swap_remove(number as usize % blobs.len());
        }
        let taken: u64 = blobs.iter().map(|blob| blob.padded_len()).sum();
        assert!(taken <= CAP);
        assert_eq!(store.stats().reserved_bytes, taken);
    }
    blobs.clear();
    assert_eq!(store.stats().reserved_bytes, 0);
});
