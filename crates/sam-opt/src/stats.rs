//! What a step reports.

use crate::pass::PassKind;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// The parameters were updated.
    Updated,
    /// A loss or norm of this pass wasn't finite; nothing was changed. Only from `step_scaled`.
    SkippedNonFinite {
        /// The pass.
        pass: PassKind,
    },
}

/// Statistics of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamStats {
    /// Number of the step, from 0.
    pub step: u64,
    /// Loss at the parameters (mean over micro-batches), without loss scaling. NaN in two-phase use, where the
    /// optimizer doesn't see it; what was summed until then on a skipped step.
    pub loss: f64,
    /// Loss at the perturbed point, if there was one.
    pub perturbed_loss: Option<f64>,
    /// `‖T g‖` over the perturbed groups (`‖g‖` without ASAM), the norm that ε is divided by. On a step that isn't
    /// perturbed, `‖g‖` of all parameters.
    pub grad_norm: f64,
    /// Norm of the gradient that the base optimizer got, before clipping.
    pub final_grad_norm: f64,
    /// Radius of this step (of groups without a radius of their own).
    pub rho: f64,
    /// `‖ε‖₂`, really applied.
    pub epsilon_norm: f64,
    /// Whether the step was perturbed (see `interval`).
    pub perturbed: bool,
    /// Whether the final gradient was clipped.
    pub clipped: bool,
    /// Forward passes with a backward pass, counting each micro-batch.
    pub passes: usize,
    /// Learning rate of the step.
    pub lr: f64,
    /// How the step ended.
    pub outcome: StepOutcome,
}

/// A dynamic loss scale for half-precision forward passes, for [`step_scaled`](crate::TwoPass::step_scaled).
///
/// The scale is halved when a step was skipped and doubled after `growth_interval` good ones.
///
/// ```
/// use sam_opt::{LossScaler, StepOutcome};
/// let mut scaler = LossScaler { growth_interval: 2, ..LossScaler::default() };
/// scaler.update(StepOutcome::Updated);
/// scaler.update(StepOutcome::Updated);
/// assert_eq!(scaler.scale, 131072.0);
/// let saved = serde_json::to_string(&scaler)?;
/// assert_eq!(serde_json::from_str::<LossScaler>(&saved)?, scaler);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScaler {
    /// The factor for the next step.
    pub scale: f64,
    /// Good steps before the scale is doubled.
    pub growth_interval: u32,
    /// Good steps since the scale last changed.
    pub good: u32,
}

impl Default for LossScaler {
    fn default() -> Self {
        Self { scale: 65536.0, growth_interval: 2000, good: 0 }
    }
}

impl LossScaler {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field.
    pub fn validate(&self) -> Result<()> {
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return Err(Error::invalid("scale", "finite and above 0", self.scale));
        }
        if self.growth_interval == 0 {
            return Err(Error::invalid("growth_interval", "at least 1 step", 0));
        }
        Ok(())
    }

    /// Learns how the step ended.
    pub fn update(&mut self, outcome: StepOutcome) {
        match outcome {
            StepOutcome::SkippedNonFinite { .. } => {
                self.scale = (self.scale / 2.0).max(1.0);
                self.good = 0;
            }
            StepOutcome::Updated => {
                self.good += 1;
                if self.good >= self.growth_interval {
                    // Beyond this, f32 losses overflow whatever the model does.
                    self.scale = (self.scale * 2.0).min(2f64.powi(64));
                    self.good = 0;
                }
            }
        }
    }
}
