//! How much a training run chatters: sign flips of updates, oscillating codes, cosines of successive gradients.
//!
//! The trackers look at tensors and work with any optimizer. All three depend on the size of the steps: compare runs at
//! equal effective step size.

use crate::{Error, Result};
use tensor::tch::{Kind, Tensor, no_grad};
use tensor::{ParamSet, ParamVec};

/// Fraction of scalars whose update points against their last one: `Δθ_t·Δθ_{t−1} < 0`.
#[derive(Debug, Default)]
pub struct SignFlips {
    values: Option<Vec<Tensor>>,
    updates: Option<Vec<Tensor>>,
    sum: f64,
    count: usize,
}

impl SignFlips {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks at the parameters after a step; the fraction of this step, from the third look on.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when the parameters aren't the same ones; what libtorch reports.
    pub fn observe(&mut self, params: &ParamSet) -> Result<Option<f64>> {
        no_grad(|| {
            let now: Vec<Tensor> = params.tensors().iter().map(|t| t.detach().copy()).collect();
            let mut fraction = None;
            if let Some(before) = &self.values {
                same_shapes(before, &now)?;
                let updates = pairwise(&now, before, |a, b| Ok(a.f_sub(b)?))?;
                if let Some(last) = &self.updates {
                    let mut flips = 0.0;
                    for (update, last) in updates.iter().zip(last) {
                        // Signs, since the product of two small updates underflows in half precision.
                        flips += count(&update.f_sign()?.f_mul(&last.f_sign()?)?.f_lt(0.0)?)?;
                    }
                    let total: usize = now.iter().map(Tensor::numel).sum();
                    fraction = Some(flips / total as f64);
                }
                self.updates = Some(updates);
            }
            self.values = Some(now);
            if let Some(fraction) = fraction {
                self.sum += fraction;
                self.count += 1;
            }
            Ok(fraction)
        })
    }

    /// Mean fraction over the steps seen.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// Cosine between successive gradients.
#[derive(Debug, Default)]
pub struct GradientCosine {
    last: Option<ParamVec>,
    sum: f64,
    count: usize,
}

impl GradientCosine {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks at the gradient of a step; its cosine with the last one, if both are longer than 0.
    ///
    /// # Errors
    /// A gradient of another shape than the last.
    pub fn observe(&mut self, gradient: &ParamVec) -> Result<Option<f64>> {
        let mut cosine = None;
        if let Some(last) = &self.last {
            let lengths = gradient.norm() * last.norm();
            if lengths > 0.0 {
                cosine = Some(gradient.dot(last)? / lengths);
            }
        }
        self.last = Some(gradient.copy());
        if let Some(cosine) = cosine {
            self.sum += cosine;
            self.count += 1;
        }
        Ok(cosine)
    }

    /// Mean cosine over the steps seen.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// Oscillation of quantized weights \[prior work: oscillations in quantization-aware training\]: a code oscillates in a
/// step when it changes in the direction opposite to its last change; `F ← m·o + (1 − m)·F` is its frequency.
#[derive(Debug)]
pub struct OscillationTracker {
    momentum: f64,
    states: Vec<Oscillation>,
}

#[derive(Debug)]
struct Oscillation {
    codes: Tensor,
    /// Sign of the last change, 0 before the first.
    direction: Tensor,
    frequency: Tensor,
}

impl Default for OscillationTracker {
    fn default() -> Self {
        Self { momentum: 0.01, states: Vec::new() }
    }
}

impl OscillationTracker {
    /// The frequency above which a weight counts as oscillating in the prior work.
    pub const THRESHOLD: f64 = 0.005;

    /// With momentum `m` (0.01 by default).
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] outside `(0, 1]`.
    pub fn new(momentum: f64) -> Result<Self> {
        if !(momentum > 0.0 && momentum <= 1.0) {
            return Err(Error::invalid("momentum", "above 0 and at most 1", momentum));
        }
        Ok(Self { momentum, states: Vec::new() })
    }

    /// Looks at the codes after a step (from [`FakeQuant::codes`](crate::FakeQuant::codes)), the same tensors in the same
    /// order each time.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for other shapes than before; what libtorch reports.
    pub fn observe(&mut self, codes: &[Tensor]) -> Result<()> {
        no_grad(|| {
            if self.states.is_empty() {
                let zeros = |code: &Tensor| code.zeros_like().to_kind(Kind::Float);
                let start = |c: &Tensor| Oscillation { codes: c.copy(), direction: zeros(c), frequency: zeros(c) };
                self.states = codes.iter().map(start).collect();
                return Ok(());
            }
            let known: Vec<Tensor> = self.states.iter().map(|s| s.codes.shallow_clone()).collect();
            same_shapes(&known, codes)?;
            for (state, now) in self.states.iter_mut().zip(codes) {
                let change = now.f_sub(&state.codes)?.f_to_kind(Kind::Float)?.f_sign()?;
                let oscillates = change.f_mul(&state.direction)?.f_lt(0.0)?.f_to_kind(Kind::Float)?;
                let kept = state.frequency.f_mul_scalar(1.0 - self.momentum)?;
                state.frequency = kept.f_add(&oscillates.f_mul_scalar(self.momentum)?)?;
                state.direction = change.f_where_self(&change.f_ne(0.0)?, &state.direction)?;
                state.codes = now.copy();
            }
            Ok(())
        })
    }

    /// Share of weights whose frequency is above `threshold`, usually [`THRESHOLD`](Self::THRESHOLD); 0 before the first
    /// look.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn share(&self, threshold: f64) -> Result<f64> {
        let total: usize = self.states.iter().map(|s| s.frequency.numel()).sum();
        let mut above = 0.0;
        for state in &self.states {
            above += count(&state.frequency.f_gt(threshold)?)?;
        }
        Ok(if total == 0 { 0.0 } else { above / total as f64 })
    }
}

fn count(mask: &Tensor) -> Result<f64> {
    Ok(mask.f_sum(Kind::Int64)?.f_int64_value(&[])? as f64)
}

fn pairwise(a: &[Tensor], b: &[Tensor], f: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Vec<Tensor>> {
    a.iter().zip(b).map(|(a, b)| f(a, b)).collect()
}

fn same_shapes(before: &[Tensor], now: &[Tensor]) -> Result<()> {
    let shapes = |list: &[Tensor]| -> Vec<Vec<i64>> { list.iter().map(Tensor::size).collect() };
    let (before, now) = (shapes(before), shapes(now));
    if before == now {
        return Ok(());
    }
    Err(Error::invalid("the tracked tensors", format!("of the shapes seen before, {before:?}"), format!("{now:?}")))
}
