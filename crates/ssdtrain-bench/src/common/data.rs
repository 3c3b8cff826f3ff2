//! The training data.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use ssdtrain_models::{Corpus, TokenSet, Tokenizer};

use crate::common::{defaults, float, size};

/// The arguments that say where the data is.
#[derive(Clone, Debug, Serialize, clap::Args)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// A text file, a directory of text files, a nanoGPT token file (.bin), or a directory with train.bin and val.bin.
    /// Without it: the Rust sources that cargo has downloaded
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Read at most this much text
    #[arg(long, value_name = "SIZE", default_value = defaults::DATA_LIMIT, value_parser = size::parse_positive)]
    data_limit: u64,
    /// Share at the end of the data that is kept for evaluation
    #[arg(long, value_name = "SHARE", default_value = defaults::HELD_OUT, value_parser = float::inner_share)]
    held_out: f64,
}

/// Tokens to train on and to evaluate on.
#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) train: TokenSet,
    pub(crate) held_out: TokenSet,
    pub(crate) tokenizer: Tokenizer,
    /// Where they come from, in words.
    source: String,
    /// A prompt that suits a sample from these data.
    pub(crate) prompt: &'static str,
}

impl DataArgs {
    /// Reads the data; `tokens` is the name of a tokenizer, or a tokenizer as stored in a checkpoint.
    pub(crate) fn load(&self, tokens: &str) -> Result<Data> {
        match &self.data {
            Some(path) if path.join("train.bin").is_file() => {
                let (train, held_out) = (path.join("train.bin"), path.join("val.bin"));
                let tokenizer = tokenizer_of_bin(&train, tokens)?;
                let vocab = tokenizer.vocab();
                Ok(Data {
                    train: TokenSet::open_bin(&train, vocab)?,
                    held_out: TokenSet::open_bin(&held_out, vocab)?,
                    tokenizer,
                    source: format!("{} and {}", train.display(), held_out.display()),
                    prompt: "\n",
                })
            }
            Some(path) if path.extension().is_some_and(|extension| extension == "bin") => {
                let tokenizer = tokenizer_of_bin(path, tokens)?;
                let all = TokenSet::open_bin(path, tokenizer.vocab())?;
                self.split(&all, tokenizer, path.display().to_string(), "\n")
            }
            Some(path) => self.encode(&Corpus::read(path, self.limit())?, tokens, "\n"),
            None => self.encode(&Corpus::cargo_registry(self.limit())?, tokens, "pub fn "),
        }
    }

    fn limit(&self) -> usize {
        usize::try_from(self.data_limit).unwrap_or(usize::MAX)
    }

    fn encode(&self, corpus: &Corpus, tokens: &str, prompt: &'static str) -> Result<Data> {
        let tokenizer = match tokens {
            "chars" => Tokenizer::by_name(tokens, corpus.text())?,
            known => known.parse()?,
        };
        let all = TokenSet::encode(corpus, &tokenizer)?;
        let mut source = format!("{} of {}", size::format(corpus.text().len() as u64), corpus.name());
        if corpus.files() > 1 {
            source += &format!(", {} files", corpus.files());
        }
        if corpus.skipped() > 0 {
            source += &format!(", {} that are no text passed over", corpus.skipped());
        }
        if corpus.is_truncated() {
            source += ", cut off at --data-limit";
        }
        self.split(&all, tokenizer, source, prompt)
    }

    fn split(
        &self,
        all: &TokenSet,
        tokenizer: Tokenizer,
        source: String,
        prompt: &'static str,
    ) -> Result<Data> {
        let (train, held_out) = all.split(self.held_out)?;
        Ok(Data { train, held_out, tokenizer, source, prompt })
    }
}

impl Data {
    /// Checks that there is a block to train on and one to evaluate on.
    pub(crate) fn require(&self, block: usize) -> Result<()> {
        for (name, tokens) in [("training", &self.train), ("held-out", &self.held_out)] {
            ensure!(
                tokens.len() > block,
                "{}: the {name} data has {} tokens, too few for a block of {block} and the token after it",
                self.source,
                tokens.len()
            );
        }
        Ok(())
    }

    /// A description in words.
    pub(crate) fn describe(&self) -> String {
        let name = self.tokenizer.to_string();
        let name = name.split(':').next().unwrap_or_default();
        format!(
            "{}; as {name}: {} tokens to train on, {} held out",
            self.source,
            self.train.len(),
            self.held_out.len()
        )
    }

    /// The tokens that a sample begins with: `prompt`, or otherwise one that suits the data.
    pub(crate) fn prompt(&self, prompt: Option<&str>) -> Result<Vec<u16>> {
        match prompt {
            Some("") => bail!("--prompt is empty; the model needs something to go on from"),
            Some(text) => self.tokenizer.encode(text).with_context(|| format!("--prompt {text:?}")),
            // Data without a line break still have a first token.
            None => Ok(self.tokenizer.encode(self.prompt).unwrap_or_else(|_| vec![0])),
        }
    }
}

/// Token files do not say which tokenizer they were made with.
fn tokenizer_of_bin(path: &Path, tokens: &str) -> Result<Tokenizer> {
    ensure!(
        tokens != "chars",
        "{}: a token file does not hold its characters; give --tokens gpt2 or bytes, or the text itself",
        path.display()
    );
    Ok(tokens.parse()?)
}
