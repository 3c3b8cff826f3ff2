//! cuFile's return values as Rust results.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::sys::{CUFILEOP_BASE_ERR, CUfileError_t, CUfileOpError, CUresult};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed call: the function, what it was called for, and why it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    function: &'static str,
    subject: Option<String>,
    cause: Cause,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The library at this path lacks the function.
    Missing(PathBuf),
    /// cuFile's status. It may be one that is not listed here.
    Status(CUfileOpError),
    /// CUDA's driver failed with this code.
    Cuda(CUresult),
    /// The operating system failed with this number.
    Os(i32),
    /// The transfer failed, and cuFile does not say why.
    Unexplained,
    /// The library claims to have transferred more than was requested.
    TooMuch {
        /// The bytes that it claims.
        claimed: usize,
        /// The bytes that were requested.
        asked: usize,
    },
    /// An argument cannot be passed on; the text names it and says what would be accepted.
    Argument(String),
}

impl Error {
    pub(crate) fn new(function: &'static str, cause: Cause) -> Error {
        Error { function, subject: None, cause }
    }

    pub(crate) fn missing(function: &'static str, library: &Path) -> Error {
        Error::new(function, Cause::Missing(library.to_path_buf()))
    }

    pub(crate) fn argument(function: &'static str, what: impl Into<String>) -> Error {
        Error::new(function, Cause::Argument(what.into()))
    }

    /// The same error, with the subject of the call.
    pub(crate) fn about(mut self, subject: impl Into<String>) -> Error {
        self.subject = Some(subject.into());
        self
    }

    /// The C name of the function.
    pub fn function(&self) -> &'static str {
        self.function
    }

    /// Why it failed.
    pub fn cause(&self) -> &Cause {
        &self.cause
    }

    /// cuFile's status, if that is the cause.
    pub fn status(&self) -> Option<CUfileOpError> {
        match self.cause {
            Cause::Status(status) => Some(status),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.function)?;
        if let Some(subject) = &self.subject {
            write!(f, " of {subject}")?;
        }
        write!(f, ": {}", self.cause)
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Missing(library) => {
                write!(f, "{} does not have this function; use a newer cuFile", library.display())
            }
            Cause::Status(status) if status.0 < CUFILEOP_BASE_ERR => {
                // Not one of cuFile's own statuses; the kernel's error numbers are in this range.
                let error = io::Error::from_raw_os_error(status.0.cast_signed());
                write!(f, "an unlisted status ({}); as an errno it would be: {error}", status.0)
            }
            Cause::Status(status) => {
                write!(f, "{} ({})", status.name().unwrap_or("an unlisted status"), status.0)?;
                match status.advice() {
                    Some(advice) => write!(f, ": {advice}"),
                    None => Ok(()),
                }
            }
            Cause::Cuda(code) => write!(f, "CUDA's driver failed with code {}", code.0),
            Cause::Os(number) => io::Error::from_raw_os_error(*number).fmt(f),
            Cause::Unexplained => {
                f.write_str("the transfer failed, and cuFile does not say why; see cufile.log")
            }
            Cause::TooMuch { claimed, asked } => {
                write!(f, "it claims {claimed} bytes of {asked}; the data cannot be trusted")
            }
            Cause::Argument(what) => f.write_str(what),
        }
    }
}

/// The outcome of a function that returns a status. Call this right after the function: it may read `errno`.
pub fn check(function: &'static str, outcome: CUfileError_t) -> Result<()> {
    let cause = match outcome.err.0.cast_signed() {
        0 => return Ok(()),
        -1 => Cause::Os(errno()),
        _ if outcome.err == CUfileOpError::CU_FILE_CUDA_DRIVER_ERROR => Cause::Cuda(outcome.cu_err),
        // The vendor's own macros accept the status with either sign.
        code => Cause::Status(CUfileOpError(code.unsigned_abs())),
    };
    Err(Error::new(function, cause))
}

/// The outcome of a transfer of `asked` bytes: a number of bytes, -1 and `errno`, or a negative status. Call this
/// right after the function.
pub fn transferred(function: &'static str, outcome: isize, asked: usize) -> Result<usize> {
    if outcome == -1 {
        return Err(Error::new(function, Cause::Os(errno())));
    }
    told(function, outcome, asked)
}

