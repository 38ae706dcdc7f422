//! DA-SAM: dual adaptive sharpness-aware minimization for training on several domains.
//!
//! Paper: "Navigating the Flatlands: Dual Adaptive Sharpness-Aware Minimization for Domain Generalization" (ICML 2026).
//! Only its abstract was available: **the formulas of both modules are a reconstruction** from the abstract and its
//! direct prior work, not the paper's. DAS (dynamic adaptive scaling) weighs the domains in the direction of the
//! perturbation by their current losses; AMDF (adaptive multi-directional flattening) probes the loss along several
//! directions around it and sets the perturbation's length and lean by what it finds.

mod amdf;
mod config;
mod das;
mod state;
mod step;

pub use config::{AmdfConfig, DaSamConfig, DasRule, OuterMode, OuterWeights};
pub use das::das_factors;

use crate::base::BaseOptimizer;
use crate::direction::Perturbed;
use crate::domain::{DomainId, DomainLosses};
use crate::engine::{Engine, engine_methods};
use crate::group::{self, ParamGroup};
use crate::pass::Pass;
use crate::{Error, Result};
use state::{Memory, Probe};
use std::collections::BTreeSet;
use tensor::tch::nn::VarStore;

const NAME: &str = "DaSam";

/// The dual adaptive sharpness-aware optimizer \[reconstruction from the paper's abstract\] over a base optimizer.
///
/// A step: one forward pass over all domains; one backward pass of the losses weighted by [`das_factors`], whose
/// direction is `u_0`; `M` forward passes at `θ + ρ u_m`; a forward and backward pass at `θ + ρ_t v`; the base
/// optimizer's step at `θ`. With `amdf: None` it costs as much as SAM.
///
/// ```
/// use sam_opt::{Adam, DaSam, DaSamConfig, DomainId, DomainLosses, tensor::{Seed, nn::{Mlp, MlpConfig}}};
/// use sam_opt::tensor::tch::{Device, Kind, Reduction, Tensor, nn::VarStore};
/// let store = VarStore::new(Device::Cpu);
/// let net = Mlp::new(&store.root(), &MlpConfig::relu(&[8, 16, 3]), Seed::new(0))?;
/// let mut optimizer = DaSam::for_store(&store, Adam::new(1e-3), DaSamConfig::default())?;
/// // Six samples: four of hospital 0, two of hospital 1.
/// let (x, y) = (Tensor::rand([6, 8], (Kind::Float, Device::Cpu)), Tensor::from_slice(&[0i64, 1, 2, 0, 1, 2]));
/// let hospitals: Vec<DomainId> = [0, 0, 0, 0, 1, 1].map(DomainId).into();
/// let stats = optimizer.step(|_pass| {
///     let log_p = net.forward_with(&x, true, true).log_softmax(-1, Kind::Float);
///     let losses = log_p.nll_loss_nd(&y, None::<Tensor>, Reduction::None, -100);
///     Ok(DomainLosses::PerSample { losses, domains: hospitals.clone() })
/// })?;
/// println!("hospital losses {:.3?}, factors {:.2?}, radius {:.3}", stats.domain_losses, stats.factors, stats.rho_t);
/// # Ok::<(), sam_opt::Error>(())
/// ```
#[derive(Debug)]
pub struct DaSam<B> {
    config: DaSamConfig,
    engine: Engine<B>,
    perturbed: Option<Perturbed>,
    /// The domains that the user announced, if any.
    announced: Option<BTreeSet<DomainId>>,
    seen: BTreeSet<DomainId>,
    memory: Memory,
}

