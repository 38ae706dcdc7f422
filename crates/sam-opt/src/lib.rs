#![doc = include_str!("../README.md")]

#[cfg(not(feature = "torch"))]
compile_error!("sam-opt works on libtorch tensors: enable its feature `torch` (it is on by default).");

pub mod base;
pub mod baselines;
mod config;
mod da_sam;
mod direction;
mod divergence;
mod domain;
mod engine;
mod error;
mod group;
mod iam;
pub mod measures;
mod pass;
mod quant;
mod rule;
pub mod s_adam;
mod scope;
mod sharpness;
mod stats;
mod swad;
mod trackers;
mod two_pass;

pub use base::{
    Adam, AdamConfig, AdamW, BaseOptimizer, ProxSgd, ProxSgdConfig, RmsProp, RmsPropConfig, Sgd, SgdConfig,
    TchOptimizer,
};
pub use config::{
    AsamConfig, AsamScope, BnMode, GsamConfig, PerturbDirection, PerturbScope, RhoSchedule, SagmConfig, SamConfig,
};
pub use da_sam::{AmdfConfig, DaSam, DaSamConfig, DaSamStats, DasRule, OuterMode, OuterWeights, das_factors};
pub use domain::{DomainFold, DomainId, DomainLosses, DomainSampler, LeaveOneDomainOut};
pub use error::{Error, Result};
pub use group::{ParamGroup, buffers};
pub use iam::{
    DirectionAudit, EmaGuard, Iam, IamConfig, IamDirection, IamStats, IamVariant, InconsistencyOpts,
    InconsistencyReport, MaskReduction, MaskStats, PenaltyForm, PenaltyGradient, WeightEma, audit_direction,
    fisher_top_eig, fisher_top_eigs, fisher_vector_product, fixmatch_loss, local_inconsistency,
};
pub use pass::{Pass, PassKind};
pub use quant::FakeQuant;
pub use rule::{GsamRule, Rule, SagmRule, SamRule};
pub use s_adam::{SAdam, SAdamConfig, SAdamStats};
pub use sharpness::{Ascent, DomainSharpness, RandomRise, SharpnessOptions, SharpnessReport, sharpness_report};
pub use stats::{LossScaler, SamStats, StepOutcome};
pub use swad::{SwadAverager, SwadConfig, SwadPhase};
pub use tensor;
pub use tensor::params::is_perturbed;
pub use trackers::{GradientCosine, OscillationTracker, SignFlips};
pub use two_pass::{Gsam, PerturbedGuard, Sagm, Sam, TwoPass};
