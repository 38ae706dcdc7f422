//! S-Adam, "singularity-aware" Adam: a few random forward probes measure how much the slopes around the parameters
//! vary (the local geometric instability, LGI), and AdamW's update is multiplied by `exp(−λ·LGI)`.
//!
//! Source: "Singularity-aware Optimization via Randomized Geometric Probing: Towards Stable Non-smooth Optimization"
//! (ICML 2026). The published form follows the authors' public code [official code].
//!
//! **Know what the published statistic measures** [derived, measured]: its mean is 1 wherever the loss is smooth, and it
//! is *lower* at kinks and under strong curvature. With the defaults the steps are AdamW's at 0.3 to 0.4 of the learning
//! rate, with undamped weight decay. [`null_lgi_mean_damping`] gives that factor, [`DampingLog`] tells whether a run did
//! anything else, [`LgiKind::Constant`] and [`LgiKind::RandomNull`] are the controls, and [`LgiKind::Residual`] and
//! [`LgiKind::Kink`] are statistics that are 0 on smooth functions [reconstruction].
//!
//! The paper claims convergence for its setting; this implementation restates no guarantee.

mod config;
mod diagnose;
mod lgi;
mod probe;
mod report;
mod state;
mod stats;
mod step;

pub use config::{EpsMode, LgiKind, ProbeNorm, SAdamConfig};
pub use diagnose::{LgiReport, ProbeOpts, probe_lgi, probe_lgi_keeping, probe_lgi_of};
pub use lgi::{
    kink_from_losses, lgi_from_probes, lgi_from_residuals, null_lgi_mean_damping, null_lgi_p_value, null_lgi_sd,
};
pub use report::{DampingLog, DampingReport};
pub use stats::{GroupLgi, SAdamStats};

use crate::Result;
use crate::base::AdamW;
use crate::engine::{Engine, engine_methods};
use crate::group::{self, ParamGroup};
use tensor::tch::nn::VarStore;

/// S-Adam over the model's tensors; see the [module](self) for what it does and doesn't do.
///
/// ```
/// use sam_opt::{SAdam, SAdamConfig, tensor::{Seed, nn::{Mlp, MlpConfig}}};
/// use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::{ModuleT, VarStore}};
///
/// let store = VarStore::new(Device::Cpu);
/// let net = Mlp::new(&store.root(), &MlpConfig::relu(&[4, 16, 3]), Seed::new(0))?;
/// let mut optimizer = SAdam::for_store(&store, SAdamConfig::default())?;
///
/// let (x, y) = (Tensor::randn([32, 4], (Kind::Float, Device::Cpu)), Tensor::randint(3, [32], (Kind::Int64, Device::Cpu)));
/// for _ in 0..3 {
///     let stats = optimizer.step(|_pass| Ok(net.forward_t(&x, true).cross_entropy_for_logits(&y)))?;
///     println!("loss {:.3}, LGI {:.2?}, damping {:.2}, {} forwards", stats.loss, stats.lgi, stats.damping, stats.forwards);
/// }
/// # Ok::<(), sam_opt::Error>(())
/// ```
///
/// Groups: `lr_scale`, `weight_decay` and `perturb` (false: never probed) count; `rho` and `adaptive` don't.
pub struct SAdam {
    config: SAdamConfig,
    engine: Engine<AdamW>,
    memory: Memory,
    /// Whether f32 rounds most of a probe away; looked at now and then.
    below_precision: Option<bool>,
}

/// What a step remembers for the next one, with an entry a probed scope: all parameters, or each group.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Memory {
    /// Running mean `s_t` of the expected squared slope.
    slope_square: Vec<Option<f64>>,
    /// LGI of the last probing step.
    lgi: Vec<Option<f64>>,
}

impl std::fmt::Debug for SAdam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SAdam")
            .field("config", &self.config)
            .field("parameters", &self.engine.all.names())
            .field("step", &self.engine.step)
            .finish_non_exhaustive()
    }
}

impl SAdam {
    /// Builds the optimizer over the model's tensors.
    ///
    /// Models with running statistics: add [`with_buffers`](Self::with_buffers), or use
    /// [`for_store`](Self::for_store).
    ///
    /// # Errors
    /// An invalid configuration, an empty group, a tensor or name that comes twice, tensors that share memory.
    pub fn new(groups: Vec<ParamGroup>, config: SAdamConfig) -> Result<Self> {
        config.validate()?;
        let mut base = AdamW::from_config(config.adam());
        base.damping.decay = config.damp_weight_decay;
        base.damping.eps_first = config.eps_mode == EpsMode::Official;
        let engine = Engine::new(groups, base)?;
        let scopes = if config.per_group_lgi { engine.groups.len() } else { 1 };
        let memory = Memory { slope_square: vec![None; scopes], lgi: vec![None; scopes] };
        Ok(Self { config, engine, memory, below_precision: None })
    }

    /// Builds the optimizer over everything in a variable store: its trainable variables as one group, the
    /// others as buffers.
    ///
    /// # Errors
    /// As [`new`](Self::new); a store in which nothing is trainable.
    pub fn for_store(store: &VarStore, config: SAdamConfig) -> Result<Self> {
        let optimizer = Self::new(vec![ParamGroup::from_var_store(store)], config)?;
        Ok(optimizer.with_buffers(group::buffers(store)))
    }

    engine_methods!();

    /// The settings. The learning rate in use is [`lr`](Self::lr).
    pub fn config(&self) -> &SAdamConfig {
        &self.config
    }
}