/// The outcome of a transfer that ran on another thread, whose `errno` is not available.
pub fn told(function: &'static str, outcome: isize, asked: usize) -> Result<usize> {
    let cause = match usize::try_from(outcome) {
        Ok(bytes) if bytes <= asked => return Ok(bytes),
        Ok(claimed) => Cause::TooMuch { claimed, asked },
        Err(_) if outcome == -1 => Cause::Unexplained,
        Err(_) => match u32::try_from(outcome.unsigned_abs()) {
            Ok(code) => Cause::Status(CUfileOpError(code)),
            Err(_) => Cause::Unexplained,
        },
    };
    Err(Error::new(function, cause))
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u32) -> Result<()> {
        check("cuFileX", CUfileError_t { err: CUfileOpError(code), cu_err: CUresult(700) })
    }

    fn set_errno(number: i32) {
        // SAFETY: the address is that of this thread's errno.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: as above; nobody else writes it meanwhile.
        unsafe { *place = number };
    }

    #[test]
    fn every_status_of_the_header_becomes_an_error_with_its_name_and_number() {
        for (code, name) in CUfileOpError::ALL {
            for (way, outcome) in [
                ("as a status", status(code.0)),
                ("as a status below zero", status(code.0.wrapping_neg())),
                ("as a transfer", transferred("cuFileX", -(code.0 as isize), 0).map(drop)),
            ] {
                if *code == CUfileOpError::CU_FILE_SUCCESS {
                    assert_eq!(outcome, Ok(()), "{way}");
                    continue;
                }
                let error = outcome.unwrap_err();
                if error.cause() == &Cause::Cuda(CUresult(700)) {
                    assert_eq!(*code, CUfileOpError::CU_FILE_CUDA_DRIVER_ERROR);
                    assert!(error.to_string().contains("700"), "{error}");
                    continue;
                }
                assert_eq!(error.status(), Some(*code), "{way}");
                let message = error.to_string();
                assert!(message.starts_with(&format!("cuFileX: {name} ({})", code.0)), "{message}");
            }
        }
    }

    #[test]
    fn an_unlisted_status_keeps_its_number() {
        let error = status(5999).unwrap_err();
        assert_eq!(error.status(), Some(CUfileOpError(5999)));
        assert!(error.to_string().contains("5999"), "{error}");
        let error = told("cuFileRead", -28, 1).unwrap_err();
        assert_eq!(error.status(), Some(CUfileOpError(28)));
        assert!(error.to_string().contains("No space left"), "{error}");
    }

    #[test]
    fn minus_one_is_the_operating_systems_error() {
        set_errno(libc::EIO);
        assert_eq!(transferred("cuFileRead", -1, 10).unwrap_err().cause(), &Cause::Os(libc::EIO));
        set_errno(libc::ENOSPC);
        let error = status(u32::MAX).unwrap_err();
        assert_eq!(error.cause(), &Cause::Os(libc::ENOSPC));
        assert!(error.to_string().contains("No space left"), "{error}");
    }

    #[test]
    fn minus_one_of_another_thread_has_no_errno() {
        set_errno(libc::EIO);
        assert_eq!(told("cuFileRead", -1, 10).unwrap_err().cause(), &Cause::Unexplained);
    }

    #[test]
    fn bytes_are_bytes_and_never_more_than_asked_for() {
        assert_eq!(transferred("cuFileRead", 0, 10), Ok(0));
        assert_eq!(transferred("cuFileRead", 10, 10), Ok(10));
        let cause = Cause::TooMuch { claimed: 11, asked: 10 };
        assert_eq!(transferred("cuFileRead", 11, 10).unwrap_err().cause(), &cause);
    }

    #[test]
    fn an_error_names_what_it_is_about() {
        let error = status(5027).unwrap_err().about("descriptor 7 (/mnt/spill)");
        let message = error.to_string();
        for part in
            ["cuFileX of descriptor 7 (/mnt/spill)", "CU_FILE_HANDLE_NOT_REGISTERED (5027)", "/run/udev"]
        {
            assert!(message.contains(part), "{message}");
        }
    }
}
