//! Settings of a decoding.

use crate::guard::GuardConfig;
use crate::select::{RATIO_CLIP, check_alpha};
use crate::{Error, Result, error::Side};
use serde::{Deserialize, Serialize};

/// How the next token is chosen from the logits of policy (z_d) and reference (z_r). ℓ are log-probabilities, A = ℓ_d − ℓ_r.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Rule {
    /// arg-max of A over V_α: alignment-aware decoding \[paper\].
    #[default]
    Aad,
    /// A draw from softmax(A/τ) over V_α; τ → 0 gives [`Aad`](Self::Aad) \[reconstruction: the paper's rule is greedy\].
    AadSample {
        /// τ, above 0.
        tau: f64,
    },
    /// arg-max of w·A + (1 − w)·ℓ_d over V_α; w = 1 is [`Aad`](Self::Aad), w = 0 greedy decoding of the policy \[ours\].
    AadMix {
        /// w, from 0 to 1.
        w: f64,
    },
    /// arg-max of, or a draw from, ℓ_r + γ(ℓ_d − ℓ_r) \[prior work: emulated fine-tuning, DeRa, proxy tuning\]. γ = 1 is the policy,
    /// γ = 0 the reference, γ → ∞ unfiltered AAD.
    Eft {
        /// γ, at least 0.
        gamma: f64,
        /// 0 takes the arg-max.
        #[serde(default)]
        temperature: f64,
    },
    /// arg-max of ℓ_expert − ℓ_amateur over V_α of the expert \[prior work: contrastive decoding\]. The sums are AAD's; the pair is
    /// another: the reference is a smaller generic model.
    Contrastive,
    /// arg-max of ℓ_d.
    GreedyDpo,
    /// arg-max of ℓ_r.
    GreedyRef,
    /// A draw from one of the models.
    Sample {
        /// Which.
        from: Side,
        /// Divisor of the logits; 0 is greedy.
        temperature: f64,
        /// Keeps the most probable tokens until their probabilities sum to p.
        #[serde(default)]
        top_p: Option<f64>,
        /// Keeps tokens at least this many times as probable as the most probable one.
        #[serde(default)]
        min_p: Option<f64>,
    },
    /// The filter alone: a token of V_α, all with the same probability (or the policy's favourite, which is greedy decoding of the
    /// policy by another way) \[paper's ablation\].
    FilterOnly {
        /// Takes the favourite.
        greedy: bool,
    },
    /// arg-max of A over the k most probable tokens of the policy \[paper's ablation\].
    RatioTopK {
        /// k, at least 1.
        k: usize,
    },
    /// arg-max of A over the most probable tokens of the policy whose probabilities sum to p \[paper's ablation\].
    RatioTopP {
        /// p, above 0 and at most 1.
        p: f64,
    },
}

/// What a rule reads of the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing.
    Policy,
    /// Logits of the candidates, where there is more than one.
    Candidates,
    /// All logits, at every step.
    All,
}

impl Rule {
    /// # Errors
    /// [`Error::InvalidArgument`] for a value outside its domain.
    pub fn validate(&self) -> Result<()> {
        let positive = |name: &str, x: f64| {
            if x.is_finite() && x > 0.0 { Ok(()) } else { Err(Error::invalid(name, "above 0 and finite", x)) }
        };
        let not_negative = |name: &str, x: f64| {
            if x.is_finite() && x >= 0.0 { Ok(()) } else { Err(Error::invalid(name, "at least 0 and finite", x)) }
        };
        let share = |name: &str, x: f64| {
            if x > 0.0 && x <= 1.0 { Ok(()) } else { Err(Error::invalid(name, "above 0 and at most 1", x)) }
        };
        match *self {
            Self::AadSample { tau } => positive("tau", tau),
            Self::AadMix { w } if (0.0..=1.0).contains(&w) => Ok(()),
            Self::AadMix { w } => Err(Error::invalid("w", "from 0 to 1", w)),
            Self::Eft { gamma, temperature } => {
                not_negative("gamma", gamma)?;
                not_negative("temperature", temperature)
            }
            Self::Sample { temperature, top_p, min_p, .. } => {
                not_negative("temperature", temperature)?;
                top_p.map_or(Ok(()), |p| share("top_p", p))?;
                min_p.map_or(Ok(()), |p| share("min_p", p))
            }
            Self::RatioTopK { k: 0 } => Err(Error::invalid("k", "at least 1", 0)),
            Self::RatioTopP { p } => share("p", p),
            Self::Aad
            | Self::Contrastive
            | Self::GreedyDpo
            | Self::GreedyRef
            | Self::FilterOnly { .. }
            | Self::RatioTopK { .. } => Ok(()),
        }
    }

    /// What it reads of the reference.
    pub fn needs(&self) -> Needs {
        match self {
            Self::GreedyDpo | Self::FilterOnly { .. } | Self::Sample { from: Side::Policy, .. } => Needs::Policy,
            Self::GreedyRef | Self::Eft { .. } | Self::Sample { from: Side::Reference, .. } => Needs::All,
            _ => Needs::Candidates,
        }
    }

    /// Whether it draws.
    pub fn is_random(&self) -> bool {
        match *self {
            Self::AadSample { .. } | Self::FilterOnly { greedy: false } => true,
            Self::Eft { temperature, .. } | Self::Sample { temperature, .. } => temperature > 0.0,
            _ => false,
        }
    }
}

