//! The passes of a step.

use super::TwoPass;
use crate::base::BaseOptimizer;
use crate::config::{PerturbDirection, PerturbScope};
use crate::direction::Perturbed;
use crate::engine::{Evaluated, Finish, Request, accumulate};
use crate::pass::{Pass, PassKind};
use crate::rule::Rule;
use crate::scope::{StepScope, without_grad};
use crate::stats::SamStats;
use crate::{Error, Result};
use std::ops::Range;
use tensor::params::Scratch;
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamVec, RestoreGuard, fused};

/// What a perturbation was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Applied {
    /// `‖T g‖`, without loss scaling.
    pub(super) norm: f64,
    /// `‖ε‖₂`.
    pub(super) length: f64,
    /// ρ.
    pub(super) rho: f64,
}

/// Some micro-batches that share a perturbation.
struct Sweep {
    micros: Range<usize>,
    /// Their share of the step.
    share: f64,
    scale: f64,
}

impl<B: BaseOptimizer, R: Rule> TwoPass<B, R> {
    /// All passes of a step; the final gradient, unscaled, and the guard that restores the parameters to θ.
    pub(super) fn gradients(
        &mut self,
        n: usize,
        scale: f64,
        scope: &mut StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
        stats: &mut SamStats,
    ) -> Result<(ParamVec, Option<RestoreGuard>)> {
        let size = if stats.perturbed && self.sam().scope == PerturbScope::PerMicroBatch { 1 } else { n };
        let mut total: Option<ParamVec> = None;
        let mut guard: Option<RestoreGuard> = None;
        (stats.loss, stats.grad_norm) = (0.0, 0.0);
        for start in (0..n).step_by(size) {
            let sweep = Sweep { micros: start..start + size, share: size as f64 / n as f64, scale };
            // The last guard stays open: the base optimizer can read the originals and write over the perturbed
            // parameters, which saves a pass over memory.
            if let Some(guard) = guard.take() {
                self.engine.scratch = Some(guard.close());
            }
            let gradient;
            (gradient, guard) = self.sweep(&sweep, scope, closure, stats)?;
            if sweep.share < 1.0 {
                gradient.scale(sweep.share)?;
            }
            accumulate(&mut total, gradient)?;
        }
        let gradient = total.ok_or(Error::NoGradient { pass: PassKind::Main })?;
        if scale != 1.0 {
            gradient.scale(1.0 / scale)?;
        }
        Ok((gradient, guard))
    }

    /// Main pass, perturbation and perturbed pass over some micro-batches; the final gradient of them and the open
    /// guard.
    fn sweep(
        &mut self,
        sweep: &Sweep,
        scope: &mut StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
        stats: &mut SamStats,
    ) -> Result<(ParamVec, Option<RestoreGuard>)> {
        let Sweep { micros, share, scale } = sweep;
        let n = micros.len() as f64;
        // Only the perturbed groups' gradient is needed unless the method mixes or the step ends here.
        let whole = R::MIXES || !stats.perturbed;
        let mut main: Option<ParamVec> = None;
        let mut losses = Vec::with_capacity(micros.len());
        for micro in micros.clone() {
            let evaluated = self.evaluate(PassKind::Main, micro, scope, closure)?;
            stats.passes += 1;
            stats.loss += share / n * evaluated.value;
            accumulate(&mut main, self.backward(&evaluated.loss, scale / n, PassKind::Main, whole)?)?;
            losses.push(evaluated);
        }
        if stats.perturbed || self.sam().check_batch {
            scope.keep_buffers()?;
        }
        if self.sam().check_batch {
            self.check_batch(micros.clone(), &losses, scope, closure)?;
            scope.return_to_kept();
        }
        let main = main.ok_or(Error::NoGradient { pass: PassKind::Main })?;
        let (Some(perturbed), true) = (&self.perturbed, stats.perturbed) else {
            stats.grad_norm += share * main.norm() / scale;
            return Ok((main, None));
        };
        let along_noise = self.sam().direction == PerturbDirection::Random;
        let gradient_norm = if along_noise { main.norm() / scale } else { f64::NAN };
        if along_noise {
            if !gradient_norm.is_finite() {
                return Err(Error::NonFinite { what: "gradient norm", pass: PassKind::Main, value: gradient_norm });
            }
            // The gradient's memory becomes the direction; methods that mix it in refuse this setting.
            let seed = self.engine.step_seed(self.sam().seed).noise("random-direction").index(micros.start as u64);
            for (i, part) in main.parts().iter().enumerate() {
                part.as_ref().map_or(Ok(()), |part| fused::fill_normal(part, seed, i as u64))?;
            }
        }
        let scratch = self.engine.scratch.take();
        let loss = losses.iter().map(|l| l.value).sum::<f64>() / n;
        // The mix needs `g` later; otherwise its memory becomes the direction.
        let (direction, main) = if R::MIXES { (perturbed.select(&main), Some(main)) } else { (main, None) };
        let (guard, applied) = self.apply(perturbed, direction, loss, *scale, main.is_none(), scratch)?;
        stats.grad_norm += share * if along_noise { gradient_norm } else { applied.norm };
        stats.epsilon_norm += share * applied.length;
        stats.rho += share * applied.rho;

        let mut gradient: Option<ParamVec> = None;
        for (micro, first) in micros.clone().zip(&losses) {
            let kind = PassKind::Perturbed(0);
            let evaluated = self.evaluate(kind, micro, scope, closure)?;
            if evaluated.loss.data_ptr() == first.loss.data_ptr() {
                return Err(Error::StaleLoss { pass: kind });
            }
            stats.passes += 1;
            *stats.perturbed_loss.get_or_insert(0.0) += share / n * evaluated.value;
            accumulate(&mut gradient, self.backward(&evaluated.loss, scale / n, kind, true)?)?;
        }
        scope.return_to_kept();
        let gradient = gradient.ok_or(Error::NoGradient { pass: PassKind::Perturbed(0) })?;
        if let Some(main) = &main {
            R::combine(&self.config, main, &gradient)?;
        }
        Ok((gradient, Some(guard)))
    }

