//! Best of n: draws n texts for each prompt and keeps the one that a picker likes best. With n = 2 it costs what alignment-aware decoding
//! costs.

use crate::config::{AadConfig, Rule};
use crate::error::Side;
use crate::generate::{Generation, generate};
use crate::pair::ModelPair;
use crate::{Error, Result};
use lm::model::CausalLm;

/// Draws from the policy at temperature 1.
pub const DRAW: Rule = Rule::Sample { from: Side::Policy, temperature: 1.0, top_p: None, min_p: None };

/// A text that was kept, with what the picker thought of all.
#[derive(Debug, Clone, PartialEq)]
pub struct Best {
    /// The text.
    pub generation: Generation,
    /// Its number among the draws.
    pub number: usize,
    /// The picker's values of all draws.
    pub rewards: Vec<f64>,
}

/// The best of n draws for each prompt, by what `picker` says of prompt and text. Of equal ones the first. `config` says how to draw:
/// its rule must be one that draws.
///
/// # Errors
/// As [`generate`]; [`Error::InvalidArgument`] for n = 0, a rule that doesn't draw, or a reward that isn't a number; what the picker
/// reports.
pub fn best_of<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    prompts: &[Vec<u32>],
    n: usize,
    config: &AadConfig,
    mut picker: impl FnMut(&[u32], &Generation) -> Result<f64>,
) -> Result<Vec<Best>> {
    if n == 0 {
        return Err(Error::invalid("n", "at least 1", 0));
    }
    if !config.rule.is_random() {
        let expected = "one that draws: all n texts would be the same";
        return Err(Error::invalid("rule", expected, format!("{:?}", config.rule)));
    }
    // Each draw has a row, and so a stream of random numbers, of its own.
    let rows: Vec<Vec<u32>> = prompts.iter().flat_map(|prompt| std::iter::repeat_n(prompt.clone(), n)).collect();
    let mut generations = generate(pair, &rows, config)?.into_iter();
    let mut out = Vec::with_capacity(prompts.len());
    for (row, prompt) in prompts.iter().enumerate() {
        let mut best: Option<(usize, Generation)> = None;
        let mut rewards: Vec<f64> = Vec::with_capacity(n);
        for (number, generation) in generations.by_ref().take(n).enumerate() {
            let reward = picker(prompt, &generation)?;
            if reward.is_nan() {
                return Err(Error::invalid(format!("the reward of draw {number} of prompt {row}"), "a number", reward));
            }
            if best.as_ref().is_none_or(|(at, _)| reward > rewards[*at]) {
                best = Some((number, generation));
            }
            rewards.push(reward);
        }
        // n is at least 1, and there is a generation for each row.
        let Some((number, generation)) = best else { continue };
        out.push(Best { generation, number, rewards });
    }
    Ok(out)
}

/// The pair's own implicit reward, as a picker: Σ A. The settings must ask for scores.
///
/// # Errors
/// [`Error::InvalidArgument`] for a text without scores.
pub fn by_implicit_reward(_: &[u32], generation: &Generation) -> Result<f64> {
    generation.sum_advantage.ok_or_else(|| Error::invalid("scores", "on, for the implicit reward", false))
}
