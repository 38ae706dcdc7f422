//! The passes of a step, variant by variant.

use super::config::{IamConfig, IamDirection, IamVariant, PenaltyForm, PenaltyGradient};
use super::delta::{Delta, Kept, Noise};
use super::outputs::Outputs;
use super::stats::IamStats;
use super::{Iam, Start, search};
use crate::base::BaseOptimizer;
use crate::direction::Perturbed;
use crate::divergence::{cross_entropy, kl};
use crate::engine::{Engine, Evaluated, Finish, Request};
use crate::pass::{Pass, PassKind};
use crate::scope::{StepScope, without_grad};
use crate::{Error, Result};
use std::collections::HashMap;
use tensor::params::Scratch;
use tensor::tch::Tensor;
use tensor::{ParamVec, RestoreGuard};

/// A closure that returns logits.
pub(super) type Logits<'a> = &'a mut dyn FnMut(&Pass<'_>) -> Result<Tensor>;

/// What the user gave for a step.
pub(super) struct Closures<'a> {
    pub(super) logits: Logits<'a>,
    pub(super) loss: &'a dyn Fn(&Tensor) -> Result<Tensor>,
    /// Of other inputs, for the search.
    pub(super) delta_logits: Option<Logits<'a>>,
    /// How many of the first inputs have a label.
    pub(super) labeled: Option<i64>,
}

/// What the passes of a step share.
pub(super) struct Bench<'a, B> {
    pub(super) engine: &'a Engine<B>,
    pub(super) config: &'a IamConfig,
    pub(super) perturbed: &'a Perturbed,
    /// Radius of each group.
    pub(super) radii: Vec<f64>,
    pub(super) scope: &'a StepScope,
    /// Gives δ₀ in place of normal noise.
    pub(super) start: Option<&'a Start>,
}

/// The outcome of a step's passes.
pub(super) struct Passed {
    pub(super) gradient: ParamVec,
    /// Open at the perturbed point, if the base optimizer may write over it.
    pub(super) guard: Option<RestoreGuard>,
    /// The persistent δ from now on.
    pub(super) delta: Option<Kept>,
    pub(super) scratch: Option<Scratch>,
    /// The pass that the gradient comes from, for messages.
    pub(super) pass: PassKind,
}

impl<B: BaseOptimizer> Iam<B> {
    /// Runs a step in a scope that cleans up after errors and panics.
    pub(super) fn run(&mut self, mut closures: Closures<'_>) -> Result<IamStats> {
        let mut scope = self.engine.open(self.config.seed, self.config.sync_rng)?;
        scope.keep_buffers()?;
        let mut stats = self.blank_stats();
        let scratch = self.engine.scratch.take();
        let done = self.gradient(&mut closures, &mut scope, &mut stats, scratch)?;
        if done.scratch.is_some() {
            self.engine.scratch = done.scratch;
        }
        let finish = Finish { clip_norm: self.config.clip_norm, ..Finish::plain(done.pass) };
        let finished = self.engine.finish(&done.gradient, done.guard, finish)?;
        (stats.final_grad_norm, stats.clipped) = (finished.norm, finished.clipped);
        scope.commit();
        if done.delta.is_some() {
            self.delta = done.delta;
        }
        self.engine.step += 1;
        Ok(stats)
    }

    /// All passes of a step.
    fn gradient(
        &self,
        closures: &mut Closures<'_>,
        scope: &mut StepScope,
        stats: &mut IamStats,
        scratch: Option<Scratch>,
    ) -> Result<Passed> {
        let config = &self.config;
        let radius = |g: &crate::ParamGroup| if g.perturb { g.rho.unwrap_or(config.rho) } else { 0.0 };
        let radii: Vec<f64> = self.engine.groups.iter().map(radius).collect();
        let weightless = config.variant != IamVariant::S && config.beta == 0.0;
        let perturbed = match &self.perturbed {
            Some(perturbed) if !weightless && radii.iter().any(|&rho| rho > 0.0) => perturbed,
            _ => return self.plain(closures, scope, stats),
        };
        let due = self.engine.step.is_multiple_of(config.refresh_every as u64);
        // DE starts from noise and follows its own δ; the others search when it is due.
        let fresh;
        let delta = match (config.variant, self.delta.as_ref().map(|kept| &kept.vector)) {
            (IamVariant::De, None) => {
                fresh = Noise::new(config.seed, self.engine.step).draw(&perturbed.set, config.noise_scale)?;
                Some(&fresh)
            }
            (IamVariant::De, delta) => delta,
            (_, delta) => delta.filter(|_| !due),
        };
        if config.variant == IamVariant::S {
            return self.iam_s(perturbed, radii, closures, scope, stats, scratch, delta);
        }
        if config.form == PenaltyForm::Split {
            return Bench { engine: &self.engine, config, perturbed, radii, scope, start: self.start.as_deref() }
                .split(closures, stats, scratch, delta);
        }
        let pass = (PassKind::Main, true);
        let outputs = forward(&self.engine, config, scope, pass, &mut closures.logits, None, stats)?;
        scope.keep_buffers()?;
        let bench = Bench { engine: &self.engine, config, perturbed, radii, scope, start: self.start.as_deref() };
        let done = bench.functional(&outputs, closures, stats, delta)?;
        // After the backward pass: libtorch refuses a graph whose saved tensors were written to.
        scope.return_to_kept();
        Ok(done)
    }

