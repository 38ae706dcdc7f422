//! SAM and its kin go through the workspace's conformance suite.
#![allow(missing_docs)]

mod common;
use common::training::{Method, Training};
use sam_opt::baselines::{Dgsam, DgsamConfig};
use sam_opt::tensor::StateDict;
use sam_opt::tensor::conformance::assert_conforms;
use sam_opt::tensor::nn::Mlp;
use sam_opt::tensor::tch::{Kind, Reduction, Tensor};
use sam_opt::{
    AdamW, AmdfConfig, AsamConfig, DaSam, DaSamConfig, DasRule, DomainId, DomainLosses, Gsam, GsamConfig, GsamRule,
    OuterMode, ParamGroup, Result, Rule, Sagm, SagmConfig, SagmRule, Sam, SamConfig, SamRule, TwoPass,
};

/// A method's configurations for the suite.
trait Cases: Rule {
    fn valid() -> Self::Config;
    fn invalid() -> Vec<(&'static str, Self::Config)>;
}

fn valid() -> SamConfig {
    SamConfig { clip_norm: Some(10.0), interval: 2, seed: 11, ..SamConfig::asam(0.5) }
}

fn invalid() -> Vec<(&'static str, SamConfig)> {
    let asam = |eta| Some(AsamConfig { eta, ..AsamConfig::default() });
    vec![
        ("rho", SamConfig { rho: -0.1, ..valid() }),
        ("rho", SamConfig { rho: f64::NAN, ..valid() }),
        ("rho", SamConfig { rho: f64::INFINITY, ..valid() }),
        ("eta", SamConfig { adaptive: asam(-1.0), ..valid() }),
        ("norm_eps", SamConfig { norm_eps: -1e-12, ..valid() }),
        ("interval", SamConfig { interval: 0, ..valid() }),
        ("clip_norm", SamConfig { clip_norm: Some(0.0), ..valid() }),
        (
            "fraction",
            SamConfig {
                rho_schedule: sam_opt::RhoSchedule::LossBudget { fraction: f64::NAN, rho_max: 1.0 },
                ..valid()
            },
        ),
        (
            "lr_min",
            SamConfig {
                rho_schedule: sam_opt::RhoSchedule::ProportionalToLr {
                    rho_min: 0.0,
                    rho_max: 1.0,
                    lr_min: 1.0,
                    lr_max: 1.0,
                },
                ..valid()
            },
        ),
    ]
}

impl Cases for SamRule {
    fn valid() -> SamConfig {
        valid()
    }

    fn invalid() -> Vec<(&'static str, SamConfig)> {
        invalid()
    }
}

impl Cases for GsamRule {
    fn valid() -> GsamConfig {
        GsamConfig { alpha: 0.3, sam: valid() }
    }

    fn invalid() -> Vec<(&'static str, GsamConfig)> {
        let mut cases = vec![("alpha", GsamConfig { alpha: -1.0, sam: valid() })];
        cases.extend(invalid().into_iter().map(|(field, sam)| (field, GsamConfig { alpha: 0.3, sam })));
        cases
    }
}

impl Cases for SagmRule {
    fn valid() -> SagmConfig {
        SagmConfig { alpha: 0.01, sam: valid() }
    }

    fn invalid() -> Vec<(&'static str, SagmConfig)> {
        vec![("alpha", SagmConfig { alpha: f64::NAN, sam: valid() })]
    }
}

impl<R: Cases> Method for TwoPass<AdamW, R>
where
    R::Config: PartialEq,
{
    type Config = R::Config;

    fn valid() -> R::Config {
        R::valid()
    }

    fn invalid() -> Vec<(&'static str, R::Config)> {
        R::invalid()
    }

    fn build(groups: Vec<ParamGroup>, buffers: Vec<Tensor>, config: R::Config) -> Result<Self> {
        Ok(TwoPass::new(groups, AdamW::new(0.01), config)?.with_buffers(buffers))
    }

    fn step(&mut self, net: &Mlp, x: &Tensor, y: &Tensor) -> Result<()> {
        TwoPass::step(self, |_| Ok(net.forward_with(x, true, true).cross_entropy_for_logits(y))).map(|_| ())
    }

    fn state(&self) -> Result<StateDict> {
        self.state_dict()
    }

    fn load(&mut self, state: &StateDict) -> Result<()> {
        self.load_state_dict(state)
    }
}

fn losses(net: &Mlp, x: &Tensor, y: &Tensor) -> DomainLosses {
    let log_p = net.forward_with(x, true, true).log_softmax(-1, Kind::Float);
    let losses = log_p.nll_loss_nd(y, None::<Tensor>, Reduction::None, -100);
    DomainLosses::PerSample { losses, domains: (0..16).map(|i| DomainId(u32::from(i >= 6))).collect() }
}

impl Method for DaSam<AdamW> {
    type Config = DaSamConfig;

