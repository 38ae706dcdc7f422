//! S-Adam goes through the workspace's conformance suite.
#![allow(missing_docs)]

mod common;
use common::{batch, bits};
use sam_opt::s_adam::{EpsMode, LgiKind};
use sam_opt::tensor::conformance::{Subject, assert_conforms};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{self, Device, nn::VarStore};
use sam_opt::tensor::{Seed, StateDict};
use sam_opt::{SAdam, SAdamConfig};

/// A small network with batch norm and dropout.
struct Training<const KIND: u8> {
    store: VarStore,
    net: Mlp,
    optimizer: SAdam,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl<const KIND: u8> Subject for Training<KIND> {
    type Config = SAdamConfig;

    fn config() -> SAdamConfig {
        let lgi = [LgiKind::Published, LgiKind::Residual, LgiKind::Kink, LgiKind::RandomNull][KIND as usize];
        // Every third step probes, so the kept LGI must be saved; the residual's running slope too.
        SAdamConfig { lr: 0.01, lgi, probe_every: 3, eps_mode: EpsMode::Official, seed: 4, ..SAdamConfig::default() }
    }

    fn invalid() -> Vec<(&'static str, SAdamConfig)> {
        let valid = Self::config;
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

    fn build(config: &SAdamConfig) -> Result<Self, String> {
        tch::set_num_threads(1);
        let store = VarStore::new(Device::Cpu);
        let shape = MlpConfig { batch_norm: true, dropout: 0.2, ..MlpConfig::relu(&[4, 8, 3]) };
        let net = Mlp::new(&store.root(), &shape, Seed::new(1)).map_err(text)?;
        let optimizer = SAdam::for_store(&store, config.clone()).map_err(text)?;
        Ok(Self { store, net, optimizer })
    }

    fn advance(&mut self, i: u64) -> Result<(), String> {
        let net = &self.net;
        let (x, y) = batch(16, i);
        self.optimizer
            .step(|_| Ok(net.forward_with(&x, true, true).cross_entropy_for_logits(&y)))
            .map(|_| ())
            .map_err(text)
    }

    fn advance_on_nan(&mut self) -> Result<(), String> {
        let net = &self.net;
        let (x, y) = batch(16, 0);
        self.optimizer
            .step(|_| Ok(net.forward_with(&(&x * f64::NAN), true, true).cross_entropy_for_logits(&y)))
            .map(|_| ())
            .map_err(text)
    }

    fn observe(&self) -> Vec<u8> {
        let ordered: std::collections::BTreeMap<_, _> = self.store.variables().into_iter().collect();
        let tensors: Vec<_> = ordered.into_values().collect();
        bits(&tensors).into_iter().flatten().flat_map(u64::to_le_bytes).collect()
    }

    fn save(&self) -> Result<Vec<u8>, String> {
        let file = tempfile::NamedTempFile::new().map_err(text)?;
        let mut state = self.optimizer.state_dict().map_err(text)?;
        for (name, tensor) in self.store.variables() {
            state.tensors.insert(format!("model:{name}"), tensor);
        }
        state.save(file.path()).map_err(text)?;
        std::fs::read(file.path()).map_err(text)
    }

    fn load(config: &SAdamConfig, saved: &[u8]) -> Result<Self, String> {
        let file = tempfile::NamedTempFile::new().map_err(text)?;
        std::fs::write(file.path(), saved).map_err(text)?;
        let mut state = StateDict::load(file.path()).map_err(text)?;
        let (model, optimizer) =
            std::mem::take(&mut state.tensors).into_iter().partition(|(name, _)| name.starts_with("model:"));
        state.tensors = optimizer;
        let mut new = Self::build(config)?;
        let names = sam_opt::tensor::checkpoint::NameMap { prefixes: vec![("model:".into(), String::new())] };
        let weights = StateDict { tensors: model, ..StateDict::default() };
        weights.copy_into(&new.store, &names).map_err(text)?;
        new.optimizer.load_state_dict(&state).map_err(text)?;
        Ok(new)
    }
}

/// One test, because the networks draw their dropout from libtorch's one global stream.
#[test]
fn s_adam_conforms_in_every_form() {
    assert_conforms::<Training<0>>();
    assert_conforms::<Training<1>>();
    assert_conforms::<Training<2>>();
    assert_conforms::<Training<3>>();
}
