//! The step that SAM, ASAM, GSAM and SAGM share: a main pass, a perturbed pass, the base step.

use crate::base::{BaseOptimizer, Slot};
use crate::config::{BnMode, PerturbScope, RhoSchedule, SamConfig};
use crate::direction::Perturbed;
use crate::group::{self, ParamGroup};
use crate::pass::{Pass, PassKind};
use crate::rule::{GsamRule, Rule, SagmRule, SamRule};
use crate::scope::{StepScope, StepSeed};
use crate::stats::{SamStats, StepOutcome};
use crate::{Error, Result};
use tensor::params::{Scratch, is_perturbed};
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamSet, ParamVec, RestoreGuard, StateDict};

/// Sharpness-aware minimization [prior work: Foret et al. 2021], with ASAM [Kwon et al. 2021] by
/// [`SamConfig::adaptive`]: `ε = ρ g/‖g‖`, then a base step at `θ` with the gradient at `θ + ε`.
pub type Sam<B> = TwoPass<B, SamRule>;
/// Surrogate-gap guided SAM [prior work: Zhuang et al. 2022]: the final gradient is `g_p − α g_⊥`.
pub type Gsam<B> = TwoPass<B, GsamRule>;
/// Sharpness-aware gradient matching [prior work; official code]: `ε = (ρ/‖g‖ − α) g`, the final gradient is
/// `½ (g + g_p)`.
pub type Sagm<B> = TwoPass<B, SagmRule>;

/// A function from the step's number to the radius.
type RhoFn = Box<dyn Fn(u64) -> f64>;

/// A sharpness-aware optimizer over a base optimizer; use it under the names [`Sam`], [`Gsam`], [`Sagm`].
pub struct TwoPass<B, R: Rule> {
    config: R::Config,
    groups: Vec<ParamGroup>,
    base: B,
    /// All parameters, flat over the groups.
    all: ParamSet,
    /// Group of each.
    group: Vec<usize>,
    perturbed: Option<Perturbed>,
    buffers: Vec<Tensor>,
    rho_fn: Option<RhoFn>,
    step: u64,
    scratch: Option<Scratch>,
}

impl<B: std::fmt::Debug, R: Rule> std::fmt::Debug for TwoPass<B, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct(R::NAME)
            .field("config", &self.config)
            .field("base", &self.base)
            .field("parameters", &self.all.names())
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

/// Loss and gradient of one pass.
struct Evaluated {
    loss: Tensor,
    value: f64,
}

impl<B: BaseOptimizer, R: Rule> TwoPass<B, R> {
    /// Builds the optimizer over the model's tensors.
    ///
    /// Models with running statistics: add [`with_buffers`](Self::with_buffers).
    ///
    /// # Errors
    /// An invalid configuration, an empty group, a tensor or name that comes twice, tensors that share memory.
    pub fn new(groups: Vec<ParamGroup>, base: B, config: R::Config) -> Result<Self> {
        R::validate(&config)?;
        base.validate()?;
        group::validate(&groups)?;
        let all = ParamSet::new(
            groups.iter().flat_map(|g| g.names.iter().cloned().zip(g.params.iter().map(Tensor::shallow_clone))),
        )?;
        let group = groups.iter().enumerate().flat_map(|(i, g)| vec![i; g.params.len()]).collect();
        let perturbed = Perturbed::new(&groups, R::sam(&config).adaptive)?;
        Ok(Self {
            config,
            groups,
            base,
            all,
            group,
            perturbed,
            buffers: Vec::new(),
            rho_fn: None,
            step: 0,
            scratch: None,
        })
    }

    /// Names the non-trainable tensors (running statistics, from [`buffers`](crate::buffers)) that only the
    /// main pass may change: they are put back after the later passes, for any kind of layer.
    #[must_use]
    pub fn with_buffers(mut self, buffers: Vec<Tensor>) -> Self {
        self.buffers = buffers;
        self
    }

    /// The settings.
    pub fn config(&self) -> &R::Config {
        &self.config
    }

    /// The groups.
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// The base optimizer.
    pub fn base(&self) -> &B {
        &self.base
    }

    /// All parameters as one vector.
    pub fn params(&self) -> &ParamSet {
        &self.all
    }

