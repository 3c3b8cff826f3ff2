//! The ways that bytes can take, and the route that they do take.

use std::fmt;

use bytesize::ByteSize;
use ssdtrain_plan::Release;
use ssdtrain_store::StoreConfig;

use crate::tier::PoolSize;

/// Where saved bytes go from the device, and why.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Route {
    /// The way that the bytes take.
    pub way: Way,
    /// What decided besides the settings: a trial of the paths, or how many processes share the host.
    pub why: Option<String>,
    /// How much host memory is pinned for the bytes.
    pub(crate) pool: Option<PoolSize>,
    /// The spill files.
    pub(crate) store: Option<StoreConfig>,
}

/// The ways that saved bytes can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Way {
    /// None: everything stays on the device.
    Stay,
    /// From the CPU's memory to the spill files.
    Disk,
    /// From a GPU through pinned host memory, and on to the spill files if there are any.
    Host,
    /// Straight between a GPU and the spill files.
    Direct,
}

impl Route {
    /// Upper limit on the bytes of pinned host memory in which storages can stay.
    pub fn host_bytes(&self) -> u64 {
        match self.pool {
            Some(PoolSize::Fixed(bytes) | PoolSize::Learned { cap: bytes }) => bytes,
            Some(PoolSize::Bounce(_)) | None => 0,
        }
    }

    /// Upper limit on the bytes of all spill files together.
    pub fn disk_bytes(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.cap_bytes)
    }

    /// Whether what is written to the spill files is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.encrypt)
    }

    /// When storages leave the device.
    pub(crate) fn release(&self) -> Release {
        match self.way {
            Way::Stay | Way::Disk => Release::WhenStored,
            Way::Host => Release::InStreamOrder,
            Way::Direct => Release::OnceWritten,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encrypted = if self.is_encrypted() { "encrypted " } else { "" };
        let disk = || format!("{encrypted}spill files of {} at most", ByteSize(self.disk_bytes()));
        match (self.way, &self.store) {
            (Way::Stay, _) => f.write_str("none: everything is kept")?,
            (Way::Disk, _) => f.write_str(&disk())?,
            (Way::Direct, _) => write!(f, "straight to {}", disk())?,
            (Way::Host, store) => {
                match self.host_bytes() {
                    0 => f.write_str("through pinned host memory")?,
                    bytes => write!(f, "{} of pinned host memory at most", ByteSize(bytes))?,
                }
                if store.is_some() {
                    write!(f, ", then {}", disk())?;
                }
            }
        }
        self.why.iter().try_for_each(|why| write!(f, " ({why})"))
    }
}
