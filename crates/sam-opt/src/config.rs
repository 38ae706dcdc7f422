//! Settings of the SAM family.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Which parameters ASAM's scaling `T = |θ| + η` applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AsamScope {
    /// Tensors of two or more axes; biases and other 1-D tensors have `T = 1` (the paper's choice).
    #[default]
    Weights,
    /// All tensors, as davda54/sam and pytorch_optimizer do (they also have `η = 0`).
    All,
}

/// Adaptive SAM \[prior work: Kwon et al. 2021\]: `ε = ρ T² g / ‖T g‖₂`, so that `‖T⁻¹ε‖₂ = ρ`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AsamConfig {
    /// `η` in `T = |θ| + η`.
    pub eta: f64,
    /// Which tensors are scaled.
    pub scope: AsamScope,
}

impl Default for AsamConfig {
    fn default() -> Self {
        Self { eta: 0.01, scope: AsamScope::Weights }
    }
}

/// Over how many samples one perturbation is computed when a step has several micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PerturbScope {
    /// One perturbation from the gradient of all micro-batches, then a second sweep over the same ones: with
    /// micro-batches of equal size, the same step as with one big batch.
    #[default]
    Global,
    /// One perturbation for each micro-batch, gradients averaged: m-sharpness, what data-parallel training
    /// does whose first pass isn't synchronized. Smaller micro-batches often generalize better (prior work).
    PerMicroBatch,
}

/// Along what the parameters are perturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PerturbDirection {
    /// The gradient: SAM.
    #[default]
    Gradient,
    /// Noise of the same length: the control that shows whether the gradient's direction matters. Needs the closure, and
    /// a radius that doesn't come from a loss budget.
    Random,
}

/// What normalization layers use during a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BnMode {
    /// Batch statistics in every pass; running statistics are updated by the main pass only.
    #[default]
    Train,
    /// Running statistics in every pass, never updated (common in domain generalization). The closure must
    /// ask [`Pass::batch_statistics`](crate::Pass::batch_statistics).
    Frozen,
}

/// How the radius changes from step to step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RhoSchedule {
    /// Always `rho`.
    #[default]
    Constant,
    /// Follows the learning rate \[prior work: GSAM\]:
    /// `(ρ_t − ρ_min)/(ρ_max − ρ_min) = (lr_t − lr_min)/(lr_max − lr_min)`, not clipped.
    ProportionalToLr {
        /// Radius at `lr_min`.
        rho_min: f64,
        /// Radius at `lr_max`.
        rho_max: f64,
        /// Smallest learning rate.
        lr_min: f64,
        /// Largest learning rate.
        lr_max: f64,
    },
    /// The radius at which the predicted increase of the loss, `ρ‖g‖`, is this fraction of the loss, at most
    /// `rho_max`. Robust across networks whose gradients differ in scale \[reconstruction after LE-SAM's idea\].
    LossBudget {
        /// Fraction of the loss.
        fraction: f64,
        /// Upper bound of the radius.
        rho_max: f64,
    },
    /// From a function of the step: [`TwoPass::set_rho_fn`](crate::TwoPass::set_rho_fn) provides it.
    Function,
}

/// Settings of SAM and of what its kin share with it.
///
/// ```
/// use sam_opt::{AsamConfig, SamConfig};
/// let config = SamConfig { rho: 0.5, adaptive: Some(AsamConfig::default()), ..SamConfig::default() };
/// config.validate()?;
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<SamConfig>(&text)?, config);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamConfig {
    /// Radius ρ of the perturbation, in parameter units (ASAM: in relative units). 0 is the base optimizer.
    /// Default 0.05; typical 0.01 to 0.5, small networks from scratch 0.5, ASAM 0.5 to 2.
    pub rho: f64,
    /// How ρ changes.
    pub rho_schedule: RhoSchedule,
    /// Along what the parameters are perturbed.
    pub direction: PerturbDirection,
    /// ASAM's scaling; `None` is plain SAM.
    pub adaptive: Option<AsamConfig>,
    /// One perturbation a step or one a micro-batch.
    pub scope: PerturbScope,
    /// Counts weight decay as part of the loss in both passes, as the reference JAX code does (over `Sgd` and
    /// `Adam`, whose decay is part of the gradient). Off: the
    /// perturbation comes from the loss gradient only, and decay is applied once, in the base step.
    pub perturb_weight_decay: bool,
    /// Added to the gradient norm: a zero gradient gives `ε = 0`, not NaN.
    pub norm_eps: f64,
    /// Only every `interval`-th step is perturbed (the first one is); the others are plain base steps.
    pub interval: usize,
    /// Reseeds libtorch's global generator before every pass of a step, so that dropout and augmentation
    /// are the same in all of them, and after the step. While on, the optimizer owns that stream.
    pub sync_rng: bool,
    /// Batch or running statistics in normalization layers.
    pub bn: BnMode,
    /// Clips the final gradient, after the second pass, to this norm.
    pub clip_norm: Option<f64>,
    /// Repeats the main pass once more, forward only, to catch a closure that draws new data. For debugging.
    pub check_batch: bool,
    /// Seed of the noise streams.
    pub seed: u64,
}

