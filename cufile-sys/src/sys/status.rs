//! The status that cuFile's functions return.

use super::integers::integers;

integers! {
    /// The outcome of a cuFile function.
    CUfileOpError {
        /// It went well.
        CU_FILE_SUCCESS = 0,
        /// nvidia-fs is not loaded and compatibility mode is off, or the driver was not opened.
        CU_FILE_DRIVER_NOT_INITIALIZED = 5001,
        /// A property is not valid.
        CU_FILE_DRIVER_INVALID_PROPS = 5002,
        /// A property is out of range.
        CU_FILE_DRIVER_UNSUPPORTED_LIMIT = 5003,
        /// The kernel module and the library are incompatible.
        CU_FILE_DRIVER_VERSION_MISMATCH = 5004,
        /// The version of the kernel module cannot be read.
        CU_FILE_DRIVER_VERSION_READ_ERROR = 5005,
        /// The driver is being closed.
        CU_FILE_DRIVER_CLOSING = 5006,
        /// The platform is not supported.
        CU_FILE_PLATFORM_NOT_SUPPORTED = 5007,
        /// The file cannot be used with GPUDirect Storage.
        CU_FILE_IO_NOT_SUPPORTED = 5008,
        /// The GPU cannot be used with GPUDirect Storage.
        CU_FILE_DEVICE_NOT_SUPPORTED = 5009,
        /// A call into nvidia-fs failed.
        CU_FILE_NVFS_DRIVER_ERROR = 5010,
        /// CUDA's driver failed; its own code comes along.
        CU_FILE_CUDA_DRIVER_ERROR = 5011,
        /// A pointer is no device pointer.
        CU_FILE_CUDA_POINTER_INVALID = 5012,
        /// A pointer is to memory of a type that cannot be used.
        CU_FILE_CUDA_MEMORY_TYPE_INVALID = 5013,
        /// A range goes past the end of its allocation.
        CU_FILE_CUDA_POINTER_RANGE_ERROR = 5014,
        /// The current CUDA context is not that of the memory.
        CU_FILE_CUDA_CONTEXT_MISMATCH = 5015,
        /// An access goes past the largest pinned size.
        CU_FILE_INVALID_MAPPING_SIZE = 5016,
        /// An access goes past the mapped size.
        CU_FILE_INVALID_MAPPING_RANGE = 5017,
        /// The file is of a type that cannot be used.
        CU_FILE_INVALID_FILE_TYPE = 5018,
        /// The file was opened in a way that cannot be used.
        CU_FILE_INVALID_FILE_OPEN_FLAG = 5019,
        /// The file was opened without `O_DIRECT`.
        CU_FILE_DIO_NOT_SET = 5020,
        /// An argument is not valid.
        CU_FILE_INVALID_VALUE = 5022,
        /// The memory is registered already.
        CU_FILE_MEMORY_ALREADY_REGISTERED = 5023,
        /// The memory is not registered.
        CU_FILE_MEMORY_NOT_REGISTERED = 5024,
        /// The driver or the file may not be accessed.
        CU_FILE_PERMISSION_DENIED = 5025,
        /// The driver is open already.
        CU_FILE_DRIVER_ALREADY_OPEN = 5026,
        /// The file is not, or cannot be, registered.
        CU_FILE_HANDLE_NOT_REGISTERED = 5027,
        /// The file is registered already.
        CU_FILE_HANDLE_ALREADY_REGISTERED = 5028,
        /// There is no such GPU.
        CU_FILE_DEVICE_NOT_FOUND = 5029,
        /// The library failed internally.
        CU_FILE_INTERNAL_ERROR = 5030,
        /// The library could not get a descriptor of its own.
        CU_FILE_GETNEWFD_FAILED = 5031,
        /// The library could not be set up.
        CU_FILE_NVFS_SETUP_ERROR = 5033,
        /// The configuration forbids GPUDirect Storage on the file.
        CU_FILE_IO_DISABLED = 5034,
        /// A batch could not be submitted.
        CU_FILE_BATCH_SUBMIT_FAILED = 5035,
        /// GPU memory could not be pinned.
        CU_FILE_GPU_MEMORY_PINNING_FAILED = 5036,
        /// A batch has no room.
        CU_FILE_BATCH_FULL = 5037,
        /// Operations on streams are not supported.
        CU_FILE_ASYNC_NOT_SUPPORTED = 5038,
        /// A batch could not be set up.
        CU_FILE_INTERNAL_BATCH_SETUP_ERROR = 5039,
        /// A batch failed internally while it was being submitted.
        CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR = 5040,
        /// A batch failed internally while its state was being read.
        CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR = 5041,
        /// A batch failed internally while it was being cancelled.
        CU_FILE_INTERNAL_BATCH_CANCEL_ERROR = 5042,
        /// The library is out of memory.
        CU_FILE_NOMEM_ERROR = 5043,
        /// An I/O failed.
        CU_FILE_IO_ERROR = 5044,
        /// A buffer could not be registered internally.
        CU_FILE_INTERNAL_BUF_REGISTER_ERROR = 5045,
        /// A hash table of the library failed.
        CU_FILE_HASH_OPR_ERROR = 5046,
        /// A context is not valid.
        CU_FILE_INVALID_CONTEXT_ERROR = 5047,
        /// nvidia-fs failed internally.
        CU_FILE_NVFS_INTERNAL_DRIVER_ERROR = 5048,
        /// A batch would need compatibility mode, which is off.
        CU_FILE_BATCH_NOCOMPAT_ERROR = 5049,
        /// The end of the list.
        CU_FILE_IO_MAX_ERROR = 5050,
    }
}

