//! S-Adam goes through the workspace's conformance suite.
#![allow(missing_docs)]

mod common;
use common::training::{Method, Training};
use sam_opt::s_adam::{EpsMode, LgiKind};
use sam_opt::tensor::StateDict;
use sam_opt::tensor::conformance::assert_conforms;
use sam_opt::tensor::nn::Mlp;
use sam_opt::tensor::tch::Tensor;
use sam_opt::{ParamGroup, Result, SAdam, SAdamConfig};

/// S-Adam with one of its statistics.
struct Tried<const KIND: u8>(SAdam);

impl<const KIND: u8> Method for Tried<KIND> {
    type Config = SAdamConfig;

    fn valid() -> SAdamConfig {
        let lgi = [LgiKind::Published, LgiKind::Residual, LgiKind::Kink, LgiKind::RandomNull][KIND as usize];
        // Every third step probes, so the kept LGI must be saved; the residual's running slope too.
        SAdamConfig { lr: 0.01, lgi, probe_every: 3, eps_mode: EpsMode::Official, seed: 4, ..SAdamConfig::default() }
    }

    fn invalid() -> Vec<(&'static str, SAdamConfig)> {
        let valid = Self::valid;
        vec![
            ("lr", SAdamConfig { lr: -1.0, ..valid() }),
            ("betas", SAdamConfig { betas: (1.0, 0.999), ..valid() }),
            ("betas", SAdamConfig { betas: (0.9, f64::NAN), ..valid() }),
            ("eps", SAdamConfig { eps: -1e-8, ..valid() }),
            ("weight_decay", SAdamConfig { weight_decay: f64::INFINITY, ..valid() }),
            ("k_directions", SAdamConfig { k_directions: 0, ..valid() }),
            ("sigma", SAdamConfig { sigma: 0.0, ..valid() }),
            ("sigma", SAdamConfig { sigma: f64::NAN, ..valid() }),
            ("lambda", SAdamConfig { lambda: -0.1, ..valid() }),
            ("zeta", SAdamConfig { zeta: -1.0, ..valid() }),
            ("lgi_cap", SAdamConfig { lgi_cap: f64::NAN, ..valid() }),
            ("lgi", SAdamConfig { lgi: LgiKind::Constant(0.0), ..valid() }),
            ("lgi", SAdamConfig { lgi: LgiKind::Constant(1.5), ..valid() }),
            ("probe_every", SAdamConfig { probe_every: 0, ..valid() }),
        ]
    }

    fn build(groups: Vec<ParamGroup>, buffers: Vec<Tensor>, config: SAdamConfig) -> Result<Self> {
        Ok(Self(SAdam::new(groups, config)?.with_buffers(buffers)))
    }

    fn step(&mut self, net: &Mlp, x: &Tensor, y: &Tensor) -> Result<()> {
        self.0.step(|_| Ok(net.forward_with(x, true, true).cross_entropy_for_logits(y))).map(|_| ())
    }

    fn state(&self) -> Result<StateDict> {
        self.0.state_dict()
    }

    fn load(&mut self, state: &StateDict) -> Result<()> {
        self.0.load_state_dict(state)
    }
}

/// One test, because the networks draw their dropout from libtorch's one global stream.
#[test]
fn s_adam_conforms_in_every_form() {
    assert_conforms::<Training<Tried<0>>>();
    assert_conforms::<Training<Tried<1>>>();
    assert_conforms::<Training<Tried<2>>>();
    assert_conforms::<Training<Tried<3>>>();
}
