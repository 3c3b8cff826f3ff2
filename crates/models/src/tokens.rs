//! Token sets: where they come from, how they are split, and the batches drawn from them.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use tch::{Device, Tensor};

use crate::corpus::Corpus;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// In tokens: 2 GiB of ids.
const LARGEST_BATCH: usize = 1 << 28;

/// A sequence of tokens, in memory or in a file. Clones and parts share them.
#[derive(Clone, Debug)]
pub struct TokenSet {
    source: Source,
    name: Arc<str>,
    vocab: usize,
    range: Range<usize>,
}

#[derive(Clone, Debug)]
enum Source {
    Memory(Arc<[u16]>),
    /// Little-endian 16-bit ids with nothing before them.
    File(Arc<dyn Bytes>, Arc<Path>),
}

/// The bytes of a token file.
pub(crate) trait Bytes: Debug + Send + Sync {
    /// Fills `bytes` with those from `offset` on.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
}

impl Bytes for File {
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, bytes, offset)
    }
}

/// Inputs and the tokens that follow each of them, both `[rows, block]` with 64-bit ids.
#[derive(Debug)]
pub struct Batch {
    /// The tokens that the model reads.
    pub inputs: Tensor,
    /// The tokens that it should predict: the inputs, shifted by one token.
    pub targets: Tensor,
}

impl TokenSet {
    /// The tokens of a corpus.
    ///
    /// # Errors
    /// [`Error::Data`] if the corpus has a character that the tokenizer's vocabulary lacks.
    pub fn encode(corpus: &Corpus, tokenizer: &Tokenizer) -> Result<TokenSet> {
        let tokens =
            tokenizer.encode(corpus.text()).map_err(|error| Error::data(corpus.name(), error.to_string()))?;
        let range = 0..tokens.len();
        Ok(TokenSet {
            source: Source::Memory(tokens.into()),
            name: corpus.name().into(),
            vocab: tokenizer.vocab(),
            range,
        })
    }

    /// A token file as written by nanoGPT: 16-bit little-endian ids and nothing else. It is read as batches are
    /// drawn, and may be larger than memory; an id that is not below `vocab` is reported then.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened, [`Error::Data`] if its size is odd.
    pub fn open_bin(path: impl AsRef<Path>, vocab: usize) -> Result<TokenSet> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io("open", path))?;
        let found = file.metadata().map_err(Error::io("open", path))?;
        if !found.is_file() {
            return Err(Error::data(path.display().to_string(), "is not a file of tokens"));
        }
        TokenSet::over(Arc::new(file), found.len() as usize, path, vocab)
    }

    /// A token file of so many bytes, the one at `path`.
    pub(crate) fn over(source: Arc<dyn Bytes>, bytes: usize, path: &Path, vocab: usize) -> Result<TokenSet> {
        let name = path.display().to_string();
        if !bytes.is_multiple_of(2) {
            return Err(Error::data(
                name,
                format!("has an odd length of {bytes} bytes; tokens have two each"),
            ));
        }
        let source = Source::File(source, path.into());
        Ok(TokenSet { source, name: name.into(), vocab, range: 0..bytes / 2 })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Number of different tokens that may occur.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The tokens to train on and, from the end, the fraction `held_out` to evaluate on.
    ///
    /// # Errors
    /// [`Error::Argument`] unless `held_out` is in `0.0..1.0`.
    pub fn split(&self, held_out: f64) -> Result<(TokenSet, TokenSet)> {
        if !(0.0..1.0).contains(&held_out) {
            return Err(Error::argument(format!(
                "the held-out share is {held_out}; it must be at least 0 and below 1"
            )));
        }
        let border = self.range.start + (self.len() as f64 * (1.0 - held_out)) as usize;
        let part = |range| TokenSet { range, ..self.clone() };
        Ok((part(self.range.start..border), part(border..self.range.end)))
    }

    /// Batches of `rows` blocks of `block` tokens from random positions. They depend only on `seed` and on the
    /// batch's number, not on libtorch's generator.
    ///
    /// # Errors
    /// [`Error::Argument`] if a batch is empty or absurdly large, [`Error::Data`] if there are not
    /// `block + 1` tokens.
    pub fn random_batches(
        &self,
        rows: usize,
        block: usize,
        seed: u64,
        device: Device,
    ) -> Result<RandomBatches> {
        let reader = BlockReader::new(self, rows, block, device)?;
        Ok(RandomBatches { reader, seed, position: 0 })
    }

    /// All blocks of `block` tokens, one after another without overlap, in batches of `rows`; the last batch
    /// may have fewer rows. Tokens at the end that fill no block are left out.
    ///
    /// # Errors
    /// As [`TokenSet::random_batches`].
    pub fn sequential_batches(&self, rows: usize, block: usize, device: Device) -> Result<SequentialBatches> {
        let reader = BlockReader::new(self, rows, block, device)?;
        let blocks = (self.len() - 1) / block;
        Ok(SequentialBatches { reader, blocks, given: blocks, next: 0 })
    }

    /// `len` tokens from `start` on, counted from the beginning of this set, appended to `ids`.
    fn read(&self, start: usize, len: usize, ids: &mut Vec<i64>) -> Result<()> {
        let start = self.range.start + start;
        let before = ids.len();
        match &self.source {
            Source::Memory(tokens) => {
                ids.extend(tokens[start..start + len].iter().map(|&token| i64::from(token)))
            }
            Source::File(file, path) => {
                let mut bytes = vec![0; 2 * len];
                file.read_exact_at(&mut bytes, 2 * start as u64).map_err(Error::io("read", path))?;
                let (pairs, _) = bytes.as_chunks::<2>();
                ids.extend(pairs.iter().map(|&pair| i64::from(u16::from_le_bytes(pair))));
            }
        }
        match ids[before..].iter().position(|&id| id >= self.vocab as i64) {
            None => Ok(()),
            Some(place) => {
                let (id, at, vocab) = (ids[before + place], start + place, self.vocab);
                Err(Error::data(
                    &*self.name,
                    format!("token {at} is {id}, outside the vocabulary of {vocab}"),
                ))
            }
        }
    }
}

