//! Saving and loading.

use super::{RhoOverride, TwoPass, valid_rho};
use crate::base::BaseOptimizer;
use crate::rule::Rule;
use crate::{Error, Result};
use serde_json::Value;
use tensor::StateDict;
use tensor::tch::Tensor;

/// Value of the key `rho` where a function gave the radius.
const FUNCTION: &str = "function";

impl<B: BaseOptimizer, R: Rule> TwoPass<B, R> {
    /// Saves step count, settings, learning rate, a radius set by [`set_rho`](Self::set_rho), and the base
    /// optimizer's state; never the parameters.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a base optimizer that can't be saved.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = self.base.state_dict(self.all.names())?;
        state.meta.insert("method".into(), R::NAME.into());
        state.meta.insert("step".into(), self.step.into());
        state.meta.insert("config".into(), self.settings()?);
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
        self.refuse_open_guard()?;
        let bad = |reason: String| Error::State { reason };
        let method = state.meta.get("method").and_then(Value::as_str).unwrap_or("nothing");
        if method != R::NAME {
            return Err(bad(format!("it was saved by {method}, but this is {}.", R::NAME)));
        }
        let step = state.meta.get("step").and_then(Value::as_u64);
        let step = step.ok_or_else(|| bad("it has no step count \"step\".".into()))?;
        let (own, saved) = (self.settings()?, state.meta.get("config").unwrap_or(&Value::Null));
        if *saved != own {
            let reason =
                format!("its settings are {saved}, those here are {own}: build the optimizer with the saved ones.");
            return Err(bad(reason));
        }
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
        let params: Vec<(&str, &Tensor)> = self.all.iter().collect();
        let loaded = self.base.load_state_dict(state, &params);
        if loaded.is_ok() || matches!(rho, Some(RhoOverride::Function(_))) {
            self.rho_override = rho;
        }
        loaded?;
        self.step = step;
        Ok(())
    }

    fn settings(&self) -> Result<Value> {
        serde_json::to_value(&self.config).map_err(|e| Error::State { reason: e.to_string() })
    }
}
