//! RMSprop.

use super::{BaseOptimizer, Lists, Moments, Pending, Slot, check, count, load, prepare, save, state_kind};
use crate::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensor::StateDict;
use tensor::tch::{Tensor, no_grad};

/// Settings of [`RmsProp`]; the defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RmsPropConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay α of the mean of squared gradients.
    pub alpha: f64,
    /// Added to the root of the mean square.
    pub eps: f64,
    /// Weight decay λ (added to the gradient).
    pub weight_decay: f64,
}

impl Default for RmsPropConfig {
    fn default() -> Self {
        Self { lr: 0.01, alpha: 0.99, eps: 1e-8, weight_decay: 0.0 }
    }
}

impl RmsPropConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn validate(&self) -> Result<()> {
        check("lr", self.lr, 0.0, f64::INFINITY)?;
        check("alpha", self.alpha, 0.0, 1.0)?;
        check("eps", self.eps, 0.0, f64::INFINITY)?;
        check("weight_decay", self.weight_decay, 0.0, f64::INFINITY)
    }
}

/// RMSprop with PyTorch's formulas (neither centred nor with momentum): `d = g + λw`, `v = αv + (1 − α)d²`,
/// `w ← w − lr·d/(√v + ε)`.
#[derive(Debug)]
pub struct RmsProp {
    config: RmsPropConfig,
    states: Vec<Option<Moments>>,
}

impl RmsProp {
    /// PyTorch's defaults with this learning rate.
    pub fn new(lr: f64) -> Self {
        Self::from_config(RmsPropConfig { lr, ..RmsPropConfig::default() })
    }

    /// With these settings; they are checked when a wrapping optimizer is built.
    pub fn from_config(config: RmsPropConfig) -> Self {
        Self { config, states: Vec::new() }
    }

    fn squares(&self, slots: &[Slot<'_>]) -> Option<Vec<&Tensor>> {
        slots.iter().map(|s| self.states[s.index].as_ref().map(|state| &state.moments[0])).collect()
    }

    fn decay(&self, slot: &Slot<'_>) -> f64 {
        slot.weight_decay.unwrap_or(self.config.weight_decay)
    }

    /// One pass over memory; false where the tensors aren't dense f32 CPU memory.
    fn step_fused(&self, slots: &[Slot<'_>]) -> bool {
        let Some(squares) = self.squares(slots) else { return false };
        let lists = Lists::of(slots);
        let rates: Vec<(f32, f32)> =
            slots.iter().map(|s| ((self.config.lr * s.lr_scale) as f32, self.decay(s) as f32)).collect();
        let (alpha, rest, eps) = (self.config.alpha as f32, (1.0 - self.config.alpha) as f32, self.config.eps as f32);
        lists.update([&lists.params, &squares], |i, w, [next, v], g| {
            let (lr, decay) = rates[i];
            let d = g + decay * w;
            *v = alpha * *v + rest * d * d;
            *next = w - lr * d / (v.sqrt() + eps);
        })
    }

    /// The same by libtorch operations, for every device and kind.
    fn step_plain(&self, slots: &[Slot<'_>]) -> Result<()> {
        let Some(squares) = self.squares(slots) else { return Ok(()) };
        no_grad(|| {
            let mut pending = Pending::default();
            for (slot, v) in slots.iter().zip(squares) {
                let kind = state_kind(slot.param);
                let w = slot.value.to_kind(kind);
                let d = slot.grad.to_kind(kind).f_add(&w.f_mul_scalar(self.decay(slot))?)?;
                let square = d.f_square()?.f_mul_scalar(1.0 - self.config.alpha)?;
                let v_next = v.f_mul_scalar(self.config.alpha)?.f_add(&square)?;
                let scale = v_next.f_sqrt()?.f_add_scalar(self.config.eps)?;
                let move_by = d.f_mul_scalar(self.config.lr * slot.lr_scale)?.f_div(&scale)?;
                pending.write(slot.param, w.f_sub(&move_by)?);
                pending.write(v, v_next);
            }
            pending.commit()
        })
    }
}

impl BaseOptimizer for RmsProp {
    fn name(&self) -> &'static str {
        "RmsProp"
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
        Some(self.config.weight_decay)
    }

    fn settings(&self) -> Value {
        let RmsPropConfig { alpha, eps, weight_decay, .. } = self.config;
        json!({ "alpha": alpha, "eps": eps, "weight_decay": weight_decay })
    }

    fn state_dict(&self, names: &[String]) -> Result<StateDict> {
        Ok(save(self, &self.states, names, &["mean_square"]))
    }

    fn load_state_dict(&mut self, state: &StateDict, params: &[(&str, &Tensor)]) -> Result<()> {
        (self.config.lr, self.states) = load(self, state, params, &["mean_square"])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::test_support::paths_agree;

    #[test]
    fn the_fused_step_equals_the_plain_step() {
        for weight_decay in [0.0, 0.1] {
            paths_agree(
                || RmsProp::from_config(RmsPropConfig { weight_decay, ..RmsPropConfig::default() }),
                |rms, slots| assert!(rms.step_fused(slots)),
                |rms, slots| rms.step_plain(slots).unwrap(),
                |rms, slots| prepare(&mut rms.states, slots, 1),
                |rms, slots| count(&mut rms.states, slots),
            );
        }
    }
}
