//! The step that SAM, ASAM, GSAM and SAGM share: a main pass, a perturbed pass, the base step.

mod guard;
mod passes;
mod state;

pub use guard::PerturbedGuard;

use crate::base::BaseOptimizer;
use crate::config::{PerturbDirection, RhoSchedule, SamConfig};
use crate::direction::Perturbed;
use crate::engine::{Engine, engine_methods};
use crate::group::{self, ParamGroup};
use crate::pass::Pass;
use crate::rule::{GsamRule, Rule, SagmRule, SamRule};
use crate::stats::{SamStats, StepOutcome};
use crate::{Error, Result};
use tensor::tch::{Tensor, nn::VarStore};

/// Sharpness-aware minimization \[prior work: Foret et al. 2021\], with ASAM [Kwon et al. 2021] by
/// [`SamConfig::adaptive`]: `ε = ρ g/‖g‖`, then a base step at `θ` with the gradient at `θ + ε`.
pub type Sam<B> = TwoPass<B, SamRule>;
/// Surrogate-gap guided SAM \[prior work: Zhuang et al. 2022\]: the final gradient is `g_p − α g_⊥`.
pub type Gsam<B> = TwoPass<B, GsamRule>;
/// Sharpness-aware gradient matching \[prior work; official code\]: `ε = (ρ/‖g‖ − α) g`, the final gradient is
/// `½ (g + g_p)`.
pub type Sagm<B> = TwoPass<B, SagmRule>;

/// What gives the radius in place of the configuration.
enum RhoOverride {
    /// A number, which is saved with the state.
    Fixed(f64),
    /// A function of the step's number.
    Function(Box<dyn Fn(u64) -> f64 + Send>),
}

/// A sharpness-aware optimizer over a base optimizer; use it under the names [`Sam`], [`Gsam`], [`Sagm`].
///
/// Which parameters are trainable is read when it is built: after freezing or unfreezing some, build it anew.
pub struct TwoPass<B, R: Rule> {
    config: R::Config,
    engine: Engine<B>,
    perturbed: Option<Perturbed>,
    rho_override: Option<RhoOverride>,
}

impl<B: std::fmt::Debug, R: Rule> std::fmt::Debug for TwoPass<B, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct(R::NAME)
            .field("config", &self.config)
            .field("base", &self.engine.base)
            .field("parameters", &self.engine.all.names())
            .field("step", &self.engine.step)
            .finish_non_exhaustive()
    }
}

impl<B: BaseOptimizer, R: Rule> TwoPass<B, R> {
    /// Builds the optimizer over the model's tensors.
    ///
    /// Models with running statistics: add [`with_buffers`](Self::with_buffers), or use
    /// [`for_store`](Self::for_store).
    ///
    /// # Errors
    /// An invalid configuration, an empty group, a tensor or name that comes twice, tensors that share memory,
    /// `perturb_weight_decay` over a base optimizer whose decay isn't part of the gradient.
    pub fn new(groups: Vec<ParamGroup>, base: B, config: R::Config) -> Result<Self> {
        R::validate(&config)?;
        if R::sam(&config).perturb_weight_decay && base.coupled_decay().is_none() {
            let got = format!("on over {}", base.name());
            let expected = "off, or used over Sgd or Adam, whose weight decay is part of the gradient";
            return Err(Error::invalid("perturb_weight_decay", expected, got));
        }
        if R::MIXES && R::sam(&config).direction == PerturbDirection::Random {
            let expected = format!("gradient for {}, whose update needs it", R::NAME);
            return Err(Error::invalid("direction", expected, "random"));
        }
        let engine = Engine::new(groups, base)?;
        let perturbed = Perturbed::new(&engine.groups, R::sam(&config).adaptive)?;
        Ok(Self { config, engine, perturbed, rho_override: None })
    }

    /// Builds the optimizer over everything in a variable store: its trainable variables as one group, the
    /// others as buffers.
    ///
    /// # Errors
    /// As [`new`](Self::new); a store in which nothing is trainable.
    pub fn for_store(store: &VarStore, base: B, config: R::Config) -> Result<Self> {
        let optimizer = Self::new(vec![ParamGroup::from_var_store(store)], base, config)?;
        Ok(optimizer.with_buffers(group::buffers(store)))
    }

    engine_methods!();

    /// The settings.
    pub fn config(&self) -> &R::Config {
        &self.config
    }

    /// The base optimizer.
    pub fn base(&self) -> &B {
        &self.engine.base
    }

    /// Lets a function of the step's number give the radius, whatever the configuration says. A saved state
    /// remembers that there was one; give it again before loading.
    pub fn set_rho_fn(&mut self, rho: impl Fn(u64) -> f64 + Send + 'static) {
        self.rho_override = Some(RhoOverride::Function(Box::new(rho)));
    }

    /// Fixes the radius from now on, whatever the configuration says; saved with the state.
    ///
    /// # Errors
    /// [`Error::InvalidRho`] when it is negative or not finite.
    pub fn set_rho(&mut self, rho: f64) -> Result<()> {
        self.rho_override = Some(RhoOverride::Fixed(valid_rho(rho)?));
        Ok(())
    }

