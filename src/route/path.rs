//! The paths that a GPU's tensors can take, and the choice between them from what a trial found. Pure.

use bytesize::ByteSize;
use ssdtrain_store::CuFileMode;

/// The path that a GPU's tensors take off the device and back. CPU tensors have only one: straight to the spill files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoPath {
    /// The faster path for what has to go to the disk. That is [`Staged`](IoPath::Staged) if there is a host pool to hold what is wanted
    /// next, under [`Auto`](crate::Auto), which plans for one path, with `verify` or `encrypt`, or if a backend was requested.
    /// Otherwise, with [`host_pool(0)`](crate::TensorCacheBuilder::host_pool), both paths are tried, once per process if both work:
    /// whether 64 MiB come back unchanged, and how fast bytes move while both directions run.
    #[default]
    Auto,
    /// Straight between the GPU and the spill files, through cuFile. [`TensorCache::io_path`](crate::TensorCache::io_path) says what that
    /// means on this machine: GPUDirect Storage, or cuFile's compatibility mode, in which it makes copies through host memory itself. The
    /// host pool is not used, and [`verify`](crate::TensorCacheBuilder::verify) and [`encrypt`](crate::TensorCacheBuilder::encrypt)
    /// cannot be, because the processor does not see the bytes.
    Direct,
    /// Through pinned host memory, and on to the spill files if there are any.
    Staged,
    /// To pinned host memory only: spill directories are not used.
    HostOnly,
}

/// What a trial of the paths between a GPU and the spill files found; see
/// [`TensorCacheBuilder::try_paths`](crate::TensorCacheBuilder::try_paths).
#[derive(Clone, Debug, PartialEq)]
pub struct PathTrial {
    /// Straight to the disk: how cuFile moves bytes, and how fast; or why it does not work.
    pub direct: Result<(CuFileMode, PathRates), String>,
    /// Through pinned host memory: how fast, or what failed.
    pub staged: Result<PathRates, String>,
}

/// How fast 256 MiB of a GPU's memory are written to the disk and read back, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathRates {
    /// To the disk.
    pub write: f64,
    /// From the disk.
    pub read: f64,
    /// Reads and writes together while both directions run. The choice is made by this rate.
    pub both: f64,
}

impl PathTrial {
    /// Whether both ways work.
    pub(crate) fn is_whole(&self) -> bool {
        self.direct.is_ok() && self.staged.is_ok()
    }
}

/// The faster path, and why it is chosen.
pub(crate) fn choose(found: &PathTrial) -> (IoPath, String) {
    let rate = |rates: &PathRates| format!("{}/s", ByteSize(rates.both as u64));
    match (&found.direct, &found.staged) {
        (Ok((mode, direct)), Ok(staged)) => {
            let (direct_rate, staged_rate) = (rate(direct), rate(staged));
            if direct.both > staged.both {
                let why = format!(
                    "chosen: {direct_rate} both ways at once by cuFile, {mode}; {staged_rate} through the host pool"
                );
                (IoPath::Direct, why)
            } else {
                let why = format!("chosen: {staged_rate} both ways at once; {direct_rate} by cuFile, {mode}");
                (IoPath::Staged, why)
            }
        }
        (Ok((mode, direct)), Err(reason)) => (
            IoPath::Direct,
            format!("chosen: {} by cuFile, {mode}; not through the host pool: {reason}", rate(direct)),
        ),
        (Err(reason), _) => (IoPath::Staged, format!("not straight to the disk: {reason}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(direct: Result<(CuFileMode, f64), &str>, staged: Result<f64, &str>) -> (IoPath, String) {
        // The rates of one direction alone do not decide.
        let rates = |both: f64| PathRates { write: 1e12 - both, read: 1e12 - both, both };
        choose(&PathTrial {
            direct: direct.map(|(mode, both)| (mode, rates(both))).map_err(str::to_owned),
            staged: staged.map(rates).map_err(str::to_owned),
        })
    }

    #[test]
    fn the_faster_way_is_taken_whatever_it_is_called() {
        let real = (CuFileMode::NvidiaFs, 2e9);
        assert_eq!(found(Ok(real), Ok(1e9)).0, IoPath::Direct);
        assert_eq!(found(Ok(real), Ok(3e9)).0, IoPath::Staged);
        let (path, why) = found(Ok((CuFileMode::Compatibility, 2e9)), Ok(1e9));
        assert_eq!(path, IoPath::Direct);
        assert!(
            why.contains("compatibility mode, through host memory") && why.contains("953.7 MiB/s"),
            "{why}"
        );
    }

    #[test]
    fn a_way_that_does_not_work_is_not_taken_and_the_reason_told() {
        let (path, why) = found(Err("no libcufile"), Ok(1e9));
        assert_eq!(path, IoPath::Staged);
        assert!(why.contains("no libcufile"), "{why}");
        assert_eq!(found(Ok((CuFileMode::NvidiaFs, 1.0)), Err("no memory to pin")).0, IoPath::Direct);
        assert_eq!(found(Err("a"), Err("b")).0, IoPath::Staged, "whose own error is told when it is opened");
    }
}
