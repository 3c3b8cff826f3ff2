//! The compiler of what includes libtorch's headers, for the build scripts of packages with C++, which have this file as a module.

use std::path::Path;

/// A compiler with the flags that torch-sys itself uses, for the libtorch whose libraries are in `lib`.
pub(crate) fn compiler(lib: &Path) -> cc::Build {
    let include = lib.with_file_name("include");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .pic(true)
        .extra_warnings(true)
        .std("c++17")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // As libtorch was built: some of its classes have other members without it.
        .define("NDEBUG", None)
        // What runs on every saved tensor: optimised in every profile.
        .opt_level(2)
        .debug(false)
        .include("csrc")
        // Not ours to mend: no warnings of libtorch's headers.
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()));
    build
}
