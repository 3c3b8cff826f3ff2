//! Text, tokens and batches.

use std::fs;
use std::path::Path;

use ssdtrain_models::{Corpus, Error, Result, TokenSet, Tokenizer};
use tch::{Device, Tensor};

type TestResult = std::result::Result<(), Box<dyn std::error::Error>>;

/// A `.bin` file of `count` tokens that count up.
fn counting_bin(path: &Path, count: u16) -> Result<TokenSet> {
    let bytes: Vec<u8> = (0..count).flat_map(u16::to_le_bytes).collect();
    fs::write(path, bytes).map_err(|cause| Error::Io { action: "write", path: path.to_owned(), cause })?;
    TokenSet::open_bin(path, usize::from(count))
}

fn ids(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.view(-1)).unwrap_or_default()
}

fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "accepted".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_tokenizer_gives_the_text_back() -> TestResult {
    let text = "let θ = \"naïve\";\n\tx += 1; // 日本 🦀\r\n\n  it's done";
    for name in Tokenizer::NAMES {
        let tokenizer = Tokenizer::by_name(name, text)?;
        let tokens = tokenizer.encode(text)?;
        assert!(tokens.iter().all(|&token| usize::from(token) < tokenizer.vocab()), "{name}");
        assert_eq!(tokenizer.decode(&tokens)?, text, "{name}");
        assert_eq!(tokenizer.to_string().parse::<Tokenizer>()?, tokenizer, "{name}");
    }
    Ok(())
}

#[test]
fn gpt2_tokens_are_those_of_gpt2() -> TestResult {
    let tokens = Tokenizer::Gpt2.encode("Hello world, it's 2024.\n\nHi")?;
    assert_eq!(tokens, [15496, 995, 11, 340, 338, 48609, 13, 198, 198, 17250]);
    Ok(())
}

#[test]
fn long_runs_of_one_character_are_encoded_or_refused() -> TestResult {
    for text in [" ".repeat(400_000) + "x", "\n".repeat(400_000), "a".repeat(20_000)] {
        let tokens = Tokenizer::Gpt2.encode(&text)?;
        assert_eq!(Tokenizer::Gpt2.decode(&tokens)?, text);
    }
    assert!(message(Tokenizer::Gpt2.encode(&(" ".repeat(1 << 20) + "x"))).contains("white space"));
    Ok(())
}

#[test]
fn half_a_character_decodes_to_a_replacement() -> TestResult {
    assert_eq!(Tokenizer::Bytes.decode(&[0x61, 0xe2, 0x82])?, "a\u{fffd}");
    Ok(())
}

#[test]
fn unknown_names_characters_and_tokens_are_named() -> TestResult {
    assert_eq!(
        message(Tokenizer::by_name("words", "")),
        "unknown tokenizer \"words\"; known are bytes, chars, gpt2"
    );
    let chars = Tokenizer::by_name("chars", "abc")?;
    assert!(message(chars.encode("abd")).contains("'d'"));
    assert!(message("chars:".parse::<Tokenizer>()).contains("0 different characters"));
    assert!(message(chars.decode(&[3])).contains("token 3"));
    Ok(())
}

#[test]
fn a_directory_is_read_in_the_order_of_its_names() -> TestResult {
    let dir = tempfile::tempdir()?;
    for (name, text) in
        [("b/one.txt", "3"), ("a.txt", "1"), ("b.rs", "4"), ("b/.hidden", "x"), ("aa/z/y.md", "2")]
    {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap_or_else(|| dir.path()))?;
        fs::write(path, text)?;
    }
    fs::write(dir.path().join("binary"), [0xff, 0xfe])?;
    fs::write(dir.path().join("zeros"), [0; 8])?;
    fs::write(dir.path().join("large"), "x".repeat((1 << 20) + 1))?;
    std::os::unix::fs::symlink(dir.path(), dir.path().join("loop"))?;

    let corpus = Corpus::read(dir.path(), 1 << 20)?;
    assert_eq!(corpus.text(), "1234");
    assert_eq!((corpus.files(), corpus.skipped(), corpus.is_truncated()), (4, 3, false));

    let corpus = Corpus::read(dir.path(), 2)?;
    assert_eq!((corpus.text(), corpus.files(), corpus.is_truncated()), ("12", 2, true));
    Ok(())
}

