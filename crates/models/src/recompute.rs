//! What backward recomputes instead of having it kept.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// What backward recomputes in a step of a cache ([`ssdtrain::TensorCache`]); without a cache nothing is recomputed.
/// Gradients have the same bits in every case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Each block from its input, as an [`ssdtrain::segment`]: this keeps the least, at the cost of a second forward.
    Layer,
    /// The results of GELU and of layer norms, with [`ssdtrain::remat`]: six sixteenths of what a block keeps, at
    /// almost no cost.
    Cheap,
}

impl Recompute {
    /// The names that [`Recompute::from_str`] accepts.
    pub const NAMES: &[&str] = &["none", "layer", "cheap"];
}

impl FromStr for Recompute {
    type Err = Error;

    fn from_str(name: &str) -> Result<Recompute, Error> {
        match name {
            "none" => Ok(Recompute::None),
            "layer" => Ok(Recompute::Layer),
            "cheap" => Ok(Recompute::Cheap),
            _ => {
                let known = Recompute::NAMES.join(", ");
                Err(Error::argument(format!("unknown recompute \"{name}\"; known are {known}")))
            }
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Recompute::None => "none",
            Recompute::Layer => "layer",
            Recompute::Cheap => "cheap",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_as_it_is_written() {
        for name in Recompute::NAMES {
            assert_eq!(name.parse::<Recompute>().unwrap().to_string(), *name);
        }
        assert!("block".parse::<Recompute>().unwrap_err().to_string().contains("layer"));
    }
}
