//! IAM, Inconsistency-Aware Minimization: flat where the *outputs* are flat, measured without labels.

mod audit;
mod config;
mod delta;
mod fixmatch;
mod functional;
mod inconsistency;
mod outputs;
mod passes;
mod search;
mod state;
mod stats;

pub use audit::{DirectionAudit, audit_direction};
pub use config::{IamConfig, IamDirection, IamVariant, PenaltyForm, PenaltyGradient};
pub use fixmatch::{EmaGuard, MaskReduction, MaskStats, WeightEma, fixmatch_loss};
pub use inconsistency::{
    InconsistencyOpts, InconsistencyReport, fisher_top_eig, fisher_top_eigs, fisher_vector_product, local_inconsistency,
};
pub(crate) use outputs::Outputs;
pub use stats::IamStats;

use crate::base::BaseOptimizer;
use crate::direction::Perturbed;
use crate::engine::{Engine, engine_methods};
use crate::group::{self, ParamGroup};
use crate::pass::Pass;
use crate::{Error, Result};
use delta::Kept;
use passes::Closures;
use tensor::tch::{Tensor, nn::VarStore};
use tensor::{ParamSet, ParamVec};

/// Inconsistency-aware minimization ("Inconsistency-Aware Minimization: Improving Generalization with Unlabeled Data",
/// ICML 2026) over a base optimizer.
///
/// The local inconsistency `S_ρ(θ) = max_{‖δ‖≤ρ} (1/b) Σ KL(f(x;θ) ‖ f(x;θ+δ))` needs inputs only. [`IamVariant::D`]
/// adds `β S_ρ` to the loss, [`IamVariant::S`] steps with the loss gradient at `θ+δ`, [`IamVariant::De`] keeps one δ from
/// step to step. Passes of a step (forward c, backward 2c):
///
/// | variant | passes, as [`PassKind`](crate::PassKind) | cost |
/// | --- | --- | --- |
/// | D | `Probe(0)`, `Inner(0..K)`, `Perturbed(0)`, `Main` | 10c for K = 1 |
/// | D, functional | `Main`, `Inner(0..K)`, `Perturbed(0)` | 9c |
/// | S | `Main` (without graph), `Inner(0..K)`, `Perturbed(0)` | 7c |
/// | DE | `Probe(0)`, `Perturbed(0)`, `Main` | 7c |
/// | DE, functional | `Main`, `Perturbed(0)` | 6c |
///
/// Running statistics are moved by the main pass alone ([`with_buffers`](Self::with_buffers)). Groups share one global
/// norm and may have radii of their own; groups with `perturb: false` stay where they are.
///
/// ```
/// use sam_opt::{Iam, IamConfig, Sgd, tensor::{Seed, nn::{Mlp, MlpConfig}}};
/// use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::{ModuleT, VarStore}};
/// let store = VarStore::new(Device::Cpu);
/// let net = Mlp::new(&store.root(), &MlpConfig::relu(&[4, 16, 3]), Seed::new(0))?;
/// let mut iam = Iam::for_store(&store, Sgd::with_momentum(0.05, 0.9), IamConfig::d(0.5, 1.0))?;
/// // Eight inputs with labels, first in the batch, and thirty-two without.
/// let (x, y) = (Tensor::rand([40, 4], (Kind::Float, Device::Cpu)), Tensor::randint(3, [8], (Kind::Int64, Device::Cpu)));
/// let stats = iam.step_semi(8, |_pass| Ok(net.forward_t(&x, true)), |labeled| Ok(labeled.cross_entropy_for_logits(&y)))?;
/// assert_eq!(stats.unlabeled, Some(32));
/// # Ok::<(), sam_opt::Error>(())
/// ```
pub struct Iam<B> {
    config: IamConfig,
    engine: Engine<B>,
    /// Without any, every step is the base optimizer's.
    perturbed: Option<Perturbed>,
    /// The persistent δ of DE, and of the others between refreshes.
    delta: Option<Kept>,
    /// Gives δ₀ in place of normal noise.
    start: Option<Box<Start>>,
}

/// δ₀ of a step, from its number and the perturbed parameters.
type Start = dyn Fn(u64, &ParamSet) -> Result<ParamVec> + Send;

impl<B: std::fmt::Debug> std::fmt::Debug for Iam<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Iam")
            .field("config", &self.config)
            .field("base", &self.engine.base)
            .field("parameters", &self.engine.all.names())
            .field("step", &self.engine.step)
            .finish_non_exhaustive()
    }
}

impl<B: BaseOptimizer> Iam<B> {
    /// Builds the optimizer over the model's tensors.
    ///
    /// # Errors
    /// An invalid configuration, an empty group, a tensor or name that comes twice, tensors that share memory,
    /// [`Error::NoParams`] when nothing is trainable, [`Error::InvalidConfig`] for a group with `adaptive: Some(true)`
    /// (IAM has no relative radius).
    pub fn new(groups: Vec<ParamGroup>, base: B, config: IamConfig) -> Result<Self> {
        config.validate()?;
        if let Some(index) = groups.iter().position(|g| g.adaptive == Some(true)) {
            let field = format!("adaptive of parameter group {index}");
            return Err(Error::invalid(&field, "none or false, since IAM's radius isn't relative", "true"));
        }
        let engine = Engine::new(groups, base)?;
        if !engine.all.tensors().iter().any(Tensor::requires_grad) {
            return Err(Error::NoParams);
        }
        let perturbed = Perturbed::new(&engine.groups, None)?;
        Ok(Self { config, engine, perturbed, delta: None, start: None })
    }

