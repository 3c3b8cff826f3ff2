//! The types of `sys` have the layout that the vendor's header gives them.
//!
//! The header is not ours to keep. `cargo x ci` fetches it; elsewhere the test is skipped where it is not found.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::any::type_name;
use std::env;
use std::fmt::Write;
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use cufile_sys::sys::*;

/// Names the header: `cargo x ci` sets it.
const VARIABLE: &str = "SSDTRAIN_CUFILE_HEADER";

/// The header, if there is one: that of the variable, or that of the wheel beside libtorch.
fn header() -> Option<PathBuf> {
    if let Some(header) = env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        let header = PathBuf::from(header);
        assert!(
            header.is_file(),
            "{VARIABLE} is {}, which is no file. Install the wheel nvidia-cufile==1.15.1.6 (`pip install --no-deps \
             --target DIR nvidia-cufile==1.15.1.6`) and set it to DIR/nvidia/cu13/include/cufile.h; `cargo x ci` does",
            header.display()
        );
        return Some(header);
    }
    let torch = PathBuf::from(env::var_os("LIBTORCH")?).canonicalize().ok()?;
    let header = torch.join("../nvidia/cu13/include/cufile.h");
    header.is_file().then_some(header)
}

/// Compiles `checks` below the header; the error is what the compiler says.
fn compile(header: &Path, checks: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    // The header wants CUDA's own, of which it needs but these.
    let cuda = "#pragma once\ntypedef unsigned CUresult;\ntypedef void *CUstream;\n";
    fs::write(folder.path().join("cuda.h"), cuda).unwrap();
    fs::write(folder.path().join("cuda_runtime.h"), "#include <cuda.h>\n").unwrap();
    let source = folder.path().join("layout.c");
    let includes = "#include <stddef.h>\n#include <stdint.h>\n#include <sys/types.h>\n#include <time.h>\n";
    let text = format!("{includes}#include \"{}\"\n{checks}", header.display());
    fs::write(&source, text).unwrap();
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    // GNU names such as loff_t are in the header.
    command.args(["-D_GNU_SOURCE", "-fsyntax-only", "-Wall", "-Werror", "-Wno-comment", "-I"]);
    let output = command.arg(folder.path()).arg(&source).output();
    let output = output.expect("the test needs a C compiler: install one, or set CC to it");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Assertions that a type has its size, its alignment and its fields here as in C. Fields have the same name in both.
macro_rules! layout {
    ($out:ident, $rust:ty as $c:literal { $($($field:ident).+),* $(,)? }) => {
        size(&mut $out, $c, size_of::<$rust>(), align_of::<$rust>());
        $(
            let path = concat!($(stringify!($field), "."),+).trim_end_matches('.').trim_start_matches("r#");
            let offset = offset_of!($rust, $($field).+);
            writeln!($out, "_Static_assert(offsetof({}, {path}) == {offset}, \"{}.{path}\");", $c, $c).unwrap();
        )*
    };
}

/// Assertions that the constants of an integer have their values here as in C.
macro_rules! values {
    ($out:ident, $($rust:ident as $c:literal),* $(,)?) => {$(
        size(&mut $out, $c, size_of::<$rust>(), align_of::<$rust>());
        for (value, name) in $rust::ALL {
            same(&mut $out, name, value.0.into());
        }
    )*};
}

/// Assertions that functions have their types here as in C.
macro_rules! functions {
    ($out:ident, $($name:ident),* $(,)?) => {
        $(
            let c = c_function(type_name::<$name>());
            let name = stringify!($name);
            writeln!($out, "_Static_assert(__builtin_types_compatible_p(__typeof__(&{name}), {c}), \"{name}: {c}\");").unwrap();
        )*
    };
}

/// A pointer to a function in the words of C, from the words of Rust.
fn c_function(rust: &str) -> String {
    let (arguments, result) = rust.split_once("fn(").unwrap().1.split_once(')').unwrap();
    let result = result.strip_prefix(" -> ").unwrap_or("c_void");
    let arguments: Vec<String> = arguments.split(", ").map(c_type).collect();
    format!("{} (*)({})", c_type(result), arguments.join(", "))
}

fn c_type(rust: &str) -> String {
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(target));
    }
    if let Some(target) = rust.strip_prefix("*const ") {
        return format!("const {} *", c_type(target));
    }
    match rust.rsplit("::").next().unwrap() {
        "" | "c_void" => "void",
        "bool" | "u8" => "_Bool",
        "i8" => "char",
        "i32" => "int",
        "u32" => "unsigned",
        "i64" => "long",
        "isize" => "ssize_t",
        "usize" => "size_t",
        "timespec" => "struct timespec",
        other => other,
    }
    .to_owned()
}

