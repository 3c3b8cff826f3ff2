//! Whether memory that a device may be writing to can lie in huge pages, which depends on the kernel.

use std::fs;

/// From this release of Linux on, the first write to a page that is shared with a forked process moves only that page. Before it, all of
/// a huge page moves: also what is next to the write, where a disk may just be writing, and goes on doing so in the old place.
const MOVES_SINGLE_PAGES: (u32, u32) = (5, 8);

/// Whether a write beside a transfer leaves the transfer's memory where it is, after a fork as well. Not if nothing is known of the kernel.
pub(crate) fn are_safe() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    moves_single_pages(&release)
}

/// What is true of a kernel with this release, such as `5.15.0-91-generic`.
fn moves_single_pages(release: &str) -> bool {
    let mut numbers = release.trim().split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let (major, minor) = (numbers.next(), numbers.next());
    matches!((major, minor), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= MOVES_SINGLE_PAGES)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::ffi;
    use crate::storage::Storage;

    #[test]
    fn kernels_are_told_by_their_release() {
        for release in ["5.8.0", "5.8", "5.15.0-91-generic", "6.1.0-rc4+", "10.0.1-arch1-1\n"] {
            assert!(moves_single_pages(release), "{release}");
        }
        for release in ["5.7.19", "4.18.0-553.el8_10.x86_64", "3.10.0", "2.6.32", "", "6", "six.one", "5.x"] {
            assert!(!moves_single_pages(release), "{release}");
        }
    }

    /// The flags of the mapping in which the address lies.
    fn flags_at(address: usize) -> String {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut here = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let bounds = range.map(|(start, end)| [start, end].map(|at| usize::from_str_radix(at, 16)));
            if let Some([Ok(start), Ok(end)]) = bounds {
                here = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| here) {
                return format!("{flags} ");
            }
        }
        String::new()
    }

    #[test]
    fn blocks_lie_in_huge_pages_only_where_these_are_safe() {
        if !fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap_or_default() {
            return eprintln!("skipped: this kernel has no transparent huge pages");
        }
        let mut tensors = Vec::new();
        // Each is larger than what is mapped at a time.
        for (safe, flag) in [(true, " hg "), (false, " nh ")] {
            ffi::st_allocator_install(safe);
            let tensor = Tensor::empty([300 << 20], (Kind::Uint8, Device::Cpu));
            let flags = flags_at(Storage::of(&tensor).unwrap().data().addr());
            assert!(flags.contains(flag), "{safe}: {flags}");
            tensors.push(tensor);
        }
    }
}
