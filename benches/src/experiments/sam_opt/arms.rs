//! The optimizers of the experiments and their hyper-parameters.

use anyhow::{Context as _, Result};
use sam_opt::{Adam, AdamConfig, Gsam, GsamConfig, ParamGroup, Pass, Sagm, SagmConfig, Sam, SamConfig, SamStats};
use serde::{Deserialize, Serialize};
use tensor::tch::Tensor;

/// An optimizer with its hyper-parameters, over Adam with learning rate 1e-3.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub(super) enum Method {
    /// Empirical risk minimization: the base optimizer alone.
    Erm {
        weight_decay: f64,
    },
    Sam {
        rho: f64,
    },
    Asam {
        rho: f64,
    },
    Gsam {
        rho: f64,
        alpha: f64,
    },
    Sagm {
        rho: f64,
        alpha: f64,
    },
}

/// Learning rate of the protocols.
const LR: f64 = 1e-3;

impl Method {
    /// The candidates among which validation on the source domains chooses: the same number for every method.
    pub(super) fn grid(name: &str) -> Option<Vec<Method>> {
        let rhos = [0.05, 0.1, 0.2, 0.5, 1.0];
        Some(match name {
            "erm" => [0.0, 1e-4, 1e-3, 1e-2, 1e-1].map(|weight_decay| Method::Erm { weight_decay }).into(),
            "sam" => rhos.map(|rho| Method::Sam { rho }).into(),
            "asam" => [0.2, 0.5, 1.0, 2.0, 4.0].map(|rho| Method::Asam { rho }).into(),
            // α = 0.1 is the specification's for this protocol; ρ matters far more.
            "gsam" => rhos.map(|rho| Method::Gsam { rho, alpha: 0.1 }).into(),
            "sagm" => rhos.map(|rho| Method::Sagm { rho, alpha: 0.001 }).into(),
            _ => return None,
        })
    }

    /// Settings as words.
    pub(super) fn settings(&self) -> String {
        match self {
            Method::Erm { weight_decay } => format!("weight decay {weight_decay}"),
            Method::Sam { rho } | Method::Asam { rho } => format!("ρ {rho}"),
            Method::Gsam { rho, alpha } | Method::Sagm { rho, alpha } => format!("ρ {rho}, α {alpha}"),
        }
    }

    /// Builds the optimizer over a group.
    pub(super) fn build(&self, group: ParamGroup, seed: u64) -> Result<Optimizer> {
        let shared = |rho: f64| SamConfig { seed, ..SamConfig::sam(rho) };
        let groups = vec![group];
        Ok(match *self {
            Method::Erm { weight_decay } => {
                let adam = Adam::from_config(AdamConfig { lr: LR, weight_decay, ..AdamConfig::default() });
                Optimizer::Sam(Sam::new(groups, adam, shared(0.0))?)
            }
            Method::Sam { rho } => Optimizer::Sam(Sam::new(groups, Adam::new(LR), shared(rho))?),
            Method::Asam { rho } => {
                let config = SamConfig { seed, ..SamConfig::asam(rho) };
                Optimizer::Sam(Sam::new(groups, Adam::new(LR), config)?)
            }
            Method::Gsam { rho, alpha } => {
                Optimizer::Gsam(Gsam::new(groups, Adam::new(LR), GsamConfig { alpha, sam: shared(rho) })?)
            }
            Method::Sagm { rho, alpha } => {
                Optimizer::Sagm(Sagm::new(groups, Adam::new(LR), SagmConfig { alpha, sam: shared(rho) })?)
            }
        })
    }
}

/// One of the optimizers, behind one `step`.
#[derive(Debug)]
pub(super) enum Optimizer {
    Sam(Sam<Adam>),
    Gsam(Gsam<Adam>),
    Sagm(Sagm<Adam>),
}

impl Optimizer {
    pub(super) fn step(
        &mut self,
        closure: impl FnMut(&Pass<'_>) -> sam_opt::Result<Tensor>,
    ) -> sam_opt::Result<SamStats> {
        match self {
            Optimizer::Sam(optimizer) => optimizer.step(closure),
            Optimizer::Gsam(optimizer) => optimizer.step(closure),
            Optimizer::Sagm(optimizer) => optimizer.step(closure),
        }
    }
}

/// What a search found: every candidate's score, and the choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Tuned {
    /// Seeds that the search used; evaluation never does.
    pub(super) seeds: Vec<u64>,
    /// One entry a method.
    pub(super) methods: Vec<TunedMethod>,
}

/// The search of one method.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TunedMethod {
    /// Arm.
    pub(super) arm: String,
    /// The choice.
    pub(super) chosen: Method,
    /// All candidates with their source-validation accuracy (percent) and loss (nats), means over seeds and
    /// hold-outs.
    pub(super) trials: Vec<Trial>,
}

/// A candidate's score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Trial {
    pub(super) candidate: Method,
    pub(super) validation_accuracy: f64,
    pub(super) validation_loss: f64,
}

impl Tuned {
    /// Reads a committed search.
    pub(super) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).context("the committed search can't be read")
    }

    /// The choice for an arm.
    pub(super) fn chosen(&self, arm: &str) -> Result<&Method> {
        let method = self.methods.iter().find(|m| m.arm == arm);
        method.map(|m| &m.chosen).with_context(|| format!("the search has no arm \"{arm}\""))
    }
}
