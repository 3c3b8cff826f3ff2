//! Byte counts for people.

use std::fmt;

/// A byte count that is displayed as people read it, such as `4.2 MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1 << 10 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64;
        let mut unit = "B";
        for larger in ["KiB", "MiB", "GiB", "TiB"] {
            if value < 1024.0 {
                break;
            }
            value /= 1024.0;
            unit = larger;
        }
        write!(f, "{value:.1} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_read_well() {
        let texts =
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (4_404_020, "4.2 MiB"), (5 << 40, "5.0 TiB")];
        for (bytes, text) in texts {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