#[test]
fn text_is_cut_between_characters() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("text");
    fs::write(&path, "aé日x")?;
    for (limit, expected) in
        [(usize::MAX, "aé日x"), (7, "aé日x"), (6, "aé日"), (5, "aé"), (3, "aé"), (2, "a")]
    {
        let corpus = Corpus::read(&path, limit)?;
        assert_eq!((corpus.text(), corpus.is_truncated()), (expected, limit < 7), "limit {limit}");
    }
    Ok(())
}

#[test]
fn unusable_text_is_one_clear_line() -> TestResult {
    let dir = tempfile::tempdir()?;
    let missing = dir.path().join("missing");
    assert_eq!(
        message(Corpus::read(&missing, 1)),
        format!("cannot read {}: No such file or directory (os error 2)", missing.display())
    );
    assert!(message(Corpus::read(dir.path(), 1)).ends_with("holds no text"));
    let latin1 = dir.path().join("latin1");
    fs::write(&latin1, b"caf\xe9 au lait")?;
    assert!(message(Corpus::read(&latin1, 100)).ends_with("is not UTF-8 text"));
    assert!(message(Corpus::read(&latin1, 4)).ends_with("is not UTF-8 text"));
    Ok(())
}

#[test]
fn the_held_out_part_is_the_end_and_nothing_is_in_both() -> TestResult {
    let dir = tempfile::tempdir()?;
    let tokens = counting_bin(&dir.path().join("t.bin"), 1000)?;
    let (train, held_out) = tokens.split(0.1)?;
    assert_eq!((train.len(), held_out.len()), (900, 100));

    let mut train = train.random_batches(16, 8, 0, Device::Cpu)?;
    for _ in 0..100 {
        assert!(ids(&train.draw()?.targets).iter().all(|&id| id < 900));
    }
    let first = held_out.sequential_batches(4, 8, Device::Cpu)?.next().ok_or("no batch")??;
    assert_eq!(ids(&first.inputs)[0], 900);
    assert!(tokens.split(1.0).is_err());
    assert!(tokens.split(f64::NAN).is_err());
    Ok(())
}

#[test]
fn targets_are_the_inputs_one_token_on() -> TestResult {
    let dir = tempfile::tempdir()?;
    let tokens = counting_bin(&dir.path().join("t.bin"), 500)?;
    let batch = tokens.random_batches(4, 8, 3, Device::Cpu)?.draw()?;
    assert_eq!(batch.inputs.size(), [4, 8]);
    assert_eq!(batch.targets, &batch.inputs + 1);
    assert_eq!(batch.tokens(), 32);
    Ok(())
}

#[test]
fn random_batches_follow_from_seed_and_position() -> TestResult {
    let dir = tempfile::tempdir()?;
    let tokens = counting_bin(&dir.path().join("t.bin"), 500)?;
    let draw = |seed, position, count: usize| -> Result<Vec<Vec<i64>>> {
        let mut batches = tokens.random_batches(4, 8, seed, Device::Cpu)?;
        batches.seek(position);
        (0..count).map(|_| Ok(ids(&batches.draw()?.inputs))).collect()
    };
    let all = draw(1, 0, 4)?;
    assert_eq!(all, draw(1, 0, 4)?);
    assert_eq!(all[2..], draw(1, 2, 2)?);
    assert_ne!(all, draw(2, 0, 4)?);
    assert_ne!(all[0], all[1]);
    Ok(())
}

#[test]
fn every_block_can_be_drawn() -> TestResult {
    let dir = tempfile::tempdir()?;
    let tokens = counting_bin(&dir.path().join("t.bin"), 12)?;
    let mut batches = tokens.random_batches(64, 8, 0, Device::Cpu)?;
    let mut starts: Vec<_> = ids(&batches.draw()?.inputs.select(1, 0));
    starts.sort_unstable();
    starts.dedup();
    assert_eq!(starts, [0, 1, 2, 3]);
    Ok(())
}

