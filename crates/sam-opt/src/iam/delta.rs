//! The perturbation δ and the noise it starts from.

use crate::direction::Epsilon;
use crate::scope::StepSeed;
use crate::{Error, Result};
use serde_json::Value;
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamSet, ParamVec, Seed, StateDict, fused};

/// A δ that outlives its step.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) vector: ParamVec,
    /// Whether it is noise of length σ, not a direction of length ρ (DE, where the outputs didn't move).
    pub(super) is_noise: bool,
}

impl Kept {
    pub(super) fn searched(vector: ParamVec) -> Self {
        Self { vector, is_noise: false }
    }
}

/// A perturbation `δ_i = alphas[i] · direction_i`.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) alphas: Vec<f64>,
    pub(super) direction: ParamVec,
    /// `‖δ‖₂`.
    pub(super) norm: f64,
}

impl Delta {
    pub(super) fn of(epsilon: Epsilon) -> Self {
        Self { alphas: epsilon.alphas, direction: epsilon.direction, norm: epsilon.length }
    }

    /// δ as a vector of its own.
    pub(super) fn materialize(self) -> Result<ParamVec> {
        let present = self.direction.present();
        let factors: Vec<f64> = self
            .alphas
            .iter()
            .zip(self.direction.parts())
            .filter(|(_, part)| part.is_some())
            .map(|(a, _)| *a)
            .collect();
        let narrow: Vec<f32> = factors.iter().map(|&a| a as f32).collect();
        if !fused::update([&present], [], |i, [d], []| *d *= narrow[i]) {
            no_grad(|| -> Result<()> {
                for (part, factor) in present.iter().zip(factors) {
                    let _ = part.shallow_clone().f_mul_scalar_(factor)?;
                }
                Ok(())
            })?;
        }
        Ok(self.direction)
    }
}

/// Streams of the noise, one a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Noise(Seed);

impl Noise {
    pub(super) fn new(seed: u64, step: u64) -> Self {
        Self(StepSeed::new(seed, step).noise("iam"))
    }

    /// For δ₀ and for random directions.
    pub(super) fn seed(self) -> Seed {
        self.0.child("noise")
    }

    /// −1 or 1.
    pub(super) fn sign(self) -> f64 {
        if self.0.child("sign").value() & 1 == 0 { 1.0 } else { -1.0 }
    }

    /// `N(0, (σ²/m) I)` over a set of m scalars.
    pub(super) fn draw(self, set: &ParamSet, sigma: f64) -> Result<ParamVec> {
        let noise = set.normal(self.seed())?;
        noise.scale(per_scalar(set, sigma))?;
        Ok(noise)
    }
}

/// Deviation `σ/√m` of one scalar, which makes the length of the whole about σ.
pub(super) fn per_scalar(set: &ParamSet, sigma: f64) -> f64 {
    sigma / (set.numel() as f64).sqrt()
}

/// Adds δ to a state: its tensors, how many there are, and whether it is noise.
pub(super) fn save(kept: Option<&Kept>, set: &ParamSet, state: &mut StateDict) {
    let mut count = 0u64;
    for (name, part) in set.names().iter().zip(kept.iter().flat_map(|kept| kept.vector.parts())) {
        if let Some(part) = part {
            state.tensors.insert(key(name), part.copy());
            count += 1;
        }
    }
    state.meta.insert(COUNT.into(), count.into());
    state.meta.insert(IS_NOISE.into(), kept.is_some_and(|kept| kept.is_noise).into());
}

/// δ read back from a saved state, in the kinds of the parameters' arithmetic; `None` where nothing was saved.
pub(super) fn load(set: &ParamSet, state: &StateDict) -> Result<Option<Kept>> {
    let bad = |reason: String| Error::State { reason };
    let mut parts = Vec::with_capacity(set.len());
    for (name, param) in set.iter() {
        let Some(saved) = state.tensors.get(&key(name)) else {
            parts.push(None);
            continue;
        };
        if saved.size() != param.size() {
            return Err(Error::StateMismatch { name: key(name), expected: param.size(), got: saved.size() });
        }
        if !saved.f_isfinite()?.f_all()?.f_int64_value(&[]).is_ok_and(|all| all == 1) {
            return Err(bad(format!("\"{}\" has numbers that aren't finite.", key(name))));
        }
        parts.push(Some(saved.to_device(param.device()).to_kind(crate::base::state_kind(param)).copy()));
    }
    let vector = ParamVec::new(parts);
    let found = vector.present().len() as u64;
    let expected = state.meta.get(COUNT).and_then(Value::as_u64);
    let expected = expected.ok_or_else(|| bad(format!("it has no number of saved directions \"{COUNT}\".")))?;
    if found != expected {
        return Err(bad(format!("it has {found} of the {expected} tensors \"{}\" that were saved.", key("…"))));
    }
    let is_noise = state.meta.get(IS_NOISE).and_then(Value::as_bool).unwrap_or(false);
    Ok((!vector.is_empty()).then_some(Kept { vector, is_noise }))
}

const COUNT: &str = "delta_tensors";
const IS_NOISE: &str = "delta_is_noise";

/// Name of a parameter's part of δ in a saved state.
fn key(name: &str) -> String {
    format!("delta/{name}")
}

/// The parameters' stand-ins `θ + δ` of the functional form: leaves of their own.
pub(super) fn stand_ins(set: &ParamSet, alphas: &[f64], direction: &ParamVec) -> Result<Vec<Tensor>> {
    no_grad(|| {
        set.tensors()
            .iter()
            .zip(direction.parts())
            .zip(alphas)
            .map(|((tensor, part), &alpha)| {
                let here = tensor.detach();
                let moved = match part {
                    Some(part) => here.f_add(&part.to_kind(here.kind()).f_mul_scalar(alpha)?)?,
                    None => here.copy(),
                };
                Ok(moved.set_requires_grad(true))
            })
            .collect()
    })
}
