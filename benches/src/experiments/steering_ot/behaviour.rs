//! What steered text is like: its sentiment, and what that costs in fluency.

use super::super::sentiment::{DATA, vader};
use super::linear::Softmax;
use super::maps::{self, CHARS, DIM, NONE, PAPER};
use super::pool::{LAYERS, Pool, Sizes, Split, smollm2, stack, stacked};
use crate::experiment::{Body, Context, Experiment, Outcome, Outcomes};
use crate::spec::{Claim, Curve, Direction, Kind, Metric, Mode, Spec, Test};
use anyhow::{Context as _, Result};
use lm::Lm;
use lm::activations::{CollectConfig, Pooling, collect};
use lm::generate::{GenerateConfig, Plugs};
use lm::hooks::Site;
use lm::train::repetition;
use std::ops::ControlFlow;
use std::sync::Arc;
use steering_ot::calibrate::effect_at;
use steering_ot::model::{SiteMap, SteeringPlan, activations_at, continuation_nll};

const MATCHED: &str = "matched";
const SENTIMENT: &str = "sentiment";
const NLL: &str = "nll";
const REPEATED: &str = "repeated";
const KEPT: &str = "kept";
const FRONTIER: &str = "frontier";
const FRONTIER_NLL: &str = "frontier-nll";
/// The layer whose output is steered.
const LAYER: usize = 15;
/// Tokens of a prompt and of a continuation.
const PROMPT: usize = 6;
const NEW: usize = 16;
/// Strengths, and the one that the table shows; a quick run has only that.
const ALPHAS: [f64; 4] = [1.0, 2.0, 3.0, 4.0];
const SHOWN: f64 = 3.0;
/// The rise of the negative log-likelihood at which effects are compared, nats a token.
const PRICE: f64 = 0.2;

pub(super) fn experiment() -> Experiment {
    let arms = maps::arms().into_iter().filter(|arm| [DIM, NONE, PAPER, CHARS].contains(&arm.name.as_str()));
    let better = |name: &str, statement: &str, source: &str, metric: &str, arms: (&str, &str)| {
        Claim::new(name, statement, source, metric, arms, Test::Superior(0.0))
    };
    Experiment {
        spec: Spec {
            name: "steer-behaviour".into(),
            krate: "steering-ot".into(),
            title: "Sentiment of steered text".into(),
            protocol: format!(
                "SmolLM2-135M continues the first {PROMPT} tokens of negative test snippets of four domains (64 a seed; quick: 8, α = 3 only) \
                 by {NEW} tokens at temperature 0.7, with the same random numbers in every arm. Maps are fitted as in \
                 `steer-transport` and added with α from 1 to 4 to the residual stream after layer {LAYER}, at all positions but \
                 the first. VADER judges the continuation's sentiment from −1 to 1; its price is the rise of its negative \
                 log-likelihood under the model that isn't steered. The table shows α = {SHOWN} and the gain in sentiment where \
                 the price is {PRICE} nats a token, on the line between neighbouring strengths (at the largest strength where \
                 that is cheaper). The domain counts as kept if a probe on the unsteered model finds the prompt's domain in the \
                 whole text."
            ),
            data: vec!["smollm2".into(), DATA.into()],
            kind: Kind::Core,
            metrics: vec![
                Metric::new(MATCHED, "gain at the same price", "VADER", Direction::Higher, 3),
                Metric::new(SENTIMENT, "sentiment at α = 3", "VADER", Direction::Higher, 3),
                Metric::new(NLL, "negative log-likelihood at α = 3", "nats/token", Direction::Lower, 3),
                Metric::new(REPEATED, "repeated 3-grams at α = 3", "share", Direction::Lower, 3),
                Metric::new(KEPT, "domain kept at α = 3", "share", Direction::Higher, 3),
            ],
            arms: arms.collect(),
            claims: vec![
                better(
                    "ours-matched",
                    "At the same loss of fluency, CHaRS with our default gains more sentiment than the difference in means.",
                    "ours",
                    MATCHED,
                    (CHARS, DIM),
                ),
                better(
                    "ours-equal-strength",
                    "At the same strength, CHaRS with our default gains more sentiment than the difference in means.",
                    "ours",
                    SENTIMENT,
                    (CHARS, DIM),
                ),
                better(
                    "paper-matched",
                    "At the same loss of fluency, CHaRS in its published setting gains more than the difference in means.",
                    "paper",
                    MATCHED,
                    (PAPER, DIM),
                ),
                better(
                    "steering-works",
                    "The difference in means changes the text's sentiment.",
                    "prior work",
                    SENTIMENT,
                    (DIM, NONE),
                ),
            ],
            curves: vec![
                Curve::new(
                    FRONTIER,
                    "Sentiment against fluency, for α from 1 to 4",
                    "rise of the negative log-likelihood (nats/token)",
                    "gain in sentiment (VADER)",
                    3,
                )
                .over(FRONTIER_NLL),
            ],
            seeds: (1, 6),
            seeds_for_verdict: 5,
            threads: 0,
            seconds_per_seed: (15.0, 90.0),
        },
        body: Body::Together(run),
    }
}