impl Batch {
    /// Number of tokens to predict.
    pub fn tokens(&self) -> usize {
        self.targets.numel()
    }

    /// Splits the batch into `parts` micro-batches with equally many rows, which share its memory.
    ///
    /// # Errors
    /// [`Error::Argument`] if `parts` does not divide the number of rows.
    pub fn split(&self, parts: usize) -> Result<Vec<Batch>> {
        let rows = self.inputs.size().first().map_or(0, |&rows| rows as usize);
        if parts == 0 || !rows.is_multiple_of(parts) {
            return Err(Error::argument(format!(
                "a batch of {rows} does not divide into {parts} micro-batches"
            )));
        }
        let each = (rows / parts) as i64;
        (0..parts as i64)
            .map(|part| {
                let rows = |tensor: &Tensor| tensor.f_narrow(0, part * each, each);
                Ok(Batch { inputs: rows(&self.inputs)?, targets: rows(&self.targets)? })
            })
            .collect()
    }
}

/// Batches from random positions; see [`TokenSet::random_batches`].
#[derive(Debug)]
pub struct RandomBatches {
    reader: BlockReader,
    seed: u64,
    position: u64,
}

impl RandomBatches {
    /// The next batch.
    ///
    /// # Errors
    /// [`Error::Io`] if the token file cannot be read, [`Error::Data`] if a token is outside the vocabulary.
    pub fn draw(&mut self) -> Result<Batch> {
        let batch = self.reader.batch(&self.starts())?;
        self.position += 1;
        Ok(batch)
    }

    /// Where the blocks of the next batch begin.
    fn starts(&self) -> Vec<usize> {
        let mut random = stream(self.seed, self.position);
        let places = self.reader.tokens.len() - self.reader.block;
        (0..self.reader.rows).map(|_| below(&mut random, places)).collect()
    }

    /// Where the blocks of the next batch begin, and their tokens.
    #[cfg(any(fuzzing, test))]
    pub(crate) fn ids(&self) -> Result<(Vec<usize>, Ids)> {
        let starts = self.starts();
        self.reader.ids(&starts).map(|ids| (starts, ids))
    }

    /// Number of batches drawn so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Continues as if `position` batches had been drawn.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
    }
}

