//! Writes into the program where libtorch is, so that it runs with no `LD_LIBRARY_PATH`.

fn main() {
    // Cargo passes on what ssdtrain's own build has found.
    if let Some(libraries) = std::env::var_os("DEP_SSDTRAIN_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    }
}
