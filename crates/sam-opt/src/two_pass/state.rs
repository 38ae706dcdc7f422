//! Saving and loading.

use super::{RhoOverride, TwoPass, valid_rho};
use crate::base::BaseOptimizer;
use crate::rule::Rule;
use crate::{Error, Result};
use serde_json::Value;
use tensor::StateDict;

/// Value of the key `rho` where a function gave the radius.
const FUNCTION: &str = "function";

impl<B: BaseOptimizer, R: Rule> TwoPass<B, R> {
    /// Saves step count, settings, learning rate, a radius set by [`set_rho`](Self::set_rho), and the base
    /// optimizer's state; never the parameters.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a base optimizer that can't be saved.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = self.engine.state_dict(R::NAME, &self.config)?;
        match &self.rho_override {
            None => {}
            Some(RhoOverride::Fixed(rho)) => {
                state.meta.insert("rho".into(), (*rho).into());
            }
            Some(RhoOverride::Function(_)) => {
                state.meta.insert("rho".into(), FUNCTION.into());
            }
        }
        Ok(state)
    }

    /// Continues from a saved state: the next steps are those that the saved optimizer would have done.
    ///
    /// # Errors
    /// [`Error::State`] when it was saved by another method, with other settings, for other parameters, or with a
    /// radius function that hasn't been given again; [`Error::NestedPerturbation`] while a guard is open.
    /// Nothing has changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let step = self.engine.check_state(R::NAME, &self.config, state)?;
        let bad = |reason: String| Error::State { reason };
        let rho = match state.meta.get("rho") {
            None => None,
            Some(Value::String(text)) if text == FUNCTION => {
                if !matches!(self.rho_override, Some(RhoOverride::Function(_))) {
                    return Err(bad("a function gave its radius: call `set_rho_fn` with it before loading.".into()));
                }
                self.rho_override.take()
            }
            Some(value) => {
                let number = value.as_f64().ok_or_else(|| bad(format!("its radius \"rho\" is {value}.")))?;
                Some(RhoOverride::Fixed(valid_rho(number)?))
            }
        };
        let loaded = self.engine.load_base(state, step);
        if loaded.is_ok() || matches!(rho, Some(RhoOverride::Function(_))) {
            self.rho_override = rho;
        }
        loaded
    }
}