/// All blocks in order, or some from all over the set; see [`TokenSet::sequential_batches`].
#[derive(Clone, Debug)]
pub struct SequentialBatches {
    reader: BlockReader,
    /// The number of blocks in the set, and how many of them are used.
    blocks: usize,
    given: usize,
    next: usize,
}

impl SequentialBatches {
    /// At most `batches` batches, with their blocks spread evenly over the whole set, starting with the first: what
    /// is measured on them is measured on all parts of the set.
    pub fn spread(self, batches: usize) -> SequentialBatches {
        let given = self.blocks.min(batches.saturating_mul(self.reader.rows));
        SequentialBatches { given, next: 0, ..self }
    }

    /// Where the blocks of the next batch begin; there are none after the last one.
    fn next_starts(&mut self) -> Vec<usize> {
        let end = self.given.min(self.next + self.reader.rows);
        let starts = (self.next..end).map(|index| self.start(index)).collect();
        self.next = end;
        starts
    }

    /// Where the blocks of the next batch begin, and their tokens.
    #[cfg(any(fuzzing, test))]
    pub(crate) fn next_ids(&mut self) -> Option<Result<(Vec<usize>, Ids)>> {
        let starts = self.next_starts();
        (!starts.is_empty()).then(|| self.reader.ids(&starts).map(|ids| (starts, ids)))
    }

    /// Where block number `index` of those used begins.
    fn start(&self, index: usize) -> usize {
        let block = index as u128 * self.blocks as u128 / self.given as u128;
        block as usize * self.reader.block
    }
}

impl Iterator for SequentialBatches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Result<Batch>> {
        let starts = self.next_starts();
        (!starts.is_empty()).then(|| self.reader.batch(&starts))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let batches = (self.given - self.next).div_ceil(self.reader.rows);
        (batches, Some(batches))
    }
}

impl ExactSizeIterator for SequentialBatches {}

/// Reads blocks of a set that has at least one.
#[derive(Clone, Debug)]
struct BlockReader {
    tokens: TokenSet,
    rows: usize,
    block: usize,
    device: Device,
}

impl BlockReader {
    fn new(tokens: &TokenSet, rows: usize, block: usize, device: Device) -> Result<BlockReader> {
        if !(1..=LARGEST_BATCH).contains(&rows.saturating_mul(block)) {
            return Err(Error::argument(format!(
                "batches of {rows} blocks of {block} tokens are out of range, 1 to {LARGEST_BATCH} tokens"
            )));
        }
        if tokens.len() <= block {
            let len = tokens.len();
            return Err(Error::data(
                &*tokens.name,
                format!("{len} tokens are too few for a block of {block} and the token after it"),
            ));
        }
        Ok(BlockReader { tokens: tokens.clone(), rows, block, device })
    }

    fn batch(&self, starts: &[usize]) -> Result<Batch> {
        let Ids { inputs, targets } = self.ids(starts)?;
        let tensor = |ids: &[i64]| -> Result<Tensor> {
            let size = [starts.len() as i64, self.block as i64];
            Ok(Tensor::f_from_slice(ids)?.f_view(size)?.f_to_device(self.device)?)
        };
        Ok(Batch { inputs: tensor(&inputs)?, targets: tensor(&targets)? })
    }

    fn ids(&self, starts: &[usize]) -> Result<Ids> {
        let mut inputs = Vec::with_capacity(starts.len() * self.block);
        let mut targets = Vec::with_capacity(starts.len() * self.block);
        for &start in starts {
            self.tokens.read(start, self.block, &mut inputs)?;
            self.tokens.read(start + 1, self.block, &mut targets)?;
        }
        Ok(Ids { inputs, targets })
    }
}

/// The tokens of a batch, row by row.
pub(crate) struct Ids {
    pub(crate) inputs: Vec<i64>,
    pub(crate) targets: Vec<i64>,
}

/// Random number stream `number` of `seed`.
pub(crate) fn stream(seed: u64, number: u64) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(number);
    random
}

/// A number from `0..bound`.
fn below(random: &mut impl Rng, bound: usize) -> usize {
    ((u128::from(random.next_u64()) * bound as u128) >> 64) as usize
}
