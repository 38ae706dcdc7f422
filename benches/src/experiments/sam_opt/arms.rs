//! The optimizers of the experiments on domains, and their hyper-parameters.

use super::search::{CANDIDATES, Candidate};
use anyhow::Result;
use sam_opt::baselines::{Dgsam, DgsamConfig, GroupDro, vrex_loss};
use sam_opt::{
    Adam, AdamConfig, AmdfConfig, DaSam, DaSamConfig, DasRule, DomainId, DomainLosses, Gsam, GsamConfig, OuterMode,
    OuterWeights, ParamGroup, Pass, PerturbDirection, Sagm, SagmConfig, Sam, SamConfig, SamStats,
};
use serde::{Deserialize, Serialize};
use tensor::nn::Mlp;
use tensor::tch::{Kind, Reduction, Tensor};

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
    /// SAM along noise.
    Random {
        rho: f64,
    },
    Disam {
        rho: f64,
        lambda: f64,
    },
    Dgsam {
        rho: f64,
    },
    GroupDro {
        eta: f64,
    },
    Vrex {
        beta: f64,
    },
    /// DA-SAM's defaults apart from the radius.
    DaSam {
        rho: f64,
    },
    /// DA-SAM without AMDF.
    DasOnly {
        rho: f64,
    },
    /// DA-SAM with any settings: ablations.
    Custom {
        config: Box<DaSamConfig>,
    },
}

/// Learning rate of the protocols.
const LR: f64 = 1e-3;
/// The methods whose hyper-parameters are searched.
pub(super) const SEARCHED: [&str; 12] =
    ["erm", "sam", "asam", "gsam", "sagm", "random", "disam", "dgsam", "group-dro", "v-rex", "das", "da-sam"];

impl Method {
    /// Value of the hyper-parameter that the search varies.
    fn value(&self) -> f64 {
        match *self {
            Method::Erm { weight_decay } => weight_decay,
            Method::GroupDro { eta } => eta,
            Method::Vrex { beta } => beta,
            Method::Sam { rho }
            | Method::Asam { rho }
            | Method::Gsam { rho, .. }
            | Method::Sagm { rho, .. }
            | Method::Random { rho }
            | Method::Disam { rho, .. }
            | Method::Dgsam { rho }
            | Method::DaSam { rho }
            | Method::DasOnly { rho } => rho,
            Method::Custom { ref config } => config.rho,
        }
    }

