//! Whatever a machine says of its control groups, it is read without a panic, and no folder outside of the mount points.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ssdtrain_store::fuzzing::read_control_groups;

fuzz_target!(|text: &str| {
    let mut parts = text.splitn(3, '\0');
    let mut next = || parts.next().unwrap_or_default();
    let (own, mounts, statistics) = (next(), next(), next());
    // Every group is looked for in every mount.
    if own.lines().count() * mounts.lines().count() <= 64 {
        read_control_groups(own, mounts, statistics);
    }
});
