//! The passes of a step.

use super::amdf::{Direction, Directions, judge};
use super::config::{DaSamConfig, OuterMode, OuterWeights};
use super::das::das_factors;
use super::{DaSam, DaSamStats, Memory, Probe};
use crate::base::BaseOptimizer;
use crate::direction::{Epsilon, Perturbed, products};
use crate::domain::{ByDomain, DomainLosses, f64_reduction};
use crate::engine::{Engine, Finish, Request, accumulate};
use crate::pass::{Pass, PassKind};
use crate::scope::{StepScope, StepSeed, without_grad};
use crate::{Error, Result};
use tensor::params::Scratch;
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamVec, RestoreGuard};

/// Added to norms, as in SAM.
const NORM_EPS: f64 = 1e-12;

/// A step under way: it reads the optimizer and writes only its own statistics.
struct Running<'a, B, F> {
    config: &'a DaSamConfig,
    engine: &'a Engine<B>,
    scope: &'a StepScope,
    closure: &'a mut F,
    main: ByDomain,
    /// Whether losses are reduced in f64.
    wide: bool,
    /// DAS's factors.
    factors: Vec<f64>,
    /// Weights of the domains in the gradient at the perturbed point.
    outer: Vec<f64>,
    /// Plain SAM's direction, where it is compared with.
    plain: Option<ParamVec>,
    stats: DaSamStats,
}

/// A perturbed point with what is reported of it.
struct Point {
    guard: RestoreGuard,
    length: f64,
    cos_to_guided: f64,
}

impl<B: BaseOptimizer> DaSam<B> {
    /// All passes and the base step; the statistics and what the next steps remember.
    pub(super) fn run(
        &mut self,
        scope: &mut StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<DomainLosses>,
    ) -> Result<(DaSamStats, Memory)> {
        let mut memory = self.memory.clone();
        let request = Request::new(PassKind::Main, self.config.bn);
        let losses = self.engine.call(request, scope, closure)?;
        let wide = self.takes_small_differences();
        let main = ByDomain::finite(losses, PassKind::Main, wide)?;
        scope.keep_buffers()?;
        let missing = self.missing(&main)?;
        let factors = das_factors(&self.config, &seen_losses(&self.config, &main, &mut memory));
        let outer = match self.config.outer_weights {
            OuterWeights::Uniform => vec![1.0; main.len()],
            OuterWeights::Das => factors.clone(),
        };
        let stats = DaSamStats { missing, ..blank_stats(&self.engine, &main, &factors) };
        let scratch = self.engine.scratch.take();
        let (config, engine) = (&self.config, &self.engine);
        let mut running = Running { config, engine, scope, closure, main, wide, factors, outer, plain: None, stats };

        let moves = |g: &crate::ParamGroup| g.perturb && g.rho.unwrap_or(config.rho) > 0.0;
        let perturbed = self.perturbed.as_ref().filter(|_| engine.groups.iter().any(moves));
        let (gradient, guard, pass) = match perturbed {
            None => (running.plain_gradient()?, None, PassKind::Main),
            Some(perturbed) => {
                let guided = running.guided(perturbed)?;
                let (gradient, guard) = running.perturbed_gradient(perturbed, guided, &mut memory, scratch)?;
                (gradient, Some(guard), PassKind::Perturbed(0))
            }
        };
        let mut stats = running.stats;
        scope.return_to_kept();
        let finish = Finish { clip_norm: self.config.clip_norm, ..Finish::plain(pass) };
        stats.final_grad_norm = self.engine.finish(&gradient, guard, finish)?.norm;
        Ok((stats, memory))
    }

    /// Whether the probes take differences of losses over so small a radius that f32 means would be rounding.
    fn takes_small_differences(&self) -> bool {
        let perturbed = self.engine.groups.iter().filter(|g| g.perturb);
        self.config.amdf.is_some() && f64_reduction(perturbed.map(|g| g.rho.unwrap_or(self.config.rho)))
    }

    /// Announced domains that the batch doesn't have.
    fn missing(&self, losses: &ByDomain) -> Result<Vec<crate::DomainId>> {
        let Some(announced) = &self.announced else { return Ok(Vec::new()) };
        match losses.ids.iter().find(|id| !announced.contains(id)) {
            Some(id) => Err(Error::UnknownDomain { id: *id }),
            None => Ok(announced.iter().filter(|id| !losses.ids.contains(id)).copied().collect()),
        }
    }
}

