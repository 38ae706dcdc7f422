//! Virtual adversarial training \[prior work: Miyato et al. 2018\]: the outputs must not change when the *inputs* move.

use crate::base::check;
use crate::divergence::{cross_entropy, kl};
use crate::iam::Outputs;
use crate::pass::PassKind;
use crate::scope::StepSeed;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::tch::{self, Kind, Tensor, no_grad};
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
    /// Reseeds libtorch's global generator, from `seed` and the step, before each forward pass and at the end. With
    /// dropout and this off, the penalty measures dropout noise.
    pub sync_rng: bool,
    /// Seed of the start directions.
    pub seed: u64,
}

impl Default for VatConfig {
    fn default() -> Self {
        Self { epsilon: 1.0, xi: 1e-2, power_steps: 1, sync_rng: true, seed: 0 }
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
/// with the graph that the penalty's gradient needs. `step` numbers the noise. Directions are computed in f32 (f64 for f64
/// inputs) and added in the inputs' kind.
///
/// Dropout is the same in all these passes where [`VatConfig::sync_rng`] is on. Batch normalization in training mode moves
/// its running statistics in every one of them, and in the last by inputs that aren't data: forward with the running
/// statistics here, or put the buffers back afterwards.
///
/// # Errors
/// Invalid settings, an empty batch, logits that aren't `[batch, classes]`, not finite or of another shape than in the
/// first pass, logits that don't depend on the inputs, what `logits` reports.
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
    let _reseed = config.sync_rng.then(|| Reseed(StepSeed::new(config.seed, step)));
    let mut forward = |x: &Tensor, pass: PassKind, graph: bool| {
        if config.sync_rng {
            tch::manual_seed(StepSeed::new(config.seed, step).noise("vat").torch_seed());
        }
        Outputs::new(logits(x)?, pass, graph)
    };
    let clean = no_grad(|| forward(x, PassKind::Probe(0), false))?.detached();
    let p = clean.log_p.f_exp()?;
    let wide = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let noise = x.detach().to_kind(wide).zeros_like();
    fused::fill_normal(&noise, Seed::new(config.seed).child("sam-opt.vat").index(step), 0)?;
    let mut direction = unit_rows(&noise)?;
    for k in 0..config.power_steps {
        let pass = PassKind::Inner(k);
        let r = direction.f_mul_scalar(config.xi)?.detach().set_requires_grad(true);
        let moved = forward(&x.detach().f_add(&r.to_kind(x.kind()))?, pass, true)?;
        moved.comparable(&clean, pass)?;
        let slope = Tensor::f_run_backward(&[cross_entropy(&p, &moved.log_p)?], &[&r], false, false)?.remove(0);
        direction = unit_rows(&slope)?;
    }
    let pass = PassKind::Perturbed(0);
    let moved = forward(&x.f_add(&direction.f_mul_scalar(config.epsilon)?.to_kind(x.kind()))?, pass, true)?;
    moved.comparable(&clean, pass)?;
    kl(&clean.log_p, &moved.log_p)
}

/// Lets libtorch's stream go on from a point of its own afterwards, not from the last pass's, also after an error.
struct Reseed(StepSeed);

impl Drop for Reseed {
    fn drop(&mut self) {
        tch::manual_seed(self.0.noise("vat").child("after").torch_seed());
    }
}

/// Each row divided by its norm, in f32 or f64; rows of zeros stay.
fn unit_rows(v: &Tensor) -> Result<Tensor> {
    no_grad(|| {
        let rows = v.size()[0];
        let norm = v.f_reshape([rows, -1])?.f_norm_scalaropt_dim_dtype(2.0, [1i64].as_slice(), true, Kind::Double)?;
        let shape: Vec<i64> = std::iter::once(rows).chain(std::iter::repeat_n(1, v.dim() - 1)).collect();
        let norm = norm.f_clamp_min(f64::MIN_POSITIVE)?.to_kind(v.kind()).f_clamp_min(1e-30)?.f_reshape(shape)?;
        Ok(v.f_div(&norm)?)
    })
}