    /// The base optimizer's step: one pass.
    fn plain(&self, closures: &mut Closures<'_>, scope: &StepScope, stats: &mut IamStats) -> Result<Passed> {
        let pass = PassKind::Main;
        let outputs = forward(&self.engine, &self.config, scope, (pass, true), &mut closures.logits, None, stats)?;
        let loss = main_loss(closures, &outputs, pass, true, stats)?;
        stats.backwards += 1;
        let gradient = self.engine.gradient(&loss.loss, pass)?;
        Ok(Passed { gradient, guard: None, delta: None, scratch: None, pass })
    }

    /// IAM-S: the gradient of the loss at `θ + δ`.
    #[allow(clippy::too_many_arguments)] // the state of one step, passed on once
    fn iam_s(
        &self,
        perturbed: &Perturbed,
        radii: Vec<f64>,
        closures: &mut Closures<'_>,
        scope: &mut StepScope,
        stats: &mut IamStats,
        scratch: Option<Scratch>,
        delta: Option<&ParamVec>,
    ) -> Result<Passed> {
        let config = &self.config;
        let needs_gradient = delta.is_none() && (config.align_sign || config.direction == IamDirection::LossGradient);
        let main = PassKind::Main;
        let forward_main = |closures: &mut Closures<'_>, stats: &mut IamStats| {
            let pass = (main, needs_gradient);
            let outputs = forward(&self.engine, config, scope, pass, &mut closures.logits, None, stats)?;
            let loss = main_loss(closures, &outputs, main, needs_gradient, stats)?;
            Ok::<_, Error>((outputs, loss))
        };
        let (outputs, loss) = if needs_gradient {
            forward_main(closures, stats)?
        } else {
            without_grad(|| forward_main(closures, stats))?
        };
        let mut slope = None;
        if needs_gradient {
            stats.backwards += 1;
            slope = Some(self.engine.gradient_of(&perturbed.set, &loss.loss, main)?);
        }
        drop(loss);
        let reference = outputs.detached();
        drop(outputs);
        scope.keep_buffers()?;

        let bench = Bench { engine: &self.engine, config, perturbed, radii, scope, start: self.start.as_deref() };
        let (guard, kept) = if let Some(delta) = delta {
            (bench.reuse(delta, 1.0, scratch, stats)?, None)
        } else {
            let direction = if config.align_sign { None } else { slope.take() };
            let (guard, mut found) = bench.find(closures, &reference, direction, scratch, stats)?;
            if let Some(slope) = slope {
                found = bench.align(found, &slope, &guard)?;
            }
            stats.delta_norm = found.norm;
            (guard, self.keep(found)?)
        };

        let pass = PassKind::Perturbed(0);
        let outputs = bench.forward(pass, true, &mut closures.logits, stats)?;
        outputs.comparable(&reference, pass)?;
        let loss = Evaluated::new(closures.loss_of(&outputs.logits)?, pass)?;
        stats.perturbed_loss = Some(loss.value);
        stats.inconsistency = Some(reference.divergence(&outputs)?);
        stats.backwards += 1;
        let gradient = self.engine.gradient(&loss.loss, pass)?;
        scope.return_to_kept();
        Ok(Passed { gradient, guard: Some(guard), delta: kept, scratch: None, pass })
    }

    /// δ to be used again later, if it will be.
    fn keep(&self, delta: Delta) -> Result<Option<Kept>> {
        if self.config.refresh_every > 1 { Ok(Some(Kept::searched(delta.materialize()?))) } else { Ok(None) }
    }

    fn blank_stats(&self) -> IamStats {
        IamStats {
            step: self.engine.step,
            loss: f64::NAN,
            perturbed_loss: None,
            inconsistency: None,
            delta_norm: 0.0,
            inner_signal: None,
            weak_signal: false,
            degenerate: false,
            refreshed: false,
            unlabeled: None,
            final_grad_norm: f64::NAN,
            clipped: false,
            forwards: 0,
            backwards: 0,
            lr: self.lr(),
        }
    }
}

