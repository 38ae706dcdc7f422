//! ARGS: decoding with an explicit reward model, arg-max over the k most probable tokens of ℓ(v) + w·r(x, y_<t v)
//! \[prior work: "ARGS: Alignment as Reward-Guided Search"\].

use crate::config::{StopReason, StopRule};
use crate::engine::values;
use crate::rules::{Chooser, repeating};
use crate::{Error, Result};
use lm::model::CausalLm;
use serde::{Deserialize, Serialize};
use tensor::tch::{Device, Tensor, no_grad_guard};

/// Settings of [`args`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ArgsConfig {
    /// Tokens whose reward is asked for at each step.
    pub k: usize,
    /// Nats that a unit of reward counts.
    pub weight: f64,
    /// Most tokens.
    pub max_new_tokens: usize,
    /// What ends a text earlier.
    pub stop: Vec<StopRule>,
    /// No n tokens in a row come twice.
    pub no_repeat_ngram: Option<usize>,
}

impl Default for ArgsConfig {
    /// k = 10, weight 1.5, up to 64 tokens.
    fn default() -> Self {
        Self { k: 10, weight: 1.5, max_new_tokens: 64, stop: Vec::new(), no_repeat_ngram: None }
    }
}

/// A text that was decoded with a reward, and why it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgsText {
    /// The tokens after the prompt.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub stop: StopReason,
    /// Calls of the reward.
    pub calls: usize,
}

/// Continues a prompt with one model and a reward of unfinished texts: `reward` gets the prompt, and the text so far with a candidate at
/// its end.
///
/// # Errors
/// [`Error::InvalidArgument`] for settings outside their domain or a reward that isn't finite; [`Error::EmptyPrompt`];
/// [`Error::NonFiniteLogits`], [`Error::NothingAllowed`]; what model and reward report.
pub fn args(
    model: &impl CausalLm,
    device: Device,
    prompt: &[u32],
    config: &ArgsConfig,
    mut reward: impl FnMut(&[u32], &[u32]) -> Result<f64>,
) -> Result<ArgsText> {
    if !config.weight.is_finite() {
        return Err(Error::invalid("weight", "finite", config.weight));
    }
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt { row: 0 });
    }
    let settings = crate::AadConfig {
        stop: config.stop.clone(),
        no_repeat_ngram: config.no_repeat_ngram,
        ..crate::AadConfig::default()
    };
    settings.validate()?;
    let mut chooser = Chooser::new(crate::Rule::RatioTopK { k: config.k }, crate::select::RATIO_CLIP)?;
    let _guard = no_grad_guard();
    let mut cache = model.new_cache();
    let mut text = prompt.to_vec();
    let (mut stop, mut calls, mut read) = (StopReason::Length, 0, 0);
    while text.len() - prompt.len() < config.max_new_tokens {
        if text.len() as i64 > model.context() {
            stop = StopReason::Context;
            break;
        }
        let step = text.len() - prompt.len();
        let ids: Vec<i64> = text[read..].iter().map(|&id| id.into()).collect();
        read = text.len();
        let ids = Tensor::f_from_slice(&ids)?.f_view([1, -1])?.f_to_device(device)?;
        let hidden = model.forward_hidden(&ids, None, &mut cache)?;
        let mut z = values(&model.head(&hidden.f_select(1, -1)?)?)?;
        if let Some(n) = config.no_repeat_ngram {
            repeating(&text, n).for_each(|id| z[id as usize] = f32::NEG_INFINITY);
        }
        let candidates = chooser.candidates(&z, 0.0).map_err(|e| e.at(step, 0))?;
        let mut best: Option<(u32, f64)> = None;
        for candidate in candidates {
            text.push(candidate.id);
            let r = reward(prompt, &text[prompt.len()..]);
            text.pop();
            let r = r?;
            calls += 1;
            if !r.is_finite() {
                return Err(Error::invalid(format!("the reward at step {step}"), "finite", r));
            }
            let score = f64::from(candidate.z) + config.weight * r;
            if best.is_none_or(|(_, old)| score > old) {
                best = Some((candidate.id, score));
            }
        }
        let Some((id, _)) = best else { return Err(Error::NothingAllowed { step, row: 0 }) };
        text.push(id);
        if let Some(reason) = settings.stops(prompt.len(), &text[prompt.len()..]) {
            stop = reason;
            break;
        }
    }
    Ok(ArgsText { tokens: text.split_off(prompt.len()), stop, calls })
}
