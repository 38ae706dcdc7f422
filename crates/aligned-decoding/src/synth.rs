//! Synthetic preference data: what alignment-aware decoding writes is preferred to what the policy writes by itself, and a second round
//! of preference training learns it.
//!
//! The paper reports that a tenth of the labelled data and this loop come near to all of it under greedy decoding, and that further
//! rounds saturate or degrade \[paper\].

use crate::config::{AadConfig, ReferenceMode, Rule};
use crate::error::Side;
use crate::generate::generate;
use crate::jsonl::TextPair;
use crate::pair::ModelPair;
use crate::{Error, Result};
use lm::lora::Adapter;
use lm::model::{CausalLm, Model};
use lm::tokenizer::Tokenizer;
use lm::train::{Decoder, DpoConfig, DpoLog, DpoTrainer, PreferencePair, score_pairs};
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;

/// Where the answer that is not preferred comes from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Rejected {
    /// A nucleus sample of the policy \[paper, by one summary\].
    Nucleus {
        /// Share of probability that is kept.
        top_p: f64,
        /// Divisor of the logits.
        temperature: f64,
    },
    /// What the policy writes greedily \[authors' project page\].
    GreedyDpo,
}

/// Settings of [`build_pairs`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SynthConfig {
    /// How the preferred answers are decoded; lengths, stop rules, bans and the seed are those of the others too.
    pub aad: AadConfig,
    /// The others.
    pub rejected: Rejected,
    /// Prompts that are decoded together.
    pub part: usize,
}

impl Default for SynthConfig {
    /// Alignment-aware decoding against nucleus samples (top-p 0.95, temperature 1), 16 prompts at a time.
    fn default() -> Self {
        let aad = AadConfig { scores: false, check_pair: false, ..AadConfig::default() };
        Self { aad, rejected: Rejected::Nucleus { top_p: 0.95, temperature: 1.0 }, part: 16 }
    }
}

/// A pair of answers for each prompt; those with twice the same answer are left out.
///
/// # Errors
/// As [`generate`]; [`Error::InvalidArgument`] for no prompts at a time.
pub fn build_pairs<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    prompts: &[Vec<u32>],
    config: &SynthConfig,
) -> Result<Vec<PreferencePair>> {
    if config.part == 0 {
        return Err(Error::invalid("part", "at least 1", 0));
    }
    let rule = match config.rejected {
        Rejected::GreedyDpo => Rule::GreedyDpo,
        Rejected::Nucleus { top_p, temperature } => {
            Rule::Sample { from: Side::Policy, temperature, top_p: Some(top_p), min_p: None }
        }
    };
    let mut pairs = Vec::with_capacity(prompts.len());
    for (number, part) in prompts.chunks(config.part).enumerate() {
        let chosen = generate(pair, part, &config.aad)?;
        let rejected = AadConfig {
            rule,
            scores: false,
            trace: false,
            guard: None,
            reference: ReferenceMode::default(),
            // Parts don't draw the same numbers.
            seed: tensor::Seed::new(config.aad.seed).child("rejected").index(number as u64).value(),
            ..config.aad.clone()
        };
        let rejected = generate(pair, part, &rejected)?;
        for ((prompt, chosen), rejected) in part.iter().zip(chosen).zip(rejected) {
            if chosen.tokens != rejected.tokens && !chosen.tokens.is_empty() && !rejected.tokens.is_empty() {
                let (chosen, rejected) = (chosen.tokens, rejected.tokens);
                pairs.push(PreferencePair { prompt: prompt.clone(), chosen, rejected });
            }
        }
    }
    Ok(pairs)
}

/// Pairs as text, special tokens left out, for [`jsonl`](crate::jsonl) and other programs. Pairs that are the same as text are left out.
///
/// # Errors
/// What the tokenizer reports.
pub fn as_text(pairs: &[PreferencePair], tokenizer: &Tokenizer) -> Result<Vec<TextPair>> {
    let text = |ids: &[u32]| tokenizer.decode(ids, true);
    let mut out = Vec::with_capacity(pairs.len());
    for pair in pairs {
        let pair =
            TextPair { prompt: text(&pair.prompt)?, chosen: text(&pair.chosen)?, rejected: text(&pair.rejected)? };
        if pair.chosen != pair.rejected {
            out.push(pair);
        }
    }
    Ok(out)
}

/// What a further round starts from and is measured against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum RoundReference {
    /// The reference of the first round \[paper, default\].
    #[default]
    Same,
    /// The policy before the round.
    Policy,
}

/// A further round of preference training.
#[derive(Debug)]
pub struct Round {
    /// The new policy.
    pub adapter: Adapter,
    /// What it was trained on.
    pub pairs: Vec<PreferencePair>,
    /// Its steps.
    pub logs: Vec<DpoLog>,
}

/// Writes pairs with a policy and its reference, and trains a copy of the policy on them. `reference` is the adapter of the reference,
/// none for the bare model.
///
/// # Errors
/// As [`build_pairs`] and [`DpoTrainer`]; [`Error::InvalidArgument`] if all pairs have twice the same answer.
pub fn second_round(
    model: &Model,
    policy: &Adapter,
    reference: Option<&Adapter>,
    prompts: &[Vec<u32>],
    config: &SynthConfig,
    against: RoundReference,
    dpo: &DpoConfig,
) -> Result<Round> {
    let pair = ModelPair::lora(model, policy.view(), reference.map(Adapter::view))?;
    let pairs = build_pairs(&pair, prompts, config)?;
    if pairs.is_empty() {
        let expected = "prompts on which alignment-aware decoding departs from the policy";
        return Err(Error::invalid("prompts", expected, format!("{} without", prompts.len())));
    }
    let reference = match against {
        RoundReference::Same => reference,
        RoundReference::Policy => Some(policy),
    };
    let adapter = policy.copy()?;
    let shared = pair.shared_layers();
    // What enters the first layer that differs is computed once for both.
    let mut decoder = Decoder::new(model, reference).frozen_below(shared)?;
    let scores = score_pairs(&mut decoder, &pairs, &dpo.layout, dpo.part)?;
    let mut decoder = decoder.with_adapter(Some(&adapter))?;
    let mut trainer = DpoTrainer::new(dpo.clone(), pairs.clone(), &scores, adapter.parameters())?;
    let logs = trainer.run(&mut decoder, |_| ControlFlow::Continue(()))?;
    drop(decoder);
    Ok(Round { adapter, pairs, logs })
}
