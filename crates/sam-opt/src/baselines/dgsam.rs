//! DGSAM: a walk from domain to domain.

use crate::base::BaseOptimizer;
use crate::config::{self, BnMode};
use crate::direction::Perturbed;
use crate::domain::DomainId;
use crate::engine::{Engine, Evaluated, Finish, Request, accumulate, engine_methods};
use crate::group::{self, ParamGroup};
use crate::pass::{Pass, PassKind};
use crate::scope::StepScope;
use crate::{Error, Result};
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};
use tensor::tch::{Tensor, nn::VarStore};
use tensor::{ParamVec, RestoreGuard, StateDict};

const NAME: &str = "Dgsam";

/// Settings of [`Dgsam`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DgsamConfig {
    /// Length ρ of each move.
    pub rho: f64,
    /// Clips the final gradient to this norm.
    pub clip_norm: Option<f64>,
    /// As in [`SamConfig`](crate::SamConfig::sync_rng).
    pub sync_rng: bool,
    /// Batch or running statistics in normalization layers.
    pub bn: BnMode,
    /// Seed of the domains' order.
    pub seed: u64,
}

impl Default for DgsamConfig {
    fn default() -> Self {
        Self { rho: 0.05, clip_norm: None, sync_rng: true, bn: BnMode::Train, seed: 0 }
    }
}

impl DgsamConfig {
    /// # Errors
    /// [`Error::InvalidRho`] or [`Error::InvalidConfig`] naming the field.
    pub fn validate(&self) -> Result<()> {
        config::rho("rho", self.rho)?;
        config::clip_norm(self.clip_norm)
    }
}

/// Decreased-overhead gradual SAM over domains \[prior work: DGSAM; the scaling of the moves is a reconstruction\].
///
/// In a random order `o` of the `D` domains, from `θ̃_0 = θ`: `g_j = ∇L_{o_j}(θ̃_{j−1})`, `θ̃_j = θ̃_{j−1} + ρ g_j/‖g_j‖`;
/// then one more gradient of the first domain at `θ̃_D`. The base optimizer steps at `θ` with the mean of the gradients
/// 2 to D+1: `D + 1` gradients of a single domain each, `1 + 1/D` passes over the batch. The sum over domains is thus
/// complete, and no gradient of it was taken at `θ`.
///
/// Running statistics are those of the first visited domain's pass, the only one at `θ`.
#[derive(Debug)]
pub struct Dgsam<B> {
    config: DgsamConfig,
    engine: Engine<B>,
    perturbed: Option<Perturbed>,
}

/// Statistics of one step of [`Dgsam`].
#[derive(Debug, Clone, PartialEq)]
pub struct DgsamStats {
    /// Number of the step, from 0.
    pub step: u64,
    /// The domains in the order in which they were visited.
    pub order: Vec<DomainId>,
    /// Loss of each at the point where it was visited first, in nats.
    pub losses: Vec<f64>,
    /// `‖θ̃_D − θ‖₂`.
    pub distance: f64,
    /// Norm of the gradient that the base optimizer got, before clipping.
    pub final_grad_norm: f64,
    /// Forward passes with a backward pass, each over one domain.
    pub domain_passes: usize,
    /// Learning rate of the step.
    pub lr: f64,
}

impl<B: BaseOptimizer> Dgsam<B> {
    /// Builds the optimizer over the model's tensors.
    ///
    /// # Errors
    /// An invalid configuration, an empty group, a tensor or name that comes twice, tensors that share memory, a group
    /// that asks for ASAM's scaling.
    pub fn new(groups: Vec<ParamGroup>, base: B, config: DgsamConfig) -> Result<Self> {
        config.validate()?;
        if groups.iter().any(|g| g.adaptive == Some(true)) {
            return Err(Error::invalid("adaptive of a parameter group", "off or unset: DGSAM has no such form", true));
        }
        let engine = Engine::new(groups, base)?;
        let perturbed = Perturbed::new(&engine.groups, None)?;
        Ok(Self { config, engine, perturbed })
    }

    /// Builds the optimizer over everything in a variable store: its trainable variables as one group, the others as
    /// buffers.
    ///
    /// # Errors
    /// As [`new`](Self::new); a store in which nothing is trainable.
    pub fn for_store(store: &VarStore, base: B, config: DgsamConfig) -> Result<Self> {
        let optimizer = Self::new(vec![ParamGroup::from_var_store(store)], base, config)?;
        Ok(optimizer.with_buffers(group::buffers(store)))
    }

    engine_methods!();

