//! What the library counts, at three levels of detail.
//!
//! Releases after 1.15 append to level 1 and thereby move what follows it in levels 2 and 3.

use std::ffi::c_char;

/// Bytes of a GPU's UUID.
pub const CUFILE_GPU_UUID_LEN: usize = 16;

/// How often something was done.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUfileOpCounter_t {
    /// Those that went well.
    pub ok: u64,
    /// Those that failed.
    pub err: u64,
}

/// Level 1: counts, bytes and times.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUfileStatsLevel1_t {
    /// Reads.
    pub read_ops: CUfileOpCounter_t,
    /// Writes.
    pub write_ops: CUfileOpCounter_t,
    /// Registrations of files.
    pub hdl_register_ops: CUfileOpCounter_t,
    /// Deregistrations of files.
    pub hdl_deregister_ops: CUfileOpCounter_t,
    /// Registrations of buffers.
    pub buf_register_ops: CUfileOpCounter_t,
    /// Deregistrations of buffers.
    pub buf_deregister_ops: CUfileOpCounter_t,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Bytes read per second.
    pub read_bw_bytes_per_sec: u64,
    /// Bytes written per second.
    pub write_bw_bytes_per_sec: u64,
    /// The mean time of a read, in microseconds.
    pub read_lat_avg_us: u64,
    /// The mean time of a write, in microseconds.
    pub write_lat_avg_us: u64,
    /// Reads per second.
    pub read_ops_per_sec: u64,
    /// Writes per second.
    pub write_ops_per_sec: u64,
    /// The time of all reads, in microseconds.
    pub read_lat_sum_us: u64,
    /// The time of all writes, in microseconds.
    pub write_lat_sum_us: u64,
    /// Submissions to batches.
    pub batch_submit_ops: CUfileOpCounter_t,
    /// Completions of batches.
    pub batch_complete_ops: CUfileOpCounter_t,
    /// Batches set up.
    pub batch_setup_ops: CUfileOpCounter_t,
    /// Batches cancelled.
    pub batch_cancel_ops: CUfileOpCounter_t,
    /// Batches destroyed.
    pub batch_destroy_ops: CUfileOpCounter_t,
    /// Requests queued.
    pub batch_enqueued_ops: CUfileOpCounter_t,
    /// Requests queued for the path through host memory.
    pub batch_posix_enqueued_ops: CUfileOpCounter_t,
    /// Requests carried out.
    pub batch_processed_ops: CUfileOpCounter_t,
    /// Requests carried out through host memory.
    pub batch_posix_processed_ops: CUfileOpCounter_t,
    /// Submissions to nvidia-fs.
    pub batch_nvfs_submit_ops: CUfileOpCounter_t,
    /// Submissions to peer-to-peer DMA.
    pub batch_p2p_submit_ops: CUfileOpCounter_t,
    /// Submissions to the kernel's AIO.
    pub batch_aio_submit_ops: CUfileOpCounter_t,
    /// Submissions to io_uring.
    pub batch_iouring_submit_ops: CUfileOpCounter_t,
    /// Submissions to several of these.
    pub batch_mixed_io_submit_ops: CUfileOpCounter_t,
    /// Submissions in all.
    pub batch_total_submit_ops: CUfileOpCounter_t,
    /// Bytes read by batches.
    pub batch_read_bytes: u64,
    /// Bytes written by batches.
    pub batch_write_bytes: u64,
    /// Bytes read by batches per second.
    pub batch_read_bw_bytes: u64,
    /// Bytes written by batches per second.
    pub batch_write_bw_bytes: u64,
    /// The mean time of a submission, in microseconds.
    pub batch_submit_lat_avg_us: u64,
    /// The mean time to completion, in microseconds.
    pub batch_completion_lat_avg_us: u64,
    /// Submissions per second.
    pub batch_submit_ops_per_sec: u64,
    /// Completions per second.
    pub batch_complete_ops_per_sec: u64,
    /// The time of all submissions, in microseconds.
    pub batch_submit_lat_sum_us: u64,
    /// The time to all completions, in microseconds.
    pub batch_completion_lat_sum_us: u64,
    /// Bytes read by the last batch.
    pub last_batch_read_bytes: u64,
    /// Bytes written by the last batch.
    pub last_batch_write_bytes: u64,
}

/// Level 2: sizes too.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUfileStatsLevel2_t {
    /// What level 1 has.
    pub basic: CUfileStatsLevel1_t,
    /// How many reads had which size.
    pub read_size_kb_hist: [u64; 32],
    /// How many writes had which size.
    pub write_size_kb_hist: [u64; 32],
}

/// What is counted for each GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUfilePerGpuStats_t {
    /// The GPU's UUID.
    pub uuid: [c_char; CUFILE_GPU_UUID_LEN],
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes read per second.
    pub read_bw_bytes_per_sec: u64,
    /// The share of time spent reading, in percent.
    pub read_utilization: u64,
    /// The time of all reads, in microseconds.
    pub read_duration_us: u64,
    /// Reads.
    pub n_total_reads: u64,
    /// Reads by peer-to-peer DMA.
    pub n_p2p_reads: u64,
    /// Reads by nvidia-fs.
    pub n_nvfs_reads: u64,
    /// Reads through host memory.
    pub n_posix_reads: u64,
    /// Reads that were not aligned.
    pub n_unaligned_reads: u64,
    /// Reads routed around bridges.
    pub n_dr_reads: u64,
    /// Sparse parts read.
    pub n_sparse_regions: u64,
    /// Inline parts read.
    pub n_inline_regions: u64,
    /// Reads that failed.
    pub n_reads_err: u64,
    /// Bytes written.
    pub writes_bytes: u64,
    /// Bytes written per second.
    pub write_bw_bytes_per_sec: u64,
    /// The share of time spent writing, in percent.
    pub write_utilization: u64,
    /// The time of all writes, in microseconds.
    pub write_duration_us: u64,
    /// Writes.
    pub n_total_writes: u64,
    /// Writes by peer-to-peer DMA.
    pub n_p2p_writes: u64,
    /// Writes by nvidia-fs.
    pub n_nvfs_writes: u64,
    /// Writes through host memory.
    pub n_posix_writes: u64,
    /// Writes that were not aligned.
    pub n_unaligned_writes: u64,
    /// Writes routed around bridges.
    pub n_dr_writes: u64,
    /// Writes that failed.
    pub n_writes_err: u64,
    /// Buffers registered.
    pub n_mmap: u64,
    /// Registrations that went well.
    pub n_mmap_ok: u64,
    /// Registrations that failed.
    pub n_mmap_err: u64,
    /// Buffers deregistered.
    pub n_mmap_free: u64,
    /// Bytes registered.
    pub reg_bytes: u64,
}

/// Level 3: each GPU too.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUfileStatsLevel3_t {
    /// What level 2 has.
    pub detailed: CUfileStatsLevel2_t,
    /// GPUs there are.
    pub num_gpus: u32,
    /// Those of each GPU.
    pub per_gpu_stats: [CUfilePerGpuStats_t; 16],
}
