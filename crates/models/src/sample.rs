//! Text from a trained model.

use rand_chacha::rand_core::Rng;
use tch::{Kind, Tensor, no_grad};

use crate::error::{Error, Result};
use crate::language_model::LanguageModel;
use crate::tokens::stream;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits: below 1, likely tokens become likelier; at 0, the likeliest is always chosen.
    pub temperature: f64,
    /// Restricts the choice to this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// The same seed gives the same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    /// Temperature 0.8 among the 200 likeliest, as nanoGPT does.
    fn default() -> Sampling {
        Sampling { temperature: 0.8, top_k: Some(200), seed: 1337 }
    }
}

/// The `count` tokens with which the model continues `prompt`; it sees as many of the prompt's tokens as fit its
/// context.
///
/// # Errors
/// [`Error::Argument`] if `prompt` is empty or `sampling` out of range, [`Error::Torch`] if a token of the
/// prompt is outside the model's vocabulary or memory runs out.
pub fn sample(
    model: &dyn LanguageModel,
    prompt: &[u16],
    count: usize,
    sampling: &Sampling,
) -> Result<Vec<u16>> {
    sampling.validate()?;
    if prompt.is_empty() {
        return Err(Error::argument("the prompt has no token; the model needs one to go on from"));
    }
    let mut random = stream(sampling.seed, 0);
    let mut ids: Vec<i64> = prompt.iter().map(|&token| token.into()).collect();
    no_grad(|| {
        for _ in 0..count {
            let seen = ids.len().min(model.context() as usize);
            let inputs = Tensor::f_from_slice(&ids[ids.len() - seen..])?.f_unsqueeze(0)?;
            let logits = model.next_logits(&inputs.f_to_device(model.device())?)?;
            ids.push(sampling.choose(&logits, &mut random)?);
        }
        Ok(())
    })
    .map(|()| ids[prompt.len()..].iter().map(|&id| id as u16).collect())
}

impl Sampling {
    fn validate(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            let temperature = self.temperature;
            return Err(Error::argument(format!("temperature is {temperature}; it must be at least 0")));
        }
        if self.top_k == Some(0) {
            return Err(Error::argument("top-k is 0; it must leave a token to choose"));
        }
        Ok(())
    }

    /// The id to continue with, given the logits `[vocab]` of all ids.
    fn choose(&self, logits: &Tensor, random: &mut impl Rng) -> Result<i64> {
        if self.temperature == 0.0 {
            return Ok(logits.f_argmax(None, false)?.f_int64_value(&[])?);
        }
        let vocab = logits.numel();
        let kept = self.top_k.map_or(vocab, |k| k.min(vocab));
        // Sorted, so that the draw does not depend on the order in which ties are found.
        let (logits, ids) = logits.f_topk(kept as i64, 0, true, true)?;
        let probabilities =
            logits.f_to_kind(Kind::Double)?.f_div_scalar(self.temperature)?.f_softmax(0, None)?;
        let cumulative = Vec::<f64>::try_from(probabilities.f_cumsum(0, None)?)?;
        // 53 random bits are all that fit into `0.0..1.0`.
        let drawn = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let place = cumulative.partition_point(|&upto| upto <= drawn).min(kept - 1);
        Ok(ids.f_int64_value(&[place as i64])?)
    }
}
