//! NVIDIA cuFile (GPUDirect Storage), looked up at run time, in three layers: [`sys`] has the C types, [`result`]
//! turns return values into results, and the rest owns what is registered and what is in flight.
//!
//! Nothing of cuFile is needed to build. Where it is missing, a program gets an error that says what was tried.
//!
//! ```no_run
//! use std::fs::OpenOptions;
//! use std::os::unix::fs::OpenOptionsExt;
//!
//! use cufile_sys::{Driver, Search};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (device_pointer, len) = (std::ptr::null_mut(), 1 << 20);
//! let library = Search::new().load()?;
//! let driver = Driver::open(&library)?;
//! let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open("/mnt/nvme/data")?;
//! let file = driver.register_file(file)?;
//! // SAFETY: the memory is `len` bytes of this process's own on the device, and is freed after the buffer.
//! let _buffer = unsafe { driver.register_buffer(device_pointer, len) }?;
//! // SAFETY: as above; nobody else uses it meanwhile.
//! let bytes = unsafe { file.read(device_pointer, len, 0, 0) }?;
//! println!("{bytes} bytes, by {}", library.path().display());
//! # Ok(())
//! # }
//! ```
//!
//! # Ownership
//!
//! Files and buffers keep the driver open. The memory of a transfer belongs to the caller: functions that take it are
//! `unsafe` and say how long it must live.
//!
//! # Requirements
//!
//! cuFile runs on Linux, needs the CUDA driver, and accepts files on the file systems that it supports, opened with
//! `O_DIRECT`. After a `fork` the child must not use it. Errors contain the status and what to do about it.

mod buffer;
mod driver;
mod file;
mod functions;
mod handle;
mod loader;
mod parameters;
pub mod result;
mod statistics;
pub mod sys;

pub use buffer::Buffer;
pub use driver::{Driver, Version};
pub use file::File;
pub use functions::Functions;
pub use loader::{Library, LoadError, Search, VARIABLE, has_cuda_driver};
pub use result::{Cause, Error, Result};
