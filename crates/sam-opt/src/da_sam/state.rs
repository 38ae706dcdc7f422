//! Saving and loading: what steps leave for the next ones.

use super::config::DaSamConfig;
use super::{DaSam, NAME};
use crate::base::BaseOptimizer;
use crate::domain::DomainId;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tensor::StateDict;

/// What a step leaves for the next ones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Memory {
    /// Running losses of the domains, with `loss_ema`.
    pub(super) losses: BTreeMap<DomainId, f64>,
    /// Reference level of the sharpness, `S̄`.
    pub(super) level: Option<f64>,
    /// The last probes, where `probe_every` reuses them; never those of which none was finite.
    pub(super) probe: Option<Probe>,
}

/// What the probes of a step said, as far as later steps reuse it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Probe {
    /// The step whose noise the directions use.
    pub(super) step: u64,
    /// `ρ_t / ρ`.
    pub(super) scale: f64,
    /// Weight of each direction in `v`; 0 for those that were dropped.
    pub(super) weights: Vec<f64>,
    pub(super) sharpness: f64,
    pub(super) anisotropy: f64,
    /// Directions whose probe wasn't finite.
    pub(super) failures: usize,
}

impl Memory {
    /// Refuses what no step leaves behind. `step` is the number of the next step.
    fn check(&self, config: &DaSamConfig, step: u64) -> std::result::Result<(), String> {
        if let Some((id, loss)) = self.losses.iter().find(|(_, loss)| !loss.is_finite()) {
            return Err(format!("the running loss of the domain {id} is {loss}"));
        }
        if let Some(level) = self.level
            && !(level.is_finite() && level > 0.0)
        {
            return Err(format!("the level of the sharpness is {level}, but it must be finite and above 0"));
        }
        match (&self.probe, config.amdf) {
            (None, _) => Ok(()),
            (Some(_), None) => Err("it has a probe, but these settings don't probe".into()),
            (Some(probe), Some(amdf)) => probe.check(amdf.clip, amdf.directions, step),
        }
    }
}

impl Probe {
    /// Whether a later step can use it.
    pub(super) fn usable(&self) -> bool {
        self.sharpness.is_finite()
    }

    fn check(&self, clip: f64, directions: usize, step: u64) -> std::result::Result<(), String> {
        if self.step >= step {
            return Err(format!("its probe is of step {}, but the next step is {step}", self.step));
        }
        // The bounds were computed in f64; reading them back may cost the last digit.
        if !(self.scale >= (1.0 - 1e-9) / clip && self.scale <= (1.0 + 1e-9) * clip) {
            return Err(format!("its probe scales the radius by {}, beyond clip = {clip}", self.scale));
        }
        let sum: f64 = self.weights.iter().sum();
        let weights = self.weights.iter().all(|w| w.is_finite() && *w >= 0.0) && (sum - 1.0).abs() < 1e-6;
        if !weights || self.weights.len() > directions {
            return Err(format!(
                "its probe has the weights {:?}, which must be at most {directions}, at least 0 and sum to 1",
                self.weights
            ));
        }
        if !(self.sharpness.is_finite() && self.anisotropy.is_finite()) {
            return Err(format!("its probe has the sharpness {} ± {}", self.sharpness, self.anisotropy));
        }
        Ok(())
    }
}

impl<B: BaseOptimizer> DaSam<B> {
    /// Saves step count, settings, learning rate, the running losses and sharpness, and the base optimizer's state;
    /// never the parameters.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a base optimizer that can't be saved.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = self.engine.state_dict(NAME, &self.config)?;
        let value = |result: serde_json::Result<_>| result.map_err(|e| Error::State { reason: e.to_string() });
        state.meta.insert("memory".into(), value(serde_json::to_value(&self.memory))?);
        state.meta.insert("seen".into(), value(serde_json::to_value(&self.seen))?);
        Ok(state)
    }

    /// Continues from a saved state: the next steps are those that the saved optimizer would have done.
    ///
    /// # Errors
    /// [`Error::State`] when it was saved by another method, with other settings or for other parameters, or when it
    /// holds numbers that no step leaves behind; [`Error::NestedPerturbation`] while a guard is open. Nothing has
    /// changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let step = self.engine.check_state(NAME, &self.config, state)?;
        let bad =
            |key: &str, e: &serde_json::Error| Error::State { reason: format!("its \"{key}\" can't be read: {e}.") };
        let get = |key: &str| state.meta.get(key).cloned().unwrap_or_default();
        let memory: Memory = serde_json::from_value(get("memory")).map_err(|e| bad("memory", &e))?;
        memory
            .check(&self.config, step)
            .map_err(|what| Error::State { reason: format!("in its \"memory\", {what}: save it anew.") })?;
        let seen = serde_json::from_value(get("seen")).map_err(|e| bad("seen", &e))?;
        self.engine.load_base(state, step)?;
        (self.memory, self.seen) = (memory, seen);
        Ok(())
    }
}
