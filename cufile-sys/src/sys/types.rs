//! Descriptors and properties.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{off64_t, size_t, sockaddr, ssize_t};

use super::CUfileOpError;
use super::integers::integers;

/// cuFile's statuses start one above this.
pub const CUFILEOP_BASE_ERR: u32 = 5000;

/// An outcome of CUDA's driver.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUresult(pub u32);

/// A registered file.
pub type CUfileHandle_t = *mut c_void;

/// What most functions return.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUfileError_t {
    /// cuFile's status.
    pub err: CUfileOpError,
    /// The outcome of CUDA's driver where the status is `CU_FILE_CUDA_DRIVER_ERROR`.
    pub cu_err: CUresult,
}

integers! {
    /// Numbers of the bits in `nvfs.dstatusflags`: what the driver supports.
    CUfileDriverStatusFlags_t {
        /// DDN Lustre.
        CU_FILE_LUSTRE_SUPPORTED = 0,
        /// WekaFS.
        CU_FILE_WEKAFS_SUPPORTED = 1,
        /// NFS.
        CU_FILE_NFS_SUPPORTED = 2,
        /// GPFS.
        CU_FILE_GPFS_SUPPORTED = 3,
        /// NVMe.
        CU_FILE_NVME_SUPPORTED = 4,
        /// NVMe over fabrics.
        CU_FILE_NVMEOF_SUPPORTED = 5,
        /// SCSI.
        CU_FILE_SCSI_SUPPORTED = 6,
        /// ScaleFlux CSD.
        CU_FILE_SCALEFLUX_CSD_SUPPORTED = 7,
        /// NVMesh.
        CU_FILE_NVMESH_SUPPORTED = 8,
        /// BeeGFS.
        CU_FILE_BEEGFS_SUPPORTED = 9,
        /// NVMe by PCI peer-to-peer DMA.
        CU_FILE_NVME_P2P_SUPPORTED = 11,
        /// ScateFS.
        CU_FILE_SCATEFS_SUPPORTED = 12,
    }

    /// Numbers of the bits in `nvfs.dcontrolflags`: how the driver works.
    CUfileDriverControlFlags_t {
        /// It polls for completions.
        CU_FILE_USE_POLL_MODE = 0,
        /// It may go through host memory.
        CU_FILE_ALLOW_COMPAT_MODE = 1,
    }

    /// Numbers of the bits in `fflags`: features of the library.
    CUfileFeatureFlags_t {
        /// Routing around PCIe bridges.
        CU_FILE_DYN_ROUTING_SUPPORTED = 0,
        /// Batches.
        CU_FILE_BATCH_IO_SUPPORTED = 1,
        /// Operations ordered by streams.
        CU_FILE_STREAMS_SUPPORTED = 2,
        /// Large transfers in parallel parts.
        CU_FILE_PARALLEL_IO_SUPPORTED = 3,
    }

    /// What a descriptor describes.
    CUfileFileHandleType {
        /// A Linux descriptor.
        CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1,
        /// A Windows handle; not supported.
        CU_FILE_HANDLE_TYPE_OPAQUE_WIN32 = 2,
        /// A file system in user space, with operations of its own.
        CU_FILE_HANDLE_TYPE_USERSPACE_FS = 3,
    }
}

/// The properties that nvidia-fs reports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUfileNvfsProps {
    /// Its major version.
    pub major_version: c_uint,
    /// Its minor version.
    pub minor_version: c_uint,
    /// The largest polled transfer, in KiB.
    pub poll_thresh_size: size_t,
    /// The largest single transfer, in KiB.
    pub max_direct_io_size: size_t,
    /// Bits numbered by [`CUfileDriverStatusFlags_t`].
    pub dstatusflags: c_uint,
    /// Bits numbered by [`CUfileDriverControlFlags_t`].
    pub dcontrolflags: c_uint,
}

/// The properties that the driver reports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUfileDrvProps_t {
    /// The kernel module.
    pub nvfs: CUfileNvfsProps,
    /// Bits numbered by [`CUfileFeatureFlags_t`].
    pub fflags: c_uint,
    /// GPU memory per device for bounce buffers, in KiB.
    pub max_device_cache_size: c_uint,
    /// The size of one bounce buffer, in KiB.
    pub per_buffer_cache_size: c_uint,
    /// GPU memory that can be registered, in KiB.
    pub max_device_pinned_mem_size: c_uint,
    /// The most requests of a batch.
    pub max_batch_io_size: c_uint,
    /// The time limit of a batch, in milliseconds.
    pub max_batch_io_timeout_msecs: c_uint,
}

impl CUfileDrvProps_t {
    /// Whether the driver supports this.
    pub fn supports(&self, what: CUfileDriverStatusFlags_t) -> bool {
        bit(self.nvfs.dstatusflags, what.0)
    }

    /// Whether the driver works in this way.
    pub fn uses(&self, what: CUfileDriverControlFlags_t) -> bool {
        bit(self.nvfs.dcontrolflags, what.0)
    }

    /// Whether the library has this feature.
    pub fn has(&self, what: CUfileFeatureFlags_t) -> bool {
        bit(self.fflags, what.0)
    }
}

fn bit(flags: c_uint, number: u32) -> bool {
    flags.checked_shr(number).is_some_and(|flags| flags & 1 == 1)
}

/// An RDMA key of a buffer, for file systems in user space.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cufileRDMAInfo_t {
    /// The version of the key.
    pub version: c_int,
    /// Bytes at `desc_str`.
    pub desc_len: c_int,
    /// The key.
    pub desc_str: *const c_char,
}

/// A flag of `cuFileBufRegister`: register for RDMA too.
pub const CU_FILE_RDMA_REGISTER: c_int = 1;
/// A flag of `cuFileBufRegister`: RDMA may be reordered.
pub const CU_FILE_RDMA_RELAXED_ORDERING: c_int = 2;

/// Operations of a file system in user space.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUfileFSOps_t {
    /// The name of the file system; null to find out by `fstat`.
    pub fs_type: Option<unsafe extern "C" fn(*mut c_void) -> *const c_char>,
    /// The addresses of hosts to use; null for all.
    pub getRDMADeviceList: Option<unsafe extern "C" fn(*mut c_void, *mut *mut sockaddr) -> c_int>,
    /// The priority of a host; -1 for none.
    pub getRDMADevicePriority:
        Option<unsafe extern "C" fn(*mut c_void, *mut c_char, size_t, off64_t, *mut sockaddr) -> c_int>,
    /// A read; null for the kernel's.
    pub read: Option<
        unsafe extern "C" fn(*mut c_void, *mut c_char, size_t, off64_t, *mut cufileRDMAInfo_t) -> ssize_t,
    >,
    /// A write; null for the kernel's.
    pub write: Option<
        unsafe extern "C" fn(*mut c_void, *const c_char, size_t, off64_t, *mut cufileRDMAInfo_t) -> ssize_t,
    >,
}

/// The file in a [`CUfileDescr_t`].
#[repr(C)]
#[derive(Clone, Copy)]
pub union CUfileDescrHandle {
    /// A Linux descriptor.
    pub fd: c_int,
    /// Anything else.
    pub handle: *mut c_void,
}

/// A file to register.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUfileDescr_t {
    /// Which variant of `handle` applies.
    pub r#type: CUfileFileHandleType,
    /// The file.
    pub handle: CUfileDescrHandle,
    /// Operations of a file system in user space, or null.
    pub fs_ops: *const CUfileFSOps_t,
}