    /// One step on one batch. The closure is called for every pass, does a fresh forward pass on the batch of
    /// the step and returns the scalar loss.
    ///
    /// # Errors
    /// Everything that [`Error`] lists; parameters, buffers and state are then what they were before.
    pub fn step(&mut self, closure: impl FnMut(&Pass<'_>) -> Result<Tensor>) -> Result<SamStats> {
        self.run(1, None, closure)
    }

    /// One step over `n` micro-batches of equal size, which [`Pass::micro`] numbers; gradients are averaged over
    /// them, with one perturbation for all or one for each as [`PerturbScope`](crate::PerturbScope) says.
    ///
    /// # Errors
    /// As [`step`](Self::step); [`Error::InvalidConfig`] for `n = 0`.
    pub fn step_accumulate(&mut self, n: usize, closure: impl FnMut(&Pass<'_>) -> Result<Tensor>) -> Result<SamStats> {
        self.run(n, None, closure)
    }

    /// As [`step_accumulate`](Self::step_accumulate) with loss scaling, for forward passes in half precision: the
    /// closure returns the plain loss, the gradients are taken of `scale` times it and divided by `scale` once, in
    /// f32, before the base step (ε doesn't depend on the scale). A loss or norm that isn't finite skips the step
    /// instead of failing.
    ///
    /// # Errors
    /// As [`step_accumulate`](Self::step_accumulate), except [`Error::NonFinite`]; [`Error::InvalidConfig`] for a
    /// scale that isn't finite and above 0.
    pub fn step_scaled(
        &mut self,
        scale: f64,
        n: usize,
        closure: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<SamStats> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::invalid("scale", "finite and above 0", scale));
        }
        self.run(n, Some(scale), closure)
    }

    fn sam(&self) -> &SamConfig {
        R::sam(&self.config)
    }

    /// The radius of this step, before the groups' own.
    fn rho(&self, loss: f64, norm: f64) -> Result<f64> {
        let config = self.sam();
        let rho = match (&self.rho_override, config.rho_schedule) {
            (Some(RhoOverride::Fixed(rho)), _) => *rho,
            (Some(RhoOverride::Function(rho)), _) => rho(self.engine.step),
            (None, RhoSchedule::Constant) => config.rho,
            (None, RhoSchedule::ProportionalToLr { rho_min, rho_max, lr_min, lr_max }) => {
                rho_min + (rho_max - rho_min) * (self.engine.lr() - lr_min) / (lr_max - lr_min)
            }
            (None, RhoSchedule::LossBudget { fraction, rho_max }) => {
                (fraction * loss.abs() / (norm + config.norm_eps)).min(rho_max)
            }
            (None, RhoSchedule::Function) => {
                return Err(Error::invalid("rho_schedule", "given its function by `set_rho_fn`", "function"));
            }
        };
        valid_rho(rho)
    }

    /// The radius at which the groups' own radii hold as they are: the schedule's largest.
    fn full_rho(&self) -> f64 {
        match self.sam().rho_schedule {
            RhoSchedule::ProportionalToLr { rho_max, .. } | RhoSchedule::LossBudget { rho_max, .. } => rho_max,
            RhoSchedule::Constant | RhoSchedule::Function => self.sam().rho,
        }
    }

    /// Radius of a group: its own, scaled as the schedule scales the optimizer's.
    fn group_rho(&self, group: usize, rho: f64) -> f64 {
        match (self.engine.groups[group].rho, self.full_rho()) {
            (None, _) => rho,
            (Some(own), full) if full > 0.0 => own * rho / full,
            (Some(own), _) => own,
        }
    }

    /// Whether the radius depends on the loss.
    fn needs_loss(&self) -> bool {
        self.rho_override.is_none() && matches!(self.sam().rho_schedule, RhoSchedule::LossBudget { .. })
    }

    /// Whether this step has a perturbed pass at all.
    fn perturbs(&self) -> Result<bool> {
        if self.perturbed.is_none() || !self.engine.step.is_multiple_of(self.sam().interval as u64) {
            return Ok(false);
        }
        if self.needs_loss() {
            return Ok(true);
        }
        let rho = self.rho(0.0, 0.0)?;
        let moves = |g: usize| self.engine.groups[g].perturb && R::perturbs(&self.config, self.group_rho(g, rho));
        Ok((0..self.engine.groups.len()).any(moves))
    }

    /// Runs the step in a scope that cleans up after errors and panics.
    fn run(
        &mut self,
        n: usize,
        scale: Option<f64>,
        mut closure: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<SamStats> {
        if n == 0 {
            return Err(Error::invalid("n", "at least 1 micro-batch", n));
        }
        let mut scope = self.engine.open(self.sam().seed, self.sam().sync_rng)?;
        let mut stats = self.blank_stats(self.perturbs()?);
        let result = self.gradients(n, scale.unwrap_or(1.0), &mut scope, &mut closure, &mut stats);
        match result.and_then(|(gradient, guard)| self.finish(&gradient, guard, &mut stats)) {
            Ok(()) => {
                scope.commit();
                self.engine.step += 1;
                Ok(stats)
            }
            // The scope puts the buffers back; the step counts, so that the next one draws other noise.
            Err(Error::NonFinite { pass, .. }) if scale.is_some() => {
                stats.outcome = StepOutcome::SkippedNonFinite { pass };
                self.engine.step += 1;
                Ok(stats)
            }
            Err(error) => Err(error),
        }
    }

    fn blank_stats(&self, perturbed: bool) -> SamStats {
        SamStats {
            step: self.engine.step,
            loss: f64::NAN,
            perturbed_loss: None,
            grad_norm: f64::NAN,
            final_grad_norm: f64::NAN,
            rho: 0.0,
            epsilon_norm: 0.0,
            perturbed,
            clipped: false,
            passes: 0,
            lr: self.lr(),
            outcome: StepOutcome::Updated,
        }
    }
}

fn valid_rho(rho: f64) -> Result<f64> {
    if rho.is_finite() && rho >= 0.0 { Ok(rho) } else { Err(Error::InvalidRho { field: "rho".into(), rho }) }
}
