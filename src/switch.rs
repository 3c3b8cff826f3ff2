//! The environment variable that takes the cache out of a program without a new build.

use std::ffi::OsStr;

use crate::error::{Error, ErrorKind, Result};

const NAME: &str = "SSDTRAIN";

/// What the variable says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Switch {
    /// It is not set: the cache does what its settings say.
    #[default]
    On,
    /// Everything is kept as under the policy `Keep`, whatever the policy; steps are still observed.
    Keep,
    /// Autograd saves as without a cache.
    Off,
}

impl Switch {
    /// What the environment of this process says.
    pub(crate) fn read() -> Result<Switch> {
        Switch::of(std::env::var_os(NAME).as_deref())
    }

    fn of(value: Option<&OsStr>) -> Result<Switch> {
        match value.map(OsStr::as_encoded_bytes) {
            None | Some(b"" | b"on") => Ok(Switch::On),
            Some(b"keep") => Ok(Switch::Keep),
            Some(b"off") => Ok(Switch::Off),
            Some(_) => {
                let value = value.unwrap_or_default().display();
                let message = format!(
                    "the environment says {NAME}={value}: give `off` to train without the cache, `keep` for a cache that moves \
                     nothing, or leave it unset"
                );
                Err(Error::new(ErrorKind::Config, message))
            }
        }
    }

    /// What users should know of it.
    pub(crate) fn warning(self) -> Option<String> {
        let what = match self {
            Switch::On => return None,
            Switch::Keep => "keep: everything stays in memory, as under the policy Keep",
            Switch::Off => "off: steps run as without a cache, and reports show nothing but their time",
        };
        Some(format!("the environment says {NAME}={what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_said() {
        let of = |value| Switch::of(Some(OsStr::new(value)));
        assert_eq!(Switch::of(None).unwrap(), Switch::On);
        assert_eq!(
            ["", "on", "keep", "off"].map(|value| of(value).unwrap()),
            [Switch::On, Switch::On, Switch::Keep, Switch::Off]
        );
        let error = of("Off!").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(
            error.to_string().contains("SSDTRAIN=Off!") && error.to_string().contains("unset"),
            "{error}"
        );
    }
}
