//! Stores libtorch's location in the program, so that it runs without `LD_LIBRARY_PATH`.

fn main() {
    // Cargo passes on what ssdtrain's own build script has found.
    if let Some(libraries) = std::env::var_os("DEP_SSDTRAIN_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    }
}
