//! The implicit reward of a pair: β log π(y|x)/π_ref(y|x), token by token \[prior work: direct preference optimization\].

use crate::engine::{Engine, Heads};
use crate::generate::log_probs_of;
use crate::pair::ModelPair;
use crate::{Error, Result};
use lm::generate::left_pad;
use lm::model::CausalLm;
use serde::{Deserialize, Serialize};
use tensor::tch::{Tensor, no_grad_guard};

/// A completion seen by both models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PerToken {
    /// β.
    pub beta: f64,
    /// Log-probability of each token under the policy, in nats.
    pub policy: Vec<f64>,
    /// Under the reference.
    pub reference: Vec<f64>,
}

impl PerToken {
    /// The reward of the text, β Σ A.
    pub fn total(&self) -> f64 {
        self.beta * self.advantages().sum::<f64>()
    }

    /// A of each token, in nats.
    pub fn advantages(&self) -> impl Iterator<Item = f64> + '_ {
        self.policy.iter().zip(&self.reference).map(|(ours, theirs)| ours - theirs)
    }

    /// Log-probability of the completion under the policy.
    pub fn logp_policy(&self) -> f64 {
        self.policy.iter().sum()
    }

    /// Under the reference.
    pub fn logp_ref(&self) -> f64 {
        self.reference.iter().sum()
    }
}

/// How texts are scored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewardConfig {
    /// β.
    pub beta: f64,
    /// The only tokens that exist, for both models; none: all. Completions must be of these.
    pub allowed: Option<Vec<u32>>,
    /// Texts that are computed together.
    pub part: usize,
}

impl Default for RewardConfig {
    /// β = 0.1, all tokens, 16 texts at a time.
    fn default() -> Self {
        Self { beta: 0.1, allowed: None, part: 16 }
    }
}

impl RewardConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first value outside its domain.
    pub fn validate(&self) -> Result<()> {
        if !(self.beta.is_finite() && self.beta > 0.0) {
            return Err(Error::invalid("beta", "positive and finite", self.beta));
        }
        if self.allowed.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::invalid("allowed", "at least one token, or none for all", "empty"));
        }
        if self.part == 0 {
            return Err(Error::invalid("part", "at least 1", 0));
        }
        Ok(())
    }
}

/// The implicit reward of a completion.
///
/// # Errors
/// As [`implicit_rewards`].
pub fn implicit_reward<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    prompt: &[u32],
    completion: &[u32],
    beta: f64,
) -> Result<PerToken> {
    let config = RewardConfig { beta, ..RewardConfig::default() };
    let mut rewards = implicit_rewards(pair, &[(prompt, completion)], &config)?;
    // One text, one reward.
    rewards.pop().ok_or(Error::EmptyPrompt { row: 0 })
}

/// The implicit rewards of completions of prompts. An empty completion has the reward 0.
///
/// # Errors
/// As [`RewardConfig::validate`]; [`Error::EmptyPrompt`], [`Error::ContextOverflow`], [`Error::TokenOutOfRange`];
/// [`Error::InvalidArgument`] for a token of a completion that isn't allowed; what the models report.
pub fn implicit_rewards<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    texts: &[(&[u32], &[u32])],
    config: &RewardConfig,
) -> Result<Vec<PerToken>> {
    config.validate()?;
    let _guard = no_grad_guard();
    let heads = Heads::new(config.allowed.as_deref(), pair.tokens())?;
    for (row, (prompt, completion)) in texts.iter().enumerate() {
        pair.check_text(row, prompt, completion)?;
        if let Some(id) = completion.iter().find(|id| heads.place(**id).is_none()) {
            return Err(Error::invalid(format!("the completion of text {row}"), "of allowed tokens", id));
        }
    }
    let mut rewards = Vec::with_capacity(texts.len());
    for part in texts.chunks(config.part) {
        // The last token predicts nothing that is asked for.
        let read = |(prompt, completion): &(&[u32], &[u32])| {
            [*prompt, &completion[..completion.len().saturating_sub(1)]].concat()
        };
        let rows: Vec<Vec<u32>> = part.iter().map(read).collect();
        let (ids, real) = left_pad(&rows, pair.device())?;
        let mut engine = Engine::new(pair, true);
        let ours = engine.read(&ids, real.as_ref())?;
        let Some(theirs) = engine.catch_up()? else { continue };
        for (row, (_, completion)) in part.iter().enumerate() {
            let targets: Vec<i64> = completion.iter().filter_map(|&id| heads.place(id)).map(i64::from).collect();
            let n = targets.len() as i64;
            let before = |hidden: &Tensor| -> Result<Tensor> {
                Ok(hidden.f_select(0, row as i64)?.f_narrow(0, hidden.size()[1] - n, n)?) // (n, width)
            };
            let (policy, reference) = if n == 0 {
                (Vec::new(), Vec::new())
            } else {
                (
                    log_probs_of(&heads.all(pair.policy(), &before(&ours)?)?, &targets)?,
                    log_probs_of(&heads.all(pair.reference(), &before(&theirs.hidden)?)?, &targets)?,
                )
            };
            rewards.push(PerToken { beta: config.beta, policy, reference });
        }
    }
    Ok(rewards)
}