impl Default for SamConfig {
    fn default() -> Self {
        Self {
            rho: 0.05,
            rho_schedule: RhoSchedule::Constant,
            direction: PerturbDirection::Gradient,
            adaptive: None,
            scope: PerturbScope::Global,
            perturb_weight_decay: false,
            norm_eps: 1e-12,
            interval: 1,
            sync_rng: true,
            bn: BnMode::Train,
            clip_norm: None,
            check_batch: false,
            seed: 0,
        }
    }
}

impl SamConfig {
    /// SAM with this radius.
    pub fn sam(rho: f64) -> Self {
        Self { rho, ..Self::default() }
    }

    /// ASAM with this radius and the paper's `η = 0.01` on weights.
    pub fn asam(rho: f64) -> Self {
        Self { rho, adaptive: Some(AsamConfig::default()), ..Self::default() }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidRho`] or [`Error::InvalidConfig`] naming the field, what it may be and what it is.
    pub fn validate(&self) -> Result<()> {
        rho("rho", self.rho)?;
        match self.rho_schedule {
            RhoSchedule::Constant | RhoSchedule::Function => {}
            RhoSchedule::ProportionalToLr { rho_min, rho_max, lr_min, lr_max } => {
                rho("rho_min", rho_min)?;
                rho("rho_max", rho_max)?;
                if !(lr_min.is_finite() && lr_max.is_finite() && lr_min < lr_max) {
                    let got = format!("{lr_min} and {lr_max}");
                    return Err(Error::invalid("lr_min and lr_max", "finite, with lr_min below lr_max", got));
                }
            }
            RhoSchedule::LossBudget { fraction, rho_max } => {
                rho("rho_max", rho_max)?;
                at_least("fraction", fraction, 0.0)?;
                if self.direction == PerturbDirection::Random {
                    let expected = "gradient with a loss budget, which predicts the rise along the gradient";
                    return Err(Error::invalid("direction", expected, "random"));
                }
            }
        }
        if let Some(asam) = self.adaptive {
            at_least("eta", asam.eta, 0.0)?;
        }
        at_least("norm_eps", self.norm_eps, 0.0)?;
        if self.interval == 0 {
            return Err(Error::invalid("interval", "at least 1 (1 perturbs every step)", 0));
        }
        clip_norm(self.clip_norm)
    }
}

/// Settings of GSAM \[prior work: Zhuang et al. 2022\].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GsamConfig {
    /// How much of the part of `g` orthogonal to the perturbed gradient is subtracted; 0.1 to 0.4. 0 is SAM.
    pub alpha: f64,
    /// Everything else.
    pub sam: SamConfig,
}

impl Default for GsamConfig {
    fn default() -> Self {
        Self { alpha: 0.1, sam: SamConfig::default() }
    }
}

impl GsamConfig {
    /// # Errors
    /// As [`SamConfig::validate`], and [`Error::InvalidConfig`] for `alpha`.
    pub fn validate(&self) -> Result<()> {
        at_least("alpha", self.alpha, 0.0)?;
        self.sam.validate()
    }
}

/// Settings of SAGM \[prior work; official code\].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SagmConfig {
    /// How much of the gradient is taken back from the perturbation: `ε = (ρ/‖g‖ − α) g`.
    pub alpha: f64,
    /// Everything else.
    pub sam: SamConfig,
}

impl Default for SagmConfig {
    fn default() -> Self {
        Self { alpha: 0.001, sam: SamConfig::default() }
    }
}

impl SagmConfig {
    /// # Errors
    /// As [`SamConfig::validate`], and [`Error::InvalidConfig`] for `alpha`.
    pub fn validate(&self) -> Result<()> {
        at_least("alpha", self.alpha, 0.0)?;
        self.sam.validate()
    }
}

pub(crate) fn rho(field: &str, rho: f64) -> Result<()> {
    if rho.is_finite() && rho >= 0.0 { Ok(()) } else { Err(Error::InvalidRho { field: field.into(), rho }) }
}

pub(crate) fn at_least(field: &str, value: f64, low: f64) -> Result<()> {
    if value.is_finite() && value >= low {
        Ok(())
    } else {
        Err(Error::invalid(field, format!("finite and at least {low}"), value))
    }
}

pub(crate) fn clip_norm(norm: Option<f64>) -> Result<()> {
    match norm {
        Some(norm) if !(norm.is_finite() && norm > 0.0) => {
            Err(Error::invalid("clip_norm", "finite and above 0, or none", norm))
        }
        _ => Ok(()),
    }
}
