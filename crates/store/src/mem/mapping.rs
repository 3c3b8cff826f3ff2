//! Anonymous memory in huge pages, populated from the start.

use std::io;
use std::num::NonZero;
use std::ptr::NonNull;
use std::thread;

use super::BLOCK;

/// Bytes of a huge page: the alignment of mappings and the unit of their size.
pub(super) const HUGE: usize = 2 << 20;
/// More threads than this do not clear memory any faster.
const MAX_THREADS: usize = 8;

/// Zeroed private memory of whole huge pages, unmapped on drop. In a process that is forked off, it is zero again.
#[derive(Debug)]
pub(super) struct Mapping {
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is owned by this value alone, and memory belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: through `&Mapping` only addresses and the length are reachable, once `new` has returned.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes`, a multiple of [`HUGE`] that is not 0, and makes the kernel populate all of them now. They lie on this NUMA node if
    /// there is one, as long as that has room.
    ///
    /// The error is the kernel's: it has no such memory.
    pub(super) fn new(bytes: usize, node: Option<u32>) -> io::Result<Mapping> {
        let mapping = Mapping::reserve(bytes)?;
        // Elsewhere the memory works as well, only more slowly.
        if let Some(node) = node
            && let Err(error) = mapping.prefer(node)
        {
            tracing::debug!(%error, node, "host memory is not placed on the device's NUMA node");
        }
        // This fails where the kernel has no huge pages; small ones work as well, only more slowly.
        // SAFETY: the whole range is the mapping's, and the advice changes none of its bytes.
        unsafe { libc::madvise(mapping.memory.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        // Without this, a fork would have the process and its child share the pages until either writes to them: a copy would then take
        // their place in the process while they stay pinned for devices. It fails before Linux 4.14.
        // SAFETY: the whole range is the mapping's, and the advice changes none of its bytes here.
        unsafe { libc::madvise(mapping.memory.as_ptr().cast(), bytes, libc::MADV_WIPEONFORK) };
        mapping.provide()?;
        Ok(mapping)
    }

    /// Bytes of the mapping.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// The address `offset` bytes from the start; `offset` is less than `len`.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.bytes, "an address within the mapping");
        // SAFETY: the address lies within the mapping.
        unsafe { self.memory.add(offset) }
    }

    /// Reserves an aligned range of addresses: maps a longer one and cuts off the excess at both ends.
    fn reserve(bytes: usize) -> io::Result<Mapping> {
        let longer = bytes.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), longer, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.cast::<u8>();
        let head = start.addr().next_multiple_of(HUGE) - start.addr();
        unmap(start, head);
        unmap(start.wrapping_add(head + bytes), HUGE - head);
        let memory = NonNull::new(start.wrapping_add(head)).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { memory, bytes })
    }

    /// Asks the kernel for pages of a NUMA node, unless the program has said where its memory is to be (`numactl`). Containers may not be
    /// allowed to ask.
    fn prefer(&self, node: u32) -> io::Result<()> {
        let mut policy = libc::MPOL_DEFAULT;
        let none = std::ptr::null_mut::<libc::c_ulong>();
        // SAFETY: the place for the policy is valid, and nothing else is asked for.
        let asked = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, none, 0, none, 0) };
        if asked != 0 {
            return Err(io::Error::last_os_error());
        }
        if policy != libc::MPOL_DEFAULT {
            return Ok(());
        }
        let (word, bit) = (node / libc::c_ulong::BITS, node % libc::c_ulong::BITS);
        let mut nodes: Vec<libc::c_ulong> = vec![0; word as usize + 1];
        nodes[word as usize] = 1 << bit;
        // The kernel reads one bit less than it is told of.
        let bits = nodes.len() * libc::c_ulong::BITS as usize + 1;
        let start = self.memory.as_ptr();
        // SAFETY: the range is the mapping's, none of whose pages are there yet, and there are as many bits of nodes.
        let outcome = unsafe {
            libc::syscall(libc::SYS_mbind, start, self.bytes, libc::MPOL_PREFERRED, nodes.as_ptr(), bits, 0)
        };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Makes the kernel populate all pages, in several threads, since it has to clear them.
    fn provide(&self) -> io::Result<()> {
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS);
        let share = self.bytes.div_ceil(threads).next_multiple_of(HUGE);
        thread::scope(|scope| {
            let starts = (0..self.bytes).step_by(share);
            let begin = |start| {
                let provide = move || self.provide_range(start, share.min(self.bytes - start));
                let thread = thread::Builder::new().name("ssdtrain-map".to_owned());
                // Without another thread, this one does it.
                thread.spawn_scoped(scope, provide).map_err(|_| provide())
            };
            let workers: Vec<_> = starts.map(begin).collect();
            workers.into_iter().try_for_each(|worker| match worker {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked"))),
                Err(done) => done,
            })
        })
    }

    fn provide_range(&self, start: usize, bytes: usize) -> io::Result<()> {
        let memory = self.at(start).as_ptr();
        // SAFETY: the range is the mapping's, and the advice changes none of its bytes.
        if unsafe { libc::madvise(memory.cast(), bytes, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // The kernel is older than Linux 5.14.
            Some(libc::EINVAL | libc::ENOSYS) => {
                self.touch(start, bytes);
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Writes to each page of a range that nobody uses yet.
    fn touch(&self, start: usize, bytes: usize) {
        for offset in (start..start + bytes).step_by(BLOCK) {
            // SAFETY: the byte belongs to the mapping, which no one else has yet, and only this thread has this
            // range.
            unsafe { self.at(offset).write_volatile(0) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.memory.as_ptr(), self.bytes);
    }
}

/// Unmaps memory that was mapped in this file and is no longer used.
fn unmap(memory: *mut u8, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: only this file calls it, once for each range of a mapping that it made and nobody uses any more.
    if unsafe { libc::munmap(memory.cast(), bytes) } != 0 {
        tracing::error!(bytes, error = %io::Error::last_os_error(), "memory stays mapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_process_has_other_pages() {
        let mapping = Mapping::new(HUGE, None).unwrap();
        let first = mapping.at(0).as_ptr();
        // SAFETY: the byte is the mapping's, and nobody else uses it.
        unsafe { first.write(7) };
        // SAFETY: the child only reads that byte, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the mapping is there in the child too.
            let seen = unsafe { first.read_volatile() };
            // SAFETY: a plain system call.
            unsafe { libc::_exit(i32::from(seen)) };
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 0);
        // SAFETY: as above.
        assert_eq!(unsafe { first.read() }, 7);
    }

    /// How many of the mapping's pages are in memory.
    fn resident(mapping: &Mapping) -> usize {
        let mut pages = vec![0_u8; mapping.len() / BLOCK];
        // SAFETY: the range is mapped, and there is a byte for each of its pages.
        let result =
            unsafe { libc::mincore(mapping.at(0).as_ptr().cast(), mapping.len(), pages.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        pages.iter().filter(|&&page| page & 1 == 1).count()
    }

    #[test]
    fn all_of_it_is_there_aligned_and_zero() {
        let mapping = Mapping::new(3 * HUGE, None).unwrap();
        assert_eq!((mapping.at(0).addr().get() % HUGE, mapping.len()), (0, 3 * HUGE));
        assert_eq!(resident(&mapping), 3 * HUGE / BLOCK);
        // SAFETY: the mapping is that long and nobody writes to it.
        let bytes = unsafe { std::slice::from_raw_parts(mapping.at(0).as_ptr(), mapping.len()) };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_old_kernel_has_its_pages_touched() {
        let mapping = Mapping::reserve(2 * HUGE).unwrap();
        mapping.touch(0, 2 * HUGE);
        assert_eq!(resident(&mapping), 2 * HUGE / BLOCK);
    }

    #[test]
    fn its_pages_are_preferred_on_a_node_that_there_is() {
        /// `MPOL_F_ADDR`, which libc does not have.
        const OF_ADDRESS: libc::c_int = 1 << 1;
        let mapping = Mapping::reserve(HUGE).unwrap();
        let mut policy = -1;
        // SAFETY: the place for the policy is valid, and so is the address.
        let asked = unsafe {
            let none = std::ptr::null_mut::<libc::c_ulong>();
            mapping.prefer(0).ok();
            libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, none, 0, mapping.at(0), OF_ADDRESS)
        };
        // Not every container may ask.
        assert!(asked != 0 || policy == libc::MPOL_PREFERRED, "{policy}");
        assert!(mapping.prefer(1000).is_err());
        assert_eq!(
            resident(&Mapping::new(HUGE, Some(1000)).unwrap()),
            HUGE / BLOCK,
            "it is there all the same"
        );
    }

    #[test]
    fn more_than_there_can_be_is_an_error() {
        assert!(Mapping::new(usize::MAX / HUGE * HUGE, None).is_err());
        assert!(Mapping::new(1 << 60, None).is_err());
    }
}
