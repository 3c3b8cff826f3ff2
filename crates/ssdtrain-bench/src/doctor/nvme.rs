//! What an NVMe disk says of itself: log page 2, "SMART / Health Information".

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use libc::Ioctl;

/// The length of the page, in bytes.
pub(super) const PAGE: usize = 512;
/// `_IOWR('N', 0x41, struct nvme_admin_cmd)` of linux/nvme_ioctl.h.
const ADMIN_COMMAND: Ioctl = 0xc048_4e41;
const GET_LOG_PAGE: u8 = 0x02;
/// The page's number, and its length in words of four bytes, less one.
const HEALTH_PAGE: u32 = 0x02 | ((PAGE as u32 / 4 - 1) << 16);
/// The page is that of the whole disk.
const ALL_NAMESPACES: u32 = u32::MAX;
const TIMEOUT_MS: u32 = 5000;

/// `struct nvme_admin_cmd` of linux/nvme_ioctl.h.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    words_2_3: [u32; 2],
    metadata: u64,
    address: u64,
    metadata_bytes: u32,
    bytes: u32,
    words_10_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<AdminCommand>() == 72);

/// Asks the disk whose block device is at `path` for the page. Only root may.
pub(super) fn health_page(path: &Path) -> io::Result<[u8; PAGE]> {
    let device = File::open(path)?;
    let mut page = [0; PAGE];
    let mut command = AdminCommand {
        opcode: GET_LOG_PAGE,
        namespace: ALL_NAMESPACES,
        address: (&raw mut page).expose_provenance() as u64,
        bytes: PAGE as u32,
        timeout_ms: TIMEOUT_MS,
        ..AdminCommand::default()
    };
    command.words_10_15[0] = HEALTH_PAGE;
    // SAFETY: the command has the layout that the number names, and `page` is as long as it says. Both live through the call, after
    // which the kernel knows neither.
    match unsafe { libc::ioctl(device.as_raw_fd(), ADMIN_COMMAND, &raw mut command) } {
        0 => Ok(page),
        ..0 => Err(io::Error::last_os_error()),
        status => Err(io::Error::other(format!("the disk refuses, with status {status:#x}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_nvme_disk_is_an_error_and_no_page() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(health_page(file.path()).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(health_page(Path::new("/no/such/disk")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_page_is_asked_for_as_the_specification_numbers_it() {
        assert_eq!((HEALTH_PAGE & 0xffff, HEALTH_PAGE >> 16), (2, 127));
    }
}
