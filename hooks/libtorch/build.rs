//! Compiles the shim against the libtorch that torch-sys found.

mod compiler;

use std::env;
use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=csrc");
    let Some(lib) = env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
        println!("cargo::error=torch-sys does not say where libtorch is; run `cargo x setup`");
        return;
    };
    compiler::compiler(&lib)
        // In place of CUDA's own headers.
        .include("csrc/cuda")
        .files([
            "csrc/allocator.cpp",
            "csrc/thread_state.cpp",
            "csrc/device.cpp",
            "csrc/forks.cpp",
            "csrc/hooks.cpp",
            "csrc/observer.cpp",
            "csrc/operations.cpp",
            "csrc/random.cpp",
            "csrc/ranges.cpp",
            "csrc/reads.cpp",
            "csrc/recording.cpp",
            "csrc/repeatable.cpp",
            "csrc/segments.cpp",
            "csrc/shortage.cpp",
            "csrc/storage.cpp",
            "csrc/tiles.cpp",
            "csrc/watches.cpp",
        ])
        .compile("ssdtrain_shim");
    // For the build scripts of packages that depend on this one.
    println!("cargo::metadata=lib={}", lib.display());
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    // For the tests of this package; packages that depend on it set the path themselves.
    let lib = lib.canonicalize().unwrap_or(lib);
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
}
