//! Settings of a generation.

use super::processors::{LogitsProcessor, MinP, NoRepeatNgram, RepetitionPenalty, Temperature, TopK, TopP};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Settings of a generation. The default is greedy, up to 64 tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateConfig {
    /// Most tokens that are generated for a prompt.
    pub max_new_tokens: usize,
    /// Divisor of the logits; 0 takes the most probable token (greedy), whatever the filters below say.
    pub temperature: f64,
    /// Keeps the k most probable tokens.
    pub top_k: Option<usize>,
    /// Keeps the most probable tokens until their probabilities sum to p.
    pub top_p: Option<f64>,
    /// Keeps tokens at least this many times as probable as the most probable one.
    pub min_p: Option<f64>,
    /// Divides positive and multiplies negative logits of tokens that came before, prompt included; 1 changes nothing. From
    /// 1e-3 to 1e3.
    pub repetition_penalty: f64,
    /// No n tokens in a row come twice.
    pub no_repeat_ngram: Option<usize>,
    /// Tokens that end a text. They are in the result.
    pub stop: Vec<u32>,
    /// Whether an [`Lm`](crate::Lm) leaves its checkpoint's stop tokens aside if `stop` is empty: no token ends a text then.
    pub ignore_checkpoint_stop: bool,
    /// Seed of the sampler. Each row has a stream of its own, one number a step, so that rows and runs can be paired.
    pub seed: u64,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            max_new_tokens: 64,
            temperature: 0.0,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
            no_repeat_ngram: None,
            stop: Vec::new(),
            ignore_checkpoint_stop: false,
            seed: 0,
        }
    }
}

impl GenerateConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first value outside its domain.
    pub fn validate(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(Error::invalid("temperature", "at least 0 and finite", self.temperature));
        }
        RepetitionPenalty::check(self.repetition_penalty)?;
        for (name, value) in [("top_k", self.top_k), ("no_repeat_ngram", self.no_repeat_ngram)] {
            if value == Some(0) {
                return Err(Error::invalid(name, "at least 1, or none", 0));
            }
        }
        for (name, value) in [("top_p", self.top_p), ("min_p", self.min_p)] {
            if value.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
                return Err(Error::invalid(name, "above 0 and at most 1, or none", format!("{value:?}")));
            }
        }
        Ok(())
    }

    /// The processors of these settings, in the order in which they are applied.
    pub(super) fn processors(&self) -> Vec<Box<dyn LogitsProcessor>> {
        let mut list: Vec<Box<dyn LogitsProcessor>> = Vec::new();
        if self.repetition_penalty != 1.0 {
            list.push(Box::new(RepetitionPenalty(self.repetition_penalty)));
        }
        if let Some(n) = self.no_repeat_ngram {
            list.push(Box::new(NoRepeatNgram(n)));
        }
        if self.temperature == 0.0 {
            return list;
        }
        if self.temperature != 1.0 {
            list.push(Box::new(Temperature(self.temperature)));
        }
        if let Some(k) = self.top_k {
            list.push(Box::new(TopK(k)));
        }
        if let Some(p) = self.top_p {
            list.push(Box::new(TopP(p)));
        }
        if let Some(p) = self.min_p {
            list.push(Box::new(MinP(p)));
        }
        list
    }
}
