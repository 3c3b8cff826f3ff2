//! What is known of the endurance of disks, as the command line has it.

use serde::Serialize;
use ssdtrain::TensorCacheBuilder;
use ssdtrain_store::HistoryFile;

use crate::common::size;

/// The arguments that say how long disks last.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub(crate) struct EnduranceArgs {
    /// Bytes that each disk may take in its life, as its maker rates it (TBW), such as 600TB: reports then warn where that lasts less than
    /// a year at the present rate
    #[arg(long, value_name = "SIZE", value_parser = size::parse_of_disk)]
    disk_endurance: Option<u64>,
}

impl EnduranceArgs {
    /// Bytes that each disk is rated for.
    pub(crate) fn rating(&self) -> Option<u64> {
        self.disk_endurance
    }

    /// Tells the cache, and has it add what it writes to the history of this user.
    pub(crate) fn set(&self, builder: TensorCacheBuilder) -> TensorCacheBuilder {
        let builder = match HistoryFile::of_user(true) {
            Some(file) => builder.disk_history(file.directory()),
            None => builder,
        };
        match self.disk_endurance {
            Some(bytes) => builder.disk_endurance(bytes),
            None => builder,
        }
    }
}
