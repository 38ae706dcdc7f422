//! Settings of S-Adam.

use crate::base::AdamConfig;
use crate::config::BnMode;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// What sets the damping.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LgiKind {
    /// The published statistic [official code], `Var(D)/(mean(D²) + ζ)`: about 1 where the loss is smooth, lower where
    /// all probes rise alike.
    #[default]
    Published,
    /// The part of the slopes that the gradient doesn't predict [reconstruction]: 0 on linear functions, towards 1
    /// at kinks and jumps. Use λ of about 1 with it.
    Residual,
    /// The part of the second differences that doesn't shrink with the radius [reconstruction]: 0 on quadratic
    /// functions. Four forward passes a direction.
    Kink,
    /// No probes: this fixed damping in (0, 1]. The control for "a smaller learning rate would do the same".
    Constant(f64),
    /// No probes: an LGI drawn from the law that `k_directions` probes have on a smooth loss. The control for
    /// "random step sizes would do the same".
    RandomNull,
}

impl LgiKind {
    /// Whether forward passes are needed.
    pub(crate) fn probes(self) -> bool {
        matches!(self, LgiKind::Published | LgiKind::Residual | LgiKind::Kink)
    }

    /// Directions that a value needs: a variance needs two.
    pub(crate) fn least_directions(self) -> usize {
        match self {
            LgiKind::Published | LgiKind::RandomNull => 2,
            LgiKind::Residual | LgiKind::Kink | LgiKind::Constant(_) => 1,
        }
    }
}

/// What has length 1 in a probe direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeNorm {
    /// Each tensor's part [official code]: with `n` tensors a probe is `σ√n` away.
    #[default]
    PerTensor,
    /// The whole direction [paper, by way of a public summary]: a probe is σ away.
    Global,
}

/// Where ε is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpsMode {
    /// After bias correction, as PyTorch's AdamW: without damping the steps are AdamW's, bit for bit.
    #[default]
    Torch,
    /// To `√v` before bias correction [official code]. With ε = 1e-8 the steps differ in the ninth digit.
    Official,
}

/// Settings of [`SAdam`](crate::SAdam); the defaults are the official code's, with PyTorch's place for ε and one LGI
/// over all groups.
///
/// ```
/// use sam_opt::{SAdamConfig, s_adam::LgiKind};
/// let config = SAdamConfig { lr: 3e-3, lgi: LgiKind::Constant(0.3), ..SAdamConfig::default() };
/// config.validate()?;
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<SAdamConfig>(&text)?, config);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SAdamConfig {
    /// Learning rate η.
    pub lr: f64,
    /// Decays β of the mean of gradients and of squared gradients.
    pub betas: (f64, f64),
    /// ε, added to the root of the mean square.
    pub eps: f64,
    /// Decoupled weight decay of groups that have none of their own.
    pub weight_decay: f64,
    /// Probe directions k. The official file has 2, its experiment scripts 8 or 10.
    pub k_directions: usize,
    /// Probe radius σ, in parameter units.
    pub sigma: f64,
    /// Strength λ of the damping `exp(−λ·min(LGI, cap))`; 0 is AdamW.
    pub lambda: f64,
    /// ζ in the published statistic's denominator, in squared slope units.
    pub zeta: f64,
    /// Largest LGI that counts.
    pub lgi_cap: f64,
    /// What sets the damping.
    pub lgi: LgiKind,
    /// What has length 1 in a probe direction.
    pub probe_norm: ProbeNorm,
    /// Where ε is added.
    pub eps_mode: EpsMode,
    /// One LGI a parameter group, each with its own probes [official code], instead of one over all.
    pub per_group_lgi: bool,
    /// Probes only every so many steps; the LGI is kept in between [reconstruction].
    pub probe_every: usize,
    /// Damps the weight decay too [reconstruction]. Off, as in the official code: decay keeps its strength while the
    /// steps shrink.
    pub damp_weight_decay: bool,
    /// Reseeds libtorch's global generator before every pass of a step, so that dropout is the same in all of them,
    /// and after the step. Off, the LGI of a network with dropout measures dropout.
    pub sync_rng: bool,
    /// Batch or running statistics in normalization layers.
    pub bn: BnMode,
    /// Seed of the probes' noise.
    pub seed: u64,
}

impl Default for SAdamConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-2,
            k_directions: 2,
            sigma: 0.01,
            lambda: 2.0,
            zeta: 1e-6,
            lgi_cap: 10.0,
            lgi: LgiKind::Published,
            probe_norm: ProbeNorm::PerTensor,
            eps_mode: EpsMode::Torch,
            per_group_lgi: false,
            probe_every: 1,
            damp_weight_decay: false,
            sync_rng: true,
            bn: BnMode::Train,
            seed: 0,
        }
    }
}

impl SAdamConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidK`], [`Error::InvalidSigma`], [`Error::InvalidLambda`], or [`Error::InvalidConfig`] naming the
    /// field.
    pub fn validate(&self) -> Result<()> {
        for (field, beta) in [("betas.0", self.betas.0), ("betas.1", self.betas.1)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::invalid(field, "at least 0 and below 1", beta));
            }
        }
        check_probe(self.k_directions, self.sigma, self.zeta)?;
        if !(self.lambda.is_finite() && self.lambda >= 0.0) {
            return Err(Error::InvalidLambda { lambda: self.lambda });
        }
        if !(self.lgi_cap.is_finite() && self.lgi_cap >= 0.0) {
            return Err(Error::invalid("lgi_cap", "finite and at least 0 (0 turns the damping off)", self.lgi_cap));
        }
        if let LgiKind::Constant(a) = self.lgi
            && !(a > 0.0 && a <= 1.0)
        {
            return Err(Error::invalid("the constant damping of lgi", "above 0 and at most 1", a));
        }
        if self.probe_every == 0 {
            return Err(Error::invalid("probe_every", "at least 1 (1 probes at every step)", 0));
        }
        self.adam().validate()
    }

    /// The AdamW inside.
    pub(crate) fn adam(&self) -> AdamConfig {
        let (beta1, beta2) = self.betas;
        AdamConfig { lr: self.lr, beta1, beta2, eps: self.eps, weight_decay: self.weight_decay }
    }

    /// Whether the damping can differ from 1.
    pub(crate) fn damps(&self) -> bool {
        match self.lgi {
            LgiKind::Constant(_) => true,
            kind => self.lambda > 0.0 && self.lgi_cap > 0.0 && self.k_directions >= kind.least_directions(),
        }
    }

    /// `exp(−λ·min(LGI, cap))`.
    pub fn damping(&self, lgi: f64) -> f64 {
        (-self.lambda * lgi.min(self.lgi_cap)).exp()
    }
}

/// The fields that every probe has.
pub(super) fn check_probe(k: usize, sigma: f64, zeta: f64) -> Result<()> {
    if k == 0 {
        return Err(Error::InvalidK { k });
    }
    if !(sigma.is_finite() && sigma > 0.0) {
        return Err(Error::InvalidSigma { sigma });
    }
    if !(zeta.is_finite() && zeta >= 0.0) {
        return Err(Error::invalid("zeta", "finite and at least 0", zeta));
    }
    Ok(())
}
