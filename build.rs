//! Links the path of libtorch into a package's binaries, tests, examples, benches and doctests, so that they run with no
//! `LD_LIBRARY_PATH`.
//!
//! Cargo applies such an argument only to the package whose build script asks for it, so each package of the workspace
//! with binaries or tests names this file as its build script. The alternative is worse: flags in `.cargo/config.toml`
//! cannot hold an absolute path, and a `RUSTFLAGS` in the environment replaces them. The path is the one torch-sys was given,
//! not what it points to, so that binaries follow the link `.libtorch` when it moves.

/// Build scripts that do more have this file as a module.
pub(crate) fn main() {
    // Comes from ssdtrain-libtorch's build script and, for packages that depend on ssdtrain alone, from this one: whoever depends
    // on ssdtrain writes this line into a build script as well (`examples/outside`).
    if let Some(libraries) = std::env::var_os("DEP_SSDTRAIN_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", libraries.display());
        println!("cargo::metadata=libtorch_lib={}", libraries.display());
    }
}