#[test]
fn sequential_batches_give_every_block_once() -> TestResult {
    let dir = tempfile::tempdir()?;
    let tokens = counting_bin(&dir.path().join("t.bin"), 31)?;
    let batches = tokens.sequential_batches(4, 5, Device::Cpu)?;
    assert_eq!(batches.len(), 2);
    let batches = batches.collect::<Result<Vec<_>>>()?;
    let inputs: Vec<_> = batches.iter().flat_map(|batch| ids(&batch.inputs)).collect();
    let targets: Vec<_> = batches.iter().flat_map(|batch| ids(&batch.targets)).collect();
    assert_eq!(inputs, (0..30).collect::<Vec<_>>());
    assert_eq!(targets, (1..31).collect::<Vec<_>>());
    assert_eq!(batches.iter().map(|batch| batch.inputs.size()[0]).collect::<Vec<_>>(), [4, 2]);
    Ok(())
}

#[test]
fn spread_batches_reach_over_the_whole_set() -> TestResult {
    let dir = tempfile::tempdir()?;
    let tokens = counting_bin(&dir.path().join("t.bin"), 1001)?;
    let starts = |batches: usize| -> Result<Vec<i64>> {
        let spread = tokens.sequential_batches(4, 10, Device::Cpu)?.spread(batches);
        assert_eq!(spread.len(), batches.min(25));
        let inputs = spread.map(|batch| Ok(ids(&batch?.inputs.select(1, 0))));
        Ok(inputs.collect::<Result<Vec<_>>>()?.concat())
    };
    assert_eq!(starts(1)?, [0, 250, 500, 750]);
    assert_eq!(starts(2)?, [0, 120, 250, 370, 500, 620, 750, 870]);
    // All blocks, each of them once.
    for batches in [25, usize::MAX] {
        assert_eq!(starts(batches)?, (0..100).map(|block| 10 * block).collect::<Vec<_>>());
    }
    assert!(starts(0)?.is_empty());
    Ok(())
}

#[test]
fn text_and_token_file_give_the_same_batches() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("t.bin");
    let text = "some text to be read twice, once from memory and once from a file";
    let tokens = Tokenizer::Gpt2.encode(text)?;
    fs::write(&path, tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>())?;
    let memory = TokenSet::encode(&Corpus::from_text("text", text), &Tokenizer::Gpt2)?;
    let file = TokenSet::open_bin(&path, Tokenizer::Gpt2.vocab())?;
    assert_eq!(memory.len(), file.len());
    let draw =
        |tokens: &TokenSet| -> Result<_> { Ok(tokens.random_batches(2, 4, 9, Device::Cpu)?.draw()?.inputs) };
    assert_eq!(draw(&memory)?, draw(&file)?);
    Ok(())
}

#[test]
fn unusable_tokens_are_one_clear_line() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("t.bin");
    assert!(message(TokenSet::open_bin(&path, 10)).starts_with("cannot open"));
    assert!(message(TokenSet::open_bin(dir.path(), 10)).ends_with("is not a file of tokens"));
    fs::write(&path, [1, 0, 2])?;
    assert!(message(TokenSet::open_bin(&path, 10)).ends_with("odd length of 3 bytes; tokens have two each"));

    fs::write(&path, [1, 0, 2, 0, 10, 0, 3, 0])?;
    let tokens = TokenSet::open_bin(&path, 10)?;
    let outside = message(tokens.random_batches(1, 3, 0, Device::Cpu)?.draw());
    assert!(outside.ends_with("t.bin: token 2 is 10, outside the vocabulary of 10"), "{outside}");

    let short = message(tokens.random_batches(1, 4, 0, Device::Cpu));
    assert!(
        short.ends_with("t.bin: 4 tokens are too few for a block of 4 and the token after it"),
        "{short}"
    );
    assert!(tokens.sequential_batches(1, 4, Device::Cpu).is_err());
    assert!(tokens.random_batches(0, 1, 0, Device::Cpu).is_err());
    assert!(tokens.random_batches(1, 0, 0, Device::Cpu).is_err());
    assert!(message(tokens.random_batches(usize::MAX, 3, 0, Device::Cpu)).contains("out of range"));
    Ok(())
}

#[test]
fn a_token_file_that_shrinks_is_an_error() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("t.bin");
    let tokens = counting_bin(&path, 100)?;
    let mut batches = tokens.random_batches(8, 50, 0, Device::Cpu)?;
    fs::OpenOptions::new().write(true).open(&path)?.set_len(10)?;
    assert!(message(batches.draw()).starts_with("cannot read"));
    Ok(())
}