/// The losses that DAS looks at: the batch's own, or running ones.
fn seen_losses(config: &DaSamConfig, losses: &ByDomain, memory: &mut Memory) -> Vec<f64> {
    let keep = config.loss_ema;
    if keep == 0.0 {
        return losses.values.clone();
    }
    let running = losses.ids.iter().zip(&losses.values).map(|(id, &value)| {
        let running = memory.losses.entry(*id).or_insert(value);
        *running = keep * *running + (1.0 - keep) * value;
        *running
    });
    running.collect()
}

fn blank_stats<B: BaseOptimizer>(engine: &Engine<B>, losses: &ByDomain, factors: &[f64]) -> DaSamStats {
    DaSamStats {
        step: engine.step,
        loss: losses.mean(),
        perturbed_loss: None,
        domains: losses.ids.clone(),
        domain_losses: losses.values.clone(),
        factors: factors.to_vec(),
        missing: Vec::new(),
        sharpness: f64::NAN,
        anisotropy: f64::NAN,
        rho_t: 0.0,
        epsilon_norm: 0.0,
        directions_used: 0,
        probe_failures: 0,
        grad_norm: f64::NAN,
        final_grad_norm: f64::NAN,
        cos_to_sam: None,
        cos_to_guided: 1.0,
        forwards: 1,
        backwards: 0,
        lr: engine.lr(),
    }
}

