//! The defaults of the commands. Sizes are written as a user would write them.

/// Storages smaller than this stay in memory.
pub(crate) const MIN_BYTES: &str = "64KiB";
/// Activation bytes that may be on the device, in bytes.
pub(crate) const DEVICE_BUDGET: u64 = 96 << 20;
/// See [`DEVICE_BUDGET`].
pub(crate) const GPU_DEVICE_BUDGET: u64 = 4 << 30;
/// Bytes loaded ahead of backward.
pub(crate) const PREFETCH: u64 = 32 << 20;
/// See [`PREFETCH`].
pub(crate) const GPU_PREFETCH: u64 = 1 << 30;
/// Scopes at the end of the model that stay on the device: with GPT the head and the last MLP, which backward begins with.
pub(crate) const KEEP_LAST: u32 = 2;
/// A GPU's budget holds what was saved last in any case.
pub(crate) const GPU_KEEP_LAST: u32 = 0;
/// Bytes read from the disk ahead of the loads to a GPU.
pub(crate) const READ_AHEAD: &str = "1GiB";
/// The most bytes on disk.
pub(crate) const DISK_CAP: &str = "64GiB";
/// Transfers in flight at once.
pub(crate) const QUEUE_DEPTH: &str = "16";
/// Largest single transfer.
pub(crate) const IO_BYTES: &str = "4MiB";

/// The amount of text read: enough for a run of some minutes, and read within a second or two.
pub(crate) const DATA_LIMIT: &str = "16MiB";
/// Share of the data kept for evaluation.
pub(crate) const HELD_OUT: &str = "0.1";
/// Seed of weights, batches and dropout.
pub(crate) const SEED: u64 = 1337;

/// Length of a training run if no other is given.
pub(crate) const MINUTES: f64 = 3.0;
/// Steps of warm-up, or a tenth of the run if that is less.
pub(crate) const WARMUP_STEPS: u64 = 100;
/// Held-out tokens of the final evaluation; the ones during the run use an eighth.
pub(crate) const EVAL_TOKENS: &str = "131072";
/// Steps that are compared at the end of a training run.
pub(crate) const CLOSING_STEPS: &str = "8";

/// Measured steps of `compare`; the warm-up steps before them are below.
pub(crate) const COMPARE_STEPS: &str = "20";
/// See [`COMPARE_STEPS`].
pub(crate) const COMPARE_WARMUP: &str = "3";

/// Measured steps of `rok`; the warm-up steps before them are below.
pub(crate) const ROK_STEPS: &str = "10";
/// See [`ROK_STEPS`].
pub(crate) const ROK_WARMUP: &str = "3";

/// Bytes moved in each pass of `io`.
pub(crate) const IO_SIZE: &str = "512MiB";
/// Passes of `io` in each mode.
pub(crate) const IO_ROUNDS: &str = "7";
/// Bytes copied each way in each pass of `io` on a GPU.
pub(crate) const COPY_SIZE: &str = "4GiB";
/// Bytes of each of those copies.
pub(crate) const COPY_BYTES: &str = "64MiB";
/// Copies in flight at once, in each direction.
pub(crate) const COPY_DEPTH: &str = "4";

/// How much longer a step of auto may take than one with everything kept.
pub(crate) const OVERHEAD: f64 = 0.02;

#[cfg(test)]
mod tests {
    use ssdtrain_store::StoreConfig;

    use super::*;
    use crate::common::size;

    #[test]
    fn the_disk_is_used_as_the_library_would() {
        let library = StoreConfig::default();
        assert_eq!(QUEUE_DEPTH, library.queue_depth.to_string());
        assert_eq!(size::parse(IO_BYTES), Ok(library.io_bytes as u64));
        assert_eq!(size::parse(DISK_CAP), Ok(library.cap_bytes));
    }
}
