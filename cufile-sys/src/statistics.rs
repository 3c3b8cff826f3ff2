//! The library's statistics. They exist since cuFile 1.15.

use crate::driver::{Driver, Version};
use crate::result::{Error, Result, check};
use crate::sys::{CUfileError_t, CUfileStatsLevel1_t, CUfileStatsLevel2_t, CUfileStatsLevel3_t};

/// The release whose layouts for levels 2 and 3 are known.
const KNOWN: Version = Version { major: 1, minor: 15 };

/// Space for statistics, with room for what later releases append.
#[repr(C)]
struct Roomy<T> {
    statistics: T,
    room: [[u64; 32]; 32],
}

impl Driver {
    /// Sets the level of statistics, 0 (none) to 3, and starts counting unless it is 0.
    pub fn start_statistics(&self, level: u32) -> Result<()> {
        const NAME: &str = "cuFileSetStatsLevel";
        let function = self.functions().set_stats_level()?;
        let number = level.try_into().ok().filter(|level| (0..=3).contains(level));
        let number =
            number.ok_or_else(|| Error::argument(NAME, format!("level {level}: there are 0 to 3")))?;
        // SAFETY: the argument is a number.
        check(NAME, unsafe { function(number) })?;
        if level == 0 {
            return Ok(());
        }
        let function = self.functions().stats_start()?;
        // SAFETY: it has no arguments.
        check("cuFileStatsStart", unsafe { function() })
    }

    /// The level of statistics.
    pub fn statistics_level(&self) -> Result<u32> {
        let function = self.functions().stats_level()?;
        let mut level = 0;
        // SAFETY: `level` is a place for the result.
        check("cuFileGetStatsLevel", unsafe { function(&raw mut level) })?;
        Ok(u32::try_from(level).unwrap_or(0))
    }

    /// Stops counting.
    pub fn stop_statistics(&self) -> Result<()> {
        let function = self.functions().stats_stop()?;
        // SAFETY: it has no arguments.
        check("cuFileStatsStop", unsafe { function() })
    }

    /// Resets all counts to zero.
    pub fn reset_statistics(&self) -> Result<()> {
        let function = self.functions().stats_reset()?;
        // SAFETY: it has no arguments.
        check("cuFileStatsReset", unsafe { function() })
    }

    /// Level 1.
    pub fn statistics(&self) -> Result<Box<CUfileStatsLevel1_t>> {
        let function = self.functions().stats_level1()?;
        // SAFETY: the place is larger than the statistics of any known release, and they all begin alike.
        fill("cuFileGetStatsL1", |place| unsafe { function(place) })
    }

    /// Level 2. An error unless the release is 1.15: others may have another layout.
    pub fn statistics_of_sizes(&self) -> Result<Box<CUfileStatsLevel2_t>> {
        let function = self.functions().stats_level2()?;
        self.known("cuFileGetStatsL2")?;
        // SAFETY: the place has the layout of this release.
        fill("cuFileGetStatsL2", |place| unsafe { function(place) })
    }

    /// Level 3. An error unless the release is 1.15: others may have another layout.
    pub fn statistics_of_gpus(&self) -> Result<Box<CUfileStatsLevel3_t>> {
        let function = self.functions().stats_level3()?;
        self.known("cuFileGetStatsL3")?;
        // SAFETY: the place has the layout of this release.
        fill("cuFileGetStatsL3", |place| unsafe { function(place) })
    }

    fn known(&self, function: &'static str) -> Result<()> {
        let Version { major, minor } = self.cufile().version()?;
        if (Version { major, minor }) == KNOWN {
            return Ok(());
        }
        let what =
            format!("the layout of these statistics is known for cuFile 1.15 only; this is {major}.{minor}");
        Err(Error::argument(function, what))
    }
}

/// Lets `read` fill in statistics.
fn fill<T: Copy + Default>(
    function: &'static str,
    read: impl FnOnce(*mut T) -> CUfileError_t,
) -> Result<Box<T>> {
    let mut place = Box::new(Roomy { statistics: T::default(), room: [[0; 32]; 32] });
    check(function, read((&raw mut *place).cast()))?;
    Ok(Box::new(place.statistics))
}
