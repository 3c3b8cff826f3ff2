//! NVIDIA's cuFile library: whether it can be found, and its version. Nothing of it is opened or set up.

use std::fs;
use std::path::{Path, PathBuf};

use cufile_sys::{Search, Version};

/// The library that was found.
#[derive(Clone, Debug)]
pub(super) struct Library {
    /// The file, or the name by which the loader found it.
    pub(super) path: PathBuf,
    /// Such as `1.15`; libraries before 1.7 do not report it.
    pub(super) version: Option<String>,
}

/// Finds the library the way a cache does, and asks for its version. `libtorch` is libtorch's folder. The error is
/// the loader's.
pub(super) fn find(libtorch: Option<&Path>) -> Result<Library, String> {
    let search = libtorch.into_iter().fold(Search::new(), |search, folder| search.beside(folder));
    match search.load() {
        Ok(library) => {
            let path = loaded_from().unwrap_or_else(|| library.path().to_path_buf());
            let version = library.version().ok().map(|Version { major, minor }| format!("{major}.{minor}"));
            Ok(Library { path, version })
        }
        Err(error) => {
            // A file that exists and cannot be loaded is more informative than a name that is not found.
            let telling = error.tried().iter().find(|(path, _)| path.exists());
            Err(telling
                .map_or_else(|| "libcufile.so.0 is not there".to_owned(), |(_, reason)| reason.clone()))
        }
    }
}

/// The file that the loader used.
fn loaded_from() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    paths.map(PathBuf::from).find(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"libcufile.so"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_named_and_does_no_harm() {
        if find(None).is_ok() {
            return eprintln!("skipped: the library is installed here");
        }
        // Where a wheel has it, relative to libtorch's folder.
        let packages = tempfile::tempdir().unwrap();
        let (torch, wheel) = (packages.path().join("torch/lib"), packages.path().join("nvidia/cu13/lib"));
        for folder in [&torch, &wheel] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(wheel.join("libcufile.so.0"), "not a library").unwrap();
        let error = find(Some(&torch)).unwrap_err();
        assert!(error.contains(&packages.path().display().to_string()), "{error}");
    }
}
