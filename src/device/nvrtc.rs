//! NVIDIA's run-time compiler, found at run time: it comes with torch's wheels and with the CUDA toolkit.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use cudarc::nvrtc::{result, sys};
use ssdtrain_libtorch::library_folder;

const SONAME: &str = "libnvrtc.so.13";
/// Where the wheels have it, from libtorch's folder.
const WHEELS: [&str; 2] = ["../../nvidia/cu13/lib", "../../nvidia/cuda_nvrtc/lib"];

/// Loads the compiler, if it can be found.
pub(super) fn load() -> Result<(), String> {
    let beside =
        library_folder().into_iter().flat_map(|folder| WHEELS.map(|wheel| folder.join(wheel).join(SONAME)));
    // Once one is loaded by its path, its name stands for it.
    let loaded = beside.filter(|path| path.exists()).any(|path| open(&path));
    // SAFETY: loads the library by its names; one that is loaded has only constants to initialise.
    if loaded || unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(format!(
        "{SONAME} cannot be loaded; it comes with torch's wheels (nvidia-cuda-nvrtc) and with the CUDA toolkit"
    ))
}

fn open(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: as above. It is never unloaded.
    !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }.is_null()
}

/// A program that is destroyed with this value.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is this value's, and used by no one else. There is nothing to be done about a failure.
        _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles CUDA C++ for one architecture, such as `sm_90`, to what the driver can load. The compiler must be loaded.
pub(super) fn compile(source: &CStr, architecture: &str) -> Result<Vec<u8>, String> {
    let program = Program(
        result::create_program(source, None).map_err(|error| format!("nvrtcCreateProgram: {error}"))?,
    );
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
    // SAFETY: the program is alive.
    let outcome = unsafe { result::compile_program(program.0, &options) };
    outcome.map_err(|error| format!("nvrtcCompileProgram: {error}: {}", log(&program)))?;
    let mut bytes = 0;
    // SAFETY: the program is alive, and the place for the size is valid.
    let outcome = unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut bytes) };
    outcome.result().map_err(|error| format!("nvrtcGetCUBINSize: {error}"))?;
    let mut image = vec![0_u8; bytes];
    // SAFETY: the program is alive, and there is room for as many bytes as it says.
    let outcome = unsafe { sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast::<c_char>()) };
    outcome.result().map_err(|error| format!("nvrtcGetCUBIN: {error}"))?;
    Ok(image)
}

/// What the compiler said.
fn log(program: &Program) -> String {
    // SAFETY: the program is alive.
    let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    let text: Vec<u8> = log.into_iter().take_while(|c| *c != 0).map(|c| c.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&text).into_owned()
}
