//! The header of cuFile, with which a test compares our types: fetched as a wheel into the per-user cache, and used by
//! nothing but that test.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::libtorch::{cache, lock, remove};
use crate::pip::{self, Pip};

/// Tells the test where the header is; set by hand, it names one to take instead.
pub(crate) const VARIABLE: &str = "SSDTRAIN_CUFILE_HEADER";

const WHEEL: &str = "nvidia-cufile==1.15.1.6";
const HEADER: &str = "nvidia/cu13/include/cufile.h";

/// The header: that of the environment, or that of the wheel, installed first if it is not there.
pub(crate) fn header() -> Result<PathBuf> {
    if let Some(own) = env::var_os(VARIABLE).filter(|own| !own.is_empty()).map(PathBuf::from) {
        let own = std::path::absolute(&own).with_context(|| format!("{VARIABLE} is no usable path"))?;
        ensure!(own.is_file(), "{VARIABLE} is {}, which is no file; mend or unset it", own.display());
        return Ok(own);
    }
    let cache = cache()?;
    let name = WHEEL.replace("==", "-");
    let home = cache.join(&name);
    if verify(&home).is_err() {
        install(&cache, &home, &cache.join(format!("{name}.part"))).with_context(|| {
            format!(
                "cannot get the header of cuFile; install {WHEEL} by hand and set {VARIABLE} to its {HEADER}"
            )
        })?;
    }
    let header = home.join(HEADER);
    println!("{WHEEL}: {}", header.display());
    Ok(header)
}

/// Installs the wheel into the folder `part` and then renames it to `home`, unless another process has meanwhile.
fn install(cache: &Path, home: &Path, part: &Path) -> Result<()> {
    fs::create_dir_all(cache).with_context(|| format!("cannot make the cache folder {}", cache.display()))?;
    let _lock = lock(cache)?;
    if verify(home).is_ok() {
        return Ok(());
    }
    let pip = Pip::find()?;
    // What an installation that did not finish has left goes first; the lock is held.
    remove(part)?;
    let site = part.join("site");
    let result = pip
        .install(&[WHEEL], false, &site, &part.join("tmp"))
        .and_then(|()| verify(&site))
        .and_then(|()| remove(home))
        .and_then(|()| fs::rename(&site, home).with_context(|| format!("cannot make {}", home.display())));
    remove(part)?;
    result
}

/// Checks that `home` holds every file of the wheel, and among them the header.
fn verify(home: &Path) -> Result<()> {
    let name = WHEEL.replace('-', "_").replace("==", "-");
    pip::verify_record(home, &home.join(format!("{name}.dist-info")))?;
    let header = home.join(HEADER);
    ensure!(header.is_file(), "{} is missing", header.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    #[test]
    fn an_installation_without_its_header_is_not_sound() {
        let home = env::temp_dir().join(format!("xtask-cufile-{}", process::id()));
        let (record, header) = (home.join("nvidia_cufile-1.15.1.6.dist-info"), home.join(HEADER));
        assert!(verify(&home).is_err());
        fs::create_dir_all(&record).unwrap();
        fs::write(record.join("RECORD"), "").unwrap();
        let missing = verify(&home).unwrap_err();
        assert!(missing.to_string().contains(HEADER), "{missing}");
        fs::create_dir_all(header.parent().unwrap()).unwrap();
        fs::write(&header, "").unwrap();
        verify(&home).unwrap();
        fs::remove_dir_all(&home).unwrap();
    }
}
