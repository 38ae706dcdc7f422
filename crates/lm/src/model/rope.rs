//! Rotary positions: the two halves of each head are turned against each other, as Hugging Face lays them out.

use crate::Result;
use crate::config::{Rope, RopeScaling};
use std::f64::consts::TAU;
use tensor::tch::{Device, Kind, Tensor};

/// Angular frequencies, `head_dim / 2` of them, for texts of up to `length` tokens.
pub(crate) fn frequencies(rope: &Rope, head_dim: i64, context: i64, length: i64) -> Vec<f64> {
    let half = head_dim / 2;
    let of_base = |base: f64| -> Vec<f64> {
        (0..half).map(|i| base.powf(-2.0 * i as f64 / head_dim as f64)).collect()
    };
    let plain = || of_base(rope.theta);
    match &rope.scaling {
        None => plain(),
        Some(RopeScaling::Linear { factor }) => plain().iter().map(|f| f / factor).collect(),
        Some(RopeScaling::Divisors(divisors)) => plain().iter().zip(divisors).map(|(f, d)| f / d).collect(),
        Some(RopeScaling::Dynamic { factor }) => {
            if length <= context || half < 2 {
                return plain();
            }
            let stretch = factor * length as f64 / context as f64 - (factor - 1.0);
            of_base(rope.theta * stretch.powf(head_dim as f64 / (head_dim - 2) as f64))
        }
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
            let scale = |f: f64| {
                // How many turns a frequency makes within the original context.
                let turns = *original_context as f64 * f / TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                kept * f + (1.0 - kept) * f / factor
            };
            plain().into_iter().map(scale).collect()
        }
    }
}

/// Cosine and sine of every position and frequency.
#[derive(Debug)]
pub(crate) struct Turns {
    /// `[batch or 1, 1, time, head_dim]`: the cosines twice.
    cos: Tensor,
    /// `[batch or 1, 1, time, head_dim]`: the sines twice, the first half negated.
    sin: Tensor,
}

impl Turns {
    /// For positions `[batch or 1, time]`. Angles are computed in f64: at position 8000 those of f32 are off by 5e-4.
    pub(crate) fn new(frequencies: &[f64], positions: &Tensor, kind: Kind, device: Device) -> Result<Self> {
        let [batch, time] = [positions.size()[0], positions.size()[1]];
        let frequencies = Tensor::from_slice(frequencies).f_to_device(device)?;
        let angles = positions.f_to_kind(Kind::Double)?.f_unsqueeze(-1)?.f_mul(&frequencies)?; // (b, t, d/2)
        let (cos, sin) = (angles.f_cos()?, angles.f_sin()?);
        let shape = [batch, 1, time, 2 * frequencies.numel() as i64];
        let whole = |first: &Tensor, second: &Tensor| -> Result<Tensor> {
            Ok(Tensor::f_cat(&[first, second], -1)?.f_view(shape)?.f_to_kind(kind)?)
        };
        Ok(Self { cos: whole(&cos, &cos)?, sin: whole(&sin.f_neg()?, &sin)? })
    }

    /// Turns `x` `[batch, heads, time, head_dim]`: `(a, b) → (a cos − b sin, b cos + a sin)` for its halves `a`, `b`.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let half = self.cos.size()[3] / 2;
        let swapped = x.f_roll([half], [3])?;
        Ok(x.f_mul(&self.cos)?.f_addcmul(&swapped, &self.sin)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: Option<RopeScaling>) -> Rope {
        Rope { theta: 10_000.0, scaling }
    }

    #[test]
    fn the_first_frequency_is_1_and_the_ratio_is_the_base() {
        let f = frequencies(&rope(None), 4, 16, 1);
        assert_eq!(f, [1.0, 0.01]);
    }

    #[test]
    fn linear_scaling_divides_all_and_divisors_each() {
        assert_eq!(frequencies(&rope(Some(RopeScaling::Linear { factor: 4.0 })), 4, 16, 1), [0.25, 0.0025]);
        assert_eq!(frequencies(&rope(Some(RopeScaling::Divisors(vec![1.0, 2.0]))), 4, 16, 1), [1.0, 0.005]);
    }

    #[test]
    fn dynamic_scaling_starts_beyond_the_context() {
        let dynamic = rope(Some(RopeScaling::Dynamic { factor: 2.0 }));
        assert_eq!(frequencies(&dynamic, 4, 16, 16), frequencies(&rope(None), 4, 16, 16));
        // Base 10 000 · (2·32/16 − 1)^(4/2) = 90 000.
        let stretched = frequencies(&dynamic, 4, 16, 32);
        assert!((stretched[1] - 90_000f64.powf(-0.5)).abs() < 1e-15);
    }

    #[test]
    fn llama3_keeps_fast_and_divides_slow_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let scaled = frequencies(&Rope { theta: 5e5, scaling: Some(scaling) }, 128, 131_072, 10);
        let plain = frequencies(&Rope { theta: 5e5, scaling: None }, 128, 131_072, 10);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        let between = (0..64).filter(|&i| scaled[i] < plain[i] && scaled[i] > plain[i] / 8.0).count();
        assert!(between > 0);
    }

    #[test]
    fn a_turn_is_a_rotation_of_the_halves() {
        let positions = Tensor::from_slice(&[0i64, 3]).view([1, 2]);
        let turns = Turns::new(&[1.0, 0.01], &positions, Kind::Double, Device::Cpu).unwrap();
        let x = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]).view([1, 1, 2, 4]);
        let y = Vec::<f64>::try_from(turns.apply(&x).unwrap().view([-1])).unwrap();
        assert_eq!(y[..4], [1.0, 2.0, 3.0, 4.0]);
        let (s, c) = 3f64.sin_cos();
        assert!((y[4] - (c - 3.0 * s)).abs() < 1e-15 && (y[6] - (3.0 * c + s)).abs() < 1e-15);
    }
}
