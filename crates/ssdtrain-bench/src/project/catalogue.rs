//! Models, GPUs and SSDs by name, or from the user's TOML files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use ssdtrain_models::GptConfig;

use super::endurance::Ssd;
use super::gpu::Gpu;
use super::model::Model;
use super::presets::Preset;

/// Something that can be given by name or as a file.
pub(crate) trait Listed: DeserializeOwned {
    /// What it is, for messages.
    const WHAT: &str;

    /// All known names.
    fn names() -> Vec<String>;

    /// The entry of that name.
    fn named(name: &str) -> Option<Self>;

    /// Checks an entry of a file, and names it after the file unless it has a name.
    fn checked(self, stem: &str) -> Result<Self>;
}

/// The entry that `text` names: one of the known names, or a file whose name ends in `.toml`.
///
/// # Errors
/// If it is neither, or the file cannot be read or does not make sense. The message names `argument`.
pub(crate) fn find<T: Listed>(argument: &str, text: &str) -> Result<T> {
    if let Some(entry) = T::named(text) {
        return Ok(entry);
    }
    let path = Path::new(text);
    if path.extension().is_none_or(|extension| extension != "toml") {
        let (what, known) = (T::WHAT, T::names().join(", "));
        bail!("{argument}: there is no {what} named {text:?}; known are {known}, or give a file FILE.toml");
    }
    let context = || format!("{argument}: {text} does not describe a {}", T::WHAT);
    let read = fs::read_to_string(path).with_context(|| format!("{argument}: cannot read {text}"))?;
    let entry: T = toml::from_str(&read).map_err(|error| one_line(&read, &error)).with_context(context)?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    entry.checked(&stem).with_context(context)
}

/// What is wrong with a file, and in which line; the parser's own message would span several lines.
fn one_line(text: &str, error: &toml::de::Error) -> anyhow::Error {
    match error.span().filter(|span| span.end > 0) {
        Some(span) => {
            let line = 1 + text[..span.start].matches('\n').count();
            anyhow::anyhow!("line {line}: {}", error.message())
        }
        None => anyhow::anyhow!("{}", error.message()),
    }
}

impl Listed for Gpu {
    const WHAT: &str = "GPU";

    fn names() -> Vec<String> {
        ["a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb"].map(String::from).to_vec()
    }

    /// According to NVIDIA's data sheets.
    fn named(name: &str) -> Option<Gpu> {
        let (memory_gib, peak_tflops) = match name {
            "a100-40gb" => (40.0, 312.0),
            "a100-80gb" => (80.0, 312.0),
            "h100-80gb" => (80.0, 989.0),
            "h200-141gb" => (141.0, 989.0),
            _ => return None,
        };
        Some(Gpu { name: name.to_owned(), memory_gib, peak_tflops })
    }

    fn checked(mut self, stem: &str) -> Result<Gpu> {
        for (name, value) in [("memory_gib", self.memory_gib), ("peak_tflops", self.peak_tflops)] {
            ensure!(value > 0.0 && value <= 1e6, "{name} is {value}; it must be above 0 and at most 1000000");
        }
        name_after(&mut self.name, stem);
        Ok(self)
    }
}

impl Listed for Ssd {
    const WHAT: &str = "SSD";

    fn names() -> Vec<String> {
        Ssd::NAMES.iter().map(|name| (*name).to_owned()).collect()
    }

    fn named(name: &str) -> Option<Ssd> {
        Ssd::named(name)
    }

    fn checked(mut self, stem: &str) -> Result<Ssd> {
        self.check()?;
        name_after(&mut self.name, stem);
        Ok(self)
    }
}

impl Listed for Model {
    const WHAT: &str = "model";

    fn names() -> Vec<String> {
        let gpts = GptConfig::PRESETS.iter().map(|name| (*name).to_owned());
        gpts.chain(preset_models().into_iter().map(|model| model.name)).collect()
    }

    /// The models of the presets, and those that `train` and `compare` know, with their full context length.
    fn named(name: &str) -> Option<Model> {
        preset_models().into_iter().find(|model| model.name == name).or_else(|| gpt(name))
    }

    fn checked(mut self, stem: &str) -> Result<Model> {
        self.check()?;
        name_after(&mut self.name, stem);
        Ok(self)
    }
}

/// Each once.
fn preset_models() -> Vec<Model> {
    let mut models = Vec::new();
    for run in Preset::ALL.into_iter().flat_map(Preset::runs) {
        if !models.contains(&run.scenario.model) {
            models.push(run.scenario.model);
        }
    }
    models
}

fn gpt(name: &str) -> Option<Model> {
    let GptConfig { vocab, context, layers, heads, hidden, .. } = GptConfig::preset(name).ok()?;
    let [layers, hidden, heads, vocab, sequence] =
        [layers, hidden, heads, vocab, context].map(i64::unsigned_abs);
    Some(Model { name: name.to_owned(), layers, hidden, heads, vocab, sequence })
}

fn name_after(name: &mut String, stem: &str) {
    if name.is_empty() {
        stem.clone_into(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_is_found_and_makes_sense() {
        fn all<T: Listed>() {
            for name in T::names() {
                find::<T>("--it", &name).unwrap().checked("x").unwrap();
            }
        }
        all::<Gpu>();
        all::<Ssd>();
        all::<Model>();
    }

    #[test]
    fn a_file_is_as_good_as_a_name() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("mine.toml");
        fs::write(&path, "layers = 2\nhidden = 8\nheads = 2\nvocab = 10\nsequence = 4\n").unwrap();
        let model: Model = find("--model", path.to_str().unwrap()).unwrap();
        assert_eq!((model.name.as_str(), model.layers, model.sequence), ("mine", 2, 4));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told_in_one_line() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("odd.toml");
        let error = |text: &str| {
            fs::write(&path, text).unwrap();
            format!("{:#}", find::<Gpu>("--gpu", path.to_str().unwrap()).unwrap_err())
        };
        let wrong = [
            ("memory_gib = ", "line 1"),
            ("memory_gib = 1\nmemory = 2\n", "line 2"),
            ("memory_gib = 1\n", "peak_tflops"),
            ("memory_gib = -1\npeak_tflops = 1\n", "memory_gib is -1"),
        ];
        for (text, expected) in wrong {
            let error = error(text);
            assert!(
                error.contains(expected) && error.contains("--gpu") && error.contains("odd.toml"),
                "{error}"
            );
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn what_is_neither_name_nor_file_is_told_with_what_is_known() {
        let error = format!("{:#}", find::<Ssd>("--ssd", "floppy").unwrap_err());
        assert!(error.contains("--ssd") && error.contains("d7-p5620-12.8tb"), "{error}");
        let error = format!("{:#}", find::<Ssd>("--ssd", "nowhere.toml").unwrap_err());
        assert!(error.contains("cannot read nowhere.toml"), "{error}");
    }
}
