//! What moving may cost besides the time of the transfers.

use crate::{Machine, Release};

/// What moving may cost the program's own work before anything is known of it, as a share of the time that the transfers take: on a CPU,
/// whose processors move the bytes, and on a device with engines for that.
const BY_PROCESSOR: f64 = 0.3;
const BY_ENGINE: f64 = 0.01;
/// What a transfer may cost processors besides, whatever its size, in seconds.
const EACH_BY_PROCESSOR: f64 = 50e-6;

/// How many seconds moving so many bytes in so many transfers may cost before anything is known of that.
pub(super) fn moving_doubt(machine: &Machine, moved: f64, transfers: f64) -> f64 {
    let Machine { copy_out, copy_in, disk_write, disk_read, .. } = machine;
    match machine.release {
        Release::WhenStored => {
            BY_PROCESSOR * moved / disk_write.min(*disk_read) + EACH_BY_PROCESSOR * transfers
        }
        Release::InStreamOrder => BY_ENGINE * moved / copy_out.min(*copy_in),
        Release::OnceWritten => BY_ENGINE * moved / disk_write.min(*disk_read),
    }
}
