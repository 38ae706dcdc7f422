//! The socket for routing, and the softmax router with its balance loss.

use crate::Result;
use std::fmt;
use tensor::tch::Tensor;

/// What a router learns about the tokens.
#[derive(Debug)]
pub struct RouteContext<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// Texts in the batch; the N tokens are theirs, row by row.
    pub batch: i64,
    /// Which of the N tokens are real, `[N]` of bool; none if all are. Padding is routed, but must not count.
    pub real: Option<&'a Tensor>,
    /// Whether the pass trains: losses are wanted.
    pub training: bool,
    /// Whether the pass continues a text from a cache: later tokens can't be seen.
    pub decoding: bool,
}

/// Where tokens go: A assignments of a token to an expert, in any number a token and an expert.
#[derive(Debug)]
pub struct Routing {
    /// Token of each assignment, `[A]` of i64, below N.
    pub token: Tensor,
    /// Expert of each assignment, `[A]` of i64.
    pub expert: Tensor,
    /// Weight of the expert's output, `[A]`.
    pub weight: Tensor,
    /// Scores of all experts, `[N, experts]`, for observers; none if the router has none.
    pub logits: Option<Tensor>,
    /// Losses to be added to the task's, by name, already multiplied by their factors. Empty unless training.
    pub losses: Vec<(&'static str, Tensor)>,
}

/// How many tokens each expert got in a step of training, over all its passes.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadStats {
    /// Tokens by expert.
    pub counts: Vec<u64>,
}

/// The socket: chooses experts for tokens.
pub trait Router: fmt::Debug + Send {
    /// Number of experts.
    fn experts(&self) -> usize;

    /// Routes N tokens `x` `[N, width]`, the same that the experts see.
    ///
    /// # Errors
    /// Whatever the plug reports.
    fn route(&self, x: &Tensor, context: &RouteContext<'_>) -> Result<Routing>;

    /// Whether a token's experts depend on it and earlier ones only. One that isn't can't decode from a cache.
    fn causal(&self) -> bool {
        true
    }

    /// Called by the training loop after each step of the optimizer.
    fn post_step(&mut self, _stats: &LoadStats) {}

    /// What can be trained, by name, sharing memory.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}
