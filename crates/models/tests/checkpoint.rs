//! Checkpoints: what is saved is restored, and what does not match is refused.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use ssdtrain_models::{
    AdamW, AdamWConfig, Checkpoint, Error, Gpt, GptConfig, LanguageModel, Result, TrainState,
};
use support::{Run, tiny};
use tch::{Device, Kind, Tensor, nn, no_grad};

type TestResult = std::result::Result<(), Box<dyn std::error::Error>>;

#[test]
fn a_model_is_restored_without_an_optimizer() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    let mut saved = Run::new(tiny(), Kind::Float)?;
    saved.train(1)?;
    let state = saved.save(&path)?;

    let checkpoint = Checkpoint::open(&path)?;
    assert_eq!(*checkpoint.config(), tiny().into());
    assert_eq!(*checkpoint.state(), state);
    let restored = Run::new(tiny(), Kind::Float)?;
    checkpoint.restore(tiny(), &restored.vs, None)?;
    assert_eq!(restored.bits(), saved.bits());
    Ok(())
}

#[test]
fn tied_weights_are_stored_once_and_stay_tied() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    let config = GptConfig { tied: true, ..tiny() };
    let saved = Run::new(config.clone(), Kind::Float)?;
    saved.save(&path)?;
    let restored = Run::new(config, Kind::Float)?;
    Checkpoint::open(&path)?.restore(restored.model.config(), &restored.vs, None)?;
    let inputs = Tensor::from_slice(&[1_i64, 2, 3]).unsqueeze(0);
    assert_eq!(restored.model.forward(&inputs, false)?, saved.model.forward(&inputs, false)?);
    Ok(())
}

#[test]
fn a_checkpoint_of_another_shape_is_refused_by_field() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    Run::new(tiny(), Kind::Float)?.save(&path)?;
    let mut other = Run::new(GptConfig { layers: 3, heads: 4, ..tiny() }, Kind::Float)?;
    let before = other.bits();
    let message = other.restore(&path).map_or_else(|error| error.to_string(), |()| "accepted".to_owned());
    assert_eq!(
        message,
        format!(
            "checkpoint {}: is of a model with heads 2, layers 2; this one has heads 4, layers 3",
            path.display()
        )
    );
    assert_eq!(other.bits(), before, "a refused checkpoint changes nothing");
    Ok(())
}

#[test]
fn a_checkpoint_of_another_kind_is_refused() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    Run::new(tiny(), Kind::BFloat16)?.save(&path)?;
    let refused = Run::new(tiny(), Kind::Float)?.restore(&path);
    assert!(refused.is_err_and(|error| error.to_string().contains("as BF16, and the model as Float")));
    Ok(())
}

#[test]
fn tensors_that_are_missing_misshapen_or_too_many_are_named() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    let save_as = |vs: &nn::VarStore| -> Result<()> {
        let optimizer = AdamW::new(vs, AdamWConfig::default())?;
        Checkpoint::save(&path, tiny(), vs, &optimizer, &TrainState::default())
    };
    let message = || match Run::new(tiny(), Kind::Float).and_then(|mut run| run.restore(&path)) {
        Ok(()) => "accepted".to_owned(),
        Err(error) => error.to_string(),
    };

    let vs = nn::VarStore::new(Device::Cpu);
    let _smaller = Gpt::new(&vs.root(), GptConfig { tied: true, ..tiny() })?;
    save_as(&vs)?;
    assert!(message().ends_with("has no tensor \"head.weight\""), "{}", message());

    let vs = nn::VarStore::new(Device::Cpu);
    let _narrower = Gpt::new(&vs.root(), GptConfig { context: 4, ..tiny() })?;
    save_as(&vs)?;
    assert!(
        message().ends_with("holds \"wpe.weight\" as [4, 16], and the model as [8, 16]"),
        "{}",
        message()
    );

    let vs = nn::VarStore::new(Device::Cpu);
    let _model = Gpt::new(&vs.root(), tiny())?;
    let _more = vs.root().zeros("more", &[1]);
    save_as(&vs)?;
    assert!(message().contains("has a tensor \"more\""), "{}", message());
    Ok(())
}

