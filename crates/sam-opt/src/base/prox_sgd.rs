//! Proximal SGD with momentum, for L1-regularized problems.

use super::{BaseOptimizer, Lists, Moments, Pending, Slot, check, count, load, momenta, prepare, save, state_kind};
use crate::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensor::StateDict;
use tensor::tch::{Tensor, no_grad};

/// Settings of [`ProxSgd`]; the defaults are those of S-Adam's experiment scripts \[official code\].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProxSgdConfig {
    /// Learning rate η.
    pub lr: f64,
    /// Momentum μ.
    pub momentum: f64,
    /// Weight of the L1 norm: each step moves every weight by at most `η·l1` towards 0.
    pub l1: f64,
}

impl Default for ProxSgdConfig {
    fn default() -> Self {
        Self { lr: 1e-2, momentum: 0.9, l1: 1e-4 }
    }
}

impl ProxSgdConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn validate(&self) -> Result<()> {
        check("lr", self.lr, 0.0, f64::INFINITY)?;
        check("momentum", self.momentum, 0.0, 1.0)?;
        check("l1", self.l1, 0.0, f64::INFINITY)
    }
}

/// SGD with momentum, then a soft threshold \[official code\]: `b = μb + g` (`b = g` at first), `w ← w − η b`,
/// `w ← sign(w)·max(|w| − η·l1, 0)`.
///
/// The threshold isn't scaled as momentum scales the steps, so that what is minimized is the loss with the L1 weight
/// `(1 − μ)·l1` (derived): to minimize it with the weight λ, set `l1` to `λ/(1 − μ)`.
///
/// The L1 term belongs to the optimizer: leave it out of the loss. A group's `weight_decay` is added to the gradient.
#[derive(Debug)]
pub struct ProxSgd {
    config: ProxSgdConfig,
    states: Vec<Option<Moments>>,
}

impl ProxSgd {
    /// With these settings; they are checked when a wrapping optimizer is built.
    pub fn from_config(config: ProxSgdConfig) -> Self {
        Self { config, states: Vec::new() }
    }

    /// One pass over memory; false where the tensors aren't dense f32 CPU memory.
    fn step_fused(&self, slots: &[Slot<'_>]) -> bool {
        let Some((buffers, first)) = momenta(&self.states, slots) else { return false };
        let lists = Lists::of(slots);
        let rates: Vec<[f32; 3]> = slots
            .iter()
            .map(|s| {
                let lr = self.config.lr * s.lr_scale;
                [lr as f32, (lr * self.config.l1) as f32, s.weight_decay.unwrap_or(0.0) as f32]
            })
            .collect();
        let momentum = self.config.momentum as f32;
        lists.update([&lists.params, &buffers], |i, w, [next, b], g| {
            let [lr, threshold, decay] = rates[i];
            let d = g + decay * w;
            *b = if first[i] { d } else { momentum * *b + d };
            let moved = w - lr * *b;
            // sign(w)·max(|w| − t, 0), exactly 0 below the threshold and exactly w at t = 0; NaN stays NaN.
            *next = moved - moved.max(-threshold).min(threshold);
        })
    }

    /// The same by libtorch operations, for every device and kind.
    fn step_plain(&self, slots: &[Slot<'_>]) -> Result<()> {
        let Some((buffers, first)) = momenta(&self.states, slots) else { return Ok(()) };
        no_grad(|| {
            let mut pending = Pending::default();
            for ((slot, b), first) in slots.iter().zip(buffers).zip(first) {
                let kind = state_kind(slot.param);
                let w = slot.value.to_kind(kind);
                let lr = self.config.lr * slot.lr_scale;
                let d = slot.grad.to_kind(kind).f_add(&w.f_mul_scalar(slot.weight_decay.unwrap_or(0.0))?)?;
                let b_next = if first { d } else { b.f_mul_scalar(self.config.momentum)?.f_add(&d)? };
                let moved = w.f_sub(&b_next.f_mul_scalar(lr)?)?;
                let threshold = lr * self.config.l1;
                pending.write(slot.param, moved.f_sub(&moved.f_clamp(-threshold, threshold)?)?);
                pending.write(b, b_next);
            }
            pending.commit()
        })
    }
}

impl BaseOptimizer for ProxSgd {
    fn name(&self) -> &'static str {
        "ProxSgd"
    }

    fn validate(&self) -> Result<()> {
        self.config.validate()
    }

    fn step(&mut self, slots: &[Slot<'_>]) -> Result<()> {
        prepare(&mut self.states, slots, 1);
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
        Some(0.0)
    }

    fn settings(&self) -> Value {
        let ProxSgdConfig { momentum, l1, .. } = self.config;
        json!({ "momentum": momentum, "l1": l1 })
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
        for l1 in [0.0, 0.5] {
            paths_agree(
                || ProxSgd::from_config(ProxSgdConfig { lr: 0.1, momentum: 0.9, l1 }),
                |prox, slots| assert!(prox.step_fused(slots)),
                |prox, slots| prox.step_plain(slots).unwrap(),
                |prox, slots| prepare(&mut prox.states, slots, 1),
                |prox, slots| count(&mut prox.states, slots),
            );
        }
    }
}
