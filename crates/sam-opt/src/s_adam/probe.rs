//! Random forward probes around the parameters.
//!
//! The noise of a direction is written into the parameters' own memory, which a guard has backed up; one pass sums what
//! the direction's length and slope need, one more turns noise into `θ + σu`. Nothing else is stored, and restoring
//! copies the backup back.

use super::config::ProbeNorm;
use super::lgi::kink_from_losses;
use crate::direction::products;
use crate::{Error, Result};
use tensor::tch::{Kind, Tensor, no_grad};
use tensor::{Seed, fused};

/// Added to a direction's length \[official code\].
const NORM_EPS: f64 = 1e-12;

/// A loss as it was read, with the rounding that it carries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    pub(super) value: f64,
    pub(super) rounding: f64,
}

impl Reading {
    /// Reads a scalar, or the mean of losses a sample in f64; `None` for any other shape.
    pub(super) fn of(loss: &Tensor) -> Result<Option<Self>> {
        let n = loss.numel();
        if n == 0 || (n > 1 && loss.dim() != 1) {
            return Ok(None);
        }
        let unit = match loss.kind() {
            Kind::Double => 0.5f64.powi(53),
            Kind::Half => 0.5f64.powi(11),
            Kind::BFloat16 => 0.5f64.powi(8),
            _ => 0.5f64.powi(24),
        };
        if n == 1 {
            let value = loss.f_double_value(&vec![0; loss.dim()])?;
            return Ok(Some(Self { value, rounding: unit * value.abs() }));
        }
        no_grad(|| {
            let wide = loss.detach().f_to_kind(Kind::Double)?;
            let value = wide.f_mean(Kind::Double)?.f_double_value(&[])?;
            let square = wide.f_square()?.f_mean(Kind::Double)?.f_double_value(&[])?;
            // The roundings of n losses are independent.
            Ok(Some(Self { value, rounding: unit * (square / n as f64).sqrt() }))
        })
    }
}

/// One direction: factors that make unit length of the noise, and what the gradient predicts.
#[derive(Debug)]
struct Direction {
    scales: Vec<f64>,
    /// `⟨g, u⟩`.
    slope: f64,
}

/// What the probes saw.
#[derive(Debug, Default)]
pub(super) struct Probed {
    /// `D_i`.
    pub(super) slopes: Vec<f64>,
    /// `D_i − ⟨g, u_i⟩`.
    pub(super) residuals: Vec<f64>,
    /// `K_i`, if asked for.
    pub(super) kinks: Vec<f64>,
    /// `Σ (f_i − f0)²`, to compare with rounding.
    signal: f64,
    pub(super) dropped: usize,
    pub(super) forwards: usize,
}

impl Probed {
    /// Root mean square of the loss differences over the loss's rounding; NaN without probes.
    pub(super) fn snr(&self, rounding: f64) -> f64 {
        (self.signal / self.slopes.len() as f64).sqrt() / rounding.max(f64::MIN_POSITIVE)
    }

    pub(super) fn add(&mut self, other: Self) {
        self.slopes.extend(other.slopes);
        self.residuals.extend(other.residuals);
        self.kinks.extend(other.kinks);
        self.signal += other.signal;
        self.dropped += other.dropped;
        self.forwards += other.forwards;
    }
}

/// Some parameters under an open guard, with their originals and their gradient.
#[derive(Debug)]
pub(super) struct Prober<'a> {
    pub(super) params: Vec<&'a Tensor>,
    pub(super) originals: Vec<&'a Tensor>,
    pub(super) grads: Vec<&'a Tensor>,
    pub(super) sigma: f64,
    pub(super) norm: ProbeNorm,
    pub(super) seed: Seed,
}