    /// Number of the next step.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// The learning rate: the base optimizer's, the only one there is.
    pub fn lr(&self) -> f64 {
        self.base.lr()
    }

    /// Sets the learning rate; what a scheduler calls.
    pub fn set_lr(&mut self, lr: f64) {
        self.base.set_lr(lr);
    }

    /// Lets a function of the step's number give the radius.
    pub fn set_rho_fn(&mut self, rho: impl Fn(u64) -> f64 + 'static) {
        self.rho_fn = Some(Box::new(rho));
    }

    /// Fixes the radius from now on.
    ///
    /// # Errors
    /// [`Error::InvalidRho`] when it is negative or not finite.
    pub fn set_rho(&mut self, rho: f64) -> Result<()> {
        if !(rho.is_finite() && rho >= 0.0) {
            return Err(Error::InvalidRho { field: "rho".into(), rho });
        }
        self.set_rho_fn(move |_| rho);
        Ok(())
    }

    /// True while some parameter is perturbed: assert that it is false before an evaluation.
    pub fn is_perturbed(&self) -> bool {
        self.all.tensors().iter().any(is_perturbed)
    }

    /// One step on one batch. The closure is called for every pass, does a fresh forward pass on the batch of
    /// the step and returns the scalar loss.
    ///
    /// # Errors
    /// Everything that [`Error`] lists; parameters, buffers and state are then what they were before.
    pub fn step(&mut self, closure: impl FnMut(&Pass<'_>) -> Result<Tensor>) -> Result<SamStats> {
        self.run(1, None, closure)
    }

    /// One step over `n` micro-batches, which [`Pass::micro`] numbers; gradients are averaged over them, with
    /// one perturbation for all or one for each as [`PerturbScope`] says.
    ///
    /// # Errors
    /// As [`step`](Self::step); [`Error::InvalidConfig`] for `n = 0`.
    pub fn step_accumulate(&mut self, n: usize, closure: impl FnMut(&Pass<'_>) -> Result<Tensor>) -> Result<SamStats> {
        if n == 0 {
            return Err(Error::invalid("n", "at least 1 micro-batch", n));
        }
        self.run(n, None, closure)
    }

    /// One step with loss scaling, for forward passes in half precision: the closure returns the plain loss,
    /// the gradients are taken of `scale` times it and divided by `scale` once, before the base step (ε doesn't
    /// depend on the scale). A loss or norm that isn't finite skips the step instead of failing.
    ///
    /// # Errors
    /// As [`step`](Self::step), except [`Error::NonFinite`].
    pub fn step_scaled(&mut self, scale: f64, closure: impl FnMut(&Pass<'_>) -> Result<Tensor>) -> Result<SamStats> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::invalid("scale", "finite and above 0", scale));
        }
        self.run(1, Some(scale), closure)
    }

    /// Perturbs the parameters along gradients that you computed (in the order of [`params`](Self::params)),
    /// for use without a closure. The guard restores them when dropped; [`PerturbedGuard::step`] finishes.
    ///
    /// # Errors
    /// A gradient that doesn't fit or isn't finite, half-precision parameters that can't move, an open guard.
    pub fn perturb(&mut self, gradient: &ParamVec) -> Result<PerturbedGuard<'_, B, R>> {
        if matches!(self.sam().rho_schedule, RhoSchedule::LossBudget { .. }) && self.rho_fn.is_none() {
            return Err(Error::invalid(
                "rho_schedule",
                "one that needs no loss, since `perturb` isn't given any",
                "loss_budget",
            ));
        }
        // Dropping the scope puts the buffers back to where the main pass left them; the stream is yours here.
        let scope = StepScope::open(&self.buffers, StepSeed::new(self.sam().seed, self.step), false)?;
        let scratch = self.scratch.take();
        let mut stats = self.blank_stats(false);
        let mut guard = None;
        if let Some(perturbed) = &self.perturbed {
            let direction = select(gradient, &perturbed.position);
            let (open, applied) = self.apply(perturbed, direction, 0.0, 1.0, false, scratch)?;
            guard = Some(open);
            (stats.perturbed, stats.grad_norm, stats.epsilon_norm, stats.rho) =
                (true, applied.norm, applied.length, applied.rho);
        }
        Ok(PerturbedGuard { main: gradient.copy(), optimizer: self, guard, _scope: scope, stats })
    }

    /// Saves step count, settings, learning rate and the base optimizer's state; never the parameters.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a base optimizer that can't be saved.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = self.base.state_dict(self.all.names())?;
        state.meta.insert("method".into(), R::NAME.into());
        state.meta.insert("step".into(), self.step.into());
        let config = serde_json::to_value(&self.config).map_err(|e| Error::State { reason: e.to_string() })?;
        state.meta.insert("config".into(), config);
        Ok(state)
    }

