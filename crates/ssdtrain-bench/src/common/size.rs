//! Byte counts as people read and write them.

/// The bytes of a text such as `65536`, `64KiB`, `1.5GiB` or `2g`; for clap.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim().trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let unit = text.trim()[digits.len()..].trim().to_ascii_lowercase();
    let shift = match unit.as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(format!("the unit {unit:?} is not one of B, KiB, MiB, GiB, TiB")),
    };
    let number: f64 = digits.parse().map_err(|_| "give a size such as 64KiB, 1MiB or 2GiB".to_owned())?;
    let bytes = number * (1_u64 << shift) as f64;
    if !(0.0..=(1_u64 << 60) as f64).contains(&bytes) {
        return Err("give a size from 0 to 1048576TiB".to_owned());
    }
    Ok(bytes as u64)
}

/// As [`parse_positive`], also in the decimal units that makers of disks count in, such as `600TB`.
pub(crate) fn parse_of_disk(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len();
    let unit = match text[split..].to_ascii_lowercase().as_str() {
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "pb" => 1e15,
        _ => return parse_positive(text),
    };
    let number: f64 =
        text[..split].trim().parse().map_err(|_| "give a size such as 2TB or 500GiB".to_owned())?;
    let bytes = number * unit;
    if !(1.0..=(1_u64 << 60) as f64).contains(&bytes) {
        return Err("give a size above 0 and of at most 1000PB".to_owned());
    }
    Ok(bytes as u64)
}

/// As [`parse`], but not zero.
pub(crate) fn parse_positive(text: &str) -> Result<u64, String> {
    match parse(text)? {
        0 => Err("give a size above 0".to_owned()),
        bytes => Ok(bytes),
    }
}

/// As [`parse`]; `none` means no limit.
pub(crate) fn parse_limit(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(u64::MAX) } else { parse(text) }
}

/// A readable byte count, such as `4.2 MiB`.
pub(crate) fn format(bytes: u64) -> String {
    bytesize::ByteSize(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        let sizes = [
            ("0", 0),
            ("65536", 65536),
            ("12B", 12),
            ("64KiB", 64 << 10),
            ("1MiB", 1 << 20),
            ("2 GiB", 2 << 30),
            ("1.5g", 3 << 29),
            ("1TiB", 1 << 40),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        assert_eq!(parse_limit("none"), Ok(u64::MAX));
        assert_eq!(parse_limit("1KiB"), Ok(1024));
    }

    #[test]
    fn sizes_of_disks_may_be_decimal() {
        let sizes = [
            ("600TB", 600_000_000_000_000),
            ("1.5 pb", 1_500_000_000_000_000),
            ("20GB", 20_000_000_000),
            ("7mb", 7_000_000),
            ("1TiB", 1 << 40),
            ("4096", 4096),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse_of_disk(text), Ok(bytes), "{text}");
        }
        for text in ["", "TB", "0TB", "-1TB", "nanTB", "9999PB", "1KB", "0", "1 2TB"] {
            assert!(parse_of_disk(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "KiB", "-1", "1XB", "1 2", "nan", "inf", "9999999TiB", "1KB"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse_positive("0").is_err());
    }
}