impl<B: BaseOptimizer, F: FnMut(&Pass<'_>) -> Result<DomainLosses>> Running<'_, B, F> {
    /// A later pass. It starts from the buffers that the main pass left: one that enters the output would otherwise
    /// count in the slopes. The graphs of the passes before have been used by then.
    fn losses(&mut self, kind: PassKind) -> Result<DomainLosses> {
        self.stats.forwards += 1;
        self.scope.return_to_kept();
        self.engine.call(Request::new(kind, self.config.bn), self.scope, self.closure)
    }

    /// Radius of a group.
    fn rho(&self, group: usize) -> f64 {
        self.engine.groups[group].rho.unwrap_or(self.config.rho)
    }

    /// The gradient of a step that isn't perturbed.
    fn plain_gradient(&mut self) -> Result<ParamVec> {
        let gradient = self.engine.gradient(&self.main.weighted(&self.outer)?, PassKind::Main)?;
        self.stats.backwards += 1;
        self.stats.grad_norm = gradient.norm();
        Ok(gradient)
    }

    /// The gradient of the weighted losses over the perturbed parameters.
    fn guided(&mut self, perturbed: &Perturbed) -> Result<ParamVec> {
        if self.config.compare_with_sam {
            let uniform = self.main.weighted(&vec![1.0; self.main.len()])?;
            self.stats.backwards += 1;
            self.plain = Some(self.engine.gradient_keeping_graph(&perturbed.set, &uniform, PassKind::Main)?);
        }
        let loss = self.main.weighted(&self.factors)?;
        let gradient = self.engine.gradient_of(&perturbed.set, &loss, PassKind::Main)?;
        self.stats.backwards += 1;
        let value = gradient.norm();
        self.stats.grad_norm = value;
        if value.is_finite() {
            Ok(gradient)
        } else {
            Err(Error::NonFinite { what: "gradient norm", pass: PassKind::Main, value })
        }
    }

    /// Probes, perturbation and the gradient there.
    fn perturbed_gradient(
        &mut self,
        perturbed: &Perturbed,
        guided: ParamVec,
        memory: &mut Memory,
        scratch: Option<Scratch>,
    ) -> Result<(ParamVec, RestoreGuard)> {
        // Without a gradient there is no direction to probe along: its slope of 0 must not enter the level.
        let Some(amdf) = self.config.amdf.filter(|_| self.stats.grad_norm > 0.0) else {
            let point = self.along_guided(perturbed, guided, 1.0, scratch)?;
            return self.outer_gradient(perturbed, point, 1.0, 0);
        };
        // Without noise all directions are one.
        let count = if amdf.zeta > 0.0 { amdf.directions } else { 1 };
        let reusable = |probe: &Probe| {
            let age = self.engine.step.checked_sub(probe.step);
            age.is_some_and(|age| age < amdf.probe_every as u64) && probe.weights.len() == count
        };
        let reused = memory.probe.take().filter(reusable).map(|probe| Probe { failures: 0, ..probe });
        let noise_step = reused.as_ref().map_or(self.engine.step, |probe| probe.step);
        let seed = StepSeed::new(self.config.seed, noise_step).noise("amdf");

        let norm = self.stats.grad_norm + NORM_EPS;
        let radii: Vec<f64> = perturbed.group.iter().map(|&g| self.rho(g)).collect();
        let alphas: Vec<f64> = radii.iter().map(|rho| rho / norm).collect();
        if self.engine.half {
            let direction =
                ParamVec::new(guided.parts().iter().map(|p| p.as_ref().map(Tensor::shallow_clone)).collect());
            // Whether anything is to move; the length itself isn't known yet.
            let length = radii.iter().copied().fold(0.0, f64::max);
            perturbed.check_precision(&Epsilon { norm, length, alphas: alphas.clone(), direction })?;
        }
        // The backup is made with the first move, to the guided direction.
        let guard = perturbed.set.perturb(&alphas, &guided, scratch)?;
        let around = Directions::new(&perturbed.set, &guided, norm, amdf.zeta, seed, radii);
        let mut directions = vec![around.guided()];
        let probe = if let Some(probe) = reused {
            for m in 1..count {
                directions.push(around.visit(m, 1.0, &guard)?);
            }
            probe
        } else {
            let mut slopes = vec![self.probe(0)?];
            for m in 1..count {
                directions.push(around.visit(m, 1.0, &guard)?);
                slopes.push(self.probe(m)?);
            }
            judge(&amdf, &slopes, self.engine.step, memory)
        };
        self.stats.sharpness = probe.sharpness;
        self.stats.anisotropy = probe.anisotropy;
        self.stats.probe_failures = probe.failures;
        let result = if count == 1 {
            let scratch = Some(guard.close());
            let point = self.along_guided(perturbed, guided, probe.scale, scratch)?;
            self.outer_gradient(perturbed, point, probe.scale, 0)
        } else {
            self.around_guided(perturbed, &around, &directions, &probe, guard)
        };
        memory.probe = Some(probe).filter(|probe| amdf.probe_every > 1 && probe.usable());
        result
    }

    /// `h = (1/ρ)(1/D) Σ_k s_k [L_k(θ + ρu) − L_k(θ)]` where the parameters are; `None` where it isn't finite.
    fn probe(&mut self, m: usize) -> Result<Option<f64>> {
        let kind = PassKind::Probe(m);
        let probed = without_grad(|| self.losses(kind))?;
        let probed = ByDomain::new(probed, kind, self.wide)?;
        self.main.check_later(&probed, kind)?;
        let rise = probed.weighted_value(&self.factors) - self.main.weighted_value(&self.factors);
        // With groups of other radii alone, ρ itself may be 0; the slope is then per unit of them.
        let rho = if self.config.rho > 0.0 { self.config.rho } else { 1.0 };
        Ok(Some(rise / rho).filter(|h| h.is_finite()))
    }

    /// `θ + ρ_t u_0`, by SAM's own code.
    fn along_guided(
        &self,
        perturbed: &Perturbed,
        gradient: ParamVec,
        scale: f64,
        scratch: Option<Scratch>,
    ) -> Result<Point> {
        let groups = self.engine.groups.len();
        let epsilon = perturbed.epsilon(gradient, groups, true, |norm| {
            (0..groups).map(|g| if norm == 0.0 { 0.0 } else { self.rho(g) * scale / (norm + NORM_EPS) }).collect()
        })?;
        perturbed.check_precision(&epsilon)?;
        let mut cos_to_guided = 1.0;
        // Groups with radii of their own bend ε away from the gradient.
        if epsilon.alphas.iter().any(|a| *a != epsilon.alphas[0]) && epsilon.length > 0.0 {
            let mut inner = 0.0;
            for (alpha, part) in epsilon.alphas.iter().zip(epsilon.direction.parts()) {
                if let Some(part) = part {
                    inner += alpha * products(part, part)?[0];
                }
            }
            cos_to_guided = inner / (epsilon.length * epsilon.norm);
        }
        let guard = perturbed.set.perturb(&epsilon.alphas, &epsilon.direction, scratch)?;
        Ok(Point { guard, length: epsilon.length, cos_to_guided })
    }

    /// The gradient at the point or points that the probe's weights and the outer mode say.
    fn around_guided(
        &mut self,
        perturbed: &Perturbed,
        around: &Directions<'_>,
        directions: &[Direction],
        probe: &Probe,
        guard: RestoreGuard,
    ) -> Result<(ParamVec, RestoreGuard)> {
        let scale = probe.scale;
        let used: Vec<usize> = (0..directions.len()).filter(|&m| probe.weights[m] > 0.0).collect();
        match self.config.outer {
            OuterMode::Soft => {
                let (length, cos_to_guided) = around.visit_mean(&probe.weights, directions, scale, &guard)?;
                self.stats.directions_used = used.len();
                self.outer_gradient(perturbed, Point { guard, length, cos_to_guided }, scale, 0)
            }
            OuterMode::Worst => {
                let worst = used.into_iter().max_by(|&a, &b| probe.weights[a].total_cmp(&probe.weights[b]));
                around.visit(worst.unwrap_or(0), scale, &guard)?;
                let (length, cos_to_guided) = around.measure(&guard)?;
                self.outer_gradient(perturbed, Point { guard, length, cos_to_guided }, scale, 0)
            }
            OuterMode::Average => {
                let (share, mut loss) = (1.0 / used.len() as f64, 0.0);
                let mut total: Option<ParamVec> = None;
                let mut open = guard;
                for m in &used {
                    around.visit(*m, scale, &open)?;
                    let (length, cos_to_guided) = around.measure(&open)?;
                    let point = Point { guard: open, length, cos_to_guided };
                    let (gradient, guard) = self.outer_gradient(perturbed, point, scale, *m)?;
                    open = guard;
                    loss += share * self.stats.perturbed_loss.unwrap_or(f64::NAN);
                    gradient.scale(share)?;
                    accumulate(&mut total, gradient)?;
                }
                (self.stats.directions_used, self.stats.perturbed_loss) = (used.len(), Some(loss));
                Ok((total.ok_or(Error::NoGradient { pass: PassKind::Perturbed(0) })?, open))
            }
        }
    }

    /// Forward and backward pass at the perturbed point, as the pass `Perturbed(m)`.
    fn outer_gradient(
        &mut self,
        perturbed: &Perturbed,
        point: Point,
        scale: f64,
        m: usize,
    ) -> Result<(ParamVec, RestoreGuard)> {
        if let Some(plain) = &self.plain {
            self.stats.cos_to_sam = Some(cosine(perturbed, plain, &point.guard)?);
        }
        let kind = PassKind::Perturbed(m);
        let losses = ByDomain::finite(self.losses(kind)?, kind, self.wide)?;
        self.main.check_later(&losses, kind)?;
        let gradient = self.engine.gradient(&losses.weighted(&self.outer)?, kind)?;
        let stats = &mut self.stats;
        stats.backwards += 1;
        stats.perturbed_loss = Some(losses.mean());
        (stats.epsilon_norm, stats.cos_to_guided) = (point.length, point.cos_to_guided);
        // A radius of −0 is valid; reported it is 0.
        stats.rho_t = (self.config.rho * scale).abs();
        stats.directions_used = stats.directions_used.max(1);
        Ok((gradient, point.guard))
    }
}

/// Cosine of the perturbation that the parameters are under with a direction.
fn cosine(perturbed: &Perturbed, direction: &ParamVec, guard: &RestoreGuard) -> Result<f64> {
    let moved = no_grad(|| {
        let pairs = perturbed.set.tensors().iter().zip(guard.originals());
        pairs.map(|(now, before)| now.f_sub(before).map(Some)).collect::<std::result::Result<Vec<_>, _>>()
    })?;
    let moved = ParamVec::new(moved);
    let lengths = moved.norm() * direction.norm();
    Ok(if lengths > 0.0 { moved.dot(direction)? / lengths } else { 1.0 })
}
