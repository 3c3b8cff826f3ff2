//! The model and the pieces of its training loop.

use ssdtrain_models::{
    AdamW, AdamWConfig, Batch, Corpus, Error, Gpt, GptConfig, LanguageModel, Optimizer, Result, Sampling,
    TokenSet, Tokenizer, accumulate, evaluate, sample,
};
use tch::{Device, Kind, Tensor, nn};

fn tiny() -> GptConfig {
    GptConfig {
        vocab: 256,
        context: 16,
        layers: 2,
        heads: 2,
        hidden: 32,
        dropout: 0.0,
        tied: true,
        bias: true,
    }
}

fn batch(rows: i64, block: i64) -> Batch {
    let ids = || Tensor::randint(256, [rows, block], (Kind::Int64, Device::Cpu));
    Batch { inputs: ids(), targets: ids() }
}

#[test]
fn an_untrained_model_finds_all_tokens_about_equally_likely() -> Result<()> {
    for tied in [true, false] {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), GptConfig { tied, ..tiny() })?;
        let batch = batch(8, 16);
        let loss = model.loss(&batch.inputs, &batch.targets, false)?.double_value(&[]);
        assert!((loss - 256_f64.ln()).abs() < 0.1, "loss {loss}, tied {tied}");
    }
    Ok(())
}

#[test]
fn training_on_the_alphabet_learns_it() -> Result<()> {
    let corpus = Corpus::from_text("alphabet", "abcdefghijklmnopqrstuvwxyz ".repeat(20));
    let tokens = TokenSet::encode(&corpus, &Tokenizer::Bytes)?;
    let (train, held_out) = tokens.split(0.2)?;
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), tiny())?;
    let mut optimizer = AdamW::new(&vs, AdamWConfig::default())?;
    let mut batches = train.random_batches(8, 16, 1, Device::Cpu)?;
    let held_out = || held_out.sequential_batches(8, 16, Device::Cpu);

    let before = evaluate(&model, held_out()?)?;
    for _ in 0..40 {
        let batch = batches.draw()?;
        optimizer.zero_grad();
        model.loss(&batch.inputs, &batch.targets, true)?.backward();
        optimizer.clip_grad_norm(1.0)?;
        optimizer.step(1e-2)?;
    }
    let after = evaluate(&model, held_out()?)?;
    assert!(after < before / 4.0, "loss went from {before} to {after}");

    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let continued = sample(&model, &Tokenizer::Bytes.encode("stuv")?, 8, &greedy)?;
    assert_eq!(Tokenizer::Bytes.decode(&continued)?, "wxyz abc");
    Ok(())
}

#[test]
fn gradients_of_micro_batches_add_up_to_those_of_the_batch() -> Result<()> {
    let mut vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), tiny())?;
    vs.double();
    let batch = batch(6, 16);
    let gradients = |parts| -> Result<_> {
        for mut variable in vs.trainable_variables() {
            variable.zero_grad();
        }
        let loss = accumulate(&model, &batch.split(parts)?, |loss| loss.f_backward().map_err(Error::from))?;
        let gradients: Vec<_> = vs.trainable_variables().iter().map(|v| v.grad().copy()).collect();
        Ok((loss, gradients))
    };
    let ((whole_loss, whole), (loss, parts)) = (gradients(1)?, gradients(3)?);
    assert!((whole_loss - loss).abs() < 1e-12);
    for (whole, part) in whole.iter().zip(&parts) {
        assert!(part.allclose(whole, 1e-9, 1e-12, false));
    }
    Ok(())
}

#[test]
fn a_batch_splits_only_into_equal_parts() -> Result<()> {
    let batch = batch(6, 4);
    assert_eq!(batch.split(3)?[1].inputs, batch.inputs.narrow(0, 2, 2));
    assert!(batch.split(4).is_err());
    assert!(batch.split(0).is_err());
    Ok(())
}

#[test]
fn dropout_acts_in_training_only() -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), GptConfig { dropout: 0.5, ..tiny() })?;
    let inputs = batch(2, 16).inputs;
    assert_eq!(model.forward(&inputs, false)?, model.forward(&inputs, false)?);
    assert_ne!(model.forward(&inputs, true)?, model.forward(&inputs, true)?);
    Ok(())
}

#[test]
fn evaluation_weighs_every_token_alike() -> Result<()> {
    let mut vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), tiny())?;
    vs.double();
    let whole = batch(3, 16);
    let rows = |start, len| Batch {
        inputs: whole.inputs.narrow(0, start, len),
        targets: whole.targets.narrow(0, start, len),
    };
    let parts = evaluate(&model, [Ok(rows(0, 2)), Ok(rows(2, 1))])?;
    let expected = model.loss(&whole.inputs, &whole.targets, false)?.double_value(&[]);
    assert!((parts - expected).abs() < 1e-12, "{parts} instead of {expected}");
    assert!(evaluate(&model, []).is_err(), "nothing to evaluate on");
    Ok(())
}

