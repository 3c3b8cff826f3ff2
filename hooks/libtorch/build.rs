//! Compiles the shim against the libtorch that torch-sys found, with the flags torch-sys itself uses.

use std::env;
use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=csrc");
    let Some(lib) = env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
        println!("cargo::error=torch-sys does not say where libtorch is; run `cargo x setup`");
        return;
    };
    let include = lib.with_file_name("include");
    cc::Build::new()
        .cpp(true)
        .pic(true)
        .extra_warnings(true)
        .std("c++17")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // As libtorch was built: some of its classes have other members without it.
        .define("NDEBUG", None)
        // A shim that runs on every saved tensor: optimised in every profile.
        .opt_level(2)
        .debug(false)
        .include("csrc")
        // In the place of CUDA's own headers.
        .include("csrc/cuda")
        // Not ours to mend: no warnings of libtorch's headers.
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .files([
            "csrc/allocator.cpp",
            "csrc/axpy.cpp",
            "csrc/circumstances.cpp",
            "csrc/device.cpp",
            "csrc/hooks.cpp",
            "csrc/linear.cpp",
            "csrc/observer.cpp",
            "csrc/operations.cpp",
            "csrc/random.cpp",
            "csrc/ranges.cpp",
            "csrc/reads.cpp",
            "csrc/segments.cpp",
            "csrc/storage.cpp",
            "csrc/watches.cpp",
        ])
        .compile("ssdtrain_shim");
    // For the build scripts of those who depend on this package.
    println!("cargo::metadata=lib={}", lib.display());
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    // Tests of this package; packages that depend on it set the path themselves.
    let lib = lib.canonicalize().unwrap_or(lib);
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
}
