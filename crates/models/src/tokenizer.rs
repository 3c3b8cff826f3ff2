//! Text to token ids and back.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::str::FromStr;
use std::thread;

use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use crate::error::{Error, Result};

/// Number of tokens of GPT-2's vocabulary.
const GPT2_VOCAB: usize = 50_257;

/// The encoder's regular expressions run out of stack on longer runs of white space.
const LONGEST_SPACE: usize = 500_000;

/// Fewer bytes than this are not worth a thread.
const SMALLEST_PIECE: usize = 256 << 10;

/// How text becomes tokens. It is printed as, and parsed from, a single string that contains all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tokenizer {
    /// Every byte is a token; 256 of them.
    Bytes,
    /// Every character of a given set is a token.
    Chars(CharSet),
    /// GPT-2's byte-pair encoding; 50,257 tokens.
    Gpt2,
}

/// A sorted set of characters; a character's token is its index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CharSet(Vec<char>);

impl Tokenizer {
    /// The names that [`Tokenizer::by_name`] accepts.
    pub const NAMES: &[&str] = &["bytes", "chars", "gpt2"];

    /// A tokenizer by name; "chars" takes the characters of `text`.
    ///
    /// # Errors
    /// [`Error::Argument`] for any other name, or if `text` is empty or has more different characters than
    /// there are ids.
    pub fn by_name(name: &str, text: &str) -> Result<Tokenizer> {
        match name {
            "bytes" => Ok(Tokenizer::Bytes),
            "chars" => Ok(Tokenizer::Chars(CharSet::of(text)?)),
            "gpt2" => Ok(Tokenizer::Gpt2),
            _ => {
                let known = Tokenizer::NAMES.join(", ");
                Err(Error::argument(format!("unknown tokenizer \"{name}\"; known are {known}")))
            }
        }
    }

    /// Number of different tokens.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::Chars(set) => set.0.len(),
            Tokenizer::Gpt2 => GPT2_VOCAB,
        }
    }

    /// The tokens of `text`.
    ///
    /// # Errors
    /// [`Error::Argument`] if `text` has a character that the vocabulary lacks, or, for GPT-2's encoding, more
    /// than half a million white-space characters in a row.
    pub fn encode(&self, text: &str) -> Result<Vec<u16>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u16::from).collect()),
            Tokenizer::Chars(set) => text.chars().map(|character| set.token(character)).collect(),
            Tokenizer::Gpt2 => encode_bpe(r50k_base_singleton(), text),
        }
    }

    /// The text of `tokens`; anything that is not valid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// [`Error::Argument`] if a token is not in the vocabulary.
    pub fn decode(&self, tokens: &[u16]) -> Result<String> {
        if let Some(token) = tokens.iter().find(|&&token| usize::from(token) >= self.vocab()) {
            let vocab = self.vocab();
            return Err(Error::argument(format!("token {token} is not in the vocabulary of {vocab}")));
        }
        Ok(match self {
            Tokenizer::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Tokenizer::Chars(set) => tokens.iter().map(|&token| set.0[usize::from(token)]).collect(),
            Tokenizer::Gpt2 => {
                let ranks: Vec<u32> = tokens.iter().map(|&token| token.into()).collect();
                let bytes = r50k_base_singleton().decode_bytes(&ranks);
                let bytes = bytes.map_err(|error| Error::argument(error.to_string()))?;
                String::from_utf8_lossy(&bytes).into_owned()
            }
        })
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tokenizer::Bytes => f.write_str("bytes"),
            Tokenizer::Chars(set) => write!(f, "chars:{}", set.0.iter().collect::<String>()),
            Tokenizer::Gpt2 => f.write_str("gpt2"),
        }
    }
}

impl FromStr for Tokenizer {
    type Err = Error;

    fn from_str(text: &str) -> Result<Tokenizer> {
        match text.strip_prefix("chars:") {
            Some(characters) => Tokenizer::by_name("chars", characters),
            None => Tokenizer::by_name(text, ""),
        }
    }
}

impl CharSet {
    fn of(text: &str) -> Result<CharSet> {
        let set: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        if !(1..=usize::from(u16::MAX)).contains(&set.len()) {
            let count = set.len();
            return Err(Error::argument(format!(
                "a text of {count} different characters makes no vocabulary; use bytes or gpt2"
            )));
        }
        Ok(CharSet(set))
    }

    fn token(&self, character: char) -> Result<u16> {
        // `of` keeps indices within 16 bits.
        self.0
            .binary_search(&character)
            .map(|place| place as u16)
            .map_err(|_| Error::argument(format!("the character {character:?} is not in the vocabulary")))
    }
}

/// The tokens of the whole text. Threads share the work, since it is slow.
fn encode_bpe(bpe: &CoreBPE, text: &str) -> Result<Vec<u16>> {
    let is_visible = |character: char| !character.is_whitespace();
    if let Some(space) = text.split(is_visible).find(|space| space.len() > LONGEST_SPACE) {
        let bytes = space.len();
        return Err(Error::argument(format!(
            "{bytes} bytes of white space in a row are too many for gpt2; use bytes"
        )));
    }
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let pieces = split_at_lines(text, text.len().div_ceil(threads).max(SMALLEST_PIECE));
    thread::scope(|scope| {
        let workers: Vec<_> =
            pieces.into_iter().map(|piece| scope.spawn(|| bpe.encode_ordinary(piece))).collect();
        let tokens =
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        // GPT-2's ranks are below 50,257.
        Ok(tokens.map(|rank| rank as u16).collect())
    })
}

/// Splits `text` after line breaks into pieces of at least `size` bytes, except for the last. It splits only at
/// breaks between two visible characters: there the encodings of the pieces together are the encoding of the whole.
fn split_at_lines(text: &str, size: usize) -> Vec<&str> {
    let bytes = text.as_bytes();
    let is_visible = |at: usize| bytes[at].is_ascii_graphic();
    let is_border = |&at: &usize| is_visible(at - 2) && bytes[at - 1] == b'\n' && is_visible(at);
    let mut pieces = Vec::new();
    let mut start = 0;
    while let Some(border) = (start + size.max(2)..text.len()).find(is_border) {
        pieces.push(&text[start..border]);
        start = border;
    }
    pieces.push(&text[start..]);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_encoded_in_pieces_has_the_tokens_of_the_whole() {
        let text =
            "fn main() {\n    let x = 1;\n\n\n}\n// end \n  \n\tfoo\nbar's 12\u{a0}\nde\u{301}j\u{e0}\nvu\n"
                .repeat(20);
        let bpe = r50k_base_singleton();
        for size in [1, 2, 7, 50, 333] {
            let pieces = split_at_lines(&text, size);
            assert!(pieces.len() > 1, "size {size}");
            assert_eq!(pieces.concat(), text, "size {size}");
            let parts: Vec<u32> = pieces.iter().flat_map(|piece| bpe.encode_ordinary(piece)).collect();
            assert_eq!(parts, bpe.encode_ordinary(&text), "size {size}");
        }
    }

    #[test]
    fn a_text_without_a_safe_border_stays_whole() {
        let text = " x\n\n".repeat(100);
        assert_eq!(split_at_lines(&text, 10), [text.as_str()]);
        assert_eq!(split_at_lines("", 10), [""]);
    }
}
