//! Parameter groups.

use crate::{Error, Result};
use std::collections::BTreeMap;
use tensor::tch::{Tensor, nn::VarStore};

/// Parameters that share settings. All groups of an optimizer share one global gradient norm.
#[derive(Debug)]
pub struct ParamGroup {
    /// Names, one a tensor.
    pub names: Vec<String>,
    /// Handles of the model's own tensors (shared memory).
    pub params: Vec<Tensor>,
    /// Radius of this group in place of the optimizer's; a schedule scales it as it scales its own largest radius.
    pub rho: Option<f64>,
    /// `Some(false)`: not adaptive whatever the optimizer says; `Some(true)`: adaptive even if the optimizer
    /// isn't (with ASAM's default settings).
    pub adaptive: Option<bool>,
    /// `false`: neither perturbed nor counted in the norm. With all but the normalization layers off this is
    /// SAM-ON (prior work).
    pub perturb: bool,
    /// Weight decay of this group in place of the base optimizer's.
    pub weight_decay: Option<f64>,
    /// Factor on the learning rate.
    pub lr_scale: f64,
}

impl ParamGroup {
    /// A group with the optimizer's settings.
    pub fn new(params: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        let (names, params) = params.into_iter().unzip();
        Self { names, params, rho: None, adaptive: None, perturb: true, weight_decay: None, lr_scale: 1.0 }
    }

    /// All trainable variables of a store, ordered by name.
    pub fn from_var_store(store: &VarStore) -> Self {
        Self::matching(store, |_| true)
    }

    /// The trainable variables whose name `keep` accepts, ordered by name.
    pub fn matching(store: &VarStore, keep: impl Fn(&str) -> bool) -> Self {
        let ordered: BTreeMap<String, Tensor> = store.variables().into_iter().collect();
        Self::new(ordered.into_iter().filter(|(name, tensor)| tensor.requires_grad() && keep(name)))
    }
}

/// The non-trainable variables of a store (running statistics of normalization layers), ordered by name: what
/// [`with_buffers`](crate::TwoPass::with_buffers) wants. Frozen weights are among them and are copied each step;
/// with a large frozen part, list the running statistics yourself.
pub fn buffers(store: &VarStore) -> Vec<Tensor> {
    let ordered: BTreeMap<String, Tensor> = store.variables().into_iter().collect();
    ordered.into_values().filter(|tensor| !tensor.requires_grad()).collect()
}

pub(crate) fn validate(groups: &[ParamGroup]) -> Result<()> {
    if groups.is_empty() {
        return Err(Error::EmptyGroup { group: 0 });
    }
    for (index, group) in groups.iter().enumerate() {
        let field = |name: &str| format!("{name} of parameter group {index}");
        if group.params.is_empty() {
            return Err(Error::EmptyGroup { group: index });
        }
        if group.names.len() != group.params.len() {
            return Err(Error::invalid(
                &field("names"),
                format!("{} names, one a tensor", group.params.len()),
                group.names.len(),
            ));
        }
        if let Some(rho) = group.rho
            && !(rho.is_finite() && rho >= 0.0)
        {
            return Err(Error::InvalidRho { field: field("rho"), rho });
        }
        if let Some(decay) = group.weight_decay
            && !(decay.is_finite() && decay >= 0.0)
        {
            return Err(Error::invalid(&field("weight_decay"), "finite and at least 0", decay));
        }
        if !(group.lr_scale.is_finite() && group.lr_scale >= 0.0) {
            return Err(Error::invalid(&field("lr_scale"), "finite and at least 0", group.lr_scale));
        }
    }
    Ok(())
}
