//! Locates libtorch.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the libtorch that this process uses; the libraries that come with its wheel are in the same folder.
/// `None` if the kernel does not provide the information.
pub fn library_folder() -> Option<PathBuf> {
    found_in(&fs::read_to_string("/proc/self/maps").ok()?)
}

fn found_in(maps: &str) -> Option<PathBuf> {
    // Address, permissions, offset, device and inode come before the path, which may contain spaces.
    let path = |line: &str| line.find('/').map(|start| PathBuf::from(&line[start..]));
    let library =
        maps.lines().filter_map(path).find(|path| path.file_name() == Some(OsStr::new("libtorch_cpu.so")));
    library.as_deref().and_then(Path::parent).map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_that_of_the_library_that_is_mapped() {
        let maps = "7f00-7f01 r-xp 00000000 fe:00 12 /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 00000000 fe:00 13 /opt/my torch/lib/libtorch_cpu.so\n\
                    7f04-7f05 rw-p 00000000 00:00 0 \n";
        assert_eq!(found_in(maps), Some(PathBuf::from("/opt/my torch/lib")));
        assert_eq!(found_in("7f04-7f05 rw-p 00000000 00:00 0 [heap]"), None);
    }

    #[test]
    fn this_process_has_one() {
        let _loaded = tch::Tensor::from(1.0);
        assert!(library_folder().is_some_and(|folder| folder.join("libtorch_cpu.so").exists()));
    }
}
