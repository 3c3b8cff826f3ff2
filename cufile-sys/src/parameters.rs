//! The configuration: `cufile.json`, and what a program sets on top of it before the driver is open.

use std::ffi::{CStr, CString};

use crate::loader::Library;
use crate::result::{Error, Result, check};
use crate::sys::{
    CUFileBoolConfigParameter_t, CUFileSizeTConfigParameter_t, CUFileStringConfigParameter_t, CUfileError_t,
};

/// Room for the longest text, which is a path.
const TEXT: usize = 4096;

/// Parameters, given by the constants of their types or by name (`CUFileSizeTConfigParameter_t::named`). They can be
/// read at any time, and set while the driver is not open. Before it is opened, a parameter that was not set may read
/// as zero.
impl Library {
    /// A number.
    pub fn parameter_size(&self, parameter: CUFileSizeTConfigParameter_t) -> Result<usize> {
        let function = self.functions().parameter_size()?;
        let mut value = 0;
        // SAFETY: `value` is a place for the result.
        let outcome = unsafe { function(parameter, &raw mut value) };
        of("cuFileGetParameterSizeT", outcome, parameter)?;
        Ok(value)
    }

    /// The smallest and the largest allowed value of a number.
    pub fn parameter_range(&self, parameter: CUFileSizeTConfigParameter_t) -> Result<(usize, usize)> {
        let function = self.functions().parameter_range()?;
        let (mut least, mut most) = (0, 0);
        // SAFETY: both are places for results.
        let outcome = unsafe { function(parameter, &raw mut least, &raw mut most) };
        of("cuFileGetParameterMinMaxValue", outcome, parameter)?;
        Ok((least, most))
    }

    /// Sets a number.
    pub fn set_parameter_size(&self, parameter: CUFileSizeTConfigParameter_t, value: usize) -> Result<()> {
        let function = self.functions().set_parameter_size()?;
        // SAFETY: the arguments are numbers.
        of("cuFileSetParameterSizeT", unsafe { function(parameter, value) }, parameter)
    }

    /// A switch.
    pub fn parameter_bool(&self, parameter: CUFileBoolConfigParameter_t) -> Result<bool> {
        let function = self.functions().parameter_bool()?;
        let mut value = 0;
        // SAFETY: `value` is a place for the result.
        let outcome = unsafe { function(parameter, &raw mut value) };
        of("cuFileGetParameterBool", outcome, parameter)?;
        Ok(value != 0)
    }

    /// Sets a switch.
    pub fn set_parameter_bool(&self, parameter: CUFileBoolConfigParameter_t, value: bool) -> Result<()> {
        let function = self.functions().set_parameter_bool()?;
        // SAFETY: the arguments are numbers.
        of("cuFileSetParameterBool", unsafe { function(parameter, value) }, parameter)
    }

    /// A text.
    pub fn parameter_string(&self, parameter: CUFileStringConfigParameter_t) -> Result<String> {
        const NAME: &str = "cuFileGetParameterString";
        let function = self.functions().parameter_string()?;
        let mut text = vec![0_u8; TEXT];
        // One byte stays zero, whatever the library writes.
        let room = (TEXT - 1).try_into().unwrap_or(0);
        // SAFETY: there are `room` bytes for the text.
        let outcome = unsafe { function(parameter, text.as_mut_ptr().cast(), room) };
        of(NAME, outcome, parameter)?;
        let text = CStr::from_bytes_until_nul(&text)
            .map_err(|_| Error::argument(NAME, "the text has no end").about(format!("{parameter:?}")))?;
        Ok(text.to_string_lossy().into_owned())
    }

    /// Sets a text.
    pub fn set_parameter_string(&self, parameter: CUFileStringConfigParameter_t, value: &str) -> Result<()> {
        const NAME: &str = "cuFileSetParameterString";
        let function = self.functions().set_parameter_string()?;
        let value = CString::new(value).map_err(|_| {
            Error::argument(NAME, "the text has a zero byte; leave it out").about(format!("{parameter:?}"))
        })?;
        // SAFETY: the text is a C string that lives through the call.
        of(NAME, unsafe { function(parameter, value.as_ptr()) }, parameter)
    }
}

fn of(function: &'static str, outcome: CUfileError_t, parameter: impl std::fmt::Debug) -> Result<()> {
    check(function, outcome).map_err(|error| error.about(format!("{parameter:?}")))
}
