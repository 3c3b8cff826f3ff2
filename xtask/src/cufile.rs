//! cuFile's header, which a test compares our types with; nothing else uses it.

use std::env;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::wheel::Wheel;

/// Tells the test where the header is; set by the user, it names the one to use instead.
pub(crate) const VARIABLE: &str = "SSDTRAIN_CUFILE_HEADER";

const WHEEL: Wheel = Wheel { requirement: "nvidia-cufile==1.15.1.6", file: "nvidia/cu13/include/cufile.h" };

/// The header: the one named in the environment, or the wheel's.
pub(crate) fn header() -> Result<PathBuf> {
    if let Some(own) = env::var_os(VARIABLE).filter(|own| !own.is_empty()).map(PathBuf::from) {
        let own = std::path::absolute(&own).with_context(|| format!("{VARIABLE} is no usable path"))?;
        ensure!(own.is_file(), "{VARIABLE} is {}, which is no file; mend or unset it", own.display());
        return Ok(own);
    }
    WHEEL.ensure().with_context(|| {
        let Wheel { requirement, file } = WHEEL;
        format!(
            "cannot get the header of cuFile; install {requirement} by hand and set {VARIABLE} to its {file}"
        )
    })
}
