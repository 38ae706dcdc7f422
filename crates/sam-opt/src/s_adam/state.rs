//! Saving and loading.

use super::{Memory, SAdam, SAdamConfig};
use crate::{Error, Result};
use tensor::StateDict;

const METHOD: &str = "S-Adam";

impl SAdam {
    /// Saves step count, settings, learning rate, AdamW's moments, the running squared slope and the LGI in use; never
    /// the parameters.
    ///
    /// # Errors
    /// None in practice; settings that can't be written as JSON.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = self.engine.state_dict(METHOD, &self.settings())?;
        let memory = serde_json::to_value(&self.memory).map_err(|e| Error::State { reason: e.to_string() })?;
        state.meta.insert("memory".into(), memory);
        Ok(state)
    }

    /// Continues from a saved state: the next steps are those that the saved optimizer would have done.
    ///
    /// # Errors
    /// [`Error::State`] when it was saved by another method, with other settings or for other parameters;
    /// [`Error::StateMismatch`] for a tensor of another shape; [`Error::NestedPerturbation`] while a guard is open.
    /// Nothing has changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let step = self.engine.check_state(METHOD, &self.settings(), state)?;
        let bad = |reason: String| Error::State { reason };
        let memory = state.meta.get("memory").ok_or_else(|| bad("it has no \"memory\".".into()))?;
        let memory: Memory =
            serde_json::from_value(memory.clone()).map_err(|e| bad(format!("its \"memory\" can't be read: {e}.")))?;
        let scopes = self.memory.lgi.len();
        if memory.lgi.len() != scopes || memory.slope_square.len() != scopes {
            let (lgi, slopes) = (memory.lgi.len(), memory.slope_square.len());
            return Err(bad(format!("it remembers {lgi} LGIs and {slopes} slopes, but {scopes} are needed.")));
        }
        let remembered = memory.lgi.iter().chain(&memory.slope_square).flatten();
        if let Some(value) = remembered.clone().find(|v| !(v.is_finite() && **v >= 0.0)) {
            return Err(bad(format!(
                "its \"memory\" has {value}, but LGIs and squared slopes are finite and at least 0."
            )));
        }
        self.engine.load_base(state, step)?;
        self.memory = memory;
        self.below_precision = None;
        Ok(())
    }

    /// The settings that a saved state must share; the learning rate is kept apart, because schedules change it.
    fn settings(&self) -> SAdamConfig {
        SAdamConfig { lr: 0.0, ..self.config.clone() }
    }
}
