//! The socket for experts' weights, and the default that keeps them all in memory.

use crate::Result;
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
