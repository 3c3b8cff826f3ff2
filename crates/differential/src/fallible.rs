//! What of a cache can be made to fail.

use std::sync::Arc;

use ssdtrain::DeviceFaults;
use ssdtrain::store::Faulty;

/// The disk and the device of a cache, which fail on request.
#[derive(Default)]
pub(crate) struct Fallible {
    /// `None` without spill files.
    pub(crate) disk: Option<Arc<Faulty>>,
    pub(crate) device: Arc<DeviceFaults>,
}

impl Fallible {
    /// From now on nothing fails.
    pub(crate) fn heal(&self) {
        self.disk.iter().for_each(|disk| disk.heal());
        self.device.heal();
    }
}
