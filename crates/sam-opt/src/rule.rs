//! What distinguishes SAM, GSAM and SAGM: the radius of the perturbation and the mix of the two gradients.

use crate::{GsamConfig, Result, SagmConfig, SamConfig};
use serde::{Serialize, de::DeserializeOwned};
use tensor::ParamVec;

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::SamRule {}
    impl Sealed for super::GsamRule {}
    impl Sealed for super::SagmRule {}
}

/// A two-pass method. Sealed: the methods are [`Sam`](crate::Sam), [`Gsam`](crate::Gsam) and
/// [`Sagm`](crate::Sagm).
pub trait Rule: sealed::Sealed {
    /// The method's settings.
    type Config: Clone + std::fmt::Debug + Serialize + DeserializeOwned;
    /// The method's name in messages and saved states.
    const NAME: &'static str;
    /// Whether [`combine`](Self::combine) reads the main gradient.
    const MIXES: bool;

    /// # Errors
    /// Naming the invalid field.
    fn validate(config: &Self::Config) -> Result<()>;

    /// The shared settings inside.
    fn sam(config: &Self::Config) -> &SamConfig;

    /// Whether a group of radius `rho` moves at all.
    fn perturbs(config: &Self::Config, rho: f64) -> bool;

    /// The factor of `ε = factor · T²g`, from the radius and the norm `‖T g‖` (with `norm_eps` added).
    fn factor(config: &Self::Config, rho: f64, norm: f64) -> f64;

    /// Turns the perturbed gradient into the final one, in place.
    ///
    /// # Errors
    /// What libtorch reports.
    fn combine(config: &Self::Config, main: &ParamVec, perturbed: &ParamVec) -> Result<()>;
}

/// SAM and ASAM: the gradient at the perturbed point.
#[derive(Debug)]
pub enum SamRule {}

impl Rule for SamRule {
    type Config = SamConfig;
    const NAME: &'static str = "Sam";
    const MIXES: bool = false;

    fn validate(config: &SamConfig) -> Result<()> {
        config.validate()
    }

    fn sam(config: &SamConfig) -> &SamConfig {
        config
    }

    fn perturbs(_config: &SamConfig, rho: f64) -> bool {
        rho > 0.0
    }

    fn factor(_config: &SamConfig, rho: f64, norm: f64) -> f64 {
        rho / norm
    }

    fn combine(_config: &SamConfig, _main: &ParamVec, _perturbed: &ParamVec) -> Result<()> {
        Ok(())
    }
}

/// GSAM: minus the part of `g` that is orthogonal to the perturbed gradient.
#[derive(Debug)]
pub enum GsamRule {}

impl Rule for GsamRule {
    type Config = GsamConfig;
    const NAME: &'static str = "Gsam";
    const MIXES: bool = true;

    fn validate(config: &GsamConfig) -> Result<()> {
        config.validate()
    }

    fn sam(config: &GsamConfig) -> &SamConfig {
        &config.sam
    }

    fn perturbs(_config: &GsamConfig, rho: f64) -> bool {
        rho > 0.0
    }

    fn factor(_config: &GsamConfig, rho: f64, norm: f64) -> f64 {
        rho / norm
    }

    /// `g_p − α g_⊥` with `g_⊥ = g − (⟨g, g_p⟩/‖g_p‖²) g_p`.
    fn combine(config: &GsamConfig, main: &ParamVec, perturbed: &ParamVec) -> Result<()> {
        let square = perturbed.dot(perturbed)?;
        if config.alpha == 0.0 || square == 0.0 {
            return Ok(());
        }
        let along = main.dot(perturbed)? / square;
        perturbed.scale(1.0 + config.alpha * along)?;
        perturbed.axpy(-config.alpha, main)?;
        Ok(())
    }
}

/// SAGM: the mean of both gradients, at a point that is pulled back along the gradient.
#[derive(Debug)]
pub enum SagmRule {}

impl Rule for SagmRule {
    type Config = SagmConfig;
    const NAME: &'static str = "Sagm";
    const MIXES: bool = true;

    fn validate(config: &SagmConfig) -> Result<()> {
        config.validate()
    }

    fn sam(config: &SagmConfig) -> &SamConfig {
        &config.sam
    }

    fn perturbs(config: &SagmConfig, rho: f64) -> bool {
        rho > 0.0 || config.alpha > 0.0
    }

    fn factor(config: &SagmConfig, rho: f64, norm: f64) -> f64 {
        rho / norm - config.alpha
    }

    /// `½ (g + g_p)`.
    fn combine(_config: &SagmConfig, main: &ParamVec, perturbed: &ParamVec) -> Result<()> {
        perturbed.axpy(1.0, main)?;
        perturbed.scale(0.5)?;
        Ok(())
    }
}
