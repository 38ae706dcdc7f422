//! The norms before attention, feed-forward and head.

use super::source::Source;
use crate::Result;
use tensor::tch::Tensor;

/// RMS norm, or layer norm where there is a bias.
#[derive(Debug)]
pub(crate) struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
    epsilon: f64,
}

impl Norm {
    pub(crate) fn build(source: &mut dyn Source, name: &str, width: i64, bias: bool, epsilon: f64) -> Result<Self> {
        let weight = source.tensor(&format!("{name}.weight"), &[width])?;
        let bias = if bias { Some(source.tensor(&format!("{name}.bias"), &[width])?) } else { None };
        Ok(Self { weight, bias, epsilon })
    }

    /// `[…, width] → […, width]`. Half-precision inputs are normalized in f32.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let width = [self.weight.size()[0]];
        Ok(match &self.bias {
            None => x.f_rms_norm(width, Some(&self.weight), self.epsilon)?,
            bias @ Some(_) => x.f_layer_norm(width, Some(&self.weight), bias.as_ref(), self.epsilon, false)?,
        })
    }

    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        let weight = std::iter::once(("weight".to_owned(), self.weight.shallow_clone()));
        weight.chain(self.bias.as_ref().map(|b| ("bias".to_owned(), b.shallow_clone()))).collect()
    }
}