/// What a set of continuations is like, on average.
struct Scores {
    sentiment: f64,
    nll: f64,
    repeated: f64,
    kept: f64,
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let (sizes, layers, of_domain, alphas): (_, &[usize], usize, &[f64]) = match context.mode {
        Mode::Quick => (Sizes { fit: 30, test: 20 }, &[LAYER], 2, &[SHOWN]),
        Mode::Full => (Sizes { fit: 140, test: 80 }, &LAYERS, 16, &ALPHAS),
    };
    let split = Pool::get(context, sizes, layers)?.split(LAYER, seed)?;
    let lm = smollm2(context)?;
    let (a, b) = (stacked(&split.fit, 0)?, stacked(&split.fit, 1)?);
    let judge = domain_probe(&split)?;
    let prompts: Vec<Vec<u32>> = split
        .prompts
        .iter()
        .flat_map(|of| of.iter().take(of_domain).map(|ids| ids[..ids.len().min(PROMPT)].to_vec()))
        .collect();
    let unsteered = scores(&lm, &prompts, &mut None, seed, of_domain, &judge)?;
    let mut outcomes = Outcomes::new();
    for arm in experiment().spec.arms {
        let mut outcome = Outcome::default();
        let map = maps::fit(&arm.name, &a, &b, seed)?;
        let mut shown = None;
        let mut points = vec![(0.0, 0.0)];
        match map {
            None => shown = Some(&unsteered),
            Some(_) => outcome.point(FRONTIER_NLL, 0.0, 0.0),
        }
        let strong;
        if let Some(map) = map {
            outcome.point(FRONTIER, 0.0, 0.0);
            let mut plan = Some(SteeringPlan::new(vec![SiteMap { site: Site::ResidPost(LAYER), map: Arc::from(map) }]));
            let mut at_shown = None;
            for &alpha in alphas {
                context.check()?;
                if let Some(plan) = &mut plan {
                    plan.alpha = alpha;
                }
                let steered = scores(&lm, &prompts, &mut plan, seed, of_domain, &judge)?;
                points.push((steered.nll - unsteered.nll, steered.sentiment - unsteered.sentiment));
                outcome.point(FRONTIER_NLL, alpha, steered.nll - unsteered.nll);
                outcome.point(FRONTIER, alpha, steered.sentiment - unsteered.sentiment);
                if alpha == SHOWN {
                    at_shown = Some(steered);
                }
            }
            strong = at_shown.context("the strength of the table is among the strengths")?;
            shown = Some(&strong);
        }
        let last = points.last().map_or(0.0, |point| point.1);
        outcome.set(MATCHED, effect_at(&points, PRICE).unwrap_or(last));
        if let Some(shown) = shown {
            outcome.set(SENTIMENT, shown.sentiment);
            outcome.set(NLL, shown.nll);
            outcome.set(REPEATED, shown.repeated);
            outcome.set(KEPT, shown.kept);
        }
        outcomes.push((arm.name, outcome));
    }
    Ok(outcomes)
}

/// Tells domains apart by activations of the model that isn't steered.
fn domain_probe(split: &Split) -> Result<Softmax> {
    let all = stack(split.fit.iter().flatten())?;
    let domains = split.fit.iter().enumerate().flat_map(|(d, cell)| vec![d; cell[0].nrows() + cell[1].nrows()]);
    Ok(Softmax::fit(&all, &domains.collect::<Vec<_>>(), split.fit.len()))
}

/// Continues the prompts, `of_domain` of each domain one after another, and judges what comes.
fn scores(
    lm: &Lm,
    prompts: &[Vec<u32>],
    plan: &mut Option<SteeringPlan>,
    seed: u64,
    of_domain: usize,
    judge: &Softmax,
) -> Result<Scores> {
    let config = GenerateConfig {
        max_new_tokens: NEW,
        temperature: 0.7,
        ignore_checkpoint_stop: true,
        seed,
        ..GenerateConfig::default()
    };
    let mut hooks = plan.as_mut().map(SteeringPlan::hooks).transpose()?;
    let plugs = Plugs { hooks: hooks.as_mut(), ..Plugs::default() };
    let texts = lm.generate_tokens(prompts, &config, plugs, |_| ControlFlow::Continue(()))?;
    let n = texts.len() as f64;
    let pairs: Vec<(&[u32], &[u32])> =
        prompts.iter().zip(&texts).map(|(prompt, text)| (&prompt[..], &text.tokens[..])).collect();
    let nll = continuation_nll(&lm.model, &pairs)?;
    let mut sentiment = 0.0;
    for text in &texts {
        sentiment += vader(&lm.decode(&text.tokens)?);
    }
    let whole: Vec<Vec<u32>> = pairs.iter().map(|(prompt, text)| [*prompt, *text].concat()).collect();
    let site = Site::ResidPost(LAYER);
    let read = CollectConfig { sites: vec![site], pooling: Pooling::Last, ..CollectConfig::default() };
    let domains = judge.classes(&activations_at(&collect(&lm.model, &whole, &read)?, site)?);
    let kept = domains.iter().enumerate().filter(|(row, domain)| row / of_domain == **domain).count();
    Ok(Scores {
        sentiment: sentiment / n,
        nll: nll.iter().sum::<f64>() / n,
        repeated: texts.iter().map(|text| repetition(&text.tokens, 3)).sum::<f64>() / n,
        kept: kept as f64 / n,
    })
}
