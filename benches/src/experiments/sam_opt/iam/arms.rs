//! The methods of IAM's experiments and the values that their searches choose among.

use super::super::search::Candidate;
use sam_opt::{IamConfig, IamDirection, IamVariant, PenaltyGradient};
use serde::{Deserialize, Serialize};

/// Candidates of each method in the searches with few labels.
const CANDIDATES: usize = 5;

/// A way to train a classifier, over SGD with momentum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Method {
    /// Cross-entropy on the labeled inputs.
    Sgd {
        weight_decay: f64,
    },
    /// With smoothed labels.
    Smoothing {
        smoothing: f64,
    },
    Sam {
        rho: f64,
    },
    Asam {
        rho: f64,
    },
    /// Plus the entropy of the outputs on unlabeled inputs.
    Entropy {
        beta: f64,
    },
    /// Plus the divergence under the worst small change of the inputs, labeled and unlabeled.
    Vat {
        epsilon: f64,
    },
    Iam(Iam),
}

/// A form of IAM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Iam {
    pub(super) form: Form,
    pub(super) rho: f64,
    pub(super) beta: f64,
    pub(super) inner_steps: usize,
    pub(super) noise_scale: f64,
    pub(super) refresh_every: usize,
}

/// What of IAM an arm uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    D,
    /// D with the penalty on the labeled inputs alone.
    Labeled,
    /// D with the unperturbed output as a constant: the defect.
    Detached,
    /// D along a random direction.
    Random,
    /// S with δ from all inputs.
    S,
    De,
}

impl Iam {
    pub(super) fn new(form: Form, rho: f64, beta: f64) -> Self {
        Self { form, rho, beta, inner_steps: 1, noise_scale: 1.0, refresh_every: 1 }
    }

    pub(super) fn config(&self, seed: u64) -> IamConfig {
        let variant = match self.form {
            Form::S => IamVariant::S,
            Form::De => IamVariant::De,
            _ => IamVariant::D,
        };
        let direction = if self.form == Form::Random { IamDirection::Random } else { IamDirection::Power };
        let gradient = if self.form == Form::Detached { PenaltyGradient::Detached } else { PenaltyGradient::BothSides };
        IamConfig {
            variant,
            rho: self.rho,
            beta: self.beta,
            inner_steps: self.inner_steps,
            noise_scale: self.noise_scale,
            refresh_every: self.refresh_every,
            direction,
            gradient,
            seed,
            ..IamConfig::default()
        }
    }
}

/// Weight decay of the protocols, where it isn't searched.
pub(super) const DECAY: f64 = 5e-4;

impl Method {
    /// Candidates of an arm, in ascending order; the values of the specification's own scan are among them.
    pub(super) fn grid(arm: &str) -> Option<Vec<Method>> {
        // The product β·ρ² sets the strength, so the pairs lie on a line of it, nearly.
        let penalties: [(f64, f64); CANDIDATES] = [(0.1, 1.0), (0.2, 1.0), (0.5, 1.0), (0.1, 10.0), (1.0, 1.0)];
        let penalized = |form| penalties.map(|(rho, beta)| Method::Iam(Iam::new(form, rho, beta))).into();
        Some(match arm {
            "sgd" => [0.0, 5e-4, 2e-3, 5e-3, 1e-2].map(|weight_decay| Method::Sgd { weight_decay }).into(),
            "smoothing" => [0.05, 0.1, 0.2, 0.3, 0.5].map(|smoothing| Method::Smoothing { smoothing }).into(),
            "sam" => [0.05, 0.1, 0.2, 0.5, 1.0].map(|rho| Method::Sam { rho }).into(),
            "asam" => [0.25, 0.5, 1.0, 2.0, 4.0].map(|rho| Method::Asam { rho }).into(),
            "entropy" => [0.01, 0.03, 0.1, 0.3, 1.0].map(|beta| Method::Entropy { beta }).into(),
            "vat" => [0.5, 1.0, 2.0, 4.0, 8.0].map(|epsilon| Method::Vat { epsilon }).into(),
            "iam-d" => penalized(Form::D),
            "iam-d-labeled" => penalized(Form::Labeled),
            "iam-d-detached" => penalized(Form::Detached),
            "iam-de" => penalized(Form::De),
            "iam-s" => [0.1, 0.2, 0.5, 1.0, 2.0].map(|rho| Method::Iam(Iam::new(Form::S, rho, 0.0))).into(),
            _ => return None,
        })
    }
}

impl Candidate for Method {
    fn name(&self) -> &'static str {
        match self {
            Method::Sgd { .. } => "weight decay",
            Method::Smoothing { .. } => "smoothing",
            Method::Sam { .. } | Method::Asam { .. } => "ρ",
            Method::Entropy { .. } => "β",
            Method::Vat { .. } => "ε",
            Method::Iam(iam) if iam.form == Form::S => "ρ",
            Method::Iam(_) => "",
        }
    }

    fn varied(&self) -> String {
        match self {
            Method::Sgd { weight_decay: value }
            | Method::Smoothing { smoothing: value }
            | Method::Sam { rho: value }
            | Method::Asam { rho: value }
            | Method::Entropy { beta: value }
            | Method::Vat { epsilon: value } => value.to_string(),
            Method::Iam(iam) if iam.form == Form::S => iam.rho.to_string(),
            Method::Iam(iam) => format!("ρ {} β {}", iam.rho, iam.beta),
        }
    }

    fn on_a_line(&self) -> bool {
        !matches!(self, Method::Iam(iam) if iam.form != Form::S)
    }

    fn is_natural_end(&self) -> bool {
        *self == Method::Sgd { weight_decay: 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_searched_arm_has_as_many_different_valid_candidates() {
        for arm in super::super::few::SEARCHED {
            let grid = Method::grid(arm).unwrap();
            assert_eq!(grid.len(), CANDIDATES, "{arm}");
            for (i, candidate) in grid.iter().enumerate() {
                assert!(!grid[..i].contains(candidate), "{arm}: {candidate:?} twice");
                let text = serde_json::to_string(candidate).unwrap();
                assert_eq!(serde_json::from_str::<Method>(&text).unwrap(), *candidate);
                if let Method::Iam(iam) = candidate {
                    iam.config(0).validate().unwrap();
                }
            }
        }
    }
}
