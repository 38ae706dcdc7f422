//! Adam and AdamW.

use super::{BaseOptimizer, Lists, Moments, Pending, Slot, check, count, load, prepare, save, state_kind};
use crate::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensor::StateDict;
use tensor::tch::{Tensor, no_grad};

/// What S-Adam changes about the step: a factor on each parameter's update. The default changes nothing, bit for bit.
#[derive(Debug, Clone, Default)]
pub(crate) struct Damping {
    /// Factor by index of the parameter; 1 beyond the end. The moments see the raw gradient.
    pub(crate) factors: Vec<f64>,
    /// Shrinks the decoupled decay by the same factor.
    pub(crate) decay: bool,
    /// Adds ε to the root before bias correction, as the official S-Adam does, instead of after it, as PyTorch does.
    pub(crate) eps_first: bool,
}

/// The arithmetic that Adam and AdamW share.
#[derive(Debug, Clone, Copy)]
struct Rule<'a> {
    config: &'a AdamConfig,
    damping: &'a Damping,
    /// Decay the weights themselves (AdamW) rather than through the gradient (Adam).
    decoupled: bool,
}

/// What the step of one parameter needs besides its values, after bias correction.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    step: f64,
    root: f64,
    eps: f64,
    shrink: f64,
    decay: f64,
}

impl Rule<'_> {
    fn scalars(self, slot: &Slot<'_>, steps: i64) -> Scalars {
        let lr = self.config.lr * slot.lr_scale;
        let decay = slot.weight_decay.unwrap_or(self.config.weight_decay);
        let factor = self.damping.factors.get(slot.index).copied().unwrap_or(1.0);
        let root = (1.0 - self.config.beta2.powi(steps as i32)).sqrt().recip();
        let shrunk_by = if self.damping.decay { factor * lr * decay } else { lr * decay };
        Scalars {
            step: factor * lr / (1.0 - self.config.beta1.powi(steps as i32)),
            root,
            // (√v + ε)·root = √v·root + ε·root.
            eps: if self.damping.eps_first { self.config.eps * root } else { self.config.eps },
            shrink: if self.decoupled { 1.0 - shrunk_by } else { 1.0 },
            decay: if self.decoupled { 0.0 } else { decay },
        }
    }

    fn states<'a>(self, states: &'a [Option<Moments>], slots: &[Slot<'_>]) -> Option<Vec<(&'a Moments, Scalars)>> {
        slots
            .iter()
            .map(|slot| states[slot.index].as_ref().map(|state| (state, self.scalars(slot, state.steps + 1))))
            .collect()
    }

    /// One pass over memory; false where the tensors aren't dense f32 CPU memory.
    fn step_fused(self, states: &[Option<Moments>], slots: &[Slot<'_>]) -> bool {
        let Some(states) = self.states(states, slots) else { return false };
        let lists = Lists::of(slots);
        let first: Vec<&Tensor> = states.iter().map(|(state, _)| &state.moments[0]).collect();
        let second: Vec<&Tensor> = states.iter().map(|(state, _)| &state.moments[1]).collect();
        let scalars: Vec<[f32; 5]> = states
            .iter()
            .map(|(_, s)| [s.step as f32, s.root as f32, s.eps as f32, s.shrink as f32, s.decay as f32])
            .collect();
        let (b1, b2) = (self.config.beta1 as f32, self.config.beta2 as f32);
        let (c1, c2) = ((1.0 - self.config.beta1) as f32, (1.0 - self.config.beta2) as f32);
        lists.update([&lists.params, &first, &second], |i, w, [next, m, v], g| {
            let [step, root, eps, shrink, decay] = scalars[i];
            let g = g + decay * w;
            *m = b1 * *m + c1 * g;
            *v = b2 * *v + c2 * g * g;
            *next = w * shrink - step * *m / (v.sqrt() * root + eps);
        })
    }

    /// The same by libtorch operations, for every device and kind.
    fn step_plain(self, states: &[Option<Moments>], slots: &[Slot<'_>]) -> Result<()> {
        let Some(states) = self.states(states, slots) else { return Ok(()) };
        no_grad(|| {
            let mut pending = Pending::default();
            for (slot, (state, scalars)) in slots.iter().zip(states) {
                let kind = state_kind(slot.param);
                let w = slot.value.to_kind(kind);
                let g = slot.grad.to_kind(kind).f_add(&w.f_mul_scalar(scalars.decay)?)?;
                let (m, v) = (&state.moments[0], &state.moments[1]);
                let m_next = m.f_mul_scalar(self.config.beta1)?.f_add(&g.f_mul_scalar(1.0 - self.config.beta1)?)?;
                let square = g.f_square()?.f_mul_scalar(1.0 - self.config.beta2)?;
                let v_next = v.f_mul_scalar(self.config.beta2)?.f_add(&square)?;
                let scale = v_next.f_sqrt()?.f_mul_scalar(scalars.root)?.f_add_scalar(scalars.eps)?;
                let move_by = m_next.f_mul_scalar(scalars.step)?.f_div(&scale)?;
                pending.write(slot.param, w.f_mul_scalar(scalars.shrink)?.f_sub(&move_by)?);
                pending.write(m, m_next);
                pending.write(v, v_next);
            }
            pending.commit()
        })
    }
}

/// Settings of [`Adam`] and [`AdamW`]. The defaults are PyTorch's for Adam; [`AdamConfig::decoupled`] gives
/// those for AdamW.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the mean square.
    pub eps: f64,
    /// Weight decay λ.
    pub weight_decay: f64,
}

