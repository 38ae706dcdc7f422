//! The protocol between optimizer and model: a step is a sequence of passes.

use std::collections::HashMap;
use std::fmt;
use tensor::tch::Tensor;

/// What a pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PassKind {
    /// At the parameters themselves.
    Main,
    /// At the `i`-th perturbed point, with a backward pass.
    Perturbed(usize),
    /// At the `i`-th probe, forward only.
    Probe(usize),
    /// The `i`-th inner step of a search for a perturbation.
    Inner(usize),
}

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PassKind::Main => f.write_str("main"),
            PassKind::Perturbed(i) => write!(f, "perturbed ({i})"),
            PassKind::Probe(i) => write!(f, "probe ({i})"),
            PassKind::Inner(i) => write!(f, "inner ({i})"),
        }
    }
}

/// What the optimizer tells the closure about the forward pass that it wants.
///
/// The closure returns the loss on the batch that `step` and `micro` name, from a fresh forward pass. It never
/// calls `backward` and never zeroes gradients.
#[derive(Debug)]
pub struct Pass<'a> {
    /// What the pass is for.
    pub kind: PassKind,
    /// Number of the step, from 0. The same in all passes of a step.
    pub step: u64,
    /// Number of the micro-batch, from 0.
    pub micro: usize,
    /// Seed for the closure's own randomness; the same in all passes over a micro-batch in a step.
    pub seed: i64,
    pub(crate) batch_statistics: bool,
    pub(crate) overrides: Option<&'a HashMap<String, Tensor>>,
}

impl Pass<'_> {
    /// Whether normalization layers should use the batch's statistics (`train`), or their running ones
    /// ([`BnMode::Frozen`](crate::BnMode::Frozen)).
    pub fn batch_statistics(&self) -> bool {
        self.batch_statistics
    }

    /// The weight to use in place of the variable `name`, where an optimizer perturbs functionally. A model
    /// that ignores it gets the in-place form.
    pub fn param(&self, name: &str) -> Option<Tensor> {
        self.overrides.and_then(|overrides| overrides.get(name)).map(Tensor::shallow_clone)
    }
}
