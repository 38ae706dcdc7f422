//! The search for δ by power iteration, in place.

use super::config::{IamConfig, IamDirection};
use super::delta::{Delta, Noise, per_scalar};
use super::outputs::Outputs;
use super::passes::{Bench, Logits};
use super::stats::{IamStats, WEAK};
use crate::base::BaseOptimizer;
use crate::direction::{Epsilon, Perturbed};
use crate::divergence::cross_entropy;
use crate::engine::Engine;
use crate::pass::PassKind;
use crate::{Error, Result};
use tensor::params::Scratch;
use tensor::{ParamVec, RestoreGuard};

/// `ρ_g v/(‖v‖ + ε)` over the groups' own radii; a zero vector gives zeros.
pub(super) fn scaled(
    perturbed: &Perturbed,
    radii: &[f64],
    norm_eps: f64,
    vector: ParamVec,
    pass: PassKind,
) -> Result<Epsilon> {
    let epsilon = perturbed.epsilon(vector, radii.len(), true, |norm| {
        let factor = |rho: &f64| if norm == 0.0 { 0.0 } else { rho / (norm + norm_eps) };
        radii.iter().map(factor).collect()
    })?;
    if !epsilon.norm.is_finite() {
        return Err(Error::NonFinite { what: "gradient norm", pass, value: epsilon.norm });
    }
    perturbed.check_precision(&epsilon)?;
    Ok(epsilon)
}

/// Remembers how strong the first inner signal was.
pub(super) fn note_signal(stats: &mut IamStats, first: &Outputs, reference: &Outputs) -> Result<()> {
    let signal = first.signal(reference)?;
    stats.inner_signal = Some(signal);
    stats.weak_signal = signal < WEAK;
    Ok(())
}

impl<B: BaseOptimizer> Bench<'_, B> {
    /// δ where it needs no search: a random direction, or the loss gradient's.
    pub(super) fn at_once(&self, loss_gradient: Option<ParamVec>) -> Result<Option<Epsilon>> {
        let vector = match (self.config.direction, loss_gradient) {
            (IamDirection::Power, _) => return Ok(None),
            (IamDirection::Random, _) => {
                self.perturbed.set.normal(Noise::new(self.config.seed, self.engine.step).seed())?
            }
            (IamDirection::LossGradient, gradient) => gradient.ok_or(Error::NoGradient { pass: PassKind::Main })?,
        };
        Ok(Some(scaled(self.perturbed, &self.radii, self.config.norm_eps, vector, PassKind::Main)?))
    }

    /// Searches δ_K on the inputs whose outputs at θ are `reference`, and leaves the parameters at `θ + δ_K` under the
    /// returned guard.
    pub(super) fn search(
        &self,
        reference: &Outputs,
        logits: &mut Logits<'_>,
        loss_gradient: Option<ParamVec>,
        scratch: Option<Scratch>,
        stats: &mut IamStats,
    ) -> Result<(RestoreGuard, Delta)> {
        let (engine, config, perturbed): (&Engine<B>, &IamConfig, &Perturbed) =
            (self.engine, self.config, self.perturbed);
        let noise = Noise::new(config.seed, engine.step);
        let set = &perturbed.set;
        stats.refreshed = true;
        if let Some(epsilon) = self.at_once(loss_gradient)? {
            stats.degenerate = epsilon.length == 0.0;
            let guard = set.perturb(&epsilon.alphas, &epsilon.direction, scratch)?;
            return Ok((guard, Delta::of(epsilon)));
        }
        let p = reference.log_p.f_exp()?;
        let guard = match self.start {
            Some(start) => set.perturb(&vec![1.0; set.len()], &start(engine.step, set)?, scratch)?,
            None => set.perturb_normal(per_scalar(set, config.noise_scale), noise.seed(), scratch)?,
        };
        let mut found: Option<Delta> = None;
        for k in 0..config.inner_steps {
            let pass = PassKind::Inner(k);
            let outputs = self.forward(pass, true, logits, stats)?;
            outputs.comparable(reference, pass)?;
            if k == 0 {
                note_signal(stats, &outputs, reference)?;
            }
            stats.backwards += 1;
            let gradient = engine.gradient_of(set, &cross_entropy(&p, &outputs.log_p)?, pass)?;
            let epsilon = scaled(perturbed, &self.radii, config.norm_eps, gradient, pass)?;
            stats.degenerate = epsilon.length == 0.0;
            // The old δ is discarded: only the direction in which the divergence grows is kept.
            guard.shift(&epsilon.alphas, &epsilon.direction)?;
            found = Some(Delta::of(epsilon));
            if stats.degenerate {
                break;
            }
        }
        Ok((guard, found.ok_or(Error::InvalidInnerSteps)?))
    }
}