impl CUfileOpError {
    /// What to do about the status; `None` if its name already says everything.
    pub fn advice(self) -> Option<&'static str> {
        Some(match self {
            Self::CU_FILE_DRIVER_NOT_INITIALIZED => {
                "open the driver first; without the nvidia-fs module set allow_compat_mode in cufile.json"
            }
            Self::CU_FILE_DRIVER_VERSION_MISMATCH | Self::CU_FILE_DRIVER_VERSION_READ_ERROR => {
                "install the nvidia-fs module of the CUDA release that the library is from"
            }
            Self::CU_FILE_DRIVER_CLOSING => "someone in this process closes the driver; open it again",
            Self::CU_FILE_PLATFORM_NOT_SUPPORTED | Self::CU_FILE_DEVICE_NOT_SUPPORTED => {
                "set allow_compat_mode in cufile.json, or use a path through host memory"
            }
            Self::CU_FILE_IO_NOT_SUPPORTED => {
                "use a file on ext4 (data=ordered) or XFS on a local NVMe disk, and mind that a container shows \
                 the disk to udev, or set allow_compat_mode in cufile.json"
            }
            Self::CU_FILE_NVFS_DRIVER_ERROR | Self::CU_FILE_NVFS_INTERNAL_DRIVER_ERROR => {
                "the kernel's log says what nvidia-fs did not like"
            }
            Self::CU_FILE_CUDA_POINTER_INVALID | Self::CU_FILE_CUDA_MEMORY_TYPE_INVALID => {
                "use memory of cuMemAlloc, or registered memory of the host"
            }
            Self::CU_FILE_CUDA_POINTER_RANGE_ERROR => "the range goes past its allocation",
            Self::CU_FILE_CUDA_CONTEXT_MISMATCH | Self::CU_FILE_INVALID_CONTEXT_ERROR => {
                "make the CUDA context of the memory current on the calling thread"
            }
            Self::CU_FILE_INVALID_MAPPING_SIZE => {
                "raise max_device_pinned_mem_size_kb in cufile.json, or register less at once"
            }
            Self::CU_FILE_INVALID_MAPPING_RANGE => "the range goes past the registered buffer",
            Self::CU_FILE_INVALID_FILE_TYPE => "use a regular file or a block device",
            Self::CU_FILE_INVALID_FILE_OPEN_FLAG | Self::CU_FILE_DIO_NOT_SET => "open the file with O_DIRECT",
            Self::CU_FILE_PERMISSION_DENIED => {
                "check the permissions of the file and of /dev/nvidia-fs*, and what the container may see"
            }
            Self::CU_FILE_HANDLE_NOT_REGISTERED => {
                "the file system may be unknown to cuFile: it needs ID_FS_USAGE of the disk in /run/udev/data, \
                 which containers often lack (mount /run/udev), and never takes tmpfs; cufile.log tells more"
            }
            Self::CU_FILE_HANDLE_ALREADY_REGISTERED => "register a descriptor once and share the handle",
            Self::CU_FILE_NVFS_SETUP_ERROR => {
                "the library found no CUDA driver (libcuda.so.1) or no GPU, or cufile.json is wrong"
            }
            Self::CU_FILE_IO_DISABLED => "cufile.json forbids it for this file system: see its fs section",
            Self::CU_FILE_GPU_MEMORY_PINNING_FAILED => {
                "register less at once: BAR1 and max_device_pinned_mem_size_kb limit what can be pinned"
            }
            Self::CU_FILE_BATCH_FULL => "wait for requests of the batch to complete",
            Self::CU_FILE_ASYNC_NOT_SUPPORTED => "use transfers that are not ordered by a stream",
            Self::CU_FILE_BATCH_NOCOMPAT_ERROR => {
                "set allow_compat_mode in cufile.json, or use single transfers"
            }
            Self::CU_FILE_INTERNAL_BATCH_SETUP_ERROR
            | Self::CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR
            | Self::CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR
            | Self::CU_FILE_INTERNAL_BATCH_CANCEL_ERROR
            | Self::CU_FILE_NOMEM_ERROR => "try again later",
            _ => return None,
        })
    }
}
