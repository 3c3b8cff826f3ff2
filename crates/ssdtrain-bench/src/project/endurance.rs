//! How much may be written to SSDs before they wear out.

use anyhow::{Result, ensure};
use serde::Deserialize;

/// An SSD and its maker's endurance rating.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "SsdFile")]
pub(crate) struct Ssd {
    pub(crate) name: String,
    /// In terabytes, 10^12 bytes, as makers count them.
    pub(crate) capacity_tb: f64,
    pub(crate) rating: Rating,
    /// Media writes per host write under the workload of the rating: random writes, as defined by JESD219.
    pub(crate) rated_waf: f64,
}

/// How much may be written over the life of an SSD, in its maker's terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rating {
    /// This many times its capacity on each day of the warranty.
    Daily { drive_writes_per_day: f64, warranty_years: f64 },
    /// This many petabytes.
    Total { petabytes_written: f64 },
}

/// An [`Ssd`] as written in files.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SsdFile {
    #[serde(default)]
    name: String,
    capacity_tb: f64,
    drive_writes_per_day: Option<f64>,
    warranty_years: Option<f64>,
    petabytes_written: Option<f64>,
    #[serde(default = "rated_waf")]
    rated_waf: f64,
}

impl TryFrom<SsdFile> for Ssd {
    type Error = &'static str;

    fn try_from(file: SsdFile) -> Result<Ssd, Self::Error> {
        let rating = match (file.drive_writes_per_day, file.warranty_years, file.petabytes_written) {
            (Some(drive_writes_per_day), Some(warranty_years), None) => {
                Rating::Daily { drive_writes_per_day, warranty_years }
            }
            (None, None, Some(petabytes_written)) => Rating::Total { petabytes_written },
            _ => return Err("give either drive_writes_per_day and warranty_years, or petabytes_written"),
        };
        let SsdFile { name, capacity_tb, rated_waf, .. } = file;
        Ok(Ssd { name, capacity_tb, rating, rated_waf })
    }
}

/// The SSDs of one GPU and how they are used.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) ssd: Ssd,
    /// SSDs of each GPU.
    pub(crate) count: u64,
    /// Media writes per host write in actual use: 1 for large sequential writes.
    pub(crate) waf: f64,
    /// The factor by which the cells endure more program and erase cycles if data have to be retained for a shorter
    /// time than they are rated for; 1 means as rated.
    pub(crate) retention_relaxation: f64,
}

/// Ratings count years of 365 days.
pub(crate) const SECONDS_PER_YEAR: f64 = 365.0 * 86_400.0;

impl Ssd {
    /// The names that [`Ssd::named`] knows.
    pub(crate) const NAMES: &[&str] = &["d7-p5620-12.8tb", "980-pro-1tb", "p5800x-1.6tb"];

    /// An SSD by name, as its maker's data sheet has it.
    pub(crate) fn named(name: &str) -> Option<Ssd> {
        let five_years = |drive_writes_per_day| Rating::Daily { drive_writes_per_day, warranty_years: 5.0 };
        let (capacity_tb, rating, rated_waf) = match name {
            // Solidigm D7-P5620, mixed use: the SSD of section 5.3.6.
            "d7-p5620-12.8tb" => (12.8, five_years(3.0), rated_waf()),
            // Samsung 980 PRO, consumer: the cheap one of section 5.4.4.
            "980-pro-1tb" => (1.0, Rating::Total { petabytes_written: 0.6 }, rated_waf()),
            // Intel Optane P5800X, the SSD of section 5.4.1: written in place, so that nothing is amplified.
            "p5800x-1.6tb" => (1.6, five_years(100.0), 1.0),
            _ => return None,
        };
        Some(Ssd { name: name.to_owned(), capacity_tb, rating, rated_waf })
    }

