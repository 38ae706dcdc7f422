//! Two-phase use, for training loops that don't fit a closure.

use super::TwoPass;
use crate::base::BaseOptimizer;
use crate::config::PerturbDirection;
use crate::pass::PassKind;
use crate::rule::Rule;
use crate::scope::StepScope;
use crate::stats::SamStats;
use crate::{Error, Result};
use tensor::{ParamSet, ParamVec, RestoreGuard};

/// Perturbed parameters in two-phase use: compute the gradient at the perturbed point, then [`step`](Self::step).
/// Dropping the guard restores parameters and buffers without a step.
pub struct PerturbedGuard<'a, B: BaseOptimizer, R: Rule> {
    optimizer: &'a mut TwoPass<B, R>,
    guard: Option<RestoreGuard>,
    /// The main gradient, where the method mixes.
    main: Option<ParamVec>,
    /// Dropped, it puts the buffers back to where the main pass left them.
    _scope: StepScope,
    stats: SamStats,
}

impl<B: BaseOptimizer, R: Rule> TwoPass<B, R> {
    /// Perturbs the parameters along gradients that you computed (in the order of [`params`](Self::params)),
    /// for use without a closure. The guard restores them when dropped; [`PerturbedGuard::step`] finishes.
    ///
    /// On steps that `interval` leaves out, and with ρ = 0, the guard holds unperturbed parameters. What the
    /// optimizer can't do here: it doesn't see the passes, so `sync_rng`, `bn` and `check_batch` are yours (reseed
    /// libtorch's generator before both passes if the model draws noise), and the statistics have no loss.
    ///
    /// # Errors
    /// A gradient that doesn't fit the parameters or isn't finite, half-precision parameters that can't move,
    /// an open guard, a loss-budget schedule (it needs the loss), a random direction.
    pub fn perturb(&mut self, gradient: &ParamVec) -> Result<PerturbedGuard<'_, B, R>> {
        self.engine.all.check(gradient)?;
        if self.needs_loss() {
            let expected = "one that needs no loss, since `perturb` isn't given any";
            return Err(Error::invalid("rho_schedule", expected, "loss_budget"));
        }
        if self.sam().direction == PerturbDirection::Random {
            let expected = "gradient in two-phase use, since the guard perturbs along the gradients that it is given";
            return Err(Error::invalid("direction", expected, "random"));
        }
        let scope = self.engine.open(self.sam().seed, false)?;
        let mut stats = self.blank_stats(self.perturbs()?);
        stats.passes = 1;
        let mut guard = None;
        if let (Some(perturbed), true) = (&self.perturbed, stats.perturbed) {
            let direction = perturbed.select(gradient);
            let scratch = self.engine.scratch.take();
            let (open, applied) = self.apply(perturbed, direction, 0.0, 1.0, false, scratch)?;
            guard = Some(open);
            stats.passes = 2;
            (stats.grad_norm, stats.epsilon_norm, stats.rho) = (applied.norm, applied.length, applied.rho);
        } else {
            stats.grad_norm = gradient.norm();
            if !stats.grad_norm.is_finite() {
                let value = stats.grad_norm;
                return Err(Error::NonFinite { what: "gradient norm", pass: PassKind::Main, value });
            }
        }
        let main = (R::MIXES && stats.perturbed).then(|| gradient.copy());
        Ok(PerturbedGuard { optimizer: self, guard, main, _scope: scope, stats })
    }
}

impl<B: BaseOptimizer, R: Rule> PerturbedGuard<'_, B, R> {
    /// `‖ε‖₂` of the perturbation; 0 on a step that isn't perturbed.
    pub fn epsilon_norm(&self) -> f64 {
        self.stats.epsilon_norm
    }

    /// Whether the parameters are perturbed.
    pub fn is_perturbed(&self) -> bool {
        self.stats.perturbed
    }

    /// All parameters, perturbed now: for [`ParamSet::gradient`].
    pub fn params(&self) -> &ParamSet {
        &self.optimizer.engine.all
    }

    /// Restores the parameters and lets the base optimizer step with the gradient at the perturbed point (in
    /// the order of [`params`](Self::params)).
    ///
    /// # Errors
    /// A gradient that doesn't fit or isn't finite; the parameters are restored, nothing else changed.
    pub fn step(mut self, gradient: &ParamVec) -> Result<SamStats> {
        self.optimizer.engine.all.check(gradient)?;
        let guard = self.guard.take();
        let clips = self.optimizer.sam().clip_norm.is_some();
        let mut stats = self.stats;
        if self.main.is_some() || clips {
            // The mix and the clipping work in place; the gradient is yours.
            let own = gradient.copy();
            if let Some(main) = &self.main {
                R::combine(&self.optimizer.config, main, &own)?;
            }
            self.optimizer.finish(&own, guard, &mut stats)?;
        } else {
            self.optimizer.finish(gradient, guard, &mut stats)?;
        }
        self.optimizer.engine.step += 1;
        Ok(stats)
    }
}