impl Default for AdamConfig {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

impl AdamConfig {
    /// PyTorch's defaults for AdamW: weight decay 0.01.
    pub fn decoupled() -> Self {
        Self { weight_decay: 0.01, ..Self::default() }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn validate(&self) -> Result<()> {
        check("lr", self.lr, 0.0, f64::INFINITY)?;
        check("beta1", self.beta1, 0.0, 1.0)?;
        check("beta2", self.beta2, 0.0, 1.0)?;
        check("eps", self.eps, 0.0, f64::INFINITY)?;
        check("weight_decay", self.weight_decay, 0.0, f64::INFINITY)
    }
}

/// Adam (`DECOUPLED = false`) and AdamW (`true`), under the names [`Adam`] and [`AdamW`].
#[derive(Debug)]
pub struct AdamFamily<const DECOUPLED: bool> {
    config: AdamConfig,
    pub(crate) damping: Damping,
    states: Vec<Option<Moments>>,
}

/// Adam with PyTorch's formulas; weight decay is added to the gradient.
pub type Adam = AdamFamily<false>;
/// AdamW with PyTorch's formulas; weight decay shrinks the weights by `lr·λ` each step.
pub type AdamW = AdamFamily<true>;

impl<const DECOUPLED: bool> AdamFamily<DECOUPLED> {
    /// PyTorch's defaults with this learning rate.
    pub fn new(lr: f64) -> Self {
        let defaults = if DECOUPLED { AdamConfig::decoupled() } else { AdamConfig::default() };
        Self::from_config(AdamConfig { lr, ..defaults })
    }

    /// With these settings; they are checked when a wrapping optimizer is built.
    pub fn from_config(config: AdamConfig) -> Self {
        Self { config, damping: Damping::default(), states: Vec::new() }
    }

    fn rule(&self) -> Rule<'_> {
        Rule { config: &self.config, damping: &self.damping, decoupled: DECOUPLED }
    }
}

impl<const DECOUPLED: bool> BaseOptimizer for AdamFamily<DECOUPLED> {
    fn name(&self) -> &'static str {
        if DECOUPLED { "AdamW" } else { "Adam" }
    }

    fn validate(&self) -> Result<()> {
        self.config.validate()
    }

    fn step(&mut self, slots: &[Slot<'_>]) -> Result<()> {
        prepare(&mut self.states, slots, 2);
        if !self.rule().step_fused(&self.states, slots) {
            self.rule().step_plain(&self.states, slots)?;
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
        (!DECOUPLED).then_some(self.config.weight_decay)
    }

    fn settings(&self) -> Value {
        let AdamConfig { beta1, beta2, eps, weight_decay, .. } = self.config;
        json!({ "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay })
    }

    fn state_dict(&self, names: &[String]) -> Result<StateDict> {
        Ok(save(self, &self.states, names, &["mean", "mean_square"]))
    }

    fn load_state_dict(&mut self, state: &StateDict, params: &[(&str, &Tensor)]) -> Result<()> {
        (self.config.lr, self.states) = load(self, state, params, &["mean", "mean_square"])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::test_support::paths_agree;

    #[test]
    fn the_fused_step_equals_the_plain_step() {
        for (weight_decay, damped) in [(0.0, false), (0.1, false), (0.1, true)] {
            let damping = Damping { factors: vec![0.3, 1.0, 0.7], decay: damped, eps_first: damped };
            paths_agree(
                || Adam::from_config(AdamConfig { lr: 0.01, weight_decay, ..AdamConfig::default() }),
                |a, slots| assert!(a.rule().step_fused(&a.states, slots)),
                |a, slots| a.rule().step_plain(&a.states, slots).unwrap(),
                |a, slots| prepare(&mut a.states, slots, 2),
                |a, slots| count(&mut a.states, slots),
            );
            paths_agree(
                || {
                    let config = AdamConfig { lr: 0.01, weight_decay, ..AdamConfig::default() };
                    AdamW { damping: damping.clone(), ..AdamW::from_config(config) }
                },
                |a, slots| assert!(a.rule().step_fused(&a.states, slots)),
                |a, slots| a.rule().step_plain(&a.states, slots).unwrap(),
                |a, slots| prepare(&mut a.states, slots, 2),
                |a, slots| count(&mut a.states, slots),
            );
        }
    }
}
