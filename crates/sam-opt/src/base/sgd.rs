//! Stochastic gradient descent with momentum.

use super::{BaseOptimizer, Lists, Moments, Pending, Slot, check, count, load, momenta, prepare, save, state_kind};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensor::StateDict;
use tensor::tch::{Tensor, no_grad};

/// Settings of [`Sgd`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SgdConfig {
    /// Learning rate.
    pub lr: f64,
    /// Momentum μ.
    pub momentum: f64,
    /// Dampening of the gradient in the momentum.
    pub dampening: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// Weight decay λ (added to the gradient).
    pub weight_decay: f64,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { lr: 0.1, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

impl SgdConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field.
    pub fn validate(&self) -> Result<()> {
        check("lr", self.lr, 0.0, f64::INFINITY)?;
        check("momentum", self.momentum, 0.0, 1.0)?;
        check("weight_decay", self.weight_decay, 0.0, f64::INFINITY)?;
        check("dampening", self.dampening, 0.0, 1.0)?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::invalid(
                "nesterov",
                "off, or used with a momentum above 0 and no dampening",
                format!("on with momentum {} and dampening {}", self.momentum, self.dampening),
            ));
        }
        Ok(())
    }
}

/// SGD with PyTorch's formulas: `d = g + λw`, `b = μb + (1 − dampening)d` (`b = d` at first), then
/// `w ← w − lr·b`, or `w ← w − lr·(d + μb)` with Nesterov's momentum.
#[derive(Debug)]
pub struct Sgd {
    config: SgdConfig,
    states: Vec<Option<Moments>>,
}

impl Sgd {
    /// Plain SGD.
    pub fn new(lr: f64) -> Self {
        Self::with_momentum(lr, 0.0)
    }

    /// SGD with momentum.
    pub fn with_momentum(lr: f64, momentum: f64) -> Self {
        Self::from_config(SgdConfig { lr, momentum, ..SgdConfig::default() })
    }

    /// With these settings; they are checked when a wrapping optimizer is built.
    pub fn from_config(config: SgdConfig) -> Self {
        Self { config, states: Vec::new() }
    }

    /// One pass over memory; false where the tensors aren't dense f32 CPU memory.
    fn step_fused(&self, slots: &[Slot<'_>]) -> bool {
        let lists = Lists::of(slots);
        let rates: Vec<(f32, f32)> = slots
            .iter()
            .map(|s| ((self.config.lr * s.lr_scale) as f32, s.weight_decay.unwrap_or(self.config.weight_decay) as f32))
            .collect();
        if self.config.momentum == 0.0 {
            return lists.update([&lists.params], |i, w, [next], g| {
                let (lr, decay) = rates[i];
                *next = w - lr * (g + decay * w);
            });
        }
        let Some((buffers, first)) = momenta(&self.states, slots) else { return false };
        let (momentum, keep) = (self.config.momentum as f32, (1.0 - self.config.dampening) as f32);
        let nesterov = self.config.nesterov;
        lists.update([&lists.params, &buffers], |i, w, [next, b], g| {
            let (lr, decay) = rates[i];
            let d = g + decay * w;
            *b = if first[i] { d } else { momentum * *b + keep * d };
            *next = w - lr * if nesterov { d + momentum * *b } else { *b };
        })
    }

    /// The same by libtorch operations, for every device and kind.
    fn step_plain(&self, slots: &[Slot<'_>]) -> Result<()> {
        no_grad(|| {
            let mut pending = Pending::default();
            for slot in slots {
                let kind = state_kind(slot.param);
                let w = slot.value.to_kind(kind);
                let decay = slot.weight_decay.unwrap_or(self.config.weight_decay);
                let mut d = slot.grad.to_kind(kind);
                if decay != 0.0 {
                    d = d.f_add(&w.f_mul_scalar(decay)?)?;
                }
                if self.config.momentum != 0.0
                    && let Some(state) = &self.states[slot.index]
                {
                    let b = &state.moments[0];
                    let next = if state.steps == 0 {
                        d.shallow_clone()
                    } else {
                        b.f_mul_scalar(self.config.momentum)?.f_add(&d.f_mul_scalar(1.0 - self.config.dampening)?)?
                    };
                    b.shallow_clone().f_copy_(&next)?;
                    d = if self.config.nesterov {
                        d.f_add(&b.f_mul_scalar(self.config.momentum)?)?
                    } else {
                        b.shallow_clone()
                    };
                }
                pending.write(slot.param, w.f_sub(&d.f_mul_scalar(self.config.lr * slot.lr_scale)?)?);
            }
            pending.commit()
        })
    }
}

impl BaseOptimizer for Sgd {
    fn name(&self) -> &'static str {
        "Sgd"
    }

    fn validate(&self) -> Result<()> {
        self.config.validate()
    }

    fn step(&mut self, slots: &[Slot<'_>]) -> Result<()> {
        if self.config.momentum != 0.0 {
            prepare(&mut self.states, slots, 1);
        }
        if !self.step_fused(slots) {
            self.step_plain(slots)?;
        }
        count(&mut self.states, slots);
        Ok(())
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.config.lr = lr;
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn coupled_decay(&self) -> Option<f64> {
        Some(self.config.weight_decay)
    }

    fn settings(&self) -> Value {
        let SgdConfig { momentum, dampening, nesterov, weight_decay, .. } = self.config;
        json!({ "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": weight_decay })
    }

    fn state_dict(&self, names: &[String]) -> Result<StateDict> {
        Ok(save(self, &self.states, names, &["momentum"]))
    }

    fn load_state_dict(&mut self, state: &StateDict, params: &[(&str, &Tensor)]) -> Result<()> {
        (self.config.lr, self.states) = load(self, state, params, &["momentum"])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::test_support::paths_agree;

    #[test]
    fn the_fused_step_equals_the_plain_step() {
        for (momentum, dampening, nesterov, weight_decay) in
            [(0.0, 0.0, false, 0.01), (0.9, 0.0, false, 0.0), (0.9, 0.3, false, 0.1), (0.8, 0.0, true, 0.02)]
        {
            let make = || Sgd::from_config(SgdConfig { lr: 0.1, momentum, dampening, nesterov, weight_decay });
            paths_agree(
                make,
                |sgd, slots| assert!(sgd.step_fused(slots)),
                |sgd, slots| sgd.step_plain(slots).unwrap(),
                |sgd, slots| {
                    if momentum != 0.0 {
                        prepare(&mut sgd.states, slots, 1);
                    }
                },
                |sgd, slots| count(&mut sgd.states, slots),
            );
        }
    }
}