/// When the reference is run. The tokens are the same in every mode (up to ties of floating-point numbers).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ReferenceMode {
    /// At every step, with all its logits: the plain loop.
    Eager,
    /// At every step, with the logits of the candidates only.
    CandidateHead,
    /// Only when a step has more than one candidate, over all tokens that came since; logits of the candidates only.
    Lazy {
        /// Most tokens that wait, at least 1.
        max_lag: usize,
    },
}

impl Default for ReferenceMode {
    fn default() -> Self {
        Self::Lazy { max_lag: 32 }
    }
}

/// What ends a text, besides its length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum StopRule {
    /// One of these tokens; it is the last of the text.
    Tokens(Vec<u32>),
    /// These tokens in a row; they are the last of the text.
    Sequence(Vec<u32>),
    /// So many tokens, prompt included.
    TotalLength(usize),
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// A stop token or sequence came; it is the end of the tokens.
    Stop,
    /// The most tokens were generated.
    Length,
    /// One of the models has no more positions.
    Context,
    /// The guard against over-optimization ended it.
    Guard,
    /// The caller ended it.
    Caller,
}

/// Settings of a decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AadConfig {
    /// α: a token is plausible if the policy finds it at least α times as probable as its favourite. 1 is greedy decoding of the
    /// policy, 0 allows everything.
    pub alpha: f64,
    /// The rule.
    pub rule: Rule,
    /// Most tokens that are generated for a prompt.
    pub max_new_tokens: usize,
    /// What ends a text earlier.
    pub stop: Vec<StopRule>,
    /// When the reference is run.
    pub reference: ReferenceMode,
    /// Advantages are cut off so many nats above that of the policy's favourite.
    pub ratio_clip: f64,
    /// No n tokens in a row come twice, prompt included.
    pub no_repeat_ngram: Option<usize>,
    /// Tokens that are never chosen. Log-probabilities don't know of it.
    pub banned: Vec<u32>,
    /// The only tokens that exist, for both models: heads are computed for them only, and log-probabilities are among them. None: all.
    pub allowed: Option<Vec<u32>>,
    /// Whether texts get their log-probabilities under both models. Costs a head of the reference over the finished text, and a pass
    /// where the reference hasn't read it.
    pub scores: bool,
    /// Whether each step's candidates are kept; needs `scores`.
    pub trace: bool,
    /// Whether prompts are used to check that the two models are a pair (a warning, see `generate`).
    pub check_pair: bool,
    /// The guard against over-optimization. It needs each advantage at once, so the reference is run as with
    /// [`Eager`](ReferenceMode::Eager).
    pub guard: Option<GuardConfig>,
    /// Seed of rules that draw. Each row has a stream of its own and one number a step, so that runs can be paired.
    pub seed: u64,
}

impl Default for AadConfig {
    /// The paper's rule with α = 0.1; up to 64 tokens.
    fn default() -> Self {
        Self {
            alpha: 0.1,
            rule: Rule::Aad,
            max_new_tokens: 64,
            stop: Vec::new(),
            reference: ReferenceMode::default(),
            ratio_clip: RATIO_CLIP,
            no_repeat_ngram: None,
            banned: Vec::new(),
            allowed: None,
            scores: true,
            trace: false,
            check_pair: true,
            guard: None,
            seed: 0,
        }
    }
}

impl AadConfig {
    /// With another rule.
    #[must_use]
    pub fn with_rule(&self, rule: Rule) -> Self {
        Self { rule, ..self.clone() }
    }

    /// With another α.
    #[must_use]
    pub fn with_alpha(&self, alpha: f64) -> Self {
        Self { alpha, ..self.clone() }
    }

    /// # Errors
    /// [`Error::BadAlpha`]; [`Error::InvalidArgument`] for the first other value outside its domain.
    pub fn validate(&self) -> Result<()> {
        check_alpha(self.alpha)?;
        self.rule.validate()?;
        if !(self.ratio_clip.is_finite() && self.ratio_clip > 0.0) {
            return Err(Error::invalid("ratio_clip", "above 0 and finite", self.ratio_clip));
        }
        if self.reference == (ReferenceMode::Lazy { max_lag: 0 }) {
            return Err(Error::invalid("max_lag", "at least 1", 0));
        }
        if self.no_repeat_ngram == Some(0) {
            return Err(Error::invalid("no_repeat_ngram", "at least 1, or none", 0));
        }
        if self.allowed.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::invalid("allowed", "at least one token, or none for all", "empty"));
        }
        if self.trace && !self.scores {
            return Err(Error::invalid("trace", "off without `scores`, which it needs", true));
        }
        for rule in &self.stop {
            match rule {
                StopRule::Sequence(tokens) if tokens.is_empty() => {
                    return Err(Error::invalid("a stop sequence", "at least one token", "empty"));
                }
                StopRule::TotalLength(0) => return Err(Error::invalid("a total length", "at least 1", 0)),
                _ => {}
            }
        }
        self.guard.as_ref().map_or(Ok(()), GuardConfig::validate)
    }

    /// Whether a text that ends with `tokens` after a prompt of `prompt` tokens is finished by a stop rule.
    #[cfg_attr(not(feature = "lm"), allow(dead_code))]
    pub(crate) fn stops(&self, prompt: usize, tokens: &[u32]) -> Option<StopReason> {
        let last = tokens.last()?;
        self.stop.iter().find_map(|rule| match rule {
            StopRule::Tokens(ids) if ids.contains(last) => Some(StopReason::Stop),
            StopRule::Sequence(ids) if tokens.ends_with(ids) => Some(StopReason::Stop),
            StopRule::TotalLength(most) if prompt + tokens.len() >= *most => Some(StopReason::Length),
            _ => None,
        })
    }
}