    /// Checks that each number is in range.
    ///
    /// # Errors
    /// Names the first that is not.
    pub(crate) fn check(&self) -> Result<()> {
        let rating = match self.rating {
            Rating::Daily { drive_writes_per_day, warranty_years } => {
                [("drive_writes_per_day", drive_writes_per_day), ("warranty_years", warranty_years)]
            }
            Rating::Total { petabytes_written } => [("petabytes_written", petabytes_written); 2],
        };
        for (name, value) in [("capacity_tb", self.capacity_tb)].into_iter().chain(rating) {
            ensure!(value > 0.0 && value <= 1e6, "{name} is {value}; it must be above 0 and at most 1000000");
        }
        let waf = self.rated_waf;
        ensure!((1.0..=100.0).contains(&waf), "rated_waf is {waf}; it must be from 1 to 100");
        Ok(())
    }

    /// Bytes that may be written under the workload of the rating.
    pub(crate) fn rated_writes(&self) -> f64 {
        match self.rating {
            Rating::Daily { drive_writes_per_day, warranty_years } => {
                drive_writes_per_day * 365.0 * warranty_years * self.capacity_tb * 1e12
            }
            Rating::Total { petabytes_written } => petabytes_written * 1e15,
        }
    }
}

impl Array {
    /// Bytes that may be written in the way the array is used: cells wear with media writes, and the rating has
    /// `rated_waf` of those per host write.
    pub(crate) fn lifetime_writes(&self) -> f64 {
        let sequential = self.ssd.rated_waf / self.waf;
        self.count as f64 * self.ssd.rated_writes() * sequential * self.retention_relaxation
    }
}

/// Section 5.3.6 assumes a write amplification of 2.5 in the rating.
fn rated_waf() -> f64 {
    2.5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_known_and_in_range() {
        for name in Ssd::NAMES {
            let ssd = Ssd::named(name).unwrap();
            assert_eq!(&ssd.name, name);
            ssd.check().unwrap();
        }
        assert_eq!(Ssd::named("floppy"), None);
    }

    /// By hand: 3 x 365 x 5 x 12.8 TB = 70.08 PB; four times and 2.5 times that are 700.8 PB.
    #[test]
    fn four_p5620_take_seven_hundred_petabytes() {
        let ssd = Ssd::named("d7-p5620-12.8tb").unwrap();
        assert!((ssd.rated_writes() / 70.08e15 - 1.0).abs() < 1e-12);
        let array = Array { ssd, count: 4, waf: 1.0, retention_relaxation: 1.0 };
        assert!((array.lifetime_writes() / 700.8e15 - 1.0).abs() < 1e-12);
        let relaxed = Array { retention_relaxation: 86.0, waf: 2.5, ..array };
        assert!((relaxed.lifetime_writes() / (86.0 * 280.32e15) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn an_ssd_is_rated_by_the_day_or_in_total() {
        let daily: Ssd =
            toml::from_str("capacity_tb = 2\ndrive_writes_per_day = 1\nwarranty_years = 5").unwrap();
        let total: Ssd = toml::from_str("capacity_tb = 2\npetabytes_written = 3.65\nrated_waf = 4").unwrap();
        assert_eq!(daily.rated_writes(), total.rated_writes());
        assert_eq!((daily.rated_waf, total.rated_waf), (2.5, 4.0));
        for text in ["", "drive_writes_per_day = 1", "warranty_years = 1\npetabytes_written = 1"] {
            let error = toml::from_str::<Ssd>(&format!("capacity_tb = 1\n{text}")).unwrap_err();
            assert!(error.message().contains("drive_writes_per_day"), "{error}");
        }
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        let good = Ssd::named("d7-p5620-12.8tb").unwrap();
        let wrong = [
            (Ssd { capacity_tb: 0.0, ..good.clone() }, "capacity_tb"),
            (
                Ssd { rating: Rating::Total { petabytes_written: f64::NAN }, ..good.clone() },
                "petabytes_written",
            ),
            (Ssd { rated_waf: 0.5, ..good }, "rated_waf"),
        ];
        for (ssd, name) in wrong {
            let error = ssd.check().unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
