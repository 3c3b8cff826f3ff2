//! Encryption of what is spilled: AES-256-GCM, a piece at a time, with a key that is only in the memory of its process.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use crate::error::{Error, ErrorKind, Result};
use crate::maker::Maker;
use crate::mem::PAGE;

/// How many bytes have a seal of their own. A slot of the host pool is contiguous for as many.
pub(super) const SEALED_BYTES: usize = PAGE;
/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// Seals what is written and opens what is read. Its key is random, is written nowhere, and goes with it.
pub(super) struct Sealer {
    key: LessSafeKey,
    /// Who may seal: a process that was forked off has the key and the number of seals of its parent, and would make the next
    /// ones of both with the same nonces.
    maker: Maker,
    /// How many seals were made.
    seals: AtomicU64,
}

/// What it takes, besides the key, to open what was sealed. It is no secret.
#[derive(Clone, Copy)]
pub(super) struct Seal {
    nonce: [u8; NONCE_LEN],
    tag: Tag,
}

impl Sealer {
    /// A sealer with a key of its own.
    pub(super) fn new() -> Result<Sealer> {
        let maker = Maker::new().map_err(|error| {
            let message =
                "encrypt: processes that are forked off could not be told apart; do without encryption";
            Error::io(ErrorKind::Io, message, error)
        })?;
        let mut bytes = [0; KEY_BYTES];
        let random = SystemRandom::new().fill(&mut bytes);
        let key = random.and_then(|()| UnboundKey::new(&AES_256_GCM, &bytes)).map(LessSafeKey::new);
        overwrite(&mut bytes, [0; KEY_BYTES]);
        let key = key.map_err(|_| {
            let message = "encrypt: the system gave no random bytes for a key; do without encryption, or see what \
                           refuses the system call getrandom";
            Error::new(ErrorKind::Io, message)
        })?;
        Ok(Sealer { key, maker, seals: AtomicU64::new(0) })
    }

    /// Whether this process may seal: it was not forked from the one that made the key.
    pub(super) fn seals_here(&self) -> bool {
        !self.maker.is_parent()
    }

    /// Encrypts some bytes, [`SEALED_BYTES`] at most, where they are.
    pub(super) fn seal(&self, bytes: &mut [u8]) -> Seal {
        debug_assert!(bytes.len() <= SEALED_BYTES);
        // A child may find a task of its parent.
        assert!(self.seals_here(), "only the process that made a key encrypts with it");
        let nonce = self.next_nonce();
        let sealed =
            self.key.seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), bytes);
        #[expect(clippy::expect_used, reason = "only 64 GiB and more are refused")]
        let tag = sealed.expect("a piece is much shorter than what the cipher takes");
        Seal { nonce, tag }
    }

    /// Decrypts bytes where they are. False if they are not those that were sealed: then they are to be used for nothing.
    #[must_use = "bytes that were changed are to be used for nothing"]
    pub(super) fn open(&self, seal: &Seal, bytes: &mut [u8]) -> bool {
        let nonce = Nonce::assume_unique_for_key(seal.nonce);
        self.key.open_in_place_separate_tag(nonce, Aad::empty(), seal.tag, bytes, 0..).is_ok()
    }

    /// A nonce that no other seal of this key has.
    fn next_nonce(&self) -> [u8; NONCE_LEN] {
        let mut nonce = [0; NONCE_LEN];
        let (_, number) = nonce.split_at_mut(NONCE_LEN - size_of::<u64>());
        number.copy_from_slice(&self.seals.fetch_add(1, Relaxed).to_be_bytes());
        nonce
    }

    /// Puts another key, which everybody knows, in the place of this one: ring leaves keys in memory that is freed.
    fn forget(&mut self) {
        if let Ok(known) = UnboundKey::new(&AES_256_GCM, &[0; KEY_BYTES]) {
            overwrite(&mut self.key, LessSafeKey::new(known));
        }
    }
}

impl Drop for Sealer {
    fn drop(&mut self) {
        self.forget();
    }
}