    /// The candidates among which validation on the source domains chooses: [`CANDIDATES`] of every method, in
    /// ascending order, about geometric, with room on both sides of the usual values.
    pub(super) fn grid(name: &str) -> Option<Vec<Method>> {
        let rhos: [f64; CANDIDATES] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
        // ASAM measures its radius relative to the weights, so the same effect takes a larger number.
        let relative: [f64; CANDIDATES] = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];
        let decays: [f64; CANDIDATES] = [0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3];
        let etas: [f64; CANDIDATES] = [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0];
        let betas: [f64; CANDIDATES] = [0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0];
        Some(match name {
            "erm" => decays.map(|weight_decay| Method::Erm { weight_decay }).into(),
            "sam" => rhos.map(|rho| Method::Sam { rho }).into(),
            "asam" => relative.map(|rho| Method::Asam { rho }).into(),
            // α = 0.1 is the specification's for this protocol; ρ matters far more.
            "gsam" => rhos.map(|rho| Method::Gsam { rho, alpha: 0.1 }).into(),
            "sagm" => rhos.map(|rho| Method::Sagm { rho, alpha: 0.001 }).into(),
            "random" => rhos.map(|rho| Method::Random { rho }).into(),
            "disam" => rhos.map(|rho| Method::Disam { rho, lambda: 0.1 }).into(),
            "dgsam" => rhos.map(|rho| Method::Dgsam { rho }).into(),
            "group-dro" => etas.map(|eta| Method::GroupDro { eta }).into(),
            "v-rex" => betas.map(|beta| Method::Vrex { beta }).into(),
            "das" => rhos.map(|rho| Method::DasOnly { rho }).into(),
            "da-sam" => rhos.map(|rho| Method::DaSam { rho }).into(),
            _ => return None,
        })
    }

    /// Builds the optimizer over a group.
    pub(super) fn build(&self, group: ParamGroup, seed: u64) -> Result<Optimizer> {
        let shared = |rho: f64| SamConfig { seed, ..SamConfig::sam(rho) };
        let groups = vec![group];
        let adam = || Adam::new(LR);
        let da_sam = |groups, config: DaSamConfig| -> Result<Optimizer> {
            Ok(Optimizer::DaSam(Box::new(DaSam::new(groups, Adam::new(LR), DaSamConfig { seed, ..config })?)))
        };
        Ok(match *self {
            Method::Erm { weight_decay } => {
                let adam = Adam::from_config(AdamConfig { lr: LR, weight_decay, ..AdamConfig::default() });
                Optimizer::Sam(Sam::new(groups, adam, shared(0.0))?)
            }
            Method::Sam { rho } => Optimizer::Sam(Sam::new(groups, adam(), shared(rho))?),
            Method::Asam { rho } => {
                let config = SamConfig { seed, ..SamConfig::asam(rho) };
                Optimizer::Sam(Sam::new(groups, adam(), config)?)
            }
            Method::Gsam { rho, alpha } => {
                Optimizer::Gsam(Gsam::new(groups, adam(), GsamConfig { alpha, sam: shared(rho) })?)
            }
            Method::Sagm { rho, alpha } => {
                Optimizer::Sagm(Sagm::new(groups, adam(), SagmConfig { alpha, sam: shared(rho) })?)
            }
            Method::Random { rho } => {
                let config = SamConfig { direction: PerturbDirection::Random, ..shared(rho) };
                Optimizer::Sam(Sam::new(groups, adam(), config)?)
            }
            Method::Dgsam { rho } => {
                Optimizer::Dgsam(Dgsam::new(groups, adam(), DgsamConfig { rho, seed, ..DgsamConfig::default() })?)
            }
            Method::GroupDro { eta } => {
                Optimizer::GroupDro(Sam::new(groups, adam(), shared(0.0))?, GroupDro::new(eta)?)
            }
            Method::Vrex { beta } => Optimizer::Vrex(Sam::new(groups, adam(), shared(0.0))?, beta),
            Method::Disam { rho, lambda } => da_sam(groups, DaSamConfig::disam(rho, lambda))?,
            Method::DaSam { rho } => da_sam(groups, DaSamConfig::da_sam(rho))?,
            Method::DasOnly { rho } => da_sam(groups, DaSamConfig::das_only(rho))?,
            Method::Custom { ref config } => da_sam(groups, (**config).clone())?,
        })
    }

    /// The ablations of DA-SAM at one radius, with their names and words.
    pub(super) fn ablations(rho: f64) -> Vec<(&'static str, &'static str, Method)> {
        let base = || DaSamConfig::da_sam(rho);
        let amdf = |amdf: AmdfConfig| DaSamConfig { amdf: Some(amdf), ..base() };
        let default = AmdfConfig::default;
        let rows: Vec<(&str, &str, DaSamConfig)> = vec![
            ("da-sam", "DA-SAM (M 4, ζ 1, τ 1)", base()),
            ("das-only", "DAS only", DaSamConfig::das_only(rho)),
            ("amdf-only", "AMDF only", DaSamConfig::amdf_only(rho)),
            ("das-tau-0.5", "DAS only, τ 0.5", DaSamConfig { tau: 0.5, ..DaSamConfig::das_only(rho) }),
            ("das-opposite", "DAS only, opposite sign", DaSamConfig { tau: -1.0, ..DaSamConfig::das_only(rho) }),
            (
                "das-power",
                "DAS only, power rule γ 2",
                DaSamConfig { das: DasRule::Power(2.0), ..DaSamConfig::das_only(rho) },
            ),
            ("das-ema", "DAS only, running losses 0.9", DaSamConfig { loss_ema: 0.9, ..DaSamConfig::das_only(rho) }),
            ("m-2", "M 2", amdf(AmdfConfig { directions: 2, ..default() })),
            ("m-8", "M 8", amdf(AmdfConfig { directions: 8, ..default() })),
            ("zeta-0.5", "ζ 0.5", amdf(AmdfConfig { zeta: 0.5, ..default() })),
            ("fixed-radius", "fixed radius (a 0)", amdf(AmdfConfig { exponent: 0.0, ..default() })),
            ("probe-every-4", "probes every 4 steps", amdf(AmdfConfig { probe_every: 4, ..default() })),
            ("worst", "worst direction", DaSamConfig { outer: OuterMode::Worst, ..base() }),
            ("average", "mean over directions", DaSamConfig { outer: OuterMode::Average, ..base() }),
            ("outer-das", "outer weights by DAS", DaSamConfig { outer_weights: OuterWeights::Das, ..base() }),
            ("disam", "DISAM λ 0.1", DaSamConfig::disam(rho, 0.1)),
        ];
        rows.into_iter()
            .map(|(name, label, config)| (name, label, Method::Custom { config: Box::new(config) }))
            .collect()
    }
}