    /// Calls the closure and checks what it returns.
    fn evaluate(
        &self,
        kind: PassKind,
        micro: usize,
        scope: &StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<Evaluated> {
        let request = Request { micro, ..Request::new(kind, self.sam().bn) };
        Evaluated::new(self.engine.call(request, scope, closure)?, kind)
    }

    /// Gradient of `factor · loss`, with weight decay where it counts as part of the loss, half-precision parts
    /// widened to f32. In the order of all parameters if `whole`, else of the perturbed ones.
    fn backward(&self, loss: &Tensor, factor: f64, pass: PassKind, whole: bool) -> Result<ParamVec> {
        let subset = self.perturbed.as_ref().filter(|_| !whole);
        let set = subset.map_or(&self.engine.all, |perturbed| &perturbed.set);
        let scaled = if factor == 1.0 { loss.shallow_clone() } else { loss.f_mul_scalar(factor)? };
        let gradient = self.engine.gradient_of(set, &scaled, pass)?;
        if let (true, Some(default)) = (self.sam().perturb_weight_decay, self.engine.base.coupled_decay()) {
            for (i, (tensor, part)) in set.tensors().iter().zip(gradient.parts()).enumerate() {
                let flat = subset.map_or(i, |perturbed| perturbed.position[i]);
                let decay = self.engine.groups[self.engine.group[flat]].weight_decay.unwrap_or(default);
                if let Some(part) = part
                    && decay != 0.0
                {
                    let _ = no_grad(|| part.shallow_clone().f_add_(&tensor.detach().f_mul_scalar(decay * factor)?))?;
                }
            }
        }
        Ok(gradient)
    }

    /// Repeats the main pass without gradients: the same batch must give the same loss.
    fn check_batch(
        &self,
        micros: Range<usize>,
        losses: &[Evaluated],
        scope: &StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<()> {
        for (micro, first) in micros.zip(losses) {
            let second = without_grad(|| self.evaluate(PassKind::Probe(0), micro, scope, closure))?.value;
            // Reductions may be ordered differently from call to call on several threads.
            if (second - first.value).abs() > 1e-5 * first.value.abs().max(1e-3) {
                return Err(Error::BatchChanged { first: first.value, second });
            }
        }
        Ok(())
    }

    /// Computes ε from the (scaled) gradient of the perturbed parameters and adds it to them under a guard. `own`
    /// says that the gradient's memory may be overwritten.
    pub(super) fn apply(
        &self,
        perturbed: &Perturbed,
        gradient: ParamVec,
        loss: f64,
        scale: f64,
        own: bool,
        scratch: Option<Scratch>,
    ) -> Result<(RestoreGuard, Applied)> {
        let mut rho = Ok(0.0);
        let epsilon = perturbed.epsilon(gradient, self.engine.groups.len(), own, |norm| {
            let unscaled = norm / scale;
            rho = self.rho(loss, unscaled);
            let radius = *rho.as_ref().unwrap_or(&0.0);
            (0..self.engine.groups.len())
                .map(|g| {
                    if norm == 0.0 {
                        return 0.0;
                    }
                    // ε is made of the scaled gradient, so the factor carries 1/scale.
                    R::factor(&self.config, self.group_rho(g, radius), unscaled + self.sam().norm_eps) / scale
                })
                .collect()
        })?;
        let rho = rho?;
        if !epsilon.norm.is_finite() {
            return Err(Error::NonFinite { what: "gradient norm", pass: PassKind::Main, value: epsilon.norm });
        }
        perturbed.check_precision(&epsilon)?;
        let guard = perturbed.set.perturb(&epsilon.alphas, &epsilon.direction, scratch)?;
        Ok((guard, Applied { norm: epsilon.norm / scale, length: epsilon.length, rho }))
    }

    /// Checks and clips the final gradient and lets the base optimizer step; on an error the guard restores the
    /// parameters.
    pub(super) fn finish(
        &mut self,
        gradient: &ParamVec,
        guard: Option<RestoreGuard>,
        stats: &mut SamStats,
    ) -> Result<()> {
        let pass = if stats.perturbed { PassKind::Perturbed(0) } else { PassKind::Main };
        let sam = self.sam();
        let finish = Finish { pass, clip_norm: sam.clip_norm, decay_inside: sam.perturb_weight_decay };
        let finished = self.engine.finish(gradient, guard, finish)?;
        (stats.final_grad_norm, stats.clipped) = (finished.norm, finished.clipped);
        Ok(())
    }
}
