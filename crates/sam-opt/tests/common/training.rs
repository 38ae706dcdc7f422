//! A small network with batch norm and dropout under any optimizer, for the workspace's conformance suite.

use super::{batch, bits};
use sam_opt::tensor::checkpoint::NameMap;
use sam_opt::tensor::conformance::Subject;
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{self, Device, Tensor, nn::VarStore};
use sam_opt::tensor::{Seed, StateDict};
use sam_opt::{ParamGroup, Result, buffers};
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// An optimizer with its cases for the suite.
pub trait Method: Sized {
    type Config: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    fn valid() -> Self::Config;
    /// One invalid field each.
    fn invalid() -> Vec<(&'static str, Self::Config)>;
    fn build(groups: Vec<ParamGroup>, buffers: Vec<Tensor>, config: Self::Config) -> Result<Self>;
    fn step(&mut self, net: &Mlp, x: &Tensor, y: &Tensor) -> Result<()>;
    fn state(&self) -> Result<StateDict>;
    fn load(&mut self, state: &StateDict) -> Result<()>;
}

pub struct Training<M> {
    pub store: VarStore,
    pub net: Mlp,
    pub method: M,
}

fn text<T, E: std::fmt::Display>(result: std::result::Result<T, E>) -> std::result::Result<T, String> {
    result.map_err(|e| e.to_string())
}

impl<M: Method> Subject for Training<M> {
    type Config = M::Config;

    fn config() -> M::Config {
        M::valid()
    }

    fn invalid() -> Vec<(&'static str, M::Config)> {
        M::invalid()
    }

    fn build(config: &M::Config) -> std::result::Result<Self, String> {
        tch::set_num_threads(1);
        let store = VarStore::new(Device::Cpu);
        let shape = MlpConfig { batch_norm: true, dropout: 0.2, ..MlpConfig::relu(&[4, 8, 3]) };
        let net = text(Mlp::new(&store.root(), &shape, Seed::new(1)))?;
        let groups = vec![ParamGroup::from_var_store(&store)];
        let method = text(M::build(groups, buffers(&store), config.clone()))?;
        Ok(Self { store, net, method })
    }

    fn advance(&mut self, i: u64) -> std::result::Result<(), String> {
        let (x, y) = batch(16, i);
        text(self.method.step(&self.net, &x, &y))
    }

    fn advance_on_nan(&mut self) -> std::result::Result<(), String> {
        let (x, y) = batch(16, 0);
        text(self.method.step(&self.net, &(&x * f64::NAN), &y))
    }

    fn observe(&self) -> Vec<u8> {
        let ordered: std::collections::BTreeMap<_, _> = self.store.variables().into_iter().collect();
        let tensors: Vec<_> = ordered.into_values().collect();
        bits(&tensors).into_iter().flatten().flat_map(u64::to_le_bytes).collect()
    }

    fn save(&self) -> std::result::Result<Vec<u8>, String> {
        let file = text(tempfile::NamedTempFile::new())?;
        let mut state = text(self.method.state())?;
        for (name, tensor) in self.store.variables() {
            state.tensors.insert(format!("model:{name}"), tensor);
        }
        text(state.save(file.path()))?;
        text(std::fs::read(file.path()))
    }

    fn load(config: &M::Config, saved: &[u8]) -> std::result::Result<Self, String> {
        let file = text(tempfile::NamedTempFile::new())?;
        text(std::fs::write(file.path(), saved))?;
        let mut state = text(StateDict::load(file.path()))?;
        let (model, optimizer) =
            std::mem::take(&mut state.tensors).into_iter().partition(|(name, _)| name.starts_with("model:"));
        state.tensors = optimizer;
        let mut new = Self::build(config)?;
        let names = NameMap { prefixes: vec![("model:".into(), String::new())] };
        let weights = StateDict { tensors: model, ..StateDict::default() };
        text(weights.copy_into(&new.store, &names))?;
        text(new.method.load(&state))?;
        Ok(new)
    }
}