impl Candidate for Method {
    fn name(&self) -> &'static str {
        match self {
            Method::Erm { .. } => "weight decay",
            Method::GroupDro { .. } => "η",
            Method::Vrex { .. } => "β",
            _ => "ρ",
        }
    }

    fn varied(&self) -> String {
        self.value().to_string()
    }

    fn fixed(&self) -> String {
        match self {
            Method::Gsam { alpha, .. } | Method::Sagm { alpha, .. } => format!(", α {alpha}"),
            Method::Disam { lambda, .. } => format!(", λ {lambda}"),
            Method::DaSam { .. } => ", M 4, ζ 1, τ 1".to_owned(),
            Method::DasOnly { .. } => ", τ 1".to_owned(),
            _ => String::new(),
        }
    }

    fn is_natural_end(&self) -> bool {
        *self == Method::Erm { weight_decay: 0.0 }
    }
}

/// The samples of a step: the same number of every domain, one domain after the other.
#[derive(Debug)]
pub(super) struct DomainBatch<'a> {
    pub(super) net: &'a Mlp,
    /// `[domains · per, features]`.
    pub(super) x: Tensor,
    /// `[domains · per]`.
    pub(super) y: Tensor,
    /// The domain of each sample.
    pub(super) domains: &'a [DomainId],
    /// Samples of each domain.
    pub(super) per: i64,
}

impl DomainBatch<'_> {
    /// Every domain has the same share of the batch, so this is the mean of the domains' means.
    fn mean_loss(&self) -> Tensor {
        self.net.forward_with(&self.x, true, true).cross_entropy_for_logits(&self.y)
    }

    fn losses(&self) -> DomainLosses {
        let log_p = self.net.forward_with(&self.x, true, true).log_softmax(-1, Kind::Float);
        let losses = log_p.nll_loss_nd(&self.y, None::<Tensor>, Reduction::None, -100);
        DomainLosses::PerSample { losses, domains: self.domains.to_vec() }
    }

    fn count(&self) -> usize {
        self.domains.len() / self.per as usize
    }

    fn one_loss(&self, position: i64) -> Tensor {
        let part = |t: &Tensor| t.narrow(0, position * self.per, self.per);
        self.net.forward_with(&part(&self.x), true, true).cross_entropy_for_logits(&part(&self.y))
    }
}

/// One of the optimizers, behind one `step`.
#[derive(Debug)]
pub(super) enum Optimizer {
    Sam(Sam<Adam>),
    Gsam(Gsam<Adam>),
    Sagm(Sagm<Adam>),
    GroupDro(Sam<Adam>, GroupDro),
    Vrex(Sam<Adam>, f64),
    Dgsam(Dgsam<Adam>),
    DaSam(Box<DaSam<Adam>>),
}

impl Optimizer {
    /// One step; what it cost, in forward-backward passes over the batch (a backward pass counts as two forward ones).
    pub(super) fn step(&mut self, batch: &DomainBatch<'_>) -> sam_opt::Result<f64> {
        let mean = |_: &Pass<'_>| Ok(batch.mean_loss());
        let passes = |stats: SamStats| stats.passes as f64;
        Ok(match self {
            Optimizer::Sam(optimizer) => passes(optimizer.step(mean)?),
            Optimizer::Gsam(optimizer) => passes(optimizer.step(mean)?),
            Optimizer::Sagm(optimizer) => passes(optimizer.step(mean)?),
            Optimizer::GroupDro(optimizer, dro) => passes(optimizer.step(|pass| dro.loss(batch.losses(), pass))?),
            Optimizer::Vrex(optimizer, beta) => passes(optimizer.step(|pass| vrex_loss(batch.losses(), *beta, pass))?),
            Optimizer::Dgsam(optimizer) => {
                let ids: Vec<DomainId> = (0..batch.count() as u32).map(DomainId).collect();
                let stats = optimizer.step(&ids, |_, id| Ok(batch.one_loss(i64::from(id.0))))?;
                stats.domain_passes as f64 / batch.count() as f64
            }
            Optimizer::DaSam(optimizer) => {
                let stats = optimizer.step(|_| Ok(batch.losses()))?;
                (stats.forwards + 2 * stats.backwards) as f64 / 3.0
            }
        })
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