fn size(out: &mut String, c: &str, size: usize, align: usize) {
    writeln!(out, "_Static_assert(sizeof({c}) == {size}, \"size of {c}\");").unwrap();
    writeln!(out, "_Static_assert(_Alignof({c}) == {align}, \"alignment of {c}\");").unwrap();
}

fn same(out: &mut String, name: &str, value: u64) {
    writeln!(out, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
}

fn checks() -> String {
    let mut out = String::new();
    layout!(out, CUfileError_t as "CUfileError_t" { err, cu_err });
    layout!(out, CUfileDrvProps_t as "CUfileDrvProps_t" {
        nvfs.major_version, nvfs.minor_version, nvfs.poll_thresh_size, nvfs.max_direct_io_size, nvfs.dstatusflags,
        nvfs.dcontrolflags, fflags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size,
        max_batch_io_size, max_batch_io_timeout_msecs,
    });
    layout!(out, cufileRDMAInfo_t as "cufileRDMAInfo_t" { version, desc_len, desc_str });
    layout!(out, CUfileFSOps_t as "CUfileFSOps_t" {
        fs_type, getRDMADeviceList, getRDMADevicePriority, read, write,
    });
    layout!(out, CUfileDescr_t as "CUfileDescr_t" { r#type, handle.fd, handle.handle, fs_ops });
    layout!(out, CUfileOpCounter_t as "CUfileOpCounter_t" { ok, err });
    layout!(out, CUfileStatsLevel1_t as "CUfileStatsLevel1_t" { read_ops, write_ops, hdl_register_ops, hdl_deregister_ops, buf_register_ops, buf_deregister_ops, read_bytes, write_bytes, read_bw_bytes_per_sec, write_bw_bytes_per_sec, read_lat_avg_us, write_lat_avg_us, read_ops_per_sec, write_ops_per_sec, read_lat_sum_us, write_lat_sum_us, batch_submit_ops, batch_complete_ops, batch_setup_ops, batch_cancel_ops, batch_destroy_ops, batch_enqueued_ops, batch_posix_enqueued_ops, batch_processed_ops, batch_posix_processed_ops, batch_nvfs_submit_ops, batch_p2p_submit_ops, batch_aio_submit_ops, batch_iouring_submit_ops, batch_mixed_io_submit_ops, batch_total_submit_ops, batch_read_bytes, batch_write_bytes, batch_read_bw_bytes, batch_write_bw_bytes, batch_submit_lat_avg_us, batch_completion_lat_avg_us, batch_submit_ops_per_sec, batch_complete_ops_per_sec, batch_submit_lat_sum_us, batch_completion_lat_sum_us, last_batch_read_bytes, last_batch_write_bytes });
    layout!(out, CUfileStatsLevel2_t as "CUfileStatsLevel2_t" { basic, read_size_kb_hist, write_size_kb_hist });
    layout!(out, CUfilePerGpuStats_t as "CUfilePerGpuStats_t" { uuid, read_bytes, read_bw_bytes_per_sec, read_utilization, read_duration_us, n_total_reads, n_p2p_reads, n_nvfs_reads, n_posix_reads, n_unaligned_reads, n_dr_reads, n_sparse_regions, n_inline_regions, n_reads_err, writes_bytes, write_bw_bytes_per_sec, write_utilization, write_duration_us, n_total_writes, n_p2p_writes, n_nvfs_writes, n_posix_writes, n_unaligned_writes, n_dr_writes, n_writes_err, n_mmap, n_mmap_ok, n_mmap_err, n_mmap_free, reg_bytes });
    layout!(out, CUfileStatsLevel3_t as "CUfileStatsLevel3_t" { detailed, num_gpus, per_gpu_stats });
    values!(
        out,
        CUfileOpError as "CUfileOpError",
        CUfileDriverStatusFlags_t as "CUfileDriverStatusFlags_t",
        CUfileDriverControlFlags_t as "CUfileDriverControlFlags_t",
        CUfileFeatureFlags_t as "CUfileFeatureFlags_t",
        CUfileFileHandleType as "enum CUfileFileHandleType",
        CUFileSizeTConfigParameter_t as "CUFileSizeTConfigParameter_t",
        CUFileBoolConfigParameter_t as "CUFileBoolConfigParameter_t",
        CUFileStringConfigParameter_t as "CUFileStringConfigParameter_t",
        CUFileArrayConfigParameter_t as "CUFileArrayConfigParameter_t",
    );
    for (name, value) in [
        ("CUFILEOP_BASE_ERR", CUFILEOP_BASE_ERR),
        ("CU_FILE_RDMA_REGISTER", CU_FILE_RDMA_REGISTER.cast_unsigned()),
        ("CU_FILE_RDMA_RELAXED_ORDERING", CU_FILE_RDMA_RELAXED_ORDERING.cast_unsigned()),
    ] {
        same(&mut out, name, value.into());
    }
    same(&mut out, "CUFILE_GPU_UUID_LEN", CUFILE_GPU_UUID_LEN as u64);
    functions!(
        out,
        cuFileDriverOpen,
        cuFileDriverClose,
        cuFileUseCount,
        cuFileDriverGetProperties,
        cuFileDriverSetPollMode,
        cuFileDriverSetMaxDirectIOSize,
        cuFileDriverSetMaxCacheSize,
        cuFileDriverSetMaxPinnedMemSize,
        cuFileGetBARSizeInKB,
        cuFileGetVersion,
        cuFileHandleRegister,
        cuFileHandleDeregister,
        cuFileBufRegister,
        cuFileBufDeregister,
        cuFileRead,
        cuFileWrite,
        cuFileGetParameterSizeT,
        cuFileGetParameterBool,
        cuFileGetParameterString,
        cuFileGetParameterMinMaxValue,
        cuFileGetParameterPosixPoolSlabArray,
        cuFileSetParameterSizeT,
        cuFileSetParameterBool,
        cuFileSetParameterString,
        cuFileSetParameterPosixPoolSlabArray,
        cuFileSetStatsLevel,
        cuFileGetStatsLevel,
        cuFileStatsStart,
        cuFileStatsStop,
        cuFileStatsReset,
        cuFileGetStatsL1,
        cuFileGetStatsL2,
        cuFileGetStatsL3
    );
    out
}

#[test]
fn types_constants_and_functions_are_those_of_the_header() {
    let Some(header) = header() else {
        return println!("skipped: there is no cufile.h; set {VARIABLE} to one, as `cargo x ci` does");
    };
    if let Err(messages) = compile(&header, &checks()) {
        panic!("sys differs from {}:\n{messages}", header.display());
    }
}

#[test]
fn a_difference_would_be_seen() {
    let Some(header) = header() else {
        return println!("skipped: there is no cufile.h; set {VARIABLE} to one, as `cargo x ci` does");
    };
    for (right, wrong) in [
        ("sizeof(CUfileError_t) == 8", "sizeof(CUfileError_t) == 4"),
        ("offsetof(CUfileDescr_t, fs_ops) == 16", "offsetof(CUfileDescr_t, fs_ops) == 8"),
        ("CU_FILE_IO_ERROR == 5044", "CU_FILE_IO_ERROR == 5043"),
        ("ssize_t (*)(void *, const void *, size_t,", "ssize_t (*)(void *, const void *, int,"),
    ] {
        let checks = checks();
        assert!(checks.contains(right), "{right}");
        assert!(compile(&header, &checks.replace(right, wrong)).is_err(), "{wrong}");
    }
}