    /// One step. The closure does a fresh forward pass on the samples of the domain that it is asked for, and returns
    /// their mean loss, a scalar.
    ///
    /// # Errors
    /// [`Error::NoDomain`] for an empty list, [`Error::DuplicateDomain`], and everything that [`Error`] lists of a closure;
    /// parameters, buffers and state are then what they were before.
    pub fn step(
        &mut self,
        domains: &[DomainId],
        mut closure: impl FnMut(&Pass<'_>, DomainId) -> Result<Tensor>,
    ) -> Result<DgsamStats> {
        let mut order = domains.to_vec();
        order.sort_unstable();
        if order.is_empty() {
            return Err(Error::NoDomain { pass: PassKind::Main });
        }
        if let Some(pair) = order.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::DuplicateDomain { id: pair[0] });
        }
        let mut scope = self.engine.open(self.config.seed, self.config.sync_rng)?;
        order.shuffle(&mut self.engine.step_seed(self.config.seed).noise("dgsam-order").rng());
        let mut stats = DgsamStats {
            step: self.engine.step,
            losses: Vec::with_capacity(order.len()),
            order,
            distance: 0.0,
            final_grad_norm: f64::NAN,
            domain_passes: 0,
            lr: self.engine.lr(),
        };
        let (gradient, guard) = self.walk(&mut scope, &mut closure, &mut stats)?;
        scope.return_to_kept();
        let pass = PassKind::Perturbed(stats.order.len() - 1);
        let finish = Finish { clip_norm: self.config.clip_norm, ..Finish::plain(pass) };
        stats.final_grad_norm = self.engine.finish(&gradient, guard, finish)?.norm;
        scope.commit();
        self.engine.step += 1;
        Ok(stats)
    }

    /// The mean of the gradients 2 to D+1, and the guard of the parameters that are at `θ̃_D`.
    fn walk(
        &mut self,
        scope: &mut StepScope,
        closure: &mut impl FnMut(&Pass<'_>, DomainId) -> Result<Tensor>,
        stats: &mut DgsamStats,
    ) -> Result<(ParamVec, Option<RestoreGuard>)> {
        let scratch = self.engine.scratch.take();
        let guard = self.perturbed.as_ref().map(|perturbed| perturbed.set.guard_in(scratch)).transpose()?;
        let mut total: Option<ParamVec> = None;
        let mut first: Option<Tensor> = None;
        let order = stats.order.clone();
        for (j, &domain) in order.iter().chain(order.first()).enumerate() {
            let kind = if j == 0 { PassKind::Main } else { PassKind::Perturbed(j - 1) };
            if j > 0 {
                // Every visit starts from the buffers that the main pass left; the graph before has been used.
                scope.return_to_kept();
            }
            let request = Request::new(kind, self.config.bn);
            let loss = self.engine.call(request, scope, &mut |pass: &Pass<'_>| closure(pass, domain))?;
            let evaluated = Evaluated::new(loss, kind)?;
            // Held, so that its memory isn't given to another loss; without its graph.
            let main = first.get_or_insert_with(|| evaluated.loss.detach());
            if j > 0 && main.data_ptr() == evaluated.loss.data_ptr() {
                return Err(Error::StaleLoss { pass: kind });
            }
            if j == 0 {
                scope.keep_buffers()?;
            }
            if j < order.len() {
                stats.losses.push(evaluated.value);
            }
            let gradient = self.engine.gradient(&evaluated.loss, kind)?;
            stats.domain_passes += 1;
            if j < order.len() {
                self.move_along(&gradient, kind)?;
            }
            if j > 0 {
                accumulate(&mut total, gradient)?;
            }
        }
        if let (Some(guard), Some(perturbed)) = (&guard, &self.perturbed) {
            let moved = perturbed.set.snapshot();
            moved.axpy(-1.0, &ParamVec::new(guard.originals().iter().map(|t| Some(t.shallow_clone())).collect()))?;
            stats.distance = moved.norm();
        }
        let total = total.ok_or(Error::NoGradient { pass: PassKind::Main })?;
        total.scale(1.0 / order.len() as f64)?;
        Ok((total, guard))
    }

    /// `θ̃ ← θ̃ + ρ g/‖g‖`.
    fn move_along(&self, gradient: &ParamVec, pass: PassKind) -> Result<()> {
        let Some(perturbed) = &self.perturbed else { return Ok(()) };
        let groups = self.engine.groups.len();
        let rho = |g: usize| self.engine.groups[g].rho.unwrap_or(self.config.rho);
        let epsilon = perturbed.epsilon(perturbed.select(gradient), groups, false, |norm| {
            (0..groups).map(|g| if norm == 0.0 { 0.0 } else { rho(g) / (norm + 1e-12) }).collect()
        })?;
        if !epsilon.norm.is_finite() {
            return Err(Error::NonFinite { what: "gradient norm", pass, value: epsilon.norm });
        }
        perturbed.check_precision(&epsilon)?;
        perturbed.set.axpy_each(&epsilon.alphas, &epsilon.direction)?;
        Ok(())
    }

    /// Saves step count, settings, learning rate and the base optimizer's state; never the parameters.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a base optimizer that can't be saved.
    pub fn state_dict(&self) -> Result<StateDict> {
        self.engine.state_dict(NAME, &self.config)
    }

    /// Continues from a saved state.
    ///
    /// # Errors
    /// [`Error::State`] when it doesn't fit; nothing has changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let step = self.engine.check_state(NAME, &self.config, state)?;
        self.engine.load_base(state, step)
    }
}
