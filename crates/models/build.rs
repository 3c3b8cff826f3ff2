//! Compiles the models' own C++, and links the path of libtorch into the package's tests, examples and benchmarks.

#[path = "../../hooks/libtorch/compiler.rs"]
mod compiler;
#[path = "../../build.rs"]
mod link_path;

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=csrc");
    let Some(lib) = env::var_os("DEP_SSDTRAIN_LIBTORCH_LIB") else {
        println!("cargo::error=ssdtrain does not say where libtorch is; run `cargo x setup`");
        return;
    };
    compiler::compiler(Path::new(&lib))
        .files(["csrc/axpy.cpp", "csrc/known.cpp", "csrc/linear.cpp"])
        .compile("ssdtrain_models_shim");
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    link_path::main();
}
