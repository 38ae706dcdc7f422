//! IAM-D, IAM-S and IAM-DE go through the workspace's conformance suite.
#![allow(missing_docs)]

mod common;
use common::batch;
use common::training::{Method, Training};
use sam_opt::tensor::StateDict;
use sam_opt::tensor::conformance::{Subject, assert_conforms};
use sam_opt::tensor::nn::Mlp;
use sam_opt::tensor::tch::Tensor;
use sam_opt::{AdamW, Iam, IamConfig, ParamGroup, Result};
use std::marker::PhantomData;

/// IAM with the settings of a variant.
struct Tried<V> {
    optimizer: Iam<AdamW>,
    variant: PhantomData<V>,
}

trait Variant {
    fn valid() -> IamConfig;
}

struct D;
struct S;
struct De;

impl Variant for D {
    fn valid() -> IamConfig {
        // A direction that outlives a step, so that it must be saved.
        IamConfig { refresh_every: 3, clip_norm: Some(10.0), seed: 11, ..IamConfig::d(0.3, 2.0) }
    }
}

impl Variant for S {
    fn valid() -> IamConfig {
        IamConfig { align_sign: true, inner_steps: 2, ..IamConfig::s(0.3) }
    }
}

impl Variant for De {
    fn valid() -> IamConfig {
        IamConfig::de(0.3, 2.0)
    }
}

impl<V: Variant> Method for Tried<V> {
    type Config = IamConfig;

    fn valid() -> IamConfig {
        V::valid()
    }

    fn invalid() -> Vec<(&'static str, IamConfig)> {
        let valid = V::valid;
        vec![
            ("rho", IamConfig { rho: -0.1, ..valid() }),
            ("rho", IamConfig { rho: f64::INFINITY, ..valid() }),
            ("beta", IamConfig { beta: f64::NAN, ..valid() }),
            ("noise_scale", IamConfig { noise_scale: 0.0, ..valid() }),
            ("inner_steps", IamConfig { inner_steps: 0, ..valid() }),
            ("refresh_every", IamConfig { refresh_every: 0, ..valid() }),
            ("norm_eps", IamConfig { norm_eps: -1.0, ..valid() }),
            ("clip_norm", IamConfig { clip_norm: Some(0.0), ..valid() }),
        ]
    }

    fn build(groups: Vec<ParamGroup>, buffers: Vec<Tensor>, config: IamConfig) -> Result<Self> {
        let optimizer = Iam::new(groups, AdamW::new(0.01), config)?.with_buffers(buffers);
        Ok(Self { optimizer, variant: PhantomData })
    }

    fn step(&mut self, net: &Mlp, x: &Tensor, y: &Tensor) -> Result<()> {
        let stats = self.optimizer.step(|_| Ok(net.forward_with(x, true, true)), |z| Ok(z.cross_entropy_for_logits(y)));
        stats.map(|_| ())
    }

    fn state(&self) -> Result<StateDict> {
        self.optimizer.state_dict()
    }

    fn load(&mut self, state: &StateDict) -> Result<()> {
        self.optimizer.load_state_dict(state)
    }
}

/// One test, because the networks draw their dropout from libtorch's one global stream.
#[test]
fn iam_d_s_and_de_conform_and_share_dropout_within_a_step() {
    assert_conforms::<Training<Tried<D>>>();
    assert_conforms::<Training<Tried<S>>>();
    assert_conforms::<Training<Tried<De>>>();
    // δ reused at rate 0 and radius tiny: with other dropout in the two passes the divergence would be large.
    let config = IamConfig { rho: 1e-6, ..IamConfig::d(0.3, 2.0) };
    let mut training = Training::<Tried<D>>::build(&config).unwrap();
    let (x, y) = batch(16, 0);
    let net = &training.net;
    let stats = training
        .method
        .optimizer
        .step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y)))
        .unwrap();
    assert!(stats.inconsistency.unwrap() < 1e-5, "{stats:?}");
}
