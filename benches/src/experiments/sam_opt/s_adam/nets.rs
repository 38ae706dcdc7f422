//! The networks of S-Adam's experiments, with fake-quantized weights.

use super::data::FEATURES;
use anyhow::Result;
use sam_opt::FakeQuant;
use tensor::Seed;
use tensor::nn::uniform;
use tensor::tch::{Device, Tensor, nn::Path, nn::VarStore};

/// Classes.
const CLASSES: i64 = 10;

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Shape {
    /// 196-64-64-10 with ReLU; weights quantized if there are bits.
    Mlp { bits: Option<u32> },
    /// conv 16, pool, conv 32, pool, linear, with quantized weights and activations and dropout [official code].
    Cnn { bits: u32, dropout: f64 },
}

#[derive(Debug)]
struct Layer {
    weight: Tensor,
    bias: Tensor,
}

/// A network with its variables.
#[derive(Debug)]
pub(super) struct Network {
    pub(super) store: VarStore,
    shape: Shape,
    layers: Vec<Layer>,
    quant: Option<FakeQuant>,
}

impl Network {
    pub(super) fn new(shape: Shape, device: Device, seed: Seed) -> Result<Self> {
        let store = VarStore::new(device);
        let sizes: Vec<Vec<i64>> = match shape {
            Shape::Mlp { .. } => vec![vec![64, FEATURES], vec![64, 64], vec![CLASSES, 64]],
            // 14×14 → 7×7 → 3×3.
            Shape::Cnn { .. } => vec![vec![16, 1, 3, 3], vec![32, 16, 3, 3], vec![CLASSES, 32 * 3 * 3]],
        };
        let layers = sizes
            .iter()
            .enumerate()
            .map(|(i, size)| layer(&(store.root() / i.to_string()), size, seed.index(i as u64)))
            .collect::<Result<_>>()?;
        let bits = match shape {
            Shape::Mlp { bits } => bits,
            Shape::Cnn { bits, .. } => Some(bits),
        };
        let quant = bits.map(|bits| FakeQuant::new(bits, false)).transpose()?;
        Ok(Self { store, shape, layers, quant })
    }

    fn quantized(&self, x: &Tensor) -> sam_opt::Result<Tensor> {
        self.quant.map_or_else(|| Ok(x.shallow_clone()), |quant| quant.forward(x))
    }

    /// `[n, 196] → [n, 10]`.
    pub(super) fn forward(&self, x: &Tensor, training: bool) -> sam_opt::Result<Tensor> {
        let last = self.layers.len() - 1;
        let mut hidden = match self.shape {
            Shape::Mlp { .. } => x.shallow_clone(),
            Shape::Cnn { .. } => x.reshape([-1, 1, 14, 14]),
        };
        for (i, layer) in self.layers.iter().enumerate() {
            let weight = self.quantized(&layer.weight)?;
            hidden = match self.shape {
                Shape::Cnn { dropout, .. } if i < last => {
                    let same = hidden.f_conv2d(&weight, Some(&layer.bias), [1, 1], [1, 1], [1, 1], 1)?;
                    let pooled = same.relu().max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false); // [n, c, h/2, w/2]
                    self.quantized(&pooled)?.dropout(dropout, training)
                }
                _ => hidden.flatten(1, -1).f_linear(&weight, Some(&layer.bias))?,
            };
            if i < last && matches!(self.shape, Shape::Mlp { .. }) {
                hidden = hidden.relu();
            }
        }
        Ok(hidden)
    }

    /// Codes of the quantized weights; none in a network without quantization.
    pub(super) fn codes(&self) -> sam_opt::Result<Vec<Tensor>> {
        let Some(quant) = self.quant else { return Ok(Vec::new()) };
        self.layers.iter().map(|layer| quant.codes(&layer.weight)).collect()
    }
}

/// Weights and biases uniform in ±1/√(fan in), as PyTorch's layers.
fn layer(path: &Path<'_>, size: &[i64], seed: Seed) -> Result<Layer> {
    let bound = (size[1..].iter().product::<i64>() as f64).powf(-0.5);
    let weight = uniform(path, "weight", size, bound, seed.child("weight"))?;
    Ok(Layer { weight, bias: uniform(path, "bias", &size[..1], bound, seed.child("bias"))? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::tch::Kind;

    #[test]
    fn networks_give_logits_and_quantized_ones_have_codes_in_range() {
        let x = Tensor::ones([3, FEATURES], (Kind::Float, Device::Cpu));
        for (shape, codes) in [
            (Shape::Mlp { bits: None }, 0),
            (Shape::Mlp { bits: Some(2) }, 3),
            (Shape::Cnn { bits: 2, dropout: 0.25 }, 3),
        ] {
            let net = Network::new(shape, Device::Cpu, Seed::new(1)).unwrap();
            assert_eq!(net.forward(&x, false).unwrap().size(), [3, 10]);
            let found = net.codes().unwrap();
            assert_eq!(found.len(), codes);
            assert!(found.iter().all(|c| c.max().double_value(&[]) <= 1.0 && c.min().double_value(&[]) >= -2.0));
            assert_eq!(net.store.trainable_variables().len(), 6);
        }
    }
}