#[test]
fn files_that_are_no_checkpoint_are_refused() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    assert!(matches!(Checkpoint::open(&path), Err(Error::Io { .. })));

    Run::new(tiny(), Kind::Float)?.save(&path)?;
    let bytes = fs::read(&path)?;
    for length in [0, 5, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..length])?;
        let refused =
            Checkpoint::open(&path).map_or_else(|error| error.to_string(), |_| "accepted".to_owned());
        assert!(
            refused.starts_with(&format!("checkpoint {}: is damaged", path.display())),
            "{length}: {refused}"
        );
        assert!(!refused.contains('\n'), "{refused}");
    }

    Tensor::write_safetensors(&[("a", Tensor::from_slice(&[1.0]))], &path)?;
    assert!(
        Checkpoint::open(&path)
            .is_err_and(|error| error.to_string().ends_with("was not written by ssdtrain"))
    );
    Ok(())
}

#[test]
fn a_save_that_fails_leaves_the_old_checkpoint_and_no_litter() -> TestResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    let run = Run::new(tiny(), Kind::Float)?;
    run.save(&path)?;
    let before = fs::read(&path)?;
    let _integer = no_grad(|| run.vs.root().add("odd", Tensor::from_slice(&[1_i64]), false));
    assert!(run.save(&path).is_err_and(|error| error.to_string().contains("odd")));
    assert_eq!(fs::read(&path)?, before);

    // A directory cannot be replaced by a file.
    let taken = dir.path().join("taken");
    fs::create_dir(&taken)?;
    assert!(matches!(Run::new(tiny(), Kind::Float)?.save(&taken), Err(Error::Io { .. })));
    assert!(matches!(
        Run::new(tiny(), Kind::Float)?.save(&dir.path().join("missing/x")),
        Err(Error::Io { .. })
    ));
    assert_eq!(fs::read_dir(dir.path())?.count(), 2);
    Ok(())
}

#[test]
fn a_checkpoint_may_be_read_by_whom_the_umask_lets() -> TestResult {
    let dir = tempfile::tempdir()?;
    let [path, other] = ["run.safetensors", "other"].map(|name| dir.path().join(name));
    Run::new(tiny(), Kind::Float)?.save(&path)?;
    fs::write(&other, "")?;
    assert_eq!(fs::metadata(&path)?.mode(), fs::metadata(&other)?.mode());
    Ok(())
}

#[test]
fn what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not() -> TestResult {
    let dir = tempfile::tempdir()?;
    let run = Run::new(tiny(), Kind::Float)?;
    let own = format!("run.safetensors.{}.unfinished", std::process::id());
    let (live, others) = ("other.safetensors.1.unfinished", ["notes.unfinished", "run.safetensors.1.tmp"]);
    for name in
        ["run.safetensors.1.unfinished", "other.safetensors.2.unfinished", &own, live].iter().chain(&others)
    {
        fs::write(dir.path().join(name), "longer than nothing")?;
    }
    // A lock belongs to an open file, so this one holds even against its own process.
    let writing = File::open(dir.path().join(live))?;
    writing.lock()?;
    let mut left = vec!["run.safetensors", live, others[0], others[1]];
    left.sort_unstable();
    let names = || -> std::io::Result<Vec<String>> {
        let entries = fs::read_dir(dir.path())?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
        names.sort_unstable();
        Ok(names)
    };
    run.save(&dir.path().join("run.safetensors"))?;
    assert_eq!(names()?, left);
    drop(writing);
    run.save(&dir.path().join("run.safetensors"))?;
    left.retain(|name| *name != live);
    assert_eq!(names()?, left);
    Checkpoint::open(dir.path().join("run.safetensors"))?;
    Ok(())
}
