//! Settings of IAM.

use crate::config::{self, BnMode};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// How the perturbation enters the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IamVariant {
    /// IAM-D, the direct penalty: `L(θ) + β · mean KL(f(θ) ‖ f(θ+δ))` \[paper\]. For unlabeled data.
    #[default]
    D,
    /// IAM-S, like SAM: the gradient of the loss at `θ + δ` \[paper\]. For labeled data only.
    S,
    /// IAM-DE, the penalty along a direction that persists from step to step, with one backward pass for both
    /// \[official code, not in the abstract\].
    De,
}

/// Where the perturbation's direction comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IamDirection {
    /// Power iteration on the Fisher matrix from random noise: the method \[paper\].
    #[default]
    Power,
    /// `ρ` times a random unit vector: the control that shows what the power step adds \[our choice\].
    Random,
    /// `ρ ∇L/‖∇L‖`, SAM's direction: with [`IamVariant::S`] this is SAM, bit for bit \[our choice, for tests\].
    LossGradient,
}

/// Which side of the divergence carries gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PenaltyGradient {
    /// Both outputs: the gradient is `≈ ½∇(δᵀFδ)`, second order in δ \[official code docstring; verified\].
    #[default]
    BothSides,
    /// **A defect, kept to be measured.** The unperturbed output is a constant, and what is left is `≈ Fδ`: first order,
    /// with a random sign, noise instead of a regularizer. The authors' distributed trainer does this without meaning
    /// to \[official code\].
    Detached,
}

/// How the output at `θ + δ` is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PenaltyForm {
    /// Parameters are shifted in place, with one backward pass at `θ + δ` and one at `θ`. Works with any module.
    #[default]
    Split,
    /// The closure reads every weight through [`Pass::param`](crate::Pass::param), and one backward pass goes through
    /// both outputs. Saves a forward pass, needs memory for both graphs.
    Functional,
}

/// Settings of [`Iam`](crate::Iam).
///
/// ```
/// use sam_opt::{IamConfig, IamVariant};
/// let config = IamConfig { rho: 0.5, ..IamConfig::default() };
/// config.validate()?;
/// assert_eq!((config.variant, config.beta), (IamVariant::D, 1.0));
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<IamConfig>(&text)?, config);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IamConfig {
    /// D with unlabeled data (default), S for supervised training \[paper's results\].
    pub variant: IamVariant,
    /// Radius ρ of the perturbation, in parameter units; 0 is the base optimizer. Default 0.1, range 0.01 to 1
    /// \[paper\]; 0.5 for small networks from scratch \[measured by the specification\].
    pub rho: f64,
    /// Weight β of the penalty (D and DE); 0 is the base optimizer. Default 1, range 0.1 to 20 \[paper\]. Strength is
    /// `β · ρ²`.
    pub beta: f64,
    /// Length σ of the noise that the power iteration starts from. Default 1 (the authors' code has 1e-3, 0.05 and 3 in
    /// different places \[official code\]). Below 1e-4 in f32 the first gradient is mostly rounding.
    pub noise_scale: f64,
    /// Power steps K (D and S). Training uses 1 \[paper\].
    pub inner_steps: usize,
    /// S only: turns δ so that the loss rises along it, at the price of one more backward pass \[official code\].
    pub align_sign: bool,
    /// Where δ points (D and S).
    pub direction: IamDirection,
    /// Which outputs carry gradient (D and DE).
    pub gradient: PenaltyGradient,
    /// In place or functional (D and DE).
    pub form: PenaltyForm,
    /// A new δ every so many steps (D and S); between them the old one is used again, which saves the search \[our
    /// choice\].
    pub refresh_every: usize,
    /// Added to the norm that δ is divided by: a zero gradient gives δ = 0, not NaN \[official code\].
    pub norm_eps: f64,
    /// Clips the final gradient to this norm.
    pub clip_norm: Option<f64>,
    /// Reseeds libtorch's global generator before every pass of a step and after it. With dropout and this off, the
    /// divergence measures dropout noise.
    pub sync_rng: bool,
    /// Batch or running statistics in normalization layers.
    pub bn: BnMode,
    /// Seed of the noise.
    pub seed: u64,
}

impl Default for IamConfig {
    fn default() -> Self {
        Self {
            variant: IamVariant::D,
            rho: 0.1,
            beta: 1.0,
            noise_scale: 1.0,
            inner_steps: 1,
            align_sign: false,
            direction: IamDirection::Power,
            gradient: PenaltyGradient::BothSides,
            form: PenaltyForm::Split,
            refresh_every: 1,
            norm_eps: 1e-12,
            clip_norm: None,
            sync_rng: true,
            bn: BnMode::Train,
            seed: 0,
        }
    }
}

impl IamConfig {
    /// IAM-D with this radius and penalty weight.
    pub fn d(rho: f64, beta: f64) -> Self {
        Self { rho, beta, ..Self::default() }
    }

    /// IAM-S with this radius.
    pub fn s(rho: f64) -> Self {
        Self { variant: IamVariant::S, rho, ..Self::default() }
    }

    /// IAM-DE with this radius and penalty weight.
    pub fn de(rho: f64, beta: f64) -> Self {
        Self { variant: IamVariant::De, rho, beta, ..Self::default() }
    }

    /// Checks every field, and that the variant has a use for what was asked.
    ///
    /// # Errors
    /// [`Error::InvalidRho`], [`Error::InvalidBeta`], [`Error::InvalidInnerSteps`], or [`Error::InvalidConfig`] naming
    /// the field, what it may be and what it is.
    pub fn validate(&self) -> Result<()> {
        check_rho(self.rho)?;
        if !(self.beta.is_finite() && self.beta >= 0.0) {
            return Err(Error::InvalidBeta { beta: self.beta });
        }
        check_noise(self.noise_scale)?;
        if self.inner_steps == 0 {
            return Err(Error::InvalidInnerSteps);
        }
        if self.refresh_every == 0 {
            return Err(Error::invalid("refresh_every", "at least 1 (1 searches in every step)", 0));
        }
        config::at_least("norm_eps", self.norm_eps, 0.0)?;
        config::clip_norm(self.clip_norm)?;
        let variant = format!("used with variant {:?}", self.variant);
        let only = |allowed: bool, field: &str, expected: &str| {
            if allowed { Ok(()) } else { Err(Error::invalid(field, expected, &variant)) }
        };
        let (s, de) = (self.variant == IamVariant::S, self.variant == IamVariant::De);
        only(
            !self.align_sign || s,
            "align_sign",
            "off, or used with variant S (the penalty is the same for δ and −δ)",
        )?;
        only(!s || self.form == PenaltyForm::Split, "form", "split with variant S, which has no penalty")?;
        only(!s || self.gradient == PenaltyGradient::BothSides, "gradient", "both_sides with variant S")?;
        let by_loss = self.direction == IamDirection::LossGradient && self.form == PenaltyForm::Functional;
        only(!by_loss, "direction", "power or random with the functional form")?;
        only(
            !de || self.direction == IamDirection::Power,
            "direction",
            "power with variant De, whose δ follows itself",
        )?;
        only(!de || self.refresh_every == 1, "refresh_every", "1 with variant De, whose δ moves in every step")
    }
}

pub(super) fn check_rho(rho: f64) -> Result<()> {
    config::rho("rho", rho)
}

pub(super) fn check_noise(noise_scale: f64) -> Result<()> {
    if noise_scale.is_finite() && noise_scale > 0.0 {
        Ok(())
    } else {
        Err(Error::invalid("noise_scale", "finite and above 0 (without noise there is no direction)", noise_scale))
    }
}
