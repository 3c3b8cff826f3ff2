//! Ranges of floating-point arguments; for clap.

/// A number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    within(text, |value| value > 0.0, "a number above 0")
}

/// A number that is not negative.
pub(crate) fn non_negative(text: &str) -> Result<f64, String> {
    within(text, |value| value >= 0.0, "a number that is 0 or more")
}

/// A factor.
pub(crate) fn factor(text: &str) -> Result<f64, String> {
    within(text, |value| (1.0..=1_000.0).contains(&value), "a number from 1 to 1000")
}

/// A share, or a decay rate.
pub(crate) fn below_one(text: &str) -> Result<f64, String> {
    within(text, |value| (0.0..1.0).contains(&value), "a number from 0 to below 1")
}

/// A share that leaves something on both sides.
pub(crate) fn inner_share(text: &str) -> Result<f64, String> {
    within(text, |value| value > 0.0 && value < 1.0, "a number between 0 and 1")
}

fn within(text: &str, allowed: impl FnOnce(f64) -> bool, wanted: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite());
    value.filter(|&value| allowed(value)).ok_or_else(|| format!("give {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_are_kept() {
        assert!(positive("0").is_err() && positive("1e-9").is_ok());
        assert!(non_negative("-1").is_err() && non_negative("0").is_ok());
        assert!(factor("0.9").is_err() && factor("1").is_ok() && factor("1e9").is_err());
        assert!(below_one("1").is_err() && below_one("0").is_ok());
        assert!(inner_share("0").is_err() && inner_share("0.1").is_ok());
        assert!(["nan", "inf", "x", ""].iter().all(|text| positive(text).is_err()));
    }
}
