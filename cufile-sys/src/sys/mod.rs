//! The types, constants and functions of cuFile 1.15 as in C, under their C names.
//!
//! Nothing here is safe to use by itself. A C enum is an integer with named values: the library may return a value
//! that is not listed here.
//!
//! <https://docs.nvidia.com/gpudirect-storage/api-reference-guide/index.html>
#![expect(non_camel_case_types, non_snake_case, reason = "the names are those of the C header")]

mod functions;
mod integers;
mod parameters;
mod statistics;
mod status;
mod types;

pub use functions::*;
pub use parameters::*;
pub use statistics::*;
pub use status::*;
pub use types::*;