    /// Continues from a saved state: the next steps are those that the saved optimizer would have done.
    ///
    /// # Errors
    /// [`Error::State`] when it was saved by another method, with other settings or for other parameters;
    /// [`Error::NestedPerturbation`] while a guard is open. Nothing has changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        if let Some((name, _)) = self.all.iter().find(|(_, t)| is_perturbed(t)) {
            return Err(Error::NestedPerturbation { name: name.into() });
        }
        let text = |key: &str| state.meta.get(key).and_then(|v| v.as_str()).unwrap_or("nothing").to_owned();
        if text("method") != R::NAME {
            let reason = format!("it was saved by {}, but this is {}.", text("method"), R::NAME);
            return Err(Error::State { reason });
        }
        let step = state
            .meta
            .get("step")
            .and_then(serde_json::Value::as_u64)
            .ok_or_else(|| Error::State { reason: "it has no step count \"step\".".into() })?;
        let own = serde_json::to_value(&self.config).map_err(|e| Error::State { reason: e.to_string() })?;
        if state.meta.get("config") != Some(&own) {
            let reason = format!(
                "its settings are {}, those here are {own}: build the optimizer with the saved ones.",
                state.meta.get("config").unwrap_or(&serde_json::Value::Null)
            );
            return Err(Error::State { reason });
        }
        let params: Vec<(&str, &Tensor)> = self.all.iter().collect();
        self.base.load_state_dict(state, &params)?;
        self.step = step;
        Ok(())
    }

    fn sam(&self) -> &SamConfig {
        R::sam(&self.config)
    }

    /// The radius of this step, before the groups' own.
    fn rho(&self, loss: f64, norm: f64) -> Result<f64> {
        let config = self.sam();
        let rho = match (&self.rho_fn, config.rho_schedule) {
            (Some(rho), _) => rho(self.step),
            (None, RhoSchedule::Constant) => config.rho,
            (None, RhoSchedule::ProportionalToLr { rho_min, rho_max, lr_min, lr_max }) => {
                rho_min + (rho_max - rho_min) * (self.base.lr() - lr_min) / (lr_max - lr_min)
            }
            (None, RhoSchedule::LossBudget { fraction, rho_max }) => {
                (fraction * loss.abs() / (norm + config.norm_eps)).min(rho_max)
            }
            (None, RhoSchedule::Function) => {
                return Err(Error::invalid("rho_schedule", "given its function by `set_rho_fn`", "function"));
            }
        };
        if rho.is_finite() && rho >= 0.0 { Ok(rho) } else { Err(Error::InvalidRho { field: "rho".into(), rho }) }
    }

    /// Radius of a group: its own, scaled as the schedule scales the optimizer's.
    fn group_rho(&self, group: usize, rho: f64) -> f64 {
        match self.groups[group].rho {
            Some(own) if self.sam().rho > 0.0 => own * rho / self.sam().rho,
            Some(own) => own,
            None => rho,
        }
    }

    /// Whether this step has a perturbed pass at all.
    fn perturbs(&self) -> Result<bool> {
        if self.perturbed.is_none() || !self.step.is_multiple_of(self.sam().interval as u64) {
            return Ok(false);
        }
        let budget = matches!(self.sam().rho_schedule, RhoSchedule::LossBudget { .. }) && self.rho_fn.is_none();
        if budget {
            return Ok(true);
        }
        let rho = self.rho(0.0, 0.0)?;
        let moves = |g: usize| R::factor(&self.config, self.group_rho(g, rho), 1.0) != 0.0;
        Ok((0..self.groups.len()).any(|g| self.groups[g].perturb && moves(g)))
    }

    /// Runs the step in a scope that cleans up after errors and panics.
    fn run(
        &mut self,
        n: usize,
        scale: Option<f64>,
        mut closure: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<SamStats> {
        if let Some((name, _)) = self.all.iter().find(|(_, t)| is_perturbed(t)) {
            return Err(Error::NestedPerturbation { name: name.into() });
        }
        let seed = StepSeed::new(self.sam().seed, self.step);
        let mut scope = StepScope::open(&self.buffers, seed, self.sam().sync_rng)?;
        let result = self.gradients(n, scale, &mut scope, &mut closure).and_then(|(mut stats, gradient)| {
            self.finish(&gradient, &mut stats)?;
            Ok(stats)
        });
        match result {
            Ok(stats) => {
                scope.commit();
                self.step += 1;
                Ok(stats)
            }
            Err(Error::NonFinite { pass, value, what }) if scale.is_some() => {
                let mut stats = self.blank_stats(false);
                stats.outcome = StepOutcome::SkippedNonFinite { pass };
                stats.loss = if what == "loss" { value } else { f64::NAN };
                (stats.grad_norm, stats.final_grad_norm) = (f64::NAN, f64::NAN);
                self.step += 1;
                Ok(stats)
            }
            Err(error) => Err(error),
        }
    }

    fn blank_stats(&self, perturbed: bool) -> SamStats {
        SamStats {
            step: self.step,
            loss: 0.0,
            perturbed_loss: None,
            grad_norm: 0.0,
            final_grad_norm: 0.0,
            rho: 0.0,
            epsilon_norm: 0.0,
            perturbed,
            clipped: false,
            passes: 0,
            lr: self.lr(),
            outcome: StepOutcome::Updated,
        }
    }

    /// All passes of a step; the parameters are back at θ when it returns.
    fn gradients(
        &mut self,
        n: usize,
        scale: Option<f64>,
        scope: &mut StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<(SamStats, ParamVec)> {
        let perturbs = self.perturbs()?;
        let mut stats = self.blank_stats(perturbs);
        // Micro-batches that share one perturbation.
        let size = if perturbs && self.sam().scope == PerturbScope::PerMicroBatch { 1 } else { n };
        let share = size as f64 / n as f64;
        let mut total: Option<ParamVec> = None;
        for start in (0..n).step_by(size) {
            let micros = start..start + size;
            let gradient = self.sweep(micros, scale.unwrap_or(1.0), share, perturbs, scope, closure, &mut stats)?;
            if share < 1.0 {
                gradient.scale(share)?;
            }
            accumulate(&mut total, gradient)?;
        }
        let gradient = total.ok_or_else(|| Error::invalid("n", "at least 1 micro-batch", n))?;
        if let Some(scale) = scale {
            gradient.scale(1.0 / scale)?;
        }
        Ok((stats, gradient))
    }

    /// Main pass, perturbation and perturbed pass over some micro-batches; the final gradient of them.
    #[allow(clippy::too_many_arguments)]
    fn sweep(
        &mut self,
        micros: std::ops::Range<usize>,
        scale: f64,
        share: f64,
        perturbs: bool,
        scope: &mut StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
        stats: &mut SamStats,
    ) -> Result<ParamVec> {
        let n = micros.len() as f64;
        let mut main: Option<ParamVec> = None;
        let mut losses = Vec::with_capacity(micros.len());
        for micro in micros.clone() {
            let evaluated = self.evaluate(PassKind::Main, micro, scope, closure)?;
            // Only the perturbed groups' gradient is needed unless the methods mixes or the step ends here.
            let whole = R::MIXES || !perturbs;
            let gradient = self.backward(&evaluated.loss, scale / n, PassKind::Main, whole)?;
            accumulate(&mut main, gradient)?;
            stats.loss += share / n * evaluated.value;
            stats.passes += 1;
            losses.push(evaluated);
        }
        scope.keep_buffers()?;
        if self.sam().check_batch {
            self.check_batch(micros.clone(), &losses, scope, closure)?;
            scope.return_to_kept();
        }
        let Some(main) = main else { return Err(Error::invalid("n", "at least 1 micro-batch", 0)) };
        let (Some(perturbed), true) = (&self.perturbed, perturbs) else {
            stats.grad_norm += share * main.norm() / scale;
            return Ok(main);
        };
        let scratch = self.scratch.take();
        let loss = losses.iter().map(|l| l.value).sum::<f64>() / n;
        // The mix needs `g` later; otherwise its memory becomes the direction.
        let (direction, main) = if R::MIXES { (select(&main, &perturbed.position), Some(main)) } else { (main, None) };
        let (guard, applied) = self.apply(perturbed, direction, loss, scale, main.is_none(), scratch)?;
        stats.grad_norm += share * applied.norm;
        stats.epsilon_norm += share * applied.length;
        stats.rho += share * applied.rho;

        let mut final_gradient: Option<ParamVec> = None;
        for (micro, first) in micros.zip(&losses) {
            let kind = PassKind::Perturbed(0);
            let evaluated = self.evaluate(kind, micro, scope, closure)?;
            if evaluated.loss.data_ptr() == first.loss.data_ptr() {
                return Err(Error::StaleLoss { pass: kind });
            }
            let gradient = self.backward(&evaluated.loss, scale / n, kind, true)?;
            accumulate(&mut final_gradient, gradient)?;
            *stats.perturbed_loss.get_or_insert(0.0) += share / n * evaluated.value;
            stats.passes += 1;
        }
        self.scratch = Some(guard.close());
        scope.return_to_kept();
        let Some(gradient) = final_gradient else { return Err(Error::invalid("n", "at least 1 micro-batch", 0)) };
        if let Some(main) = &main {
            R::combine(&self.config, main, &gradient)?;
        }
        Ok(gradient)
    }

    /// Calls the closure and checks what it returns.
    fn evaluate(
        &self,
        kind: PassKind,
        micro: usize,
        scope: &StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<Evaluated> {
        scope.seed_pass(micro);
        let pass = Pass {
            kind,
            step: self.step,
            micro,
            seed: StepSeed::new(self.sam().seed, self.step).pass(micro),
            batch_statistics: self.sam().bn == BnMode::Train,
            overrides: None,
        };
        let loss = closure(&pass)?;
        if loss.numel() != 1 {
            return Err(Error::LossShape { pass: kind, got: loss.size() });
        }
        let value = loss.f_double_value(&vec![0; loss.dim()])?;
        if !value.is_finite() {
            return Err(Error::NonFinite { what: "loss", pass: kind, value });
        }
        if !loss.requires_grad() && !matches!(kind, PassKind::Probe(_)) {
            return Err(Error::Detached { pass: kind });
        }
        Ok(Evaluated { loss, value })
    }

    /// Gradient of `factor · loss`, with weight decay where it counts as part of the loss. In the order of all
    /// parameters if `whole`, else of the perturbed ones.
    fn backward(&self, loss: &Tensor, factor: f64, pass: PassKind, whole: bool) -> Result<ParamVec> {
        let set = match &self.perturbed {
            Some(perturbed) if !whole => &perturbed.set,
            _ => &self.all,
        };
        let scaled = if factor == 1.0 { loss.shallow_clone() } else { loss.f_mul_scalar(factor)? };
        let gradient = set.gradient(&scaled.f_reshape([] as [i64; 0])?)?;
        if gradient.is_empty() {
            return Err(Error::NoGradient { pass });
        }
        if self.sam().perturb_weight_decay {
            for (i, (tensor, part)) in set.tensors().iter().zip(gradient.parts()).enumerate() {
                let flat = if whole { i } else { self.perturbed.as_ref().map_or(i, |p| p.position[i]) };
                let decay = self.groups[self.group[flat]].weight_decay.unwrap_or(self.base.weight_decay());
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
        micros: std::ops::Range<usize>,
        losses: &[Evaluated],
        scope: &StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<()> {
        for (micro, first) in micros.zip(losses) {
            let second = no_grad(|| self.evaluate(PassKind::Probe(0), micro, scope, closure))?.value;
            // Reductions may be ordered differently from call to call on several threads.
            if (second - first.value).abs() > 1e-5 * first.value.abs().max(1e-3) {
                return Err(Error::BatchChanged { first: first.value, second });
            }
        }
        Ok(())
    }

    /// Computes ε from the (scaled) gradient of the perturbed parameters and adds it to them under a guard.
    fn apply(
        &self,
        perturbed: &Perturbed,
        gradient: ParamVec,
        loss: f64,
        scale: f64,
        own: bool,
        scratch: Option<Scratch>,
    ) -> Result<(RestoreGuard, Applied)> {
        let mut rho = Ok(0.0);
        let epsilon = perturbed.epsilon(gradient, self.groups.len(), own, |norm| {
            let unscaled = norm / scale;
            rho = self.rho(loss, unscaled);
            let radius = *rho.as_ref().unwrap_or(&0.0);
            (0..self.groups.len())
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

    /// Checks and clips the final gradient and lets the base optimizer step.
    fn finish(&mut self, gradient: &ParamVec, stats: &mut SamStats) -> Result<()> {
        let norm = gradient.norm();
        if !norm.is_finite() {
            let pass = if stats.perturbed { PassKind::Perturbed(0) } else { PassKind::Main };
            return Err(Error::NonFinite { what: "gradient norm", pass, value: norm });
        }
        stats.final_grad_norm = norm;
        if let Some(limit) = self.sam().clip_norm
            && norm > limit
        {
            gradient.scale(limit / norm)?;
            stats.clipped = true;
        }
        let inside = self.sam().perturb_weight_decay;
        let slots: Vec<Slot<'_>> = self
            .all
            .iter()
            .zip(gradient.parts())
            .enumerate()
            .filter_map(|(index, ((name, param), grad))| {
                let group = &self.groups[self.group[index]];
                // Decay inside the loss must not be applied again.
                let weight_decay = if inside { Some(0.0) } else { group.weight_decay };
                grad.as_ref().map(|grad| Slot { index, name, param, grad, lr_scale: group.lr_scale, weight_decay })
            })
            .collect();
        self.base.step(&slots)
    }
}

/// What a perturbation was.
#[derive(Debug, Clone, Copy)]
struct Applied {
    norm: f64,
    length: f64,
    rho: f64,
}

/// Adds a gradient to the sum; the first one is the sum.
fn accumulate(sum: &mut Option<ParamVec>, gradient: ParamVec) -> Result<()> {
    match sum {
        None => *sum = Some(gradient),
        Some(sum) => sum.accumulate(gradient)?,
    }
    Ok(())
}

/// The parts at some positions (shared memory).
fn select(vector: &ParamVec, positions: &[usize]) -> ParamVec {
    ParamVec::new(positions.iter().map(|&i| vector.parts()[i].as_ref().map(Tensor::shallow_clone)).collect())
}

/// Perturbed parameters in two-phase use: compute the gradient at the perturbed point, then [`step`](Self::step).
/// Dropping the guard restores the parameters without a step.
pub struct PerturbedGuard<'a, B: BaseOptimizer, R: Rule> {
    optimizer: &'a mut TwoPass<B, R>,
    guard: Option<RestoreGuard>,
    main: ParamVec,
    _scope: StepScope,
    stats: SamStats,
}

impl<B: BaseOptimizer, R: Rule> PerturbedGuard<'_, B, R> {
    /// `‖ε‖₂` of the perturbation.
    pub fn epsilon_norm(&self) -> f64 {
        self.stats.epsilon_norm
    }

    /// All parameters, perturbed now: for [`ParamSet::gradient`].
    pub fn params(&self) -> &ParamSet {
        &self.optimizer.all
    }

    /// Restores the parameters and lets the base optimizer step with the gradient at the perturbed point (in
    /// the order of [`params`](Self::params)).
    ///
    /// # Errors
    /// [`Error::NonFinite`] when the gradient isn't finite; the parameters are restored, nothing else changed.
    pub fn step(mut self, gradient: &ParamVec) -> Result<SamStats> {
        if let Some(guard) = self.guard.take() {
            self.optimizer.scratch = Some(guard.close());
        }
        let gradient = gradient.copy();
        if R::MIXES {
            R::combine(&self.optimizer.config, &self.main, &gradient)?;
        }
        let mut stats = self.stats;
        self.optimizer.finish(&gradient, &mut stats)?;
        self.optimizer.step += 1;
        Ok(stats)
    }
}
