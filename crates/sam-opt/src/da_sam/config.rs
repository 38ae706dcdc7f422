//! Settings of DA-SAM.

use crate::config::{self, BnMode};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// How DAS turns the domains' losses into factors `s_k`, with `r_k = L_k / L̄` and `Σ s_k = D`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DasRule {
    /// `s_k = D · softmax(r/τ)_k` \[reconstruction\]: harder domains weigh more; a negative τ turns the sign around.
    #[default]
    Softmax,
    /// `s_k ∝ r_k^γ` \[reconstruction\].
    Power(
        /// γ; negative turns the sign around.
        f64,
    ),
    /// `s_k = 1 − 2λ (L_k − L̄)` \[prior work: DISAM; official code\]: the direction of `L̄ − λ Var(L)`, which weakens the
    /// perturbation toward domains above the average, the opposite sign of the others. Not clipped.
    Disam(
        /// λ; DISAM's is 0.1.
        f64,
    ),
    /// `s_k = 1`: SAM on the mean of the domains.
    Uniform,
}

/// What the gradient is taken of, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OuterMode {
    /// At `θ + ρ_t v`, with `v` the softmax mean of the directions: it leans to the sharpest.
    #[default]
    Soft,
    /// At `θ + ρ_t u_m` of the sharpest direction.
    Worst,
    /// The mean of the gradients at all `θ + ρ_t u_m`: as many backward passes as directions.
    Average,
}

/// Weights of the domains in the gradient at the perturbed point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OuterWeights {
    /// All domains alike.
    #[default]
    Uniform,
    /// DAS's factors.
    Das,
}

/// Adaptive multi-directional flattening \[reconstruction\].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AmdfConfig {
    /// Directions `M`, the guided one `u_0` among them; 2 to 8.
    pub directions: usize,
    /// Noise ζ of the others, relative to `u_0`: the mean cosine with it is `1/√(1 + ζ²)`.
    pub zeta: f64,
    /// Weight κ of the standard deviation over directions in the sharpness.
    pub kappa: f64,
    /// Exponent `a` of `ρ_t = ρ (S_t/S̄_t)^a`; 0 keeps ρ.
    pub exponent: f64,
    /// Bound `c`: `ρ/c ≤ ρ_t ≤ ρ c`.
    pub clip: f64,
    /// `β_s` of the running level `S̄`.
    pub ema: f64,
    /// Temperature `t_d` of the softmax over directions.
    pub temperature: f64,
    /// Probes every so many steps; in between radius and weights are reused, with the same noise.
    pub probe_every: usize,
}

impl Default for AmdfConfig {
    fn default() -> Self {
        Self {
            directions: 4,
            zeta: 1.0,
            kappa: 1.0,
            exponent: 1.0,
            clip: 2.0,
            ema: 0.9,
            temperature: 1.0,
            probe_every: 1,
        }
    }
}

/// Settings of [`DaSam`](super::DaSam). The defaults are the specification's; both modules are reconstructions.
///
/// ```
/// use sam_opt::{AmdfConfig, DaSamConfig};
/// let config = DaSamConfig { rho: 0.5, amdf: Some(AmdfConfig { directions: 2, ..AmdfConfig::default() }), ..DaSamConfig::default() };
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<DaSamConfig>(&text)?, config);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DaSamConfig {
    /// Base radius ρ, in parameter units: 0.05 for fine-tuning, 0.5 for small networks from scratch. 0 is the base
    /// optimizer. A group's own radius is scaled as AMDF scales this one.
    pub rho: f64,
    /// How losses become factors.
    pub das: DasRule,
    /// Temperature τ of the softmax rule; 0.25 and up, negative for the opposite sign.
    pub tau: f64,
    /// Smallest factor.
    pub s_min: f64,
    /// Largest factor; `None` is the number of domains.
    pub s_max: Option<f64>,
    /// Share of the past in the losses that DAS sees; 0 is the current batch's alone, "real-time" in the paper's words.
    pub loss_ema: f64,
    /// Directions and radius; `None` leaves `ε = ρ u_0`.
    pub amdf: Option<AmdfConfig>,
    /// Where the gradient is taken.
    pub outer: OuterMode,
    /// Of which mixture of the domains.
    pub outer_weights: OuterWeights,
    /// Clips the final gradient to this norm.
    pub clip_norm: Option<f64>,
    /// Takes one more backward pass a step, to report the cosine of ε with plain SAM's direction.
    pub compare_with_sam: bool,
    /// As in [`SamConfig`](crate::SamConfig::sync_rng).
    pub sync_rng: bool,
    /// Batch or running statistics in normalization layers.
    pub bn: BnMode,
    /// Seed of the noise streams.
    pub seed: u64,
}

