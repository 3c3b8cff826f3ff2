//! The names of what can be configured.

use super::integers::integers;

integers! {
    /// A parameter that is a number.
    CUFileSizeTConfigParameter_t {
        /// The level of statistics.
        CUFILE_PARAM_PROFILE_STATS = 0,
        /// The most entries of a queue.
        CUFILE_PARAM_EXECUTION_MAX_IO_QUEUE_DEPTH = 1,
        /// The most threads per GPU.
        CUFILE_PARAM_EXECUTION_MAX_IO_THREADS = 2,
        /// The least size of a part of a transfer, in KiB.
        CUFILE_PARAM_EXECUTION_MIN_IO_THRESHOLD_SIZE_KB = 3,
        /// The most parts of a transfer.
        CUFILE_PARAM_EXECUTION_MAX_REQUEST_PARALLELISM = 4,
        /// The largest single transfer, in KiB.
        CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB = 5,
        /// GPU memory per device for bounce buffers, in KiB.
        CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB = 6,
        /// The size of one bounce buffer, in KiB.
        CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB = 7,
        /// GPU memory that can be registered, in KiB.
        CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB = 8,
        /// The most requests of a batch.
        CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE = 9,
        /// The largest polled transfer, in KiB.
        CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB = 10,
        /// The time limit of a batch, in milliseconds.
        CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS = 11,
    }

    /// A parameter that is on or off.
    CUFileBoolConfigParameter_t {
        /// Poll for completions.
        CUFILE_PARAM_PROPERTIES_USE_POLL_MODE = 0,
        /// Go through host memory where there is no direct path.
        CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE = 1,
        /// Always go through host memory.
        CUFILE_PARAM_FORCE_COMPAT_MODE = 2,
        /// Check arguments of file systems more strictly.
        CUFILE_PARAM_FS_MISC_API_CHECK_AGGRESSIVE = 3,
        /// Split large transfers among threads.
        CUFILE_PARAM_EXECUTION_PARALLEL_IO = 4,
        /// Mark calls for NVIDIA's profilers.
        CUFILE_PARAM_PROFILE_NVTX = 5,
        /// Take memory of the host too.
        CUFILE_PARAM_PROPERTIES_ALLOW_SYSTEM_MEMORY = 6,
        /// Use PCI peer-to-peer DMA.
        CUFILE_PARAM_USE_PCIP2PDMA = 7,
        /// Use io_uring where host memory is gone through.
        CUFILE_PARAM_PREFER_IO_URING = 8,
        /// Use `O_DIRECT` though the file was opened without.
        CUFILE_PARAM_FORCE_ODIRECT_MODE = 9,
        /// Do not look at the PCIe topology.
        CUFILE_PARAM_SKIP_TOPOLOGY_DETECTION = 10,
        /// Do without memory operations on streams.
        CUFILE_PARAM_STREAM_MEMOPS_BYPASS = 11,
    }

    /// A parameter that is text.
    CUFileStringConfigParameter_t {
        /// How much is logged.
        CUFILE_PARAM_LOGGING_LEVEL = 0,
        /// The path of the log, from the environment.
        CUFILE_PARAM_ENV_LOGFILE_PATH = 1,
        /// The folder of the log.
        CUFILE_PARAM_LOG_DIR = 2,
    }

    /// A parameter that is a list of numbers.
    CUFileArrayConfigParameter_t {
        /// The sizes of host buffers, in KiB.
        CUFILE_PARAM_POSIX_POOL_SLAB_SIZE_KB = 0,
        /// How many there are of each.
        CUFILE_PARAM_POSIX_POOL_SLAB_COUNT = 1,
    }
}
