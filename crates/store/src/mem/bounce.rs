//! Bounce buffers that are used again. Fresh memory costs more than what is done with it.

use std::sync::{Arc, Weak};

use super::{AlignedBuf, BLOCK, IoBuf};
use crate::sync::Mutex;

/// A buffer may be so many times longer than what is asked for.
const LONGER: usize = 2;

/// Makes bounce buffers, and keeps those that are given back for the next transfers.
pub(crate) struct Bounces {
    /// Upper limit on the bytes that are kept, except that a single buffer may exceed it.
    most: usize,
    /// In the order in which they were given back.
    kept: Mutex<Vec<AlignedBuf>>,
}

/// Aligned memory that is given back on drop.
pub(crate) struct Bounce {
    buf: Option<AlignedBuf>,
    home: Weak<Bounces>,
}

impl Bounces {
    /// Keeps at most so many bytes, or one buffer.
    pub(crate) fn new(most: u64) -> Arc<Bounces> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        Arc::new(Bounces { most, kept: Mutex::default() })
    }

    /// A buffer of at least `bytes`, rounded up to whole blocks. It has any contents, but zeroes from `bytes` up to the end of
    /// that block. `None` if memory has run out.
    pub(crate) fn take(self: &Arc<Bounces>, bytes: usize) -> Option<Bounce> {
        let padded = bytes.max(1).checked_next_multiple_of(BLOCK)?;
        let kept = self.take_kept(padded);
        let mut buf = kept.map_or_else(|| AlignedBuf::new(padded), Some)?;
        buf.as_mut_slice()[bytes..padded].fill(0);
        Some(Bounce { buf: Some(buf), home: Arc::downgrade(self) })
    }

    /// The shortest of those kept that are long enough and not much too long.
    fn take_kept(&self, bytes: usize) -> Option<AlignedBuf> {
        let mut kept = self.kept.lock();
        let fits = |buf: &AlignedBuf| (bytes..=bytes.saturating_mul(LONGER)).contains(&buf.len());
        let fitting = kept.iter().enumerate().filter(|(_, buf)| fits(buf));
        let (index, _) = fitting.min_by_key(|(_, buf)| buf.len())?;
        Some(kept.remove(index))
    }

    fn give_back(&self, buf: AlignedBuf) {
        let mut kept = self.kept.lock();
        kept.push(buf);
        let mut bytes: usize = kept.iter().map(AlignedBuf::len).sum();
        let mut gone = Vec::new();
        while bytes > self.most && kept.len() > 1 {
            let oldest = kept.remove(0);
            bytes -= oldest.len();
            gone.push(oldest);
        }
        // Memory is given back to the system without the lock.
        drop(kept);
        drop(gone);
    }
}

impl Bounce {
    fn buf(&self) -> &AlignedBuf {
        #[expect(clippy::expect_used, reason = "only the drop takes it")]
        self.buf.as_ref().expect("it is there until it is dropped")
    }
}

// SAFETY: all of it is the buffer's, which nobody else has until this value is dropped.
unsafe impl IoBuf for Bounce {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        self.buf().part(offset)
    }

    fn len(&self) -> usize {
        self.buf().len()
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if let (Some(home), Some(buf)) = (self.home.upgrade(), self.buf.take()) {
            home.give_back(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(bounce: &Bounce) -> usize {
        bounce.part(0).0.addr()
    }

    fn fill(bounce: &mut Bounce, byte: u8) {
        bounce.buf.as_mut().unwrap().as_mut_slice().fill(byte);
    }

    #[test]
    fn a_buffer_that_was_given_back_is_used_again_if_it_is_about_as_long() {
        let bounces = Bounces::new(1 << 20);
        let [long, short] = [8, 4].map(|blocks| bounces.take(blocks * BLOCK).unwrap());
        let addresses = [&long, &short].map(address);
        drop((long, short));
        let again = [4 * BLOCK - 5, 4 * BLOCK - 5].map(|bytes| bounces.take(bytes).unwrap());
        assert_eq!(again.each_ref().map(address), [addresses[1], addresses[0]]);
        drop(again);
        assert_eq!(bounces.take(3 * BLOCK + 1).unwrap().len(), 4 * BLOCK);
        let little = bounces.take(BLOCK).unwrap();
        assert_eq!(little.len(), BLOCK, "nothing was about as long");
    }

    #[test]
    fn padding_holds_nothing_of_what_was_there_before() {
        let bounces = Bounces::new(1 << 20);
        let mut bounce = bounces.take(2 * BLOCK).unwrap();
        fill(&mut bounce, 7);
        drop(bounce);
        let mut again = bounces.take(BLOCK + 10).unwrap();
        let contents = again.buf.as_mut().unwrap().as_mut_slice();
        assert_eq!((contents[0], contents[BLOCK + 9]), (7, 7), "it is the same");
        assert!(contents[BLOCK + 10..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn no_more_is_kept_than_may_be_and_the_oldest_goes() {
        let bounces = Bounces::new(2 * BLOCK as u64);
        let all = [(); 3].map(|()| bounces.take(BLOCK).unwrap());
        drop(all);
        assert_eq!(bounces.kept.lock().len(), 2);
        let long = bounces.take(3 * BLOCK).unwrap();
        let memory = address(&long);
        drop(long);
        assert_eq!(bounces.kept.lock().len(), 1);
        assert_eq!(address(&bounces.take(3 * BLOCK).unwrap()), memory, "a single one may be longer");
        let last = bounces.take(BLOCK).unwrap();
        drop(bounces);
        drop(last);
    }
}
