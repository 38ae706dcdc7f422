//! Whether preference training goes wrong: a policy that loses the texts it should like, and text that repeats itself.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{HashSet, VecDeque};

/// Settings of [`CollapseMonitor`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MonitorConfig {
    /// Steps that are looked at together.
    pub window: usize,
    /// Nats a token that the chosen texts may lose against the reference, by the mean over the window.
    pub limit: f64,
}

impl Default for MonitorConfig {
    /// Half a nat a token over 10 steps.
    fn default() -> Self {
        Self { window: 10, limit: 0.5 }
    }
}

impl MonitorConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first field that can't be.
    pub fn validate(&self) -> Result<()> {
        if self.window == 0 {
            return Err(Error::invalid("window", "at least 1", 0));
        }
        if self.limit.is_nan() || self.limit <= 0.0 {
            return Err(Error::invalid("limit", "positive", self.limit));
        }
        Ok(())
    }
}

/// Follows the log-ratio of chosen texts to the reference.
///
/// The margin grows as well when the chosen text loses probability and the rejected one loses more; what the policy then
/// writes is neither. This is the trend that shows it.
#[derive(Debug, Clone)]
pub struct CollapseMonitor {
    config: MonitorConfig,
    ratios: VecDeque<f64>,
}

impl CollapseMonitor {
    /// # Errors
    /// As [`MonitorConfig::validate`].
    pub fn new(config: MonitorConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self { config, ratios: VecDeque::new() })
    }

    /// Takes in a step's mean log-ratio a token, `log π(y_w)/π_ref(y_w) / |y_w|`. Gives the mean over the window if it is
    /// full and lower than the limit allows.
    pub fn observe(&mut self, ratio: f64) -> Option<f64> {
        if self.ratios.len() >= self.config.window {
            self.ratios.pop_front();
        }
        self.ratios.push_back(ratio);
        let mean = self.ratios.iter().sum::<f64>() / self.ratios.len() as f64;
        (self.ratios.len() == self.config.window && mean < -self.config.limit).then_some(mean)
    }

    /// The window, oldest first.
    pub(super) fn window(&self) -> Vec<f64> {
        self.ratios.iter().copied().collect()
    }

    pub(super) fn set_window(&mut self, ratios: Vec<f64>) {
        let surplus = ratios.len().saturating_sub(self.config.window);
        self.ratios = ratios.into_iter().skip(surplus).collect();
    }
}

/// Share of the `n`-grams of a text that have come before in it: 0 for none, near 1 for a text that only repeats itself.
pub fn repetition(tokens: &[u32], n: usize) -> f64 {
    if n == 0 || tokens.len() < n {
        return 0.0;
    }
    let mut seen = HashSet::new();
    let repeated = tokens.windows(n).filter(|gram| !seen.insert(*gram)).count();
    repeated as f64 / (tokens.len() + 1 - n) as f64
}