/// Replaces a value that is about to go, which compilers would leave out.
fn overwrite<T>(place: &mut T, value: T) {
    *place = value;
    black_box(place);
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::maker::tests::holds_in_child;

    const PLAIN: &[u8] = b"what is nobody's business";

    fn sealed(sealer: &Sealer) -> (Seal, Vec<u8>) {
        let mut bytes = PLAIN.to_vec();
        (sealer.seal(&mut bytes), bytes)
    }

    #[test]
    fn what_was_sealed_is_another_thing_each_time_and_opens_again() {
        let sealer = Sealer::new().unwrap();
        let [(seal, mut first), (_, second)] = [(); 2].map(|()| sealed(&sealer));
        assert!(first != PLAIN && second != PLAIN && first != second);
        assert!(sealer.open(&seal, &mut first));
        assert_eq!(first, PLAIN);
    }

    #[test]
    fn no_changed_byte_no_other_seal_and_no_other_key_opens_it() {
        let sealer = Sealer::new().unwrap();
        let (seal, bytes) = sealed(&sealer);
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            assert!(!sealer.open(&seal, &mut changed), "byte {index}");
        }
        let (later, _) = sealed(&sealer);
        assert!(!sealer.open(&later, &mut bytes.clone()), "an earlier write of the same");
        assert!(!sealer.open(&seal, &mut bytes[1..].to_vec()));
        assert!(!Sealer::new().unwrap().open(&seal, &mut bytes.clone()));
    }

    #[test]
    fn no_nonce_is_used_twice_whichever_threads_seal() {
        const EACH: usize = 50_000;
        let (sealer, together) = (Sealer::new().unwrap(), Barrier::new(4));
        let nonces = || {
            let mut nonces = Vec::with_capacity(EACH);
            together.wait();
            nonces.extend((0..EACH).map(|_| sealer.next_nonce()));
            nonces
        };
        let mut all = HashSet::from([sealer.seal(&mut [0]).nonce]);
        thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(nonces));
            threads.into_iter().for_each(|thread| all.extend(thread.join().unwrap()));
        });
        all.insert(sealer.seal(&mut [0]).nonce);
        assert_eq!(all.len(), 4 * EACH + 2);
    }

    #[test]
    fn a_process_that_was_forked_off_opens_and_does_not_seal() {
        let sealer = Sealer::new().unwrap();
        let (seal, bytes) = sealed(&sealer);
        assert!(holds_in_child(|| sealer.open(&seal, &mut bytes.clone()) && !sealer.seals_here()));
        assert!(sealer.seals_here());
    }

    #[test]
    fn a_key_is_gone_once_it_is_forgotten() {
        let mut sealer = Sealer::new().unwrap();
        let (seal, bytes) = sealed(&sealer);
        sealer.forget();
        assert!(!sealer.open(&seal, &mut bytes.clone()));
        let known = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[0; KEY_BYTES]).unwrap());
        let (seal, mut bytes) = sealed(&sealer);
        let nonce = Nonce::assume_unique_for_key(seal.nonce);
        assert!(known.open_in_place_separate_tag(nonce, Aad::empty(), seal.tag, &mut bytes, 0..).is_ok());
    }

    #[test]
    #[ignore = "measures: run it by name, in a release build"]
    fn how_fast_one_thread_is() {
        const BYTES: usize = 64 << 20;
        let (sealer, source, mut bytes) = (Sealer::new().unwrap(), vec![1; BYTES], vec![0; BYTES]);
        let mut fastest = [Duration::MAX; 2];
        for _ in 0..5 {
            let start = Instant::now();
            let pieces = bytes.chunks_mut(SEALED_BYTES).zip(source.chunks(SEALED_BYTES));
            let seal = |(bytes, source): (&mut [u8], _)| {
                bytes.copy_from_slice(source);
                sealer.seal(bytes)
            };
            let seals: Vec<_> = pieces.map(seal).collect();
            let sealed = Instant::now();
            let mut pieces = bytes.chunks_mut(SEALED_BYTES).zip(&seals);
            assert!(pieces.all(|(bytes, seal)| sealer.open(seal, bytes)));
            let times = [sealed - start, sealed.elapsed()];
            fastest = std::array::from_fn(|way| fastest[way].min(times[way]));
        }
        let [write, read] = fastest.map(|time| BYTES as f64 / time.as_secs_f64() / 1e9);
        println!("copied and encrypted: {write:.1} GB/s; decrypted: {read:.1} GB/s");
    }
}
