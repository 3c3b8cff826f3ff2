//! Links the path of libtorch into a package's binaries, tests, examples, benches and doctests, so that they run with no
//! `LD_LIBRARY_PATH`.
//!
//! Cargo applies such an argument only to the package whose build script asks for it, so each package of the workspace
//! with binaries or tests names this file as its build script. The alternative is worse: flags in `.cargo/config.toml`
//! cannot hold an absolute path, and a `RUSTFLAGS` in the environment replaces them. The path is that of the link
//! `.libtorch`, not of what it points to, so that binaries follow the link when it moves.

fn main() {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    if let Some(libtorch) = std::env::var_os("LIBTORCH") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}/lib", libtorch.display());
    }
}
