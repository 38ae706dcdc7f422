//! Virtual adversarial training \[prior work: Miyato et al. 2018\]: the outputs must not change when the *inputs* move.

use crate::base::check;
use crate::divergence::{cross_entropy, kl, log_probabilities};
use crate::pass::PassKind;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::tch::{Kind, Tensor, no_grad};
use tensor::{Seed, fused};

/// Settings of [`vat_penalty`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VatConfig {
    /// Length ε of each input's perturbation, in input units: 0.5 to 2 for standardized inputs.
    pub epsilon: f64,
    /// Length ξ at which the power step looks: 1e-2 in f32 (the paper's 1e-6 is below its rounding).
    pub xi: f64,
    /// Power steps.
    pub power_steps: usize,
    /// Seed of the start directions.
    pub seed: u64,
}

impl Default for VatConfig {
    fn default() -> Self {
        Self { epsilon: 1.0, xi: 1e-2, power_steps: 1, seed: 0 }
    }
}

impl VatConfig {
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field.
    pub fn validate(&self) -> Result<()> {
        check("epsilon", self.epsilon, 0.0, f64::INFINITY)?;
        if !(self.xi.is_finite() && self.xi > 0.0) {
            return Err(Error::invalid("xi", "finite and above 0", self.xi));
        }
        if self.power_steps == 0 {
            return Err(Error::invalid("power_steps", "at least 1", 0));
        }
        Ok(())
    }
}

/// `(1/b) Σ KL(f(x) ‖ f(x + r))` with `r` of length ε along the direction in which each input's output changes most, found
/// by power steps from random directions; `f(x)` is a constant. Add it to the loss.
///
/// `logits` maps inputs `[batch, …]` to logits `[batch, classes]` and is called `power_steps + 2` times, the last time
/// with the graph that the penalty's gradient needs. `step` numbers the noise.
///
/// # Errors
/// Invalid settings, an empty batch, logits that don't depend on the inputs, what `logits` reports.
pub fn vat_penalty(
    x: &Tensor,
    mut logits: impl FnMut(&Tensor) -> Result<Tensor>,
    config: &VatConfig,
    step: u64,
) -> Result<Tensor> {
    config.validate()?;
    if x.size().first().is_none_or(|&rows| rows == 0) {
        return Err(Error::EmptyBatch { pass: PassKind::Main });
    }
    let log_p = no_grad(|| log_probabilities(&logits(x)?))?.detach();
    let p = log_p.f_exp()?;
    let noise = x.detach().zeros_like();
    fused::fill_normal(&noise, Seed::new(config.seed).child("sam-opt.vat").index(step), 0)?;
    let mut direction = unit_rows(&noise)?;
    for k in 0..config.power_steps {
        let r = direction.f_mul_scalar(config.xi)?.detach().set_requires_grad(true);
        let log_q = log_probabilities(&logits(&x.detach().f_add(&r)?)?)?;
        if !log_q.requires_grad() {
            return Err(Error::DetachedLogits { pass: PassKind::Inner(k) });
        }
        let slope = Tensor::f_run_backward(&[cross_entropy(&p, &log_q)?], &[&r], false, false)?.remove(0);
        direction = unit_rows(&slope)?;
    }
    let moved = x.f_add(&direction.f_mul_scalar(config.epsilon)?)?;
    kl(&log_p, &log_probabilities(&logits(&moved)?)?)
}

/// Each row divided by its norm; rows of zeros stay.
fn unit_rows(v: &Tensor) -> Result<Tensor> {
    no_grad(|| {
        let rows = v.size()[0];
        let norm = v.f_reshape([rows, -1])?.f_norm_scalaropt_dim_dtype(2.0, [1i64].as_slice(), true, Kind::Double)?;
        let shape: Vec<i64> = std::iter::once(rows).chain(std::iter::repeat_n(1, v.dim() - 1)).collect();
        let norm = norm.f_clamp_min(f64::MIN_POSITIVE)?.to_kind(v.kind()).f_clamp_min(1e-30)?.f_reshape(shape)?;
        Ok(v.f_div(&norm)?)
    })
}
