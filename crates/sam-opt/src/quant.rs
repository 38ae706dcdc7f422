//! Fake quantization for quantization-aware training.

use crate::base::state_kind;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::tch::{Kind, Tensor, no_grad};

/// Symmetric max scaling with a straight-through gradient \[official code\]: `x̂ = clamp(round(s·x), −2^(b−1), 2^(b−1)−1)/s`,
/// where the gradient of `x̂` is passed to `x` unchanged.
///
/// The scale is `s = (2^(b−1) − 1)/max|x|` for three bits and more (codes −8..7 and 7/max at four bits), and `1.5/max|x|`
/// for two bits (codes −2..1), which puts the largest value exactly between two codes; here it always goes to the
/// outermost one on the negative side, so that it doesn't jump with the last bit of the scale \[our choice\]. Rounding is
/// to the nearest, ties to even; half-precision inputs are quantized in f32.
///
/// Quantizing twice at the same scale changes nothing. With the scale taken anew from the quantized values this still
/// holds from three bits on; with the two-bit scale it doesn't, because the largest quantized value isn't the largest
/// value.
///
/// ```
/// use sam_opt::{FakeQuant, tensor::tch::Tensor};
/// let quant = FakeQuant::new(4, false)?;
/// let x = Tensor::from_slice(&[0.0f32, 0.5, -1.0]);
/// assert_eq!(Vec::<f32>::try_from(quant.codes(&x)?).unwrap(), [0.0, 4.0, -7.0]);
/// # Ok::<(), sam_opt::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FakeQuant {
    /// Bits b, 2 to 16.
    pub bits: u32,
    /// One scale an entry of the first axis instead of one a tensor.
    pub per_channel: bool,
}

/// Keeps the scale of an all-zero tensor finite.
const SMALLEST_MAX: f64 = 1e-30;
/// Nudge of two-bit codes off the tie that the published scale makes of the largest value: more than the rounding of the
/// scale in f32, far less than a code.
const OFF_THE_TIE: f64 = 1.0 + 1.0 / (1 << 20) as f64;

impl FakeQuant {
    /// With this many bits.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for bits outside 2 to 16.
    pub fn new(bits: u32, per_channel: bool) -> Result<Self> {
        let quant = Self { bits, per_channel };
        quant.validate()?;
        Ok(quant)
    }

    /// Checks the number of bits; done again wherever it is used, since the fields are open.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for bits outside 2 to 16.
    pub fn validate(self) -> Result<()> {
        if (2..=16).contains(&self.bits) {
            return Ok(());
        }
        Err(Error::invalid("bits", "at least 2 and at most 16", self.bits))
    }

    /// Smallest and largest code; of the nearest allowed number of bits where [`validate`](Self::validate) fails.
    pub fn range(self) -> (i64, i64) {
        let half = 1i64 << (self.bits.clamp(2, 16) - 1);
        (-half, half - 1)
    }

    /// The scale `s`, codes a unit, in f32 or wider: a scalar, or `[n, 1, …]` a channel.
    ///
    /// # Errors
    /// A number of bits that isn't allowed; what libtorch reports.
    pub fn scale(self, x: &Tensor) -> Result<Tensor> {
        self.validate()?;
        let outermost = if self.bits == 2 { 1.5 } else { self.range().1 as f64 };
        no_grad(|| {
            let size = x.detach().f_to_kind(state_kind(x))?.f_abs()?;
            let largest = if self.per_channel && x.dim() > 1 {
                let others: Vec<i64> = (1..x.dim() as i64).collect();
                size.f_amax(others, true)?
            } else if self.per_channel && x.dim() == 1 {
                size
            } else {
                size.f_max()?
            };
            Ok(largest.f_clamp_min(SMALLEST_MAX)?.f_reciprocal()?.f_mul_scalar(outermost)?)
        })
    }

    /// The codes, whole numbers in the kind of `x`.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn codes(self, x: &Tensor) -> Result<Tensor> {
        Ok(self.codes_at(x, &self.scale(x)?)?.f_to_kind(x.kind())?)
    }

    /// The codes in the kind of the arithmetic.
    fn codes_at(self, x: &Tensor, scale: &Tensor) -> Result<Tensor> {
        self.validate()?;
        let (low, high) = self.range();
        let nudge = if self.bits == 2 { OFF_THE_TIE } else { 1.0 };
        no_grad(|| {
            let wide = x.detach().f_to_kind(state_kind(x))?;
            Ok(wide.f_mul(scale)?.f_mul_scalar(nudge)?.f_round()?.f_clamp(low, high)?)
        })
    }

    /// The quantized values, with the identity as gradient.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn forward(self, x: &Tensor) -> Result<Tensor> {
        self.forward_at(x, &self.scale(x)?)
    }

    /// As [`forward`](Self::forward) with a given scale (a frozen or learned one).
    ///
    /// # Errors
    /// A scale that can't be broadcast; what libtorch reports.
    pub fn forward_at(self, x: &Tensor, scale: &Tensor) -> Result<Tensor> {
        let quantized = self.codes_at(x, scale)?.f_div(scale)?.f_to_kind(x.kind())?;
        if !x.requires_grad() || x.kind() == Kind::Int64 {
            return Ok(quantized);
        }
        // x − x is exactly 0 and carries the gradient; x + (q − x) would round.
        Ok(quantized.f_add(&x.f_sub(&x.detach())?)?)
    }
}
