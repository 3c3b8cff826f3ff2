//! What moves the bytes, and the settings of the cache.

use serde::{Deserialize, Serialize};

/// The highest cost of moving a byte, in seconds of the program's own time.
pub(crate) const MOST_MOVING: f64 = 1e-3;

/// How fast bytes move, in bytes per second, and where they can stay. By default nothing is limited: such a rate is
/// infinite, and is saved as null, since JSON has no number for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// From the device to the host.
    #[serde(with = "rate")]
    pub copy_out: f64,
    /// From the host to the device.
    #[serde(with = "rate")]
    pub copy_in: f64,
    /// From the host to the disk.
    #[serde(with = "rate")]
    pub disk_write: f64,
    /// From the disk to the host.
    #[serde(with = "rate")]
    pub disk_read: f64,
    /// Host memory for storages, in bytes. A storage that is larger than this still passes through it, alone.
    pub host_pool: u64,
    /// When a storage leaves the device.
    pub release: Release,
    /// By how many seconds the program's own work takes longer for each byte that leaves the device or comes back,
    /// because it shares processors and memory with what moves it. 0 where nothing is known of it.
    #[serde(default)]
    pub moving: f64,
    /// Which share of the cache's work on the program's own thread makes the step longer ([`Handling`](crate::Handling)): all of it where
    /// that thread computes, and none on a device that always has something to do before the thread is back.
    #[serde(default)]
    pub exposed: f64,
}

/// When a storage leaves the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Release {
    /// As late as the device budget allows, once it has been copied to the host: for a GPU.
    #[default]
    InStreamOrder,
    /// As soon as it is on the disk: for the CPU, which has no other host memory. There is no copy then, and no
    /// difference between [`Placement::Host`](crate::Placement::Host) and
    /// [`Placement::Disk`](crate::Placement::Disk).
    WhenStored,
    /// As late as the device budget allows, once it is on the disk: for a GPU whose bytes go directly there
    /// (`IoPath::Direct`). This uses no copy and no host memory either.
    OnceWritten,
}

/// The cache's settings, in bytes; the documentation of its builder explains each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budgets {
    /// Saved storages on the device.
    pub device_budget: u64,
    /// The same once backward has begun.
    pub backward_budget: u64,
    /// The most bytes loaded ahead of what backward has asked for.
    pub prefetch: u64,
    /// The most bytes read from the disk ahead of the copies to the device.
    pub read_ahead: u64,
}

impl Default for Machine {
    fn default() -> Machine {
        let any = f64::INFINITY;
        Machine {
            copy_out: any,
            copy_in: any,
            disk_write: any,
            disk_read: any,
            host_pool: u64::MAX,
            release: Release::default(),
            moving: 0.0,
            exposed: 0.0,
        }
    }
}

impl Default for Budgets {
    fn default() -> Budgets {
        let any = u64::MAX;
        Budgets { device_budget: any, backward_budget: any, prefetch: any, read_ahead: any }
    }
}

/// How a rate is serialized.
mod rate {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
    pub(super) fn serialize<S: Serializer>(rate: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        Some(*rate).filter(|rate| rate.is_finite()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
    }
}
