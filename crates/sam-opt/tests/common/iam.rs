//! Problems that the tests of IAM share.
#![allow(dead_code, missing_docs, unreachable_pub)]

use super::{group, leaf, values};
use sam_opt::tensor::nn::{Activation, Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use sam_opt::tensor::{ParamVec, Seed};
use sam_opt::{Iam, IamConfig, Pass, PassKind, Sgd};
use std::cell::RefCell;

/// The specification's binary toy: logits `(0, wᵀx)` on `x₁ = (1, 0)`, `x₂ = (0, 2)`.
pub fn toy_logits(w: &Tensor) -> Tensor {
    let x = Tensor::from_slice(&[1.0f64, 0.0, 0.0, 2.0]).reshape([2, 2]).to_kind(w.kind());
    let z = x.mv(w).unsqueeze(1);
    Tensor::cat(&[z.zeros_like(), z], 1)
}

/// One step of rate 1 at `w` from `δ₀ = (0.01, 0.01)`, without a main loss: δ, the statistics, and the gradient.
pub fn toy_step(w: &[f64], config: IamConfig) -> (Vec<f64>, sam_opt::IamStats, Vec<f64>) {
    let w = leaf(w, Kind::Double);
    let before = values(&w);
    let mut iam = Iam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
    iam.set_start_fn(|_, _| Ok(ParamVec::new(vec![Some(Tensor::from_slice(&[0.01f64, 0.01]))])));
    let delta = RefCell::new(Vec::new());
    let stats = iam
        .step(
            |pass| {
                if matches!(pass.kind, PassKind::Perturbed(_)) {
                    *delta.borrow_mut() = values(&w).iter().zip(&before).map(|(a, b)| a - b).collect();
                }
                Ok(toy_logits(&w))
            },
            |logits| Ok((logits * 0.0).sum(Kind::Double)),
        )
        .unwrap();
    let gradient = before.iter().zip(values(&w)).map(|(b, a)| b - a).collect();
    (delta.into_inner(), stats, gradient)
}

/// A small network in f64 that reads its weights through the pass.
pub struct Net {
    pub store: VarStore,
    layers: Vec<(Tensor, Tensor)>,
}

impl Net {
    pub fn new(widths: &[i64], kind: Kind) -> Self {
        let mut store = VarStore::new(Device::Cpu);
        let net = Mlp::new(&store.root(), &MlpConfig::relu(widths), Seed::new(5)).unwrap();
        drop(net);
        if kind == Kind::Double {
            store.double();
        }
        let variables = store.variables();
        let layers = (0..widths.len() - 1)
            .map(|i| {
                let read = |what: &str| variables[&format!("{i}.{what}")].shallow_clone();
                (read("weight"), read("bias"))
            })
            .collect();
        Self { store, layers }
    }

    /// tanh, so that the loss is smooth.
    pub fn logits(&self, pass: Option<&Pass<'_>>, x: &Tensor) -> Tensor {
        let mut hidden = x.shallow_clone();
        for (i, (weight, bias)) in self.layers.iter().enumerate() {
            let read = |what: &str, own: &Tensor| {
                pass.and_then(|p| p.param(&format!("{i}.{what}"))).unwrap_or_else(|| own.shallow_clone())
            };
            hidden = hidden.linear(&read("weight", weight), Some(read("bias", bias)));
            if i + 1 < self.layers.len() {
                hidden = hidden.tanh();
            }
        }
        hidden
    }
}

/// A smooth f64 network with batch normalization.
pub fn normed(classes: i64, kind: Kind) -> (VarStore, Mlp) {
    let mut store = VarStore::new(Device::Cpu);
    let config = MlpConfig { batch_norm: true, activation: Activation::Tanh, ..MlpConfig::relu(&[4, 6, classes]) };
    let net = Mlp::new(&store.root(), &config, Seed::new(5)).unwrap();
    if kind == Kind::Double {
        store.double();
    }
    (store, net)
}

/// Inputs `[n, 4]` and labels below `classes`.
pub fn inputs(n: i64, classes: i64, kind: Kind) -> (Tensor, Tensor) {
    let mut x = vec![0.0f32; 4 * n as usize];
    Seed::new(7).child("inputs").fill_normal(&mut x, n as u64);
    let x = Tensor::from_slice(&x).reshape([n, 4]).to_kind(kind);
    (x, Tensor::arange(n, (Kind::Int64, Device::Cpu)).remainder(classes))
}

/// Cross-entropy in the logits' own kind.
pub fn cross_entropy(logits: &Tensor, y: &Tensor) -> Tensor {
    let picked = logits.log_softmax(-1, logits.kind()).gather(-1, &y.unsqueeze(-1), false);
    -picked.mean(logits.kind())
}
