//! What fuzz targets reach of the readers: bytes in memory in the place of files, and no tensors. The tests read the targets' corpora, and
//! what chance makes of them: CI runs the targets themselves only where they do without libtorch.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tch::{Device, Kind};

use crate::checkpoint::{Checkpoint, Wanted};
use crate::error::Result;
use crate::tokens::{Bytes, Ids, TokenSet};

/// For messages.
const NAME: &str = "fuzzed";

/// Reads a checkpoint, and looks in it for two tensors as [`Checkpoint::restore`] does.
///
/// # Errors
/// As [`Checkpoint::open`] and [`Checkpoint::restore`].
pub fn read_checkpoint(bytes: &[u8]) -> Result<()> {
    let checkpoint = Checkpoint::parse(Path::new(NAME), bytes.to_vec())?;
    let wanted = [
        Wanted { name: "a", kind: Kind::Float, shape: vec![2, 3] },
        Wanted { name: "b", kind: Kind::BFloat16, shape: vec![4] },
    ];
    let lengths: Vec<usize> = checkpoint.matching(&wanted)?.iter().map(|bytes| bytes.len()).collect();
    assert_eq!(lengths, [24, 8], "tensors would be made of more bytes or of fewer");
    Ok(())
}

/// A split of a token file, and the batches drawn from it.
#[derive(Debug)]
pub struct Drawing {
    /// [`TokenSet::vocab`].
    pub vocab: usize,
    /// The share in [`TokenSet::split`].
    pub held_out: f64,
    /// The blocks of a batch.
    pub rows: usize,
    /// The tokens of a block.
    pub block: usize,
    /// The seed of random batches.
    pub seed: u64,
    /// How many sequential batches there are at most.
    pub spread: usize,
}

/// Draws from both parts of a token file, and compares what comes with the bytes of the file.
///
/// # Errors
/// As [`TokenSet::open_bin`], [`TokenSet::split`] and what draws from a set.
pub fn draw_tokens(bytes: &[u8], drawing: &Drawing) -> Result<()> {
    let &Drawing { vocab, held_out, rows, block, seed, spread } = drawing;
    let (pairs, _) = bytes.as_chunks::<2>();
    let all: Vec<i64> = pairs.iter().map(|&pair| i64::from(u16::from_le_bytes(pair))).collect();
    let set = TokenSet::over(Arc::new(InMemory(bytes.to_vec())), bytes.len(), Path::new(NAME), vocab)?;
    let (train, evaluated) = set.split(held_out)?;
    assert_eq!(train.len() + evaluated.len(), all.len());
    let (front, back) = all.split_at(train.len());
    for (part, tokens) in [(train, front), (evaluated, back)] {
        let Ok(random) = part.random_batches(rows, block, seed, Device::Cpu) else { continue };
        let mut sequential = part.sequential_batches(rows, block, Device::Cpu)?.spread(spread);
        let batches = sequential.len();
        let in_turn: Vec<_> = std::iter::from_fn(|| sequential.next_ids()).collect();
        assert_eq!(in_turn.len(), batches);
        for (starts, Ids { inputs, targets }) in in_turn.into_iter().chain([random.ids()]).flatten() {
            let at = |offset| starts.iter().flat_map(move |&start| &tokens[start + offset..][..block]);
            assert!(
                inputs.iter().eq(at(0)) && targets.iter().eq(at(1)),
                "other tokens than those of the file"
            );
            assert!(inputs.iter().chain(&targets).all(|&id| id < vocab as i64));
        }
    }
    Ok(())
}

/// Stands for a file.
#[derive(Debug)]
struct InMemory(Vec<u8>);

impl Bytes for InMemory {
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..)?.get(..bytes.len()));
        bytes.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::Rng;

    use super::*;
    use crate::tokens::stream;

    /// How often each input is damaged.
    const DAMAGED: u64 = 500;

    /// The corpus of a target, and what chance makes of it.
    fn inputs(target: &str) -> Vec<Vec<u8>> {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
        let files = fs::read_dir(corpus).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
        let mut inputs: Vec<_> = files.collect();
        for number in 0..inputs.len() {
            let whole = inputs[number].clone();
            inputs.extend((0..DAMAGED).map(|seed| damage(&whole, &mut stream(seed, number as u64))));
        }
        inputs
    }

    /// Some bytes are others, come twice, or are gone.
    fn damage(whole: &[u8], random: &mut ChaCha8Rng) -> Vec<u8> {
        let mut bytes = whole.to_vec();
        for _ in 0..1 + random.next_u32() % 4 {
            let place = random.next_u64() as usize % bytes.len().max(1);
            match random.next_u32() % 3 {
                0 if place < bytes.len() => bytes[place] = random.next_u32() as u8,
                1 => bytes.truncate(place),
                _ => bytes.extend_from_within(place..),
            }
        }
        bytes
    }

    #[test]
    fn a_damaged_checkpoint_is_an_answer() {
        let read = inputs("checkpoint").into_iter().map(|bytes| read_checkpoint(&bytes));
        let (right, wrong): (Vec<_>, Vec<_>) = read.partition(Result::is_ok);
        assert!(right.len() > 1 && wrong.len() > 1, "{} are right, {} wrong", right.len(), wrong.len());
    }

    #[test]
    fn tokens_are_those_of_the_file_or_an_error() {
        let mut drawn = 0;
        for (vocab, bytes) in [256, 1 << 16]
            .into_iter()
            .flat_map(|vocab| inputs("token_file").into_iter().map(move |bytes| (vocab, bytes)))
        {
            let drawing =
                Drawing { vocab, held_out: 0.25, rows: 2, block: 3, seed: bytes.len() as u64, spread: 2 };
            drawn += u32::from(draw_tokens(&bytes, &drawing).is_ok());
        }
        assert!(drawn > 1, "{drawn}");
    }
}
