// Links the path of libtorch into this package's binaries, tests, examples, benches and doctests, so that they run with
// no LD_LIBRARY_PATH.
//
// Cargo applies such an argument only to the package whose build script asks for it, so the packages of the workspace
// that have binaries or tests include this file in theirs. The alternatives are worse: flags in .cargo/config.toml know
// no absolute path, and a RUSTFLAGS in the environment replaces them. The path is that of the link `.libtorch`, not
// what it points to, so that binaries follow the link when it moves.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    if let Some(libtorch) = std::env::var_os("LIBTORCH") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}/lib", libtorch.display());
    }
}