#[test]
fn samples_are_the_same_for_the_same_seed_only() -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), tiny())?;
    let draw =
        |seed| sample(&model, b"ab".map(u16::from).as_slice(), 40, &Sampling { seed, ..Sampling::default() });
    assert_eq!(draw(1)?, draw(1)?);
    assert_ne!(draw(1)?, draw(2)?);
    Ok(())
}

#[test]
fn gradients_added_to_in_place_are_the_same() -> Result<()> {
    let gradients = |in_place| -> Result<Vec<Tensor>> {
        tch::manual_seed(1);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), tiny())?.with_grads_in_place(in_place);
        vs.double();
        let inputs = Tensor::from_slice(&[3_i64, 1, 4, 1, 5, 9]).unsqueeze(0);
        for _ in 0..2 {
            model.loss(&inputs, &inputs.roll([1], [1]), true)?.backward();
        }
        let mut variables: Vec<_> = vs.variables().into_iter().collect();
        variables.sort_by(|(left, _), (right, _)| left.cmp(right));
        Ok(variables.into_iter().map(|(_, variable)| variable.grad()).collect())
    };
    for (own, in_place) in gradients(false)?.iter().zip(&gradients(true)?) {
        assert!(own.allclose(in_place, 1e-9, 1e-12, false));
    }
    Ok(())
}

#[test]
fn only_the_likeliest_tokens_are_sampled() -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), tiny())?;
    let prompt = [7];
    let logits = model.forward(&Tensor::from_slice(&[7_i64]).unsqueeze(0), false)?.squeeze();
    let likeliest = Vec::<i64>::try_from(logits.topk(3, 0, true, true).1)?;
    let mut seen = Vec::new();
    for seed in 0..40 {
        let sampling = Sampling { temperature: 1.0, top_k: Some(3), seed };
        seen.extend(sample(&model, &prompt, 1, &sampling)?.into_iter().map(i64::from));
    }
    assert!(seen.iter().all(|token| likeliest.contains(token)), "{seen:?} of {likeliest:?}");
    assert!(likeliest.iter().all(|token| seen.contains(token)), "{seen:?} of {likeliest:?}");
    Ok(())
}

#[test]
fn sampling_goes_on_past_the_context() -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), tiny())?;
    assert_eq!(sample(&model, &[1; 30], 30, &Sampling::default())?.len(), 30);
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let refused = |config: GptConfig| match Gpt::new(&vs.root(), config) {
        Ok(_) => "accepted".to_owned(),
        Err(error) => error.to_string(),
    };
    assert_eq!(refused(GptConfig { heads: 5, ..tiny() }), "hidden 32 is not a multiple of heads 5");
    assert!(refused(GptConfig { layers: 0, ..tiny() }).contains("layers is 0"));
    assert!(refused(GptConfig { hidden: i64::MAX, ..tiny() }).contains("hidden is"));
    assert!(refused(GptConfig { dropout: 1.0, ..tiny() }).contains("dropout is 1"));
    assert!(refused(GptConfig { dropout: f64::NAN, ..tiny() }).contains("dropout is NaN"));
    assert!(vs.is_empty(), "a refused model leaves no variables");

    assert!(GptConfig::preset("gpt5").is_err());
    for name in GptConfig::PRESETS {
        GptConfig::preset(name)?.validate()?;
    }

    let model = Gpt::new(&vs.root(), tiny())?;
    let forward = |inputs: &Tensor| {
        model.forward(inputs, false).map_or_else(|e| e.to_string(), |_| "accepted".to_owned())
    };
    assert!(forward(&Tensor::zeros([1, 17], (Kind::Int64, Device::Cpu))).contains("1 to 16"));
    assert!(forward(&Tensor::zeros([4], (Kind::Int64, Device::Cpu))).contains("[4]"));
    let outside = forward(&Tensor::full([1, 4], 256, (Kind::Int64, Device::Cpu)));
    assert!(outside.starts_with("libtorch: ") && !outside.contains('\n'), "{outside}");

    let sampling = |sampling| sample(&model, &[1], 1, &sampling).is_err();
    assert!(sampling(Sampling { temperature: -1.0, ..Sampling::default() }));
    assert!(sampling(Sampling { top_k: Some(0), ..Sampling::default() }));
    assert!(sample(&model, &[], 1, &Sampling::default()).is_err());
    Ok(())
}