    fn valid() -> DaSamConfig {
        let amdf = Some(AmdfConfig { directions: 3, probe_every: 3, ..AmdfConfig::default() });
        DaSamConfig { loss_ema: 0.5, amdf, clip_norm: Some(10.0), seed: 11, ..DaSamConfig::da_sam(0.3) }
    }

    fn invalid() -> Vec<(&'static str, DaSamConfig)> {
        let valid = DaSamConfig::default;
        let amdf = |change: fn(&mut AmdfConfig)| {
            let mut amdf = AmdfConfig::default();
            change(&mut amdf);
            DaSamConfig { amdf: Some(amdf), ..valid() }
        };
        vec![
            ("rho", DaSamConfig { rho: -0.1, ..valid() }),
            ("rho", DaSamConfig { rho: f64::NAN, ..valid() }),
            ("tau", DaSamConfig { tau: 0.0, ..valid() }),
            ("tau", DaSamConfig { tau: f64::INFINITY, ..valid() }),
            ("das", DaSamConfig { das: DasRule::Power(f64::NAN), ..valid() }),
            ("s_min", DaSamConfig { s_min: 1.5, ..valid() }),
            ("s_max", DaSamConfig { s_max: Some(0.5), ..valid() }),
            ("loss_ema", DaSamConfig { loss_ema: 1.0, ..valid() }),
            ("clip_norm", DaSamConfig { clip_norm: Some(0.0), ..valid() }),
            ("outer", DaSamConfig { outer: OuterMode::Worst, amdf: None, ..valid() }),
            ("directions", amdf(|a| a.directions = 0)),
            ("zeta", amdf(|a| a.zeta = -1.0)),
            ("kappa", amdf(|a| a.kappa = f64::NAN)),
            ("exponent", amdf(|a| a.exponent = -1.0)),
            ("clip", amdf(|a| a.clip = 0.5)),
            ("ema", amdf(|a| a.ema = 1.0)),
            ("temperature", amdf(|a| a.temperature = 0.0)),
            ("probe_every", amdf(|a| a.probe_every = 0)),
        ]
    }

    fn build(groups: Vec<ParamGroup>, buffers: Vec<Tensor>, config: DaSamConfig) -> Result<Self> {
        Ok(DaSam::new(groups, AdamW::new(0.01), config)?.with_buffers(buffers))
    }

    fn step(&mut self, net: &Mlp, x: &Tensor, y: &Tensor) -> Result<()> {
        DaSam::step(self, |_| Ok(losses(net, x, y))).map(|_| ())
    }

    fn state(&self) -> Result<StateDict> {
        self.state_dict()
    }

    fn load(&mut self, state: &StateDict) -> Result<()> {
        self.load_state_dict(state)
    }
}

impl Method for Dgsam<AdamW> {
    type Config = DgsamConfig;

    fn valid() -> DgsamConfig {
        DgsamConfig { rho: 0.2, clip_norm: Some(10.0), seed: 4, ..DgsamConfig::default() }
    }

    fn invalid() -> Vec<(&'static str, DgsamConfig)> {
        vec![
            ("rho", DgsamConfig { rho: -1.0, ..Self::valid() }),
            ("clip_norm", DgsamConfig { clip_norm: Some(f64::NAN), ..Self::valid() }),
        ]
    }

    fn build(groups: Vec<ParamGroup>, buffers: Vec<Tensor>, config: DgsamConfig) -> Result<Self> {
        Ok(Dgsam::new(groups, AdamW::new(0.01), config)?.with_buffers(buffers))
    }

    fn step(&mut self, net: &Mlp, x: &Tensor, y: &Tensor) -> Result<()> {
        let part = |t: &Tensor, id: DomainId| t.narrow(0, 8 * i64::from(id.0), 8);
        Dgsam::step(self, &[DomainId(0), DomainId(1)], |_, id| {
            Ok(net.forward_with(&part(x, id), true, true).cross_entropy_for_logits(&part(y, id)))
        })
        .map(|_| ())
    }

    fn state(&self) -> Result<StateDict> {
        self.state_dict()
    }

    fn load(&mut self, state: &StateDict) -> Result<()> {
        self.load_state_dict(state)
    }
}

/// One test, because the networks draw their dropout from libtorch's one global stream.
#[test]
fn every_optimizer_of_the_family_conforms() {
    assert_conforms::<Training<Sam<AdamW>>>();
    assert_conforms::<Training<Gsam<AdamW>>>();
    assert_conforms::<Training<Sagm<AdamW>>>();
    assert_conforms::<Training<DaSam<AdamW>>>();
    assert_conforms::<Training<Dgsam<AdamW>>>();
}
