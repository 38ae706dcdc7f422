//! The optimizers of the experiments and their hyper-parameters.

use super::search::{CANDIDATES, Candidate};
use anyhow::Result;
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
/// The methods whose hyper-parameters are searched.
pub(super) const SEARCHED: [&str; 5] = ["erm", "sam", "asam", "gsam", "sagm"];

impl Method {
    /// Value of the hyper-parameter that the search varies.
    fn value(&self) -> f64 {
        match *self {
            Method::Erm { weight_decay } => weight_decay,
            Method::Sam { rho } | Method::Asam { rho } | Method::Gsam { rho, .. } | Method::Sagm { rho, .. } => rho,
        }
    }

    /// The candidates among which validation on the source domains chooses: [`CANDIDATES`] of every method, in
    /// ascending order, about geometric, with room on both sides of the usual values.
    pub(super) fn grid(name: &str) -> Option<Vec<Method>> {
        let rhos: [f64; CANDIDATES] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
        // ASAM measures its radius relative to the weights, so the same effect takes a larger number.
        let relative: [f64; CANDIDATES] = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];
        let decays: [f64; CANDIDATES] = [0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3];
        Some(match name {
            "erm" => decays.map(|weight_decay| Method::Erm { weight_decay }).into(),
            "sam" => rhos.map(|rho| Method::Sam { rho }).into(),
            "asam" => relative.map(|rho| Method::Asam { rho }).into(),
            // α = 0.1 is the specification's for this protocol; ρ matters far more.
            "gsam" => rhos.map(|rho| Method::Gsam { rho, alpha: 0.1 }).into(),
            "sagm" => rhos.map(|rho| Method::Sagm { rho, alpha: 0.001 }).into(),
            _ => return None,
        })
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

impl Candidate for Method {
    fn name(&self) -> &'static str {
        match self {
            Method::Erm { .. } => "weight decay",
            _ => "ρ",
        }
    }

    fn varied(&self) -> String {
        self.value().to_string()
    }

    fn fixed(&self) -> String {
        match self {
            Method::Gsam { alpha, .. } | Method::Sagm { alpha, .. } => format!(", α {alpha}"),
            _ => String::new(),
        }
    }

    fn is_natural_end(&self) -> bool {
        *self == Method::Erm { weight_decay: 0.0 }
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

#[cfg(test)]
mod tests {
    use super::super::search::CANDIDATES;
    use super::*;

    #[test]
    fn every_method_has_as_many_candidates_in_ascending_order() {
        for name in SEARCHED {
            let values: Vec<f64> = Method::grid(name).unwrap().iter().map(Method::value).collect();
            assert_eq!(values.len(), CANDIDATES, "{name}");
            assert!(values.is_sorted_by(|a, b| a < b), "{name}: {values:?}");
        }
    }
}
