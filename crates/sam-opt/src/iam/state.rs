//! Saving and loading.

use super::{Iam, delta};
use crate::Result;
use crate::base::BaseOptimizer;
use tensor::StateDict;

const NAME: &str = "Iam";

impl<B: BaseOptimizer> Iam<B> {
    /// Saves step count, settings, learning rate, the persistent δ if there is one (`"delta/{name}"`), and the base
    /// optimizer's state; never the parameters.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a base optimizer that can't be saved.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = self.engine.state_dict(NAME, &self.config)?;
        if let Some(perturbed) = &self.perturbed {
            delta::save(self.delta.as_ref(), &perturbed.set, &mut state);
        }
        Ok(state)
    }

    /// Continues from a saved state: the next steps are those that the saved optimizer would have done.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) when it was saved by another method, with other settings or for other
    /// parameters, or when a part of δ is missing or not finite;
    /// [`Error::StateMismatch`](crate::Error::StateMismatch) when a part has another shape;
    /// [`Error::NestedPerturbation`](crate::Error::NestedPerturbation) while a guard is open. Nothing has changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let step = self.engine.check_state(NAME, &self.config, state)?;
        let delta = match &self.perturbed {
            Some(perturbed) => delta::load(&perturbed.set, state)?,
            None => None,
        };
        self.engine.load_base(state, step)?;
        self.delta = delta;
        Ok(())
    }
}
