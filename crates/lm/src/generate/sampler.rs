//! Draws a token from logits.

use super::processors::maximum;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tensor::Seed;

/// Draws tokens for one row: the most probable one, or by inverting the distribution function at one uniform number a step.
///
/// Whatever the logits, step `s` of a row uses the same number: two models, or two rules, that are compared get common
/// random numbers.
#[derive(Debug, Clone)]
pub struct Sampler {
    /// None: greedy.
    numbers: Option<StdRng>,
}

impl Sampler {
    /// Takes the largest logit; of equal ones the first.
    pub fn greedy() -> Self {
        Self { numbers: None }
    }

    /// Draws for row `row` of a generation with this seed.
    pub fn random(seed: Seed, row: usize) -> Self {
        let seed = seed.child("sampler").index(row as u64);
        Self { numbers: Some(StdRng::seed_from_u64(seed.value())) }
    }

    /// The next token; none if no logit is above −∞ or one is NaN or +∞.
    pub fn draw(&mut self, logits: &[f32]) -> Option<u32> {
        let top = maximum(logits);
        if !top.is_finite() || logits.iter().any(|z| z.is_nan()) {
            return None;
        }
        let Some(numbers) = &mut self.numbers else {
            return logits.iter().position(|&z| z == top).map(|i| i as u32);
        };
        let weight = |z: f32| f64::from(z - top).exp();
        let total: f64 = logits.iter().map(|&z| weight(z)).sum();
        let target = numbers.random::<f64>() * total;
        let mut sum = 0.0;
        let mut last = None;
        for (id, &z) in logits.iter().enumerate().filter(|(_, z)| **z > f32::NEG_INFINITY) {
            sum += weight(z);
            last = Some(id as u32);
            if sum > target {
                break;
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_follow_the_probabilities() {
        let probabilities = [0.5f32, 0.0, 0.3, 0.2];
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        let mut sampler = Sampler::random(Seed::new(1), 0);
        let mut counts = [0u32; 4];
        for _ in 0..20_000 {
            counts[sampler.draw(&logits).unwrap() as usize] += 1;
        }
        assert_eq!(counts[1], 0);
        for (count, p) in counts.iter().zip(probabilities) {
            // Five standard deviations.
            let sd = (f64::from(p) * (1.0 - f64::from(p)) / 20_000.0).sqrt();
            assert!((f64::from(*count) / 20_000.0 - f64::from(p)).abs() <= 5.0 * sd, "{counts:?}");
        }
    }

    #[test]
    fn rows_have_their_own_numbers_and_a_seed_repeats_them() {
        let logits = vec![0.0f32; 1000];
        let draws = |row| -> Vec<_> {
            let mut sampler = Sampler::random(Seed::new(7), row);
            (0..5).map(|_| sampler.draw(&logits).unwrap()).collect()
        };
        assert_eq!(draws(0), draws(0));
        assert_ne!(draws(0), draws(1));
    }

    #[test]
    fn nothing_is_drawn_where_nothing_can_be() {
        assert_eq!(Sampler::greedy().draw(&[f32::NEG_INFINITY; 2]), None);
        assert_eq!(Sampler::greedy().draw(&[f32::NAN, 1.0]), None);
        assert_eq!(Sampler::random(Seed::new(0), 0).draw(&[f32::INFINITY, 0.0]), None);
        assert_eq!(Sampler::greedy().draw(&[1.0, 2.0, 2.0]), Some(1));
    }
}
