//! Alignment-aware decoding as plainly as it can be written: one text at a time, both models over the whole text at every step, no cache,
//! no shared layers, log-softmax over all tokens. It is what `generate` is tested against.

use crate::config::{AadConfig, Rule};
use crate::engine::{Heads, values};
use crate::pair::ModelPair;
use crate::rules::repeating;
use crate::select::select_by_log_softmax;
use crate::{Error, Result};
use lm::model::CausalLm;
use tensor::tch::{Tensor, no_grad_guard};

/// The tokens after each prompt, for [`Rule::Aad`].
///
/// # Errors
/// As [`generate`](crate::generate::generate); [`Error::InvalidArgument`] for another rule.
pub fn generate<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    prompts: &[Vec<u32>],
    config: &AadConfig,
) -> Result<Vec<Vec<u32>>> {
    config.validate()?;
    if config.rule != Rule::Aad {
        return Err(Error::invalid("rule", "Aad: the plain loop has no other", format!("{:?}", config.rule)));
    }
    let _guard = no_grad_guard();
    let heads = Heads::new(config.allowed.as_deref(), pair.tokens())?;
    let mut texts = Vec::with_capacity(prompts.len());
    for (row, prompt) in prompts.iter().enumerate() {
        pair.check_text(row, prompt, &[])?;
        let mut text = prompt.clone();
        while text.len() - prompt.len() < config.max_new_tokens && text.len() as i64 <= pair.context() {
            let mut z_policy = logits(pair, pair.policy(), &heads, &text)?;
            let z_ref = logits(pair, pair.reference(), &heads, &text)?;
            let repeated = config.no_repeat_ngram.map(|n| repeating(&text, n).collect::<Vec<_>>()).unwrap_or_default();
            for place in config.banned.iter().chain(&repeated).filter_map(|&id| heads.place(id)) {
                z_policy[place as usize] = f32::NEG_INFINITY;
            }
            let choice = select_by_log_softmax(&z_policy, &z_ref, config.alpha);
            let choice = choice.map_err(|e| heads.located(e, text.len() - prompt.len(), row))?;
            text.push(heads.id(choice.token));
            if config.stops(prompt.len(), &text[prompt.len()..]).is_some() {
                break;
            }
        }
        texts.push(text.split_off(prompt.len()));
    }
    Ok(texts)
}

/// Logits after a text.
fn logits<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    model: &impl CausalLm,
    heads: &Heads,
    text: &[u32],
) -> Result<Vec<f32>> {
    let ids: Vec<i64> = text.iter().map(|&id| id.into()).collect();
    let ids = Tensor::f_from_slice(&ids)?.f_view([1, -1])?.f_to_device(pair.device())?;
    let hidden = model.forward_hidden(&ids, None, &mut model.new_cache())?;
    values(&heads.all(model, &hidden.f_select(1, -1)?)?)
}
