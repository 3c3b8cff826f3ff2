//! What moves bytes, and the settings of the cache that has them moved.

use serde::{Deserialize, Serialize};

/// What moves bytes, in bytes per second, and where they can stay. By default nothing limits anything: such a rate is infinite, and
/// saved as nothing, since JSON has no number for it.
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
    /// Host memory for storages, in bytes. One that is larger goes through it all the same, alone.
    pub host_pool: u64,
    /// When a storage leaves the device.
    pub release: Release,
}

/// When a storage leaves the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Release {
    /// As late as the device budget allows, once it is copied to the host: a GPU's.
    #[default]
    InStreamOrder,
    /// As soon as it is on the disk: the CPU's, which has no other host memory. There is no copy then, and no difference
    /// between [`Placement::Host`](crate::Placement::Host) and [`Placement::Disk`](crate::Placement::Disk).
    WhenStored,
    /// As late as the device budget allows, once it is on the disk: a GPU's whose bytes go straight there
    /// (`IoPath::Direct`). There is no copy then either, nor host memory.
    OnceWritten,
}

/// The cache's settings, in bytes; its builder says what each means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Budgets {
    /// Saved storages on the device.
    pub device_budget: u64,
    /// The same once backward has begun.
    pub backward_budget: u64,
    /// Loaded ahead of what backward has asked for.
    pub prefetch: u64,
    /// Read from the disk ahead of the copies to the device.
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
        }
    }
}

impl Default for Budgets {
    fn default() -> Budgets {
        let any = u64::MAX;
        Budgets { device_budget: any, backward_budget: any, prefetch: any, read_ahead: any }
    }
}

/// A rate as it is saved.
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
