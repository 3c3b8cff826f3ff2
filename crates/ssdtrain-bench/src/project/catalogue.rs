//! Models, GPUs and SSDs by name, or from the user's TOML files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use ssdtrain_models::{GptConfig, LlamaConfig, ModelConfig};

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
        models().map(|model| model.name).collect()
    }

    fn named(name: &str) -> Option<Model> {
        models().find(|model| model.name == name)
    }

    fn checked(mut self, stem: &str) -> Result<Model> {
        self.check()?;
        name_after(&mut self.name, stem);
        Ok(self)
    }
}

/// Those that `train` and `compare` know, with their full context length, and those of the presets.
fn models() -> impl Iterator<Item = Model> {
    trained_models().into_iter().chain(preset_models())
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

/// The presets of GPTs and Llamas. A Llama that has the name of a GPT gets another.
fn trained_models() -> Vec<Model> {
    let gpts = GptConfig::PRESETS.iter().filter_map(|name| Some(called(name, GptConfig::preset(name).ok()?)));
    let llamas = LlamaConfig::PRESETS.iter().filter_map(|name| {
        let is_taken = GptConfig::PRESETS.contains(name);
        let prefix = if is_taken { "llama-" } else { "" };
        Some(called(&format!("{prefix}{name}"), LlamaConfig::preset(name).ok()?))
    });
    gpts.chain(llamas).collect()
}

fn called(name: &str, config: impl Into<ModelConfig>) -> Model {
    Model { name: name.to_owned(), ..config.into().into() }
}

fn name_after(name: &mut String, stem: &str) {
    if name.is_empty() {
        stem.clone_into(name);
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::Architecture;
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
        assert_eq!(model.architecture, Architecture::Gpt);
    }

    #[test]
    fn a_file_with_heads_of_keys_and_the_width_of_the_mlp_is_a_llama() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("mine.toml");
        let read = |text: &str| {
            fs::write(&path, format!("layers = 2\nhidden = 16\nheads = 4\nvocab = 10\nsequence = 4\n{text}"))
                .unwrap();
            find::<Model>("--model", path.to_str().unwrap())
        };
        let llama = read("kv_heads = 2\nmlp = 40\n").unwrap();
        assert_eq!(llama.architecture, Architecture::Llama { kv_heads: 2, mlp: 40 });
        let wrong = [
            ("kv_heads = 2\n", "add mlp"),
            ("mlp = 40\n", "add kv_heads"),
            ("kv_heads = 3\nmlp = 40\n", "not a multiple of kv_heads 3"),
            ("kv_heads = 2\nmlp = 0\n", "mlp is 0"),
        ];
        for (text, expected) in wrong {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(
                error.contains(expected) && error.contains("--model") && error.contains("mine.toml"),
                "{error}"
            );
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn llamas_have_names_of_their_own() {
        let names = Model::names();
        let expected = ["mini", "llama-mini", "hidden512", "llama-7b", "llama-8b"];
        assert!(
            expected.iter().all(|&name| names.iter().filter(|known| *known == name).count() == 1),
            "{names:?}"
        );
        let is_llama = |name| matches!(Model::named(name).unwrap().architecture, Architecture::Llama { .. });
        assert_eq!(expected.map(is_llama), [false, true, true, true, true]);
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
