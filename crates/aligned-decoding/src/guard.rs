//! Guards against over-optimization, and the choice of α for a budget.
//!
//! A decoder that follows advantages can run away from text: the score rises while words repeat. A [`Guard`] watches the running
//! mean of A and repetition; [`calibrate`] finds the smallest α that keeps a measure (log-likelihood, repetition) within a budget.

use crate::select::check_alpha;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{HashSet, VecDeque};

/// What a guard does about it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// Ends the text.
    Stop,
    /// Multiplies α, up to 1, and goes on; the window starts anew.
    RaiseAlpha {
        /// Above 1.
        factor: f64,
    },
}

/// Settings of a [`Guard`]. The bounds are ours \[ours\]; calibrate them on the pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// Tokens over which A is averaged and repetition is counted.
    pub window: usize,
    /// Most mean advantage, in nats a token. None: it isn't looked at.
    pub max_mean_advantage: Option<f64>,
    /// Length of the runs of tokens that count as repeated.
    pub ngram: usize,
    /// Largest share of repeated runs in the window. None: it isn't looked at.
    pub max_repetition: Option<f64>,
    /// What is done.
    pub action: Action,
}

impl Default for GuardConfig {
    /// Over 16 tokens: 3 nats a token, or every third run of three a repetition; stops.
    fn default() -> Self {
        Self {
            window: 16,
            max_mean_advantage: Some(3.0),
            ngram: 3,
            max_repetition: Some(1.0 / 3.0),
            action: Action::Stop,
        }
    }
}

impl GuardConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first value outside its domain.
    pub fn validate(&self) -> Result<()> {
        if self.window == 0 {
            return Err(Error::invalid("window", "at least 1", 0));
        }
        if self.ngram == 0 || self.ngram > self.window {
            return Err(Error::invalid("ngram", format!("from 1 to the window, {}", self.window), self.ngram));
        }
        if let Some(most) = self.max_mean_advantage.filter(|m| !m.is_finite()) {
            return Err(Error::invalid("max_mean_advantage", "finite, or none", most));
        }
        if let Some(most) = self.max_repetition.filter(|m| !(0.0..=1.0).contains(m)) {
            return Err(Error::invalid("max_repetition", "from 0 to 1, or none", most));
        }
        match self.action {
            Action::RaiseAlpha { factor } if !(factor.is_finite() && factor > 1.0) => {
                Err(Error::invalid("factor", "above 1 and finite", factor))
            }
            _ => Ok(()),
        }
    }
}

/// What a guard sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    /// Nothing.
    Fine,
    /// The mean advantage of the window is above its bound.
    Eager {
        /// It.
        mean: f64,
    },
    /// Runs of tokens repeat.
    Repeats {
        /// Their share in the window.
        share: f64,
    },
}

/// Watches one text.
#[derive(Debug, Clone)]
pub struct Guard {
    config: GuardConfig,
    seen: VecDeque<(u32, f64)>,
}

impl Guard {
    /// Before the first token.
    ///
    /// # Errors
    /// As [`GuardConfig::validate`].
    pub fn new(config: GuardConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self { config, seen: VecDeque::new() })
    }

    /// Looks at the next token and its advantage. It judges once the window is full.
    pub fn observe(&mut self, token: u32, advantage: f64) -> Verdict {
        self.seen.push_back((token, advantage));
        if self.seen.len() > self.config.window {
            self.seen.pop_front();
        }
        if self.seen.len() < self.config.window {
            return Verdict::Fine;
        }
        let mean = self.seen.iter().map(|(_, a)| a).sum::<f64>() / self.seen.len() as f64;
        if self.config.max_mean_advantage.is_some_and(|most| mean > most) {
            return Verdict::Eager { mean };
        }
        let tokens: Vec<u32> = self.seen.iter().map(|(token, _)| *token).collect();
        let share = repetition(&tokens, self.config.ngram);
        if self.config.max_repetition.is_some_and(|most| share > most) {
            return Verdict::Repeats { share };
        }
        Verdict::Fine
    }

    /// α after a verdict that isn't fine; none if the text shall end.
    pub fn react(&mut self, alpha: f64) -> Option<f64> {
        match self.config.action {
            Action::Stop => None,
            Action::RaiseAlpha { factor } => {
                self.seen.clear();
                // From 0 no factor leads anywhere.
                Some((alpha.max(1e-3) * factor).min(1.0))
            }
        }
    }
}

/// Share of runs of n tokens that were there before in the text; 0 for a text with fewer.
pub fn repetition(tokens: &[u32], n: usize) -> f64 {
    if n == 0 || tokens.len() < n {
        return 0.0;
    }
    let different: HashSet<&[u32]> = tokens.windows(n).collect();
    let runs = tokens.len() + 1 - n;
    (runs - different.len()) as f64 / runs as f64
}

/// What [`calibrate`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// The smallest α within the budget.
    pub alpha: f64,
    /// The measure at the values of α that were tried, from the largest on.
    pub measured: Vec<(f64, f64)>,
}

/// The smallest of some values of α whose measure is within the budget, as are those of all larger ones. The measure (mean
/// negative log-likelihood under the reference, repetition) is expected to fall as α rises; values are tried from the largest on
/// until the first that exceeds the budget.
///
/// ```
/// use aligned_decoding::guard::calibrate;
///
/// // Negative log-likelihood of texts decoded with α: here a formula.
/// let found = calibrate(&[0.01, 0.05, 0.1, 0.3, 1.0], 2.6, |alpha| Ok(1.7 - 0.45 * alpha.ln()))?;
/// assert_eq!(found.alpha, 0.3);
/// assert_eq!(found.measured.len(), 3);
/// # Ok::<(), aligned_decoding::Error>(())
/// ```
///
/// # Errors
/// [`Error::BadAlpha`]; [`Error::InvalidArgument`] without values, for a budget or a measure that isn't finite, or if even the largest
/// α exceeds the budget; what the closure reports.
pub fn calibrate(alphas: &[f64], budget: f64, mut measure: impl FnMut(f64) -> Result<f64>) -> Result<Calibration> {
    alphas.iter().try_for_each(|&alpha| check_alpha(alpha))?;
    if !budget.is_finite() {
        return Err(Error::invalid("budget", "finite", budget));
    }
    let mut sorted = alphas.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted.dedup();
    let (mut found, mut measured) = (None, Vec::new());
    for alpha in sorted {
        let value = measure(alpha)?;
        if !value.is_finite() {
            return Err(Error::invalid(format!("the measure at alpha = {alpha}"), "finite", value));
        }
        measured.push((alpha, value));
        if value > budget {
            break;
        }
        found = Some(alpha);
    }
    match (found, measured.first()) {
        (Some(alpha), _) => Ok(Calibration { alpha, measured }),
        (None, None) => Err(Error::invalid("alphas", "at least one", "none")),
        (None, Some((alpha, value))) => {
            let expected = format!("at least {value}, what alpha = {alpha} has");
            Err(Error::invalid("budget", expected, budget))
        }
    }
}
