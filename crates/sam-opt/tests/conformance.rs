//! SAM and its kin go through the workspace's conformance suite.
#![allow(missing_docs)]

mod common;
use common::{batch, bits};
use sam_opt::tensor::conformance::{Subject, assert_conforms};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{self, Device, nn::VarStore};
use sam_opt::tensor::{Seed, StateDict};
use sam_opt::{
    AdamW, AsamConfig, GsamConfig, GsamRule, ParamGroup, Rule, SagmConfig, SagmRule, SamConfig, SamRule, TwoPass,
    buffers,
};

/// A small network with batch norm and dropout under one of the methods.
struct Training<R: Rule> {
    store: VarStore,
    net: Mlp,
    optimizer: TwoPass<AdamW, R>,
}

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

impl<R: Cases> Subject for Training<R>
where
    R::Config: PartialEq,
{
    type Config = R::Config;

    fn config() -> R::Config {
        R::valid()
    }

    fn invalid() -> Vec<(&'static str, R::Config)> {
        R::invalid()
    }

    fn build(config: &R::Config) -> Result<Self, String> {
        tch::set_num_threads(1);
        let store = VarStore::new(Device::Cpu);
        let shape = MlpConfig { batch_norm: true, dropout: 0.2, ..MlpConfig::relu(&[4, 8, 3]) };
        let net = Mlp::new(&store.root(), &shape, Seed::new(1)).map_err(|e| e.to_string())?;
        let optimizer = TwoPass::new(vec![ParamGroup::from_var_store(&store)], AdamW::new(0.01), config.clone())
            .map_err(|e| e.to_string())?
            .with_buffers(buffers(&store));
        Ok(Self { store, net, optimizer })
    }

    fn advance(&mut self, i: u64) -> Result<(), String> {
        let net = &self.net;
        let (x, y) = batch(16, i);
        self.optimizer
            .step(|_| Ok(net.forward_with(&x, true, true).cross_entropy_for_logits(&y)))
            .map(|_| ())
            .map_err(|e| e.to_string())
    }

    fn advance_on_nan(&mut self) -> Result<(), String> {
        let net = &self.net;
        let (x, y) = batch(16, 0);
        self.optimizer
            .step(|_| Ok(net.forward_with(&(&x * f64::NAN), true, true).cross_entropy_for_logits(&y)))
            .map(|_| ())
            .map_err(|e| e.to_string())
    }

    fn observe(&self) -> Vec<u8> {
        let ordered: std::collections::BTreeMap<_, _> = self.store.variables().into_iter().collect();
        let tensors: Vec<_> = ordered.into_values().collect();
        bits(&tensors).into_iter().flatten().flat_map(u64::to_le_bytes).collect()
    }

    fn save(&self) -> Result<Vec<u8>, String> {
        let file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
        let mut state = self.optimizer.state_dict().map_err(|e| e.to_string())?;
        for (name, tensor) in self.store.variables() {
            state.tensors.insert(format!("model:{name}"), tensor);
        }
        state.save(file.path()).map_err(|e| e.to_string())?;
        std::fs::read(file.path()).map_err(|e| e.to_string())
    }

    fn load(config: &R::Config, saved: &[u8]) -> Result<Self, String> {
        let file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
        std::fs::write(file.path(), saved).map_err(|e| e.to_string())?;
        let mut state = StateDict::load(file.path()).map_err(|e| e.to_string())?;
        let (model, optimizer) =
            std::mem::take(&mut state.tensors).into_iter().partition(|(name, _)| name.starts_with("model:"));
        state.tensors = optimizer;
        let mut new = Self::build(config)?;
        let names = sam_opt::tensor::checkpoint::NameMap { prefixes: vec![("model:".into(), String::new())] };
        let weights = StateDict { tensors: model, ..StateDict::default() };
        weights.copy_into(&new.store, &names).map_err(|e| e.to_string())?;
        new.optimizer.load_state_dict(&state).map_err(|e| e.to_string())?;
        Ok(new)
    }
}

/// One test, because the networks draw their dropout from libtorch's one global stream.
#[test]
fn sam_gsam_and_sagm_conform() {
    assert_conforms::<Training<SamRule>>();
    assert_conforms::<Training<GsamRule>>();
    assert_conforms::<Training<SagmRule>>();
}