impl Prober<'_> {
    /// Probes `k` directions; `evaluate` gives the loss at the parameters as they are. With `kink`, at ±σ and ±½σ of
    /// each direction, else at σ only. Leaves the parameters displaced.
    pub(super) fn run(
        &self,
        k: usize,
        kink: bool,
        center: f64,
        mut evaluate: impl FnMut() -> Result<f64>,
    ) -> Result<Probed> {
        let radii: &[f64] = if kink { &[1.0, -1.0, 0.5, -0.5] } else { &[1.0] };
        let mut probed = Probed::default();
        for i in 0..k as u64 {
            let seed = self.seed.index(i);
            let mut direction = None;
            let mut losses = [0.0; 4];
            for (loss, radius) in losses.iter_mut().zip(radii) {
                self.draw(seed)?;
                let direction = match &mut direction {
                    Some(known) => known,
                    unknown => unknown.insert(self.measure()?),
                };
                self.displace(direction, radius * self.sigma)?;
                *loss = evaluate()?;
                probed.forwards += 1;
            }
            let Some(direction) = direction else { continue };
            if losses[..radii.len()].iter().any(|loss| !loss.is_finite()) {
                probed.dropped += 1;
                continue;
            }
            let difference = losses[0] - center;
            // Losses may be finite where the squares of their slopes aren't.
            if !(difference / self.sigma).powi(2).is_finite() {
                probed.dropped += 1;
                continue;
            }
            probed.signal += difference * difference;
            probed.slopes.push(difference / self.sigma);
            probed.residuals.push(difference / self.sigma - direction.slope);
            if kink {
                probed.kinks.push(kink_from_losses(center, losses, self.sigma));
            }
        }
        Ok(probed)
    }

    /// Writes standard normal noise over the parameters.
    fn draw(&self, seed: Seed) -> Result<()> {
        for (i, param) in self.params.iter().enumerate() {
            fused::fill_normal(param, seed, i as u64)?;
        }
        Ok(())
    }

    /// Length of the noise in the parameters and its inner product with the gradient, tensor by tensor.
    fn measure(&self) -> Result<Direction> {
        let mut lengths = Vec::with_capacity(self.params.len());
        let mut slopes = Vec::with_capacity(self.params.len());
        for (param, grad) in self.params.iter().zip(&self.grads) {
            let [square, product, _] = products(param, grad)?;
            lengths.push(square);
            slopes.push(product);
        }
        let scale = |square: f64| 1.0 / (square.sqrt() + NORM_EPS);
        let scales: Vec<f64> = match self.norm {
            ProbeNorm::PerTensor => lengths.iter().map(|&square| scale(square)).collect(),
            ProbeNorm::Global => vec![scale(lengths.iter().sum()); lengths.len()],
        };
        let slope = scales.iter().zip(&slopes).map(|(scale, slope)| scale * slope).sum();
        Ok(Direction { scales, slope })
    }

    /// Turns the noise in the parameters into `θ + radius·u`.
    fn displace(&self, direction: &Direction, radius: f64) -> Result<()> {
        let factors: Vec<f32> = direction.scales.iter().map(|scale| (radius * scale) as f32).collect();
        if fused::update([&self.params], [&self.originals], |i, [w], [original]| *w = original + factors[i] * *w) {
            return Ok(());
        }
        no_grad(|| {
            for ((param, original), scale) in self.params.iter().zip(&self.originals).zip(&direction.scales) {
                let kind = crate::base::state_kind(param);
                let step = param.f_to_kind(kind)?.f_mul_scalar(radius * scale)?;
                let moved = original.f_to_kind(kind)?.f_add(&step)?;
                param.shallow_clone().f_copy_(&moved)?;
            }
            Ok(())
        })
    }

    /// Puts the parameters back, while the guard stays open.
    pub(super) fn restore(&self) -> Result<()> {
        if fused::update([&self.params], [&self.originals], |_, [w], [original]| *w = original) {
            return Ok(());
        }
        no_grad(|| {
            for (param, original) in self.params.iter().zip(&self.originals) {
                param.shallow_clone().f_copy_(original)?;
            }
            Ok(())
        })
    }

    /// The expected squared slope `E⟨g, u⟩²`: `Σ_j ‖g_j‖²/d_j`, or `‖g‖²/d` with a global length.
    pub(super) fn slope_square(&self) -> Result<f64> {
        let mut squares = Vec::with_capacity(self.grads.len());
        for grad in &self.grads {
            squares.push(products(grad, grad)?[0]);
        }
        let count = |tensor: &&Tensor| tensor.numel().max(1) as f64;
        Ok(match self.norm {
            ProbeNorm::PerTensor => squares.iter().zip(&self.grads).map(|(s, g)| s / count(g)).sum(),
            ProbeNorm::Global => squares.iter().sum::<f64>() / self.grads.iter().map(count).sum::<f64>(),
        })
    }

    /// Refuses half-precision parameters that most probes would leave where they are; says whether f32 ones round away
    /// most of the displacement.
    pub(super) fn check_precision(&self, names: &[&str]) -> Result<bool> {
        let total: usize = self.originals.iter().map(|t| t.numel()).sum();
        let (mut lost, mut below) = (0, 0);
        let mut first = None;
        for (i, original) in self.originals.iter().enumerate() {
            let n = original.numel();
            let moved = match self.norm {
                ProbeNorm::PerTensor => self.sigma / (n.max(1) as f64).sqrt(),
                ProbeNorm::Global => self.sigma / (total.max(1) as f64).sqrt(),
            };
            if original.kind() == Kind::Double {
                continue;
            }
            let rms = (products(original, original)?[0] / n.max(1) as f64).sqrt();
            if moved < 1e-7 * rms {
                below += n;
            }
            if let Some(spacing) = half_spacing(original.kind(), rms)
                && moved < 4.0 * spacing
            {
                lost += n;
                first.get_or_insert(i);
            }
        }
        if let Some(first) = first
            && 2 * lost > total
        {
            return Err(Error::ProbeBelowPrecision {
                name: names[first].into(),
                kind: format!("{:?}", self.originals[first].kind()),
                percent: 100.0 * lost as f64 / total as f64,
            });
        }
        Ok(2 * below > total)
    }
}

/// Distance between neighbouring numbers of a half-precision kind at `x`.
fn half_spacing(kind: Kind, x: f64) -> Option<f64> {
    let (digits, smallest) = match kind {
        Kind::BFloat16 => (7, -126),
        Kind::Half => (10, -14),
        _ => return None,
    };
    let exponent = if x > 0.0 { (x.log2().floor() as i32).max(smallest) } else { smallest };
    Some(2f64.powi(exponent - digits))
}