/// Calls a closure and checks the logits.
pub(super) fn forward<B: BaseOptimizer>(
    engine: &Engine<B>,
    config: &IamConfig,
    scope: &StepScope,
    (pass, graph): (PassKind, bool),
    logits: &mut Logits<'_>,
    overrides: Option<&HashMap<String, Tensor>>,
    stats: &mut IamStats,
) -> Result<Outputs> {
    let request = Request { overrides, ..Request::new(pass, config.bn) };
    let raw = engine.call(request, scope, logits)?;
    stats.forwards += 1;
    Outputs::new(raw, pass, graph)
}

/// The main loss at θ, noted in the statistics.
pub(super) fn main_loss(
    closures: &Closures<'_>,
    outputs: &Outputs,
    pass: PassKind,
    graph: bool,
    stats: &mut IamStats,
) -> Result<Evaluated> {
    stats.unlabeled = closures.labeled.map(|labeled| outputs.rows() - labeled);
    let loss = Evaluated::checked(closures.loss_of(&outputs.logits)?, pass, graph)?;
    stats.loss = loss.value;
    Ok(loss)
}

impl Closures<'_> {
    /// The main loss of some logits: of the labeled ones, if it was said which they are.
    pub(super) fn loss_of(&self, logits: &Tensor) -> Result<Tensor> {
        let Some(labeled) = self.labeled else { return (self.loss)(logits) };
        let rows = logits.size()[0];
        if !(1..=rows).contains(&labeled) {
            return Err(Error::invalid("labeled", format!("from 1 to the {rows} inputs of the batch"), labeled));
        }
        (self.loss)(&logits.f_narrow(0, 0, labeled)?)
    }
}

