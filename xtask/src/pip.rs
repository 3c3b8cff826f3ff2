//! pip as a downloader: packages go into a folder of ours, never into one of the user's environments.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{command, output, succeeds};
use crate::version::VERSION;

/// The minor versions of Python 3 that the torch wheel is made for.
const PYTHONS: std::ops::RangeInclusive<u32> = 10..=14;

/// Explanations of pip's messages for the user; the first that matches wins.
const HINTS: &[(&[&str], &str)] = &[
    (
        &["No space left on device", "Errno 28"],
        "the disk is full: make room, or set SSDTRAIN_CACHE to a folder on a larger disk",
    ),
    (
        &[
            "NewConnectionError",
            "Temporary failure in name resolution",
            "timed out",
            "SSLError",
            "ProxyError",
        ],
        "the package index cannot be reached: check the network and pip's settings (proxy, index, certificates)",
    ),
    (
        &["No matching distribution found", "Could not find a version"],
        "pip found no wheel for this machine: there are wheels for x86-64 Linux with glibc 2.28 or newer and Python 3.10 \
         to 3.14; or the package index in pip's settings does not have it",
    ),
];

/// A `python3 -m pip` that is known to work.
pub(crate) struct Pip(());

impl Pip {
    /// Checks that there is a suitable python3 with pip.
    pub(crate) fn find() -> Result<Pip> {
        const ASK: &str = "import sys; print(sys.version_info[0], sys.version_info[1])";
        let version = output(&mut command("python3", ["-c", ASK])).with_context(|| {
            format!(
                "python3 does not run: install it (`apt-get install python3-pip`, `dnf install python3-pip`), or set \
                 LIBTORCH to a libtorch {VERSION} of your own"
            )
        })?;
        let version = version.trim().replace(' ', ".");
        let minor = version.strip_prefix("3.").and_then(|minor| minor.parse::<u32>().ok());
        ensure!(
            minor.is_some_and(|minor| PYTHONS.contains(&minor)),
            "python3 is Python {version}, but the torch wheel is made for 3.10 to 3.14: put such a python3 first on the \
             PATH, or set LIBTORCH to a libtorch {VERSION} of your own"
        );
        ensure!(
            succeeds(&mut command("python3", ["-m", "pip", "--version"])),
            "python3 has no pip: install it (`apt-get install python3-pip`, `dnf install python3-pip`, or `python3 -m \
             ensurepip`)"
        );
        Ok(Pip(()))
    }

    /// Downloads `requirements` and unpacks them into `target`, with their dependencies if asked. Uses `temporary`,
    /// which should be on the same disk, for its work files.
    pub(crate) fn install(
        &self,
        requirements: &[String],
        with_dependencies: bool,
        target: &Path,
        temporary: &Path,
    ) -> Result<()> {
        fs::create_dir_all(temporary).with_context(|| format!("cannot make {}", temporary.display()))?;
        let mut pip = command("python3", ["-m", "pip", "install", "--only-binary", ":all:"]);
        // No bytecode, as no Python will run; no copy of the wheels in pip's own cache.
        pip.args(["--no-compile", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]);
        if !with_dependencies {
            pip.arg("--no-deps");
        }
        pip.arg("--target").arg(target).args(requirements);
        pip.env("TMPDIR", temporary);
        // None of the user's or the distribution's protections of environments apply to a plain folder. They are set
        // as variables because an older pip ignores a variable that it does not know, but rejects an option.
        pip.envs([("PIP_USER", "0"), ("PIP_REQUIRE_VIRTUALENV", "0"), ("PIP_BREAK_SYSTEM_PACKAGES", "1")]);
        pip.env("PIP_ROOT_USER_ACTION", "ignore");

        let mut child = pip.stderr(Stdio::piped()).spawn().context("cannot start python3")?;
        let messages = child.stderr.take().map(pass_on).transpose().context("cannot read what pip says")?;
        let status = child.wait().context("cannot wait for pip")?;
        if !status.success() {
            let messages = messages.unwrap_or_default();
            bail!("pip could not install {}: {}", requirements.join(" "), hint(&messages));
        }
        Ok(())
    }
}

/// Where pip records what it knows about `requirement`, such as `torch==VERSION`, installed into `home`.
pub(crate) fn dist_info(home: &Path, requirement: &str) -> PathBuf {
    home.join(format!("{}.dist-info", requirement.replace('-', "_").replace("==", "-")))
}

/// Checks that every file in the record of the package at `dist_info`, which is in `home`, has its recorded size.
pub(crate) fn verify_record(home: &Path, dist_info: &Path) -> Result<()> {
    let path = dist_info.join("RECORD");
    let record = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    for line in record.lines() {
        // A line is `path,hash,size`. Files without a size are of no use to us.
        let mut fields = line.rsplitn(3, ',');
        let (size, _hash, name) = (fields.next(), fields.next(), fields.next());
        let (Some(Ok(size)), Some(name)) = (size.map(str::parse::<u64>), name) else { continue };
        // Programs are recorded as `../../bin/NAME`; with `--target` they are in `bin`.
        let file = home.join(name.trim_matches('"').trim_start_matches("../"));
        let found = fs::metadata(&file).with_context(|| format!("{} is missing", file.display()))?.len();
        ensure!(found == size, "{} has {found} bytes instead of {size}", file.display());
    }
    Ok(())
}

/// Copies `messages` to standard error as they come, and returns them.
fn pass_on(mut messages: impl Read) -> io::Result<String> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let read = messages.read(&mut buffer)?;
        if read == 0 {
            return Ok(String::from_utf8_lossy(&all).into_owned());
        }
        io::stderr().write_all(&buffer[..read])?;
        all.extend_from_slice(&buffer[..read]);
    }
}

fn hint(messages: &str) -> &'static str {
    HINTS
        .iter()
        .find(|(signs, _)| signs.iter().any(|sign| messages.contains(sign)))
        .map_or("its messages are above", |(_, hint)| hint)
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    #[test]
    fn a_truncated_and_a_missing_file_are_found() {
        let home = env::temp_dir().join(format!("xtask-record-{}", process::id()));
        let dist_info = home.join("torch.dist-info");
        fs::create_dir_all(&dist_info).unwrap();
        fs::write(home.join("lib.so"), "1234").unwrap();
        fs::create_dir_all(home.join("bin")).unwrap();
        fs::write(home.join("bin/program"), "1").unwrap();
        fs::write(dist_info.join("RECORD"), "../../bin/program,sha256=a,1\nlib.so,sha256=b,4\nlib.pyc,,\n")
            .unwrap();
        verify_record(&home, &dist_info).unwrap();

        fs::write(home.join("bin/program"), "12").unwrap();
        assert!(verify_record(&home, &dist_info).is_err());
        fs::write(home.join("bin/program"), "1").unwrap();

        fs::write(home.join("lib.so"), "123").unwrap();
        let truncated = verify_record(&home, &dist_info).unwrap_err();
        assert!(truncated.to_string().contains("3 bytes instead of 4"), "{truncated}");

        fs::remove_file(home.join("lib.so")).unwrap();
        let missing = verify_record(&home, &dist_info).unwrap_err();
        assert!(missing.to_string().contains("is missing"), "{missing}");
        fs::remove_dir_all(&home).unwrap();
    }

    #[test]
    fn a_missing_network_is_told_from_a_missing_wheel() {
        let offline =
            "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found for torch";
        assert!(hint(offline).contains("network"));
        assert!(hint("ERROR: No matching distribution found for torch").contains("Python 3.10"));
    }
}
