//! Interleaved timings: A B A B, so that a busy machine slows both sides alike.

use crate::experiment::{Context, Outcome, Outcomes};
use anyhow::Result;
use std::time::Instant;

/// Something to be timed: does its work and returns how many seconds one step of it took.
pub struct Candidate<'a> {
    /// Arm.
    pub arm: String,
    /// Runs one round and gives seconds per step.
    pub round: Box<dyn FnMut() -> Result<f64> + 'a>,
}

impl<'a> Candidate<'a> {
    /// A candidate that does `steps` calls of `step` a round.
    pub fn new(arm: &str, steps: usize, mut step: impl FnMut() -> Result<()> + 'a) -> Self {
        let round = move || {
            let start = Instant::now();
            for _ in 0..steps {
                step()?;
            }
            Ok(start.elapsed().as_secs_f64() / steps as f64)
        };
        Self { arm: arm.into(), round: Box::new(round) }
    }
}

/// Times all candidates in turn, `rounds` times after one round of warm-up. Reports `metric` in milliseconds a
/// step: the median as the metric, all rounds as samples.
///
/// # Errors
/// What a candidate reports, or Ctrl-C.
pub fn interleave(
    context: &Context,
    metric: &str,
    rounds: usize,
    candidates: &mut [Candidate<'_>],
) -> Result<Outcomes> {
    let mut samples = vec![Vec::with_capacity(rounds); candidates.len()];
    for round in 0..=rounds {
        for (candidate, samples) in candidates.iter_mut().zip(&mut samples) {
            context.check()?;
            let seconds = (candidate.round)()?;
            if round > 0 {
                samples.push(1e3 * seconds);
            }
        }
    }
    candidates
        .iter()
        .zip(samples)
        .map(|(candidate, samples)| {
            let mut outcome = Outcome::default();
            outcome.set(metric, tensor::stats::median(&samples)?);
            outcome.samples.insert(metric.into(), samples);
            Ok((candidate.arm.clone(), outcome))
        })
        .collect()
}

/// Puts the metrics of a second timing beside those of the first.
pub fn merge(all: &mut Outcomes, more: Outcomes) {
    for (arm, outcome) in more {
        match all.iter_mut().find(|(name, _)| *name == arm) {
            Some((_, known)) => {
                known.metrics.extend(outcome.metrics);
                known.samples.extend(outcome.samples);
            }
            None => all.push((arm, outcome)),
        }
    }
}
