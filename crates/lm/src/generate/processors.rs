//! The socket for rules of decoding, and the usual ones.
//!
//! A processor changes the logits of one row before a token is drawn; −∞ forbids a token. All keep at least one token
//! possible, except those that forbid by list.

use crate::{Error, Result};
use std::collections::HashSet;
use std::fmt;

/// Where a generation stands.
#[derive(Debug, Clone, Copy)]
pub struct StepInfo<'a> {
    /// Tokens generated so far in this row.
    pub step: usize,
    /// Row of the batch, as the prompts were given.
    pub row: usize,
    /// Tokens of the prompt.
    pub prompt: &'a [u32],
    /// Tokens generated so far.
    pub generated: &'a [u32],
}

/// The socket: changes the logits `[vocab]` of a row.
pub trait LogitsProcessor: fmt::Debug {
    /// # Errors
    /// Whatever the plug reports; the step fails for all rows. If it is tried again, processors are called again for every
    /// row.
    fn process(&mut self, logits: &mut [f32], info: &StepInfo<'_>) -> Result<()>;
}

/// Divides the logits.
#[derive(Debug, Clone, Copy)]
pub struct Temperature(pub f64);

impl LogitsProcessor for Temperature {
    fn process(&mut self, logits: &mut [f32], _: &StepInfo<'_>) -> Result<()> {
        if !(self.0.is_finite() && self.0 > 0.0) {
            return Err(Error::invalid("temperature", "above 0 and finite (greedy decoding needs none)", self.0));
        }
        // In f64: a low temperature would overflow the logits' f32.
        let top = f64::from(maximum(logits));
        for z in logits {
            *z = ((f64::from(*z) - top) / self.0) as f32;
        }
        Ok(())
    }
}

/// Keeps the k largest logits; of equal ones those with the lower number.
#[derive(Debug, Clone, Copy)]
pub struct TopK(pub usize);

impl LogitsProcessor for TopK {
    fn process(&mut self, logits: &mut [f32], _: &StepInfo<'_>) -> Result<()> {
        let k = self.0.max(1);
        if k >= logits.len() {
            return Ok(());
        }
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.select_nth_unstable_by(k - 1, |&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        for &out in &order[k..] {
            logits[out as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }
}

/// Keeps the most probable tokens until their probabilities sum to p.
#[derive(Debug, Clone, Copy)]
pub struct TopP(pub f64);

impl LogitsProcessor for TopP {
    fn process(&mut self, logits: &mut [f32], _: &StepInfo<'_>) -> Result<()> {
        let top = maximum(logits);
        let weight = |z: f32| f64::from(z - top).exp();
        let total: f64 = logits.iter().map(|&z| weight(z)).sum();
        let mut order: Vec<u32> =
            (0..logits.len() as u32).filter(|&i| logits[i as usize] > f32::NEG_INFINITY).collect();
        order.sort_unstable_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        let mut sum = 0.0;
        // The token that crosses p is kept.
        let kept = order.iter().position(|&i| {
            sum += weight(logits[i as usize]) / total;
            sum >= self.0
        });
        for &out in &order[kept.map_or(order.len(), |at| at + 1)..] {
            logits[out as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }
}

/// Keeps tokens at least p times as probable as the most probable one.
#[derive(Debug, Clone, Copy)]
pub struct MinP(pub f64);

impl LogitsProcessor for MinP {
    fn process(&mut self, logits: &mut [f32], _: &StepInfo<'_>) -> Result<()> {
        let threshold = maximum(logits) + self.0.ln() as f32;
        for z in logits.iter_mut().filter(|z| **z < threshold) {
            *z = f32::NEG_INFINITY;
        }
        Ok(())
    }
}

/// Divides positive and multiplies negative logits of tokens that came before (Keskar et al. 2019). The penalty is from 1e-3
/// to 1e3: beyond, logits leave what f32 can hold.
#[derive(Debug, Clone, Copy)]
pub struct RepetitionPenalty(pub f64);

impl RepetitionPenalty {
    pub(super) fn check(penalty: f64) -> Result<()> {
        if (1e-3..=1e3).contains(&penalty) {
            return Ok(());
        }
        Err(Error::invalid("repetition_penalty", "from 1e-3 to 1e3 (1 changes nothing)", penalty))
    }
}

impl LogitsProcessor for RepetitionPenalty {
    fn process(&mut self, logits: &mut [f32], info: &StepInfo<'_>) -> Result<()> {
        Self::check(self.0)?;
        let penalty = self.0 as f32;
        let seen: HashSet<u32> = info.prompt.iter().chain(info.generated).copied().collect();
        for id in seen {
            if let Some(z) = logits.get_mut(id as usize) {
                *z = if *z > 0.0 { *z / penalty } else { *z * penalty };
            }
        }
        Ok(())
    }
}

/// Forbids the token that would complete n tokens in a row that are there already, prompt included.
#[derive(Debug, Clone, Copy)]
pub struct NoRepeatNgram(pub usize);

impl LogitsProcessor for NoRepeatNgram {
    fn process(&mut self, logits: &mut [f32], info: &StepInfo<'_>) -> Result<()> {
        let n = self.0.max(1);
        let text: Vec<u32> = info.prompt.iter().chain(info.generated).copied().collect();
        if text.len() + 1 < n {
            return Ok(());
        }
        let ending = &text[text.len() + 1 - n..];
        for window in text.windows(n).filter(|w| w[..n - 1] == *ending) {
            if let Some(z) = logits.get_mut(window[n - 1] as usize) {
                *z = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}

/// Forbids tokens.
#[derive(Debug, Clone)]
pub struct BannedTokens(pub Vec<u32>);

impl LogitsProcessor for BannedTokens {
    fn process(&mut self, logits: &mut [f32], _: &StepInfo<'_>) -> Result<()> {
        for &id in &self.0 {
            if let Some(z) = logits.get_mut(id as usize) {
                *z = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}

/// The largest logit.
pub(super) fn maximum(logits: &[f32]) -> f32 {
    logits.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: f32 = f32::NEG_INFINITY;

    fn after(mut processor: impl LogitsProcessor, logits: &[f32], prompt: &[u32], generated: &[u32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        let info = StepInfo { step: generated.len(), row: 0, prompt, generated };
        processor.process(&mut logits, &info).unwrap();
        logits
    }

    #[test]
    fn temperature_divides_differences() {
        assert_eq!(after(Temperature(0.5), &[1.0, 3.0, 2.0], &[], &[]), [-4.0, 0.0, -2.0]);
        assert_eq!(after(Temperature(1e-300), &[1.0, 3.0], &[], &[]), [OUT, 0.0]);
    }

    #[test]
    fn top_k_keeps_the_largest_and_of_ties_the_lower_number() {
        assert_eq!(after(TopK(2), &[1.0, 3.0, 3.0, 3.0], &[], &[]), [OUT, 3.0, 3.0, OUT]);
        assert_eq!(after(TopK(9), &[1.0, 3.0], &[], &[]), [1.0, 3.0]);
    }

    #[test]
    fn top_p_keeps_the_token_that_crosses_p() {
        let logits: Vec<f32> = [0.5f32, 0.3, 0.2].iter().map(|p| p.ln()).collect();
        let kept = |p| after(TopP(p), &logits, &[], &[]).iter().filter(|z| **z > OUT).count();
        assert_eq!((kept(0.49), kept(0.51), kept(0.79), kept(0.81), kept(1.0)), (1, 2, 2, 3, 3));
    }

    #[test]
    fn min_p_is_relative_to_the_most_probable() {
        let logits: Vec<f32> = [0.6f32, 0.3, 0.05].iter().map(|p| p.ln()).collect();
        let kept = |p| after(MinP(p), &logits, &[], &[]).iter().filter(|z| **z > OUT).count();
        assert_eq!((kept(0.05), kept(0.4), kept(0.6), kept(1.0)), (3, 2, 1, 1));
    }

    #[test]
    fn the_penalty_lowers_what_came_before_once_however_often() {
        assert_eq!(after(RepetitionPenalty(2.0), &[4.0, -4.0, 4.0], &[0, 0], &[1]), [2.0, -8.0, 4.0]);
    }

    #[test]
    fn no_ngram_comes_twice() {
        let z = [0.0; 4];
        assert_eq!(after(NoRepeatNgram(3), &z, &[1, 2, 3], &[1, 2]), [0.0, 0.0, 0.0, OUT]);
        assert_eq!(after(NoRepeatNgram(3), &z, &[1, 2, 3], &[2, 2]), z);
        assert_eq!(after(NoRepeatNgram(1), &z, &[1], &[2]), [0.0, OUT, OUT, 0.0]);
        assert_eq!(after(NoRepeatNgram(3), &z, &[1], &[]), z);
    }

    #[test]
    fn banned_tokens_are_forbidden_and_unknown_ones_ignored() {
        assert_eq!(after(BannedTokens(vec![1, 99]), &[0.0, 0.0], &[], &[]), [0.0, OUT]);
    }
}
