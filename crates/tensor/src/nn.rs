//! What tch's `nn` lacks: a multi-layer perceptron from a list of widths, and RMS normalization.
//!
//! Initial weights come from a [`Seed`], not from libtorch's global stream, so that paired
//! comparisons start from the same point whatever ran before.

use crate::{Error, Result, Seed};
use rand::Rng;
use tch::{
    Tensor,
    nn::{Init, ModuleT, Path},
};

/// Activation between layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x Φ(x)`.
    Gelu,
    /// Hyperbolic tangent.
    Tanh,
    /// `x σ(x)`.
    Silu,
}

impl Activation {
    /// Applies the function to every element.
    pub fn apply(self, x: &Tensor) -> Tensor {
        match self {
            Activation::Relu => x.relu(),
            Activation::Gelu => x.gelu("none"),
            Activation::Tanh => x.tanh(),
            Activation::Silu => x.silu(),
        }
    }
}

/// Settings of [`Mlp::new`].
#[derive(Debug, Clone, PartialEq)]
pub struct MlpConfig {
    /// Widths from input to output, at least two.
    pub widths: Vec<i64>,
    /// Activation after every layer but the last.
    pub activation: Activation,
    /// Batch normalization before each activation.
    pub batch_norm: bool,
    /// Probability of dropping a hidden unit in training.
    pub dropout: f64,
}

impl MlpConfig {
    /// Widths with ReLU, no normalization, no dropout.
    pub fn relu(widths: &[i64]) -> Self {
        Self { widths: widths.to_vec(), activation: Activation::Relu, batch_norm: false, dropout: 0.0 }
    }
}

#[derive(Debug)]
struct Layer {
    weight: Tensor,
    bias: Tensor,
    norm: Option<tch::nn::BatchNorm>,
}

/// A multi-layer perceptron `[batch, widths[0]] → [batch, widths[last]]`.
///
/// Weights and biases start uniform in ±1/√(fan in), as PyTorch's linear layers do.
///
/// ```
/// use tensor::{Seed, nn::{Mlp, MlpConfig}, tch::{Device, Kind, Tensor, nn::{ModuleT, VarStore}}};
/// let store = VarStore::new(Device::Cpu);
/// let net = Mlp::new(&store.root(), &MlpConfig::relu(&[64, 128, 10]), Seed::new(0))?;
/// let logits = net.forward_t(&Tensor::zeros([32, 64], (Kind::Float, Device::Cpu)), true);
/// assert_eq!(logits.size(), [32, 10]);
/// # Ok::<(), tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct Mlp {
    layers: Vec<Layer>,
    activation: Activation,
    dropout: f64,
}

impl Mlp {
    /// Creates the variables `"{layer}.weight"` `[out, in]` and `"{layer}.bias"` `[out]` under `path`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for fewer than two widths, a width below 1, or a dropout outside `[0, 1)`.
    pub fn new(path: &Path<'_>, config: &MlpConfig, seed: Seed) -> Result<Self> {
        if config.widths.len() < 2 || config.widths.iter().any(|&w| w < 1) {
            return Err(Error::invalid("widths", "at least two widths of at least 1", format!("{:?}", config.widths)));
        }
        if !(0.0..1.0).contains(&config.dropout) {
            return Err(Error::invalid("dropout", "at least 0 and below 1", config.dropout));
        }
        let last = config.widths.len() - 2;
        let mut layers = Vec::new();
        for (i, pair) in config.widths.windows(2).enumerate() {
            let (fan_in, fan_out) = (pair[0], pair[1]);
            let path = path / i.to_string();
            let bound = 1.0 / (fan_in as f64).sqrt();
            let layer_seed = seed.child(&format!("layer.{i}"));
            let weight = uniform(&path, "weight", &[fan_out, fan_in], bound, layer_seed.child("weight"))?;
            let bias = uniform(&path, "bias", &[fan_out], bound, layer_seed.child("bias"))?;
            let norm = (config.batch_norm && i < last).then(|| {
                let ones = tch::nn::BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() };
                tch::nn::batch_norm1d(&path / "norm", fan_out, ones)
            });
            layers.push(Layer { weight, bias, norm });
        }
        Ok(Self { layers, activation: config.activation, dropout: config.dropout })
    }

    /// The forward pass with batch statistics and dropout switched separately.
    pub fn forward_with(&self, x: &Tensor, batch_statistics: bool, dropout: bool) -> Tensor {
        let last = self.layers.len() - 1;
        let mut hidden = x.shallow_clone();
        for (i, layer) in self.layers.iter().enumerate() {
            hidden = hidden.linear(&layer.weight, Some(&layer.bias)); // [batch, fan_out]
            if i < last {
                if let Some(norm) = &layer.norm {
                    hidden = norm.forward_t(&hidden, batch_statistics);
                }
                hidden = self.activation.apply(&hidden);
                if self.dropout > 0.0 && dropout {
                    hidden = hidden.dropout(self.dropout, true);
                }
            }
        }
        hidden
    }
}

impl ModuleT for Mlp {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        self.forward_with(x, train, train)
    }
}

/// A variable drawn uniformly from ±`bound` with the seed's own stream.
///
/// # Errors
/// What libtorch reports.
pub fn uniform(path: &Path<'_>, name: &str, shape: &[i64], bound: f64, seed: Seed) -> Result<Tensor> {
    let mut rng = seed.rng();
    let n: i64 = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|_| rng.random_range(-bound..bound) as f32).collect();
    let start = Tensor::from_slice(&values).f_reshape(shape)?.to_kind(path.kind()).to_device(path.device());
    Ok(path.f_var_copy(name, &start)?)
}

/// Root mean square normalization over the last axis, `x / sqrt(mean(x²) + eps) · weight`, computed in f32
/// (f64 for f64 inputs) and returned in the input's kind.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// Creates the variable `weight` `[width]`, all ones.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `eps` is negative or not finite.
    pub fn new(path: &Path<'_>, width: i64, eps: f64) -> Result<Self> {
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(Error::invalid("eps", "at least 0 and finite", eps));
        }
        Ok(Self { weight: path.f_ones("weight", &[width])?, eps })
    }

    /// `[..., width] → [..., width]`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let wide = if x.kind() == tch::Kind::Double { tch::Kind::Double } else { tch::Kind::Float };
        let y = x.to_kind(wide);
        let scale = (y.square().mean_dim([-1i64].as_slice(), true, wide) + self.eps).rsqrt();
        (y * scale * self.weight.to_kind(wide)).to_kind(x.kind())
    }
}
