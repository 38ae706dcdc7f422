//! Where a model's tensors come from while it is built: a checkpoint of whatever format, or a random start.

use crate::Result;
use crate::linear::{Dense, LinearLayer};
use tensor::tch::Tensor;

/// Hands out tensors by Hugging Face's names of the Llama family (`model.layers.0.self_attn.q_proj.weight`), whatever the file
/// calls them and however it stores them.
pub(crate) trait Source {
    /// The tensor called `name`, in the kind and on the device that the model is built with.
    fn tensor(&mut self, name: &str, shape: &[i64]) -> Result<Tensor>;

    /// The linear map whose tensors are `name.weight` `[out, in]` and, with `bias`, `name.bias` `[out]`.
    fn linear(&mut self, name: &str, out: i64, inner: i64, bias: bool) -> Result<Box<dyn LinearLayer>> {
        let weight = self.tensor(&format!("{name}.weight"), &[out, inner])?;
        let bias = if bias { Some(self.tensor(&format!("{name}.bias"), &[out])?) } else { None };
        Ok(Box::new(Dense::new(weight, bias)?))
    }
}