impl<B: BaseOptimizer> Bench<'_, B> {
    pub(super) fn forward(
        &self,
        pass: PassKind,
        graph: bool,
        logits: &mut Logits<'_>,
        stats: &mut IamStats,
    ) -> Result<Outputs> {
        forward(self.engine, self.config, self.scope, (pass, graph), logits, None, stats)
    }

    /// Perturbs by `sign · δ` with the δ of an earlier step.
    fn reuse(
        &self,
        delta: &ParamVec,
        sign: f64,
        scratch: Option<Scratch>,
        stats: &mut IamStats,
    ) -> Result<RestoreGuard> {
        stats.delta_norm = delta.norm();
        Ok(self.perturbed.set.perturb(&vec![sign; self.perturbed.set.len()], delta, scratch)?)
    }

    /// Searches δ on the step's own inputs, or on those given for it.
    fn find(
        &self,
        closures: &mut Closures<'_>,
        reference: &Outputs,
        loss_gradient: Option<ParamVec>,
        scratch: Option<Scratch>,
        stats: &mut IamStats,
    ) -> Result<(RestoreGuard, Delta)> {
        match &mut closures.delta_logits {
            None => self.search(reference, &mut closures.logits, loss_gradient, scratch, stats),
            Some(other) => {
                let reference = without_grad(|| self.forward(PassKind::Probe(1), false, other, stats))?;
                self.search(&reference, other, loss_gradient, scratch, stats)
            }
        }
    }

    /// δ or −δ, whichever the loss rises along; the parameters follow.
    fn align(&self, delta: Delta, slope: &ParamVec, guard: &RestoreGuard) -> Result<Delta> {
        let norm = delta.norm;
        let vector = delta.materialize()?;
        let sign = if vector.dot(slope)? < 0.0 { -1.0 } else { 1.0 };
        vector.scale(sign)?;
        let alphas = vec![1.0; self.perturbed.set.len()];
        guard.shift(&alphas, &vector)?;
        Ok(Delta { alphas, direction: vector, norm })
    }

    /// IAM-D and IAM-DE in place: a backward pass at `θ + δ` and one at θ, whose gradients add up to the penalty's and
    /// the loss's. Exact because δ is constant and `Σ_c p_c ∂log p_c = 0`.
    fn split(
        &self,
        closures: &mut Closures<'_>,
        stats: &mut IamStats,
        scratch: Option<Scratch>,
        delta: Option<&ParamVec>,
    ) -> Result<Passed> {
        let (engine, config) = (self.engine, self.config);
        let de = config.variant == IamVariant::De;
        let (reference, slope) = self.reference(closures, stats, delta.is_none())?;
        let noise = Noise::new(config.seed, engine.step);
        let mut kept = None;
        let guard = if let Some(delta) = delta {
            self.reuse(delta, if de { noise.sign() } else { 1.0 }, scratch, stats)?
        } else {
            let (guard, found) = self.find(closures, &reference, slope, scratch, stats)?;
            stats.delta_norm = found.norm;
            kept = if config.refresh_every > 1 { Some(Kept::searched(found.materialize()?)) } else { None };
            guard
        };

        let pass = PassKind::Perturbed(0);
        let shifted = self.forward(pass, true, &mut closures.logits, stats)?;
        shifted.comparable(&reference, pass)?;
        stats.inconsistency = Some(reference.divergence(&shifted)?);
        let penalty = cross_entropy(&reference.log_p.f_exp()?, &shifted.log_p)?.f_mul_scalar(config.beta)?;
        stats.backwards += 1;
        let share = engine.gradient(&penalty, pass)?;
        let shifted = shifted.detached();
        let scratch = Some(guard.close());
        if de {
            kept = Some(self.next_delta(self.perturbed.select(&share).copy(), noise, stats)?);
        }

        let main = PassKind::Main;
        self.scope.return_to_kept();
        let outputs = self.forward(main, true, &mut closures.logits, stats)?;
        outputs.comparable(&reference, main)?;
        let loss = main_loss(closures, &outputs, main, true, stats)?;
        let total = match config.gradient {
            PenaltyGradient::BothSides => {
                let side = kl(&outputs.log_p, &shifted.log_p)?.f_mul_scalar(config.beta)?;
                loss.loss.f_reshape([] as [i64; 0])?.f_add(&side.to_kind(loss.loss.kind()))?
            }
            PenaltyGradient::Detached => loss.loss,
        };
        stats.backwards += 1;
        let mut gradient = engine.gradient(&total, main)?;
        gradient.accumulate(share)?;
        Ok(Passed { gradient, guard: None, delta: kept, scratch, pass: main })
    }

    /// The outputs at θ, and the gradient of the loss there if the direction needs it.
    fn reference(
        &self,
        closures: &mut Closures<'_>,
        stats: &mut IamStats,
        searches: bool,
    ) -> Result<(Outputs, Option<ParamVec>)> {
        let pass = PassKind::Probe(0);
        if !(searches && self.config.direction == IamDirection::LossGradient) {
            return Ok((without_grad(|| self.forward(pass, false, &mut closures.logits, stats))?.detached(), None));
        }
        let outputs = self.forward(pass, true, &mut closures.logits, stats)?;
        let loss = main_loss(closures, &outputs, pass, true, stats)?;
        stats.backwards += 1;
        let gradient = self.engine.gradient_of(&self.perturbed.set, &loss.loss, pass)?;
        Ok((outputs.detached(), Some(gradient)))
    }

    /// `ρ g_δ/‖g_δ‖` for the next step of DE, from the penalty's gradient at `θ + sδ`, (over the
    /// perturbed parameters, to be overwritten), of which g_δ is s times; new noise where it has no direction.
    pub(super) fn next_delta(&self, vector: ParamVec, noise: Noise, stats: &mut IamStats) -> Result<Kept> {
        let norm = vector.norm();
        if norm == 0.0 || !norm.is_finite() {
            stats.degenerate = true;
            // Another stream than the one that δ may have started from in this step.
            let next = Noise::new(self.config.seed, self.engine.step + 1);
            let vector = next.draw(&self.perturbed.set, self.config.noise_scale)?;
            return Ok(Kept { vector, is_noise: true });
        }
        let epsilon =
            search::scaled(self.perturbed, &self.radii, self.config.norm_eps, vector, PassKind::Perturbed(0))?;
        stats.refreshed = true;
        let delta = Delta::of(epsilon).materialize()?;
        delta.scale(noise.sign())?;
        Ok(Kept::searched(delta))
    }
}
