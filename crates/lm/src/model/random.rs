//! A random start, drawn by name: two models with one seed share the tensors that they share by name and shape.

use super::Model;
use super::source::Source;
use crate::Result;
use crate::config::{Architecture, ModelConfig};
use tensor::Seed;
use tensor::tch::{Device, Kind, Tensor};

struct RandomSource<'a> {
    config: &'a ModelConfig,
    seed: Seed,
    kind: Kind,
    device: Device,
}

impl Source for RandomSource<'_> {
    fn tensor(&mut self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let options = (Kind::Float, Device::Cpu);
        let tensor = if name.rsplit('.').next() == Some("bias") {
            Tensor::f_zeros(shape, options)?
        } else if name.contains("norm") {
            Tensor::f_ones(shape, options)?
        } else {
            let mut tensor = Tensor::f_empty(shape, options)?;
            tensor::fused::fill_normal(&tensor, self.seed.child(name), 0)?;
            tensor.f_mul_scalar_(self.scale(name))?
        };
        Ok(tensor.f_to_device(self.device)?.f_to_kind(self.kind)?)
    }
}

impl RandomSource<'_> {
    /// GPT-2 starts what is added to the residual stream lower, so that its variance doesn't grow with depth.
    fn scale(&self, name: &str) -> f64 {
        let added = name.contains("o_proj") || name.contains("down_proj");
        let depth =
            if self.config.architecture == Architecture::Gpt2 && added { 2.0 * self.config.layers as f64 } else { 1.0 };
        self.config.initializer_range / depth.sqrt()
    }
}

impl Model {
    /// A model with random weights: N(0, `initializer_range`²), norms 1, biases 0.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a configuration that can't be.
    pub fn random(config: &ModelConfig, seed: Seed, kind: Kind, device: Device) -> Result<Self> {
        config.validate()?;
        Self::build(config, &mut RandomSource { config, seed, kind, device }, kind, device)
    }
}
