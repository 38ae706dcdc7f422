//! IAM-D and IAM-DE in the functional form: the closure reads `θ + δ` through the pass, and one backward pass goes through
//! both outputs.

use super::config::{IamVariant, PenaltyGradient};
use super::delta::{Delta, Kept, Noise, per_scalar, stand_ins};
use super::outputs::Outputs;
use super::passes::{Bench, Closures, Logits, Passed, forward, main_loss};
use super::search::{note_signal, scaled};
use super::stats::IamStats;
use crate::base::BaseOptimizer;
use crate::divergence::{cross_entropy, kl};
use crate::pass::PassKind;
use crate::scope::without_grad;
use crate::{Error, Result};
use std::collections::HashMap;
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamSet, ParamVec};

impl<B: BaseOptimizer> Bench<'_, B> {
    /// The gradient of loss and penalty, from the outputs of the main pass.
    pub(super) fn functional(
        &self,
        outputs: &Outputs,
        closures: &mut Closures<'_>,
        stats: &mut IamStats,
        delta: Option<&ParamVec>,
    ) -> Result<Passed> {
        let (engine, config, set) = (self.engine, self.config, &self.perturbed.set);
        let loss = main_loss(closures, outputs, PassKind::Main, true, stats)?;
        let reference = outputs.detached();

        let noise = Noise::new(config.seed, engine.step);
        let de = config.variant == IamVariant::De;
        let mut kept = None;
        let shifted_weights = if let Some(delta) = delta {
            stats.delta_norm = delta.norm();
            let sign = if de { noise.sign() } else { 1.0 };
            stand_ins(set, &vec![sign; set.len()], delta)?
        } else {
            let found = match &mut closures.delta_logits {
                None => self.search_functional(&reference, &mut closures.logits, stats)?,
                Some(other) => {
                    let reference = without_grad(|| self.forward(PassKind::Probe(1), false, other, stats))?;
                    self.search_functional(&reference, other, stats)?
                }
            };
            stats.delta_norm = found.norm;
            let weights = stand_ins(set, &found.alphas, &found.direction)?;
            kept = if config.refresh_every > 1 { Some(Kept::searched(found.materialize()?)) } else { None };
            weights
        };

        let pass = PassKind::Perturbed(0);
        let shifted = self.forward_at(pass, &shifted_weights, &mut closures.logits, stats)?;
        shifted.comparable(&reference, pass)?;
        stats.inconsistency = Some(reference.divergence(&shifted)?);
        let penalty = match config.gradient {
            PenaltyGradient::BothSides => kl(&outputs.log_p, &shifted.log_p)?,
            PenaltyGradient::Detached => kl(&reference.log_p, &shifted.log_p)?,
        };
        let side = penalty.f_mul_scalar(config.beta)?.to_kind(loss.loss.kind());
        let total = loss.loss.f_reshape([] as [i64; 0])?.f_add(&side)?;

        // One backward pass to the weights at θ and to those at θ + δ.
        let count = engine.all.len();
        let names = engine.all.names().iter().cloned().chain(set.names().iter().map(|n| format!("{n} (shifted)")));
        let tensors = engine.all.tensors().iter().chain(&shifted_weights).map(Tensor::shallow_clone);
        let both = ParamSet::new(names.zip(tensors))?;
        stats.backwards += 1;
        let parts = engine.gradient_of(&both, &total, pass)?;
        let share =
            ParamVec::new(parts.parts()[count..].iter().map(|p| p.as_ref().map(Tensor::shallow_clone)).collect());
        if share.is_empty() {
            return Err(Error::OverridesIgnored { pass });
        }
        let mut gradient: Vec<Option<Tensor>> =
            parts.parts()[..count].iter().map(|p| p.as_ref().map(Tensor::shallow_clone)).collect();
        for (part, &position) in share.parts().iter().zip(&self.perturbed.position) {
            if let Some(part) = part {
                let sum = match &gradient[position] {
                    Some(own) => no_grad(|| own.f_add(part))?,
                    None => part.copy(),
                };
                gradient[position] = Some(sum);
            }
        }
        if de {
            kept = Some(self.next_delta(share.copy(), noise, stats)?);
        }
        Ok(Passed { gradient: ParamVec::new(gradient), guard: None, delta: kept, scratch: None, pass })
    }

    /// The search of δ_K with the parameters left alone.
    fn search_functional(&self, reference: &Outputs, logits: &mut Logits<'_>, stats: &mut IamStats) -> Result<Delta> {
        let (engine, config, set) = (self.engine, self.config, &self.perturbed.set);
        let noise = Noise::new(config.seed, engine.step);
        stats.refreshed = true;
        if let Some(epsilon) = self.at_once(None)? {
            stats.degenerate = epsilon.length == 0.0;
            return Ok(Delta::of(epsilon));
        }
        let p = reference.log_p.f_exp()?;
        let (alpha, start) = match self.start {
            Some(start) => (1.0, start(engine.step, set)?),
            None => (per_scalar(set, config.noise_scale), set.normal(noise.seed())?),
        };
        set.check(&start)?;
        let mut weights = stand_ins(set, &vec![alpha; set.len()], &start)?;
        let mut found: Option<Delta> = None;
        for k in 0..config.inner_steps {
            let pass = PassKind::Inner(k);
            let outputs = self.forward_at(pass, &weights, logits, stats)?;
            outputs.comparable(reference, pass)?;
            if k == 0 {
                note_signal(stats, &outputs, reference)?;
            }
            let leaves = ParamSet::new(set.names().iter().cloned().zip(weights.iter().map(Tensor::shallow_clone)))?;
            stats.backwards += 1;
            let gradient = leaves.gradient(&cross_entropy(&p, &outputs.log_p)?)?;
            if gradient.is_empty() {
                return Err(Error::OverridesIgnored { pass });
            }
            let epsilon = scaled(self.perturbed, &self.radii, config.norm_eps, gradient, pass)?;
            stats.degenerate = epsilon.length == 0.0;
            weights = stand_ins(set, &epsilon.alphas, &epsilon.direction)?;
            found = Some(Delta::of(epsilon));
            if stats.degenerate {
                break;
            }
        }
        found.ok_or(Error::InvalidInnerSteps)
    }

    /// The outputs with other weights in place of the perturbed parameters.
    fn forward_at(
        &self,
        pass: PassKind,
        weights: &[Tensor],
        logits: &mut Logits<'_>,
        stats: &mut IamStats,
    ) -> Result<Outputs> {
        let names = self.perturbed.set.names().iter().cloned();
        let overrides: HashMap<String, Tensor> = names.zip(weights.iter().map(Tensor::shallow_clone)).collect();
        forward(self.engine, self.config, self.scope, (pass, true), logits, Some(&overrides), stats)
    }
}
