//! The socket for experts' weights, and the default that keeps them all in memory.

use crate::{Error, Result};
use std::fmt;
use tensor::tch::Tensor;

/// An expert that a layer needs in this pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Demand {
    /// Its number.
    pub expert: usize,
    /// Tokens that it gets.
    pub tokens: usize,
    /// Largest weight among them.
    pub weight: f64,
    /// Best place that it has among a token's experts by weight; 0 if it is some token's first.
    pub rank: usize,
}

/// The weights of one expert, `down(silu(gate x) ⊙ up x)`.
#[derive(Debug)]
pub struct ExpertWeights {
    /// `[hidden, width]`.
    pub gate: Tensor,
    /// `[hidden, width]`.
    pub up: Tensor,
    /// `[width, hidden]`.
    pub down: Tensor,
}

/// The socket: where the experts' weights live.
pub trait ExpertStore: fmt::Debug + Send {
    /// Experts a layer.
    fn experts(&self) -> usize;

    /// Calls `run` exactly once for each demanded expert of a layer, in any order (as they arrive, say). The weights are
    /// read during the call only. The order can't change the result: the layer adds up in its own.
    ///
    /// # Errors
    /// What the store reports (a failed read, say), or what `run` reports.
    fn visit(
        &self,
        layer: usize,
        demand: &[Demand],
        run: &mut dyn FnMut(usize, &ExpertWeights) -> Result<()>,
    ) -> Result<()>;

    /// What can be trained, by name, sharing memory: only stores that keep all experts in memory have some.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// Bytes in memory.
    fn bytes(&self) -> u64;
}

impl ExpertWeights {
    /// `[n, width] → [n, width]`.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let none = None::<Tensor>;
        let hidden = x.f_linear(&self.gate, none.as_ref())?.f_silu()?.f_mul(&x.f_linear(&self.up, none.as_ref())?)?;
        Ok(hidden.f_linear(&self.down, none)?)
    }

    fn tensors(&self) -> [&Tensor; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// The default: the weights of a layer's experts, all in memory, visited in the order of the demand.
#[derive(Debug)]
pub struct ResidentExperts {
    experts: Vec<ExpertWeights>,
}

impl ResidentExperts {
    /// The experts of a layer.
    ///
    /// # Errors
    /// [`Error::Shape`] for weights that don't fit each other or those of the first expert; [`Error::InvalidArgument`] for
    /// no expert.
    pub fn new(experts: Vec<ExpertWeights>) -> Result<Self> {
        let Some(first) = experts.first() else {
            return Err(Error::invalid("experts", "at least one", 0));
        };
        let &[hidden, width] = first.gate.size().as_slice() else {
            return Err(Error::shape("The gate of expert 0", "[hidden, width]", &first.gate));
        };
        for (number, expert) in experts.iter().enumerate() {
            let shapes = [("gate", [hidden, width]), ("up", [hidden, width]), ("down", [width, hidden])];
            for ((name, shape), tensor) in shapes.into_iter().zip(expert.tensors()) {
                if tensor.size() != shape {
                    return Err(Error::shape(format!("`{name}` of expert {number}"), format!("{shape:?}"), tensor));
                }
            }
        }
        Ok(Self { experts })
    }

    /// The weights of an expert.
    pub fn get(&self, expert: usize) -> Option<&ExpertWeights> {
        self.experts.get(expert)
    }
}

impl ExpertStore for ResidentExperts {
    fn experts(&self) -> usize {
        self.experts.len()
    }

    fn visit(
        &self,
        layer: usize,
        demand: &[Demand],
        run: &mut dyn FnMut(usize, &ExpertWeights) -> Result<()>,
    ) -> Result<()> {
        for &Demand { expert, .. } in demand {
            let weights = self.experts.get(expert).ok_or_else(|| {
                let expected = format!("below the {} experts of layer {layer}", self.experts.len());
                Error::invalid("expert", expected, expert)
            })?;
            run(expert, weights)?;
        }
        Ok(())
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        let of = |(number, expert): (usize, &ExpertWeights)| {
            let names = ["w1", "w3", "w2"];
            let named = names.into_iter().zip(expert.tensors());
            named
                .map(move |(name, t)| (format!("experts.{number}.{name}.weight"), t.shallow_clone()))
                .collect::<Vec<_>>()
        };
        self.experts.iter().enumerate().flat_map(of).collect()
    }

    fn bytes(&self) -> u64 {
        self.experts.iter().flat_map(ExpertWeights::tensors).map(crate::linear::bytes_of).sum()
    }
}
