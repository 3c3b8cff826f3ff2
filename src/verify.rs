//! How much is verified, and whether checksums cost little enough to be taken without being asked for.

use std::time::Duration;

/// What checksums may cost, as a share of a step, to be taken without being asked for.
const LITTLE: f64 = 0.01;

/// What is verified, from nothing to everything; see [`TensorCacheBuilder::verify`](crate::TensorCacheBuilder::verify). It never
/// changes results, unless something is wrong: then there is an error instead. What is
/// [encrypted](crate::TensorCacheBuilder::encrypt) is verified at any level, since what was changed does not decrypt, and has no
/// checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Verify {
    /// Nothing.
    Off,
    /// Checksums, for as long as they cost less than 1 % of a step. That is decided anew after each step, from the bytes that it moved
    /// to and from the disk and the time that it took. Bytes that go straight between a GPU and the disk have none.
    #[default]
    Auto,
    /// A checksum (CRC-32C) is taken of everything that is written to the disk, and compared when it is read.
    Checksums,
    /// Checksums, and reruns are compared with first runs.
    Full,
}

impl Verify {
    /// Whether checksums are taken before it is known what they cost.
    pub(crate) fn takes_checksums(self) -> bool {
        self != Verify::Off
    }

    /// Whether checksums are taken whatever they cost.
    pub(crate) fn requires_checksums(self) -> bool {
        matches!(self, Verify::Checksums | Verify::Full)
    }

    /// Whether reruns are compared with first runs.
    pub(crate) fn compares_reruns(self) -> bool {
        self == Verify::Full
    }
}

/// What is known of a step to tell what checksums cost it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteWork {
    /// Bytes that the step moved to and from the disk.
    pub(crate) bytes: u64,
    /// How long the disk was at work.
    pub(crate) busy: Duration,
    /// How long the step took, or at least that.
    pub(crate) step: Duration,
    /// Of how many bytes per second one thread takes checksums, and how many threads may.
    pub(crate) rate: f64,
    pub(crate) threads: usize,
    /// Whether the step computes on the same cores, all of them.
    pub(crate) shares_cores: bool,
}

impl ByteWork {
    /// The time that checksums cost, as a share of the step.
    ///
    /// A computation that is spread over all cores waits for the one that takes checksums meanwhile. A GPU waits only if
    /// checksums take longer than the disk.
    pub(crate) fn cost(&self) -> f64 {
        let time = self.bytes as f64 / self.rate;
        let lost = if self.shares_cores {
            time
        } else {
            (time / self.threads as f64 - self.busy.as_secs_f64()).max(0.0)
        };
        lost / self.step.as_secs_f64()
    }

    /// Whether checksums cost little enough to be taken.
    pub(crate) fn is_little(&self) -> bool {
        self.cost() < LITTLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of a second that moved 500 MB in half a second, and checksums of 10 GB/s.
    const STEP: ByteWork = ByteWork {
        bytes: 500_000_000,
        busy: Duration::from_millis(500),
        step: Duration::from_secs(1),
        rate: 1e10,
        threads: 2,
        shares_cores: true,
    };

    #[test]
    fn on_the_cores_that_compute_every_byte_costs() {
        assert!((STEP.cost() - 0.05).abs() < 1e-9);
        let little = ByteWork { bytes: 90_000_000, ..STEP };
        assert!(!STEP.is_little() && little.is_little());
        let faster = ByteWork { rate: 1e11, ..STEP };
        let longer = ByteWork { step: Duration::from_secs(10), ..STEP };
        assert!(faster.is_little() && longer.is_little());
    }

    #[test]
    fn beside_a_gpu_they_cost_what_they_take_longer_than_the_disk() {
        let beside = ByteWork { shares_cores: false, ..STEP };
        assert!(beside.cost() == 0.0 && beside.is_little());
        // 500 ms of the disk's, and 2.5 s of two threads.
        let slow = ByteWork { rate: 1e8, ..beside };
        assert!((slow.cost() - 2.0).abs() < 1e-9 && !slow.is_little());
        assert!(!ByteWork { threads: 8, rate: 1e8, ..beside }.is_little());
        assert!(ByteWork { threads: 10, rate: 1e8, ..beside }.is_little());
    }

    #[test]
    fn a_step_that_takes_no_time_has_none_for_checksums() {
        assert!(!ByteWork { step: Duration::ZERO, ..STEP }.is_little());
        let nothing = ByteWork { step: Duration::ZERO, bytes: 0, ..STEP };
        assert!(!nothing.is_little());
    }

    #[test]
    fn each_level_verifies_what_the_one_below_does() {
        let levels = [Verify::Off, Verify::Auto, Verify::Checksums, Verify::Full];
        let verified = levels.map(|level| {
            [level.takes_checksums(), level.requires_checksums(), level.compares_reruns()]
                .map(u8::from)
                .iter()
                .sum::<u8>()
        });
        assert_eq!(verified, [0, 1, 2, 3]);
        assert_eq!(Verify::default(), Verify::Auto);
    }
}
