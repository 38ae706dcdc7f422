//! An adapter for libtorch's own optimizers.

use super::{BaseOptimizer, Slot};
use crate::{Error, Result};
use tensor::StateDict;
use tensor::tch::{Kind, Tensor, nn::Optimizer};

/// Writes the final gradient into `.grad` and calls a `tch::nn::Optimizer`.
///
/// The optimizer inside keeps its own groups: `lr_scale` and `weight_decay` of Tessera's groups can't reach it
/// and are refused. Its state can't be read through `tch`, so it can't be saved: use [`Sgd`](super::Sgd),
/// [`Adam`](super::Adam) or [`AdamW`](super::AdamW) where that matters. It moves the parameters of the store that
/// it was built over, and no others; their `.grad` fields hold the final gradient after a step. What it did when
/// libtorch reports an error in the middle of a step can't be undone.
#[derive(Debug)]
pub struct TchOptimizer {
    inner: Optimizer,
    lr: f64,
}

impl TchOptimizer {
    /// Wraps an optimizer that was built over the same variable store with the learning rate `lr`.
    pub fn new(inner: Optimizer, lr: f64) -> Self {
        Self { inner, lr }
    }
}

impl BaseOptimizer for TchOptimizer {
    fn name(&self) -> &'static str {
        "tch::nn::Optimizer"
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }

    fn step(&mut self, slots: &[Slot<'_>]) -> Result<()> {
        if slots.iter().any(|s| s.lr_scale != 1.0 || s.weight_decay.is_some()) {
            return Err(Error::Unsupported {
                base: self.name(),
                what: "take lr_scale or weight_decay of a parameter group",
                way_out: "set them on the inner optimizer's groups, or use Sgd, Adam or AdamW of this crate.",
            });
        }
        self.inner.zero_grad();
        for slot in slots {
            // `zero_grad` has taken the old gradients away. d/dw Σ w·g = g exactly: the one way to create `.grad`
            // through tch.
            slot.param.f_mul(&slot.grad.detach())?.f_sum(Kind::Float)?.f_backward()?;
        }
        self.inner.step();
        Ok(())
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
        self.inner.set_lr(lr);
    }

    fn coupled_decay(&self) -> Option<f64> {
        // The inner optimizer applies its own, and can't be told otherwise.
        None
    }

    fn settings(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    fn state_dict(&self, _names: &[String]) -> Result<StateDict> {
        Err(self.no_state())
    }

    fn load_state_dict(&mut self, _state: &StateDict, _params: &[(&str, &Tensor)]) -> Result<()> {
        Err(self.no_state())
    }
}

impl TchOptimizer {
    fn no_state(&self) -> Error {
        Error::Unsupported {
            base: self.name(),
            what: "save or load its state",
            way_out: "use Sgd, Adam or AdamW of this crate, which can.",
        }
    }
}