    /// Builds the optimizer over everything in a variable store: its trainable variables as one group, the others as
    /// buffers.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_store(store: &VarStore, base: B, config: IamConfig) -> Result<Self> {
        let optimizer = Self::new(vec![ParamGroup::from_var_store(store)], base, config)?;
        Ok(optimizer.with_buffers(group::buffers(store)))
    }

    engine_methods!();

    /// The settings.
    pub fn config(&self) -> &IamConfig {
        &self.config
    }

    /// The base optimizer.
    pub fn base(&self) -> &B {
        &self.engine.base
    }

    /// Changes the radius from the next step on (the authors' semi-supervised code halves it late in training), except of
    /// groups with one of their own. A δ that was kept for later steps is searched anew by D and S; DE's becomes longer or
    /// shorter with the radius (coming from 0, it starts from noise again). Part of the settings that a saved state must
    /// share.
    ///
    /// # Errors
    /// [`Error::InvalidRho`] when it is negative or not finite; nothing has changed then.
    pub fn set_rho(&mut self, rho: f64) -> Result<()> {
        config::check_rho(rho)?;
        let old = std::mem::replace(&mut self.config.rho, rho);
        if rho == old {
            return Ok(());
        }
        let factor = rho / old;
        let de = self.config.variant == IamVariant::De;
        let Some(kept) = self.delta.take_if(|kept| !(de && kept.is_noise)) else { return Ok(()) };
        if let (true, true, Some(perturbed)) = (de, factor.is_finite(), &self.perturbed) {
            let own = |group: usize| self.engine.groups[group].rho.is_some();
            let scaled = kept.vector.parts().iter().zip(&perturbed.group).filter(|(_, group)| !own(**group));
            let scaled: Vec<_> = scaled.map(|(part, _)| part.as_ref().map(Tensor::shallow_clone)).collect();
            ParamVec::new(scaled).scale(factor)?;
            self.delta = Some(kept);
        }
        Ok(())
    }

    /// Lets a function of the step's number and the perturbed parameters give δ₀, as it is, in place of normal noise: to
    /// start the search where something is known, or to compare with another implementation. Not saved; give it again
    /// before continuing from a saved state.
    pub fn set_start_fn(&mut self, start: impl Fn(u64, &ParamSet) -> Result<ParamVec> + Send + 'static) {
        self.start = Some(Box::new(start));
    }

    /// One step. `logits` is called once a pass and returns the logits `[batch, classes]` of all inputs of the step, from
    /// a fresh forward pass; `loss` makes the scalar main loss out of them.
    ///
    /// # Errors
    /// Everything that [`Error`] lists; parameters, buffers and state are then what they were before.
    pub fn step(
        &mut self,
        mut logits: impl FnMut(&Pass<'_>) -> Result<Tensor>,
        loss: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<IamStats> {
        self.run(Closures { logits: &mut logits, loss: &loss, delta_logits: None, labeled: None })
    }

    /// As [`step`](Self::step) where only the first `labeled` inputs have a label: `loss` gets their logits
    /// `[labeled, classes]`, the penalty is computed on all. An empty unlabeled part is allowed and shows in
    /// [`IamStats::unlabeled`].
    ///
    /// # Errors
    /// As [`step`](Self::step); [`Error::InvalidConfig`] when `labeled` is 0 or more than the batch.
    pub fn step_semi(
        &mut self,
        labeled: i64,
        mut logits: impl FnMut(&Pass<'_>) -> Result<Tensor>,
        loss: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<IamStats> {
        self.run(Closures { logits: &mut logits, loss: &loss, delta_logits: None, labeled: Some(labeled) })
    }

    /// As [`step`](Self::step) with other inputs for the search of δ (a larger or class-balanced batch): `delta_inputs`
    /// returns their logits, and is called in the passes of the search. Costs one more forward pass.
    ///
    /// # Errors
    /// As [`step`](Self::step); [`Error::InvalidConfig`] for DE, which has no search.
    pub fn step_with_delta_inputs(
        &mut self,
        logits: impl FnMut(&Pass<'_>) -> Result<Tensor>,
        loss: impl Fn(&Tensor) -> Result<Tensor>,
        delta_inputs: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<IamStats> {
        self.with_delta_inputs(None, logits, loss, delta_inputs)
    }

    /// [`step_semi`](Self::step_semi) with other inputs for the search of δ.
    ///
    /// # Errors
    /// As [`step_semi`](Self::step_semi) and [`step_with_delta_inputs`](Self::step_with_delta_inputs).
    pub fn step_semi_with_delta_inputs(
        &mut self,
        labeled: i64,
        logits: impl FnMut(&Pass<'_>) -> Result<Tensor>,
        loss: impl Fn(&Tensor) -> Result<Tensor>,
        delta_inputs: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<IamStats> {
        self.with_delta_inputs(Some(labeled), logits, loss, delta_inputs)
    }

    fn with_delta_inputs(
        &mut self,
        labeled: Option<i64>,
        mut logits: impl FnMut(&Pass<'_>) -> Result<Tensor>,
        loss: impl Fn(&Tensor) -> Result<Tensor>,
        mut delta_inputs: impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<IamStats> {
        if self.config.variant == IamVariant::De {
            return Err(Error::invalid("delta_inputs", "left out with variant De, which has no search", "a closure"));
        }
        let delta_logits: passes::Logits<'_> = &mut delta_inputs;
        self.run(Closures { logits: &mut logits, loss: &loss, delta_logits: Some(delta_logits), labeled })
    }
}