/// Statistics of one step of [`DaSam`].
#[derive(Debug, Clone, PartialEq)]
pub struct DaSamStats {
    /// Number of the step, from 0.
    pub step: u64,
    /// Mean of the domains' mean losses at the parameters, in nats.
    pub loss: f64,
    /// The same at `θ + ε`; `None` where nothing was perturbed.
    pub perturbed_loss: Option<f64>,
    /// The domains of the batch, in the order of their numbers.
    pub domains: Vec<DomainId>,
    /// Mean loss of each of them.
    pub domain_losses: Vec<f64>,
    /// DAS's factor `s_k` of each of them; they sum to their number.
    pub factors: Vec<f64>,
    /// Announced domains that this batch doesn't have.
    pub missing: Vec<DomainId>,
    /// AMDF's `S_t`: mean slope over the probed directions plus κ standard deviations. On a step that reuses probes it is
    /// that of the step that probed; NaN without AMDF, without a gradient to probe along, and where no probe was finite.
    pub sharpness: f64,
    /// Standard deviation of the slopes over the directions; of the same step as the sharpness, NaN where that is.
    pub anisotropy: f64,
    /// Radius of this step, of groups without a radius of their own (those are scaled alike).
    pub rho_t: f64,
    /// `‖ε‖₂` (of the last direction with [`OuterMode::Average`]).
    pub epsilon_norm: f64,
    /// Directions in the perturbation.
    pub directions_used: usize,
    /// Directions whose probe in this step wasn't finite and that were dropped; 0 on a step that reuses probes. If it is
    /// all of them, ε is `ρ u_0`, and the next step probes again.
    pub probe_failures: usize,
    /// `‖g_w‖`, norm of the weighted main gradient over the perturbed parameters.
    pub grad_norm: f64,
    /// Norm of the gradient that the base optimizer got, before clipping.
    pub final_grad_norm: f64,
    /// Cosine of ε with the direction of plain SAM on the domains' mean, with
    /// [`compare_with_sam`](DaSamConfig::compare_with_sam).
    pub cos_to_sam: Option<f64>,
    /// Cosine of ε with the guided direction `u_0`.
    pub cos_to_guided: f64,
    /// Forward passes, those with a backward pass among them.
    pub forwards: usize,
    /// Backward passes.
    pub backwards: usize,
    /// Learning rate of the step.
    pub lr: f64,
}

impl<B: BaseOptimizer> DaSam<B> {
    /// Builds the optimizer over the model's tensors.
    ///
    /// Models with running statistics: add [`with_buffers`](Self::with_buffers), or use [`for_store`](Self::for_store).
    ///
    /// # Errors
    /// An invalid configuration, an empty group, a tensor or name that comes twice, tensors that share memory, a group
    /// that asks for ASAM's scaling.
    pub fn new(groups: Vec<ParamGroup>, base: B, config: DaSamConfig) -> Result<Self> {
        config.validate()?;
        if groups.iter().any(|g| g.adaptive == Some(true)) {
            return Err(Error::invalid("adaptive of a parameter group", "off or unset: DA-SAM has no such form", true));
        }
        let engine = Engine::new(groups, base)?;
        let perturbed = Perturbed::new(&engine.groups, None)?;
        let (seen, memory) = (BTreeSet::new(), Memory::default());
        Ok(Self { config, engine, perturbed, announced: None, seen, memory })
    }

    /// Builds the optimizer over everything in a variable store: its trainable variables as one group, the others as
    /// buffers.
    ///
    /// # Errors
    /// As [`new`](Self::new); a store in which nothing is trainable.
    pub fn for_store(store: &VarStore, base: B, config: DaSamConfig) -> Result<Self> {
        let optimizer = Self::new(vec![ParamGroup::from_var_store(store)], base, config)?;
        Ok(optimizer.with_buffers(group::buffers(store)))
    }

    engine_methods!();

    /// Announces the domains: a batch with another one is refused, and those that never come are found by
    /// [`never_seen`](Self::never_seen).
    #[must_use]
    pub fn with_domains(mut self, domains: impl IntoIterator<Item = DomainId>) -> Self {
        self.announced = Some(domains.into_iter().collect());
        self
    }

    /// The announced domains that were in no batch so far.
    pub fn never_seen(&self) -> Vec<DomainId> {
        self.announced.iter().flatten().filter(|id| !self.seen.contains(id)).copied().collect()
    }

    /// The settings.
    pub fn config(&self) -> &DaSamConfig {
        &self.config
    }

    /// The base optimizer.
    pub fn base(&self) -> &B {
        &self.engine.base
    }

    /// One step on one batch. The closure is called for every pass, does a fresh forward pass on the batch of the step
    /// and returns the losses by domain.
    ///
    /// # Errors
    /// Everything that [`Error`] lists; parameters, buffers and state are then what they were before.
    pub fn step(&mut self, mut closure: impl FnMut(&Pass<'_>) -> Result<DomainLosses>) -> Result<DaSamStats> {
        let mut scope = self.engine.open(self.config.seed, self.config.sync_rng)?;
        let (stats, memory) = self.run(&mut scope, &mut closure)?;
        scope.commit();
        self.memory = memory;
        self.seen.extend(&stats.domains);
        self.engine.step += 1;
        Ok(stats)
    }
}