impl Default for DaSamConfig {
    fn default() -> Self {
        Self {
            rho: 0.05,
            das: DasRule::Softmax,
            tau: 1.0,
            s_min: 0.1,
            s_max: None,
            loss_ema: 0.0,
            amdf: Some(AmdfConfig::default()),
            outer: OuterMode::Soft,
            outer_weights: OuterWeights::Uniform,
            clip_norm: None,
            compare_with_sam: false,
            sync_rng: true,
            bn: BnMode::Train,
            seed: 0,
        }
    }
}

impl DaSamConfig {
    /// DA-SAM with this radius.
    pub fn da_sam(rho: f64) -> Self {
        Self { rho, ..Self::default() }
    }

    /// DAS without AMDF: as many passes as SAM.
    pub fn das_only(rho: f64) -> Self {
        Self { rho, amdf: None, ..Self::default() }
    }

    /// AMDF without DAS.
    pub fn amdf_only(rho: f64) -> Self {
        Self { rho, das: DasRule::Uniform, ..Self::default() }
    }

    /// DISAM \[prior work; official code\]: the direction of `L̄ − λ Var(L)`, the update of `L̄`.
    pub fn disam(rho: f64, lambda: f64) -> Self {
        Self { rho, das: DasRule::Disam(lambda), amdf: None, ..Self::default() }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidRho`], [`Error::InvalidTau`], [`Error::InvalidDirections`], or [`Error::InvalidConfig`] naming
    /// the field.
    pub fn validate(&self) -> Result<()> {
        config::rho("rho", self.rho)?;
        if !(self.tau.is_finite() && self.tau != 0.0) {
            return Err(Error::InvalidTau { tau: self.tau });
        }
        match self.das {
            DasRule::Power(x) | DasRule::Disam(x) if !x.is_finite() => {
                return Err(Error::invalid("das", "a rule with a finite number", x));
            }
            _ => {}
        }
        if !(0.0..=1.0).contains(&self.s_min) {
            return Err(Error::invalid("s_min", "at least 0 and at most 1, the mean of the factors", self.s_min));
        }
        if let Some(s_max) = self.s_max
            && !(s_max.is_finite() && s_max >= 1.0)
        {
            return Err(Error::invalid("s_max", "finite and at least 1, the mean of the factors", s_max));
        }
        share("loss_ema", self.loss_ema)?;
        config::clip_norm(self.clip_norm)?;
        match self.amdf {
            Some(amdf) => amdf.validate(),
            None if self.outer != OuterMode::Soft => Err(Error::invalid(
                "outer",
                "soft, since there is one direction without amdf",
                format!("{:?}", self.outer),
            )),
            None => Ok(()),
        }
    }
}

impl AmdfConfig {
    fn validate(&self) -> Result<()> {
        if self.directions == 0 {
            return Err(Error::InvalidDirections { directions: 0 });
        }
        config::at_least("zeta", self.zeta, 0.0)?;
        config::at_least("kappa", self.kappa, 0.0)?;
        config::at_least("exponent", self.exponent, 0.0)?;
        config::at_least("clip", self.clip, 1.0)?;
        share("ema", self.ema)?;
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            return Err(Error::invalid("temperature", "finite and above 0", self.temperature));
        }
        if self.probe_every == 0 {
            return Err(Error::invalid("probe_every", "at least 1 (1 probes every step)", 0));
        }
        Ok(())
    }
}

fn share(field: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) { Ok(()) } else { Err(Error::invalid(field, "at least 0 and below 1", value)) }
}
