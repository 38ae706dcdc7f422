//! What AAD costs beside greedy decoding of the policy: the plain loop, the head of the candidates, the late reference, the shared trunk.

use super::super::sentiment::DATA;
use super::pair::{Recipe, Trained, trained};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Curve, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use aligned_decoding::{AadConfig, Generation, ModelPair, ReferenceMode, Rule, Stats, View, generate};
use anyhow::{Result, ensure};
use lm::model::Model;
use lm::{Lm, LoadOptions};
use std::time::Instant;
use tensor::tch::no_grad_guard;

const TOKEN: &str = "token";
const SINGLE: &str = "single";
const PASSES: &str = "passes";
const BY_ALPHA: &str = "by-alpha";
const BY_BATCH: &str = "by-batch";
const BY_LAG: &str = "by-lag";
const GREEDY: &str = "greedy";
const EAGER: &str = "eager";
const HEAD: &str = "head";
const LAZY: &str = "lazy";
const LORA: &str = "lora";
const SHARED: &str = "shared";

type Pair<'a> = ModelPair<View<'a>, View<'a>>;

pub(super) fn experiment() -> Experiment {
    let at_most = |name: &str, statement: &str, arms: (&str, &str), ratio| {
        Claim::new(name, statement, "ours", TOKEN, arms, Test::RatioAtMost(ratio))
    };
    let throughput = |name: &str, title: &str, x: &str| Curve::new(name, title, x, "tokens/s, AAD over greedy DPO", 3);
    Experiment {
        spec: Spec {
            name: "aad-cost".into(),
            krate: "aligned-decoding".into(),
            title: "What AAD costs".into(),
            protocol: "Time of a generated token at batch 1, prompts of `aad-sentiment`, all 49,152 tokens, rounds in turn. Full weights: \
                       two models, with the adapters merged in. LoRA: one model with two adapters on its top 4 layers. All modes of one \
                       pair must give the same tokens, or the experiment fails. The plots show tokens per second relative to greedy DPO \
                       of the same pair, over α, the batch and the most tokens that wait for the reference."
                .into(),
            data: vec!["smollm2".into(), DATA.into()],
            kind: Kind::Core,
            metrics: vec![
                Metric::new(TOKEN, "a token", "ms", Direction::Lower, 1),
                Metric::new(SINGLE, "steps with one candidate", "share", Direction::Neither, 3),
                Metric::new(PASSES, "passes of the reference a token", "", Direction::Lower, 2),
            ],
            arms: vec![
                Arm::new(GREEDY, "Greedy DPO", Role::Baseline, "full weights"),
                Arm::new(EAGER, "AAD, plain loop", Role::Baseline, "full weights, both models at every step, both heads"),
                Arm::new(HEAD, "AAD, head of the candidates", Role::Ablation, "full weights"),
                Arm::new(LAZY, "AAD, late reference", Role::Method, "full weights, head of the candidates, at most 32 tokens wait"),
                Arm::new(LORA, "Greedy DPO, LoRA", Role::Baseline, "adapter on the top 4 layers"),
                Arm::new(SHARED, "AAD, shared trunk", Role::Method, "adapters on the top 4 layers, late reference"),
            ],
            claims: vec![
                at_most("late", "AAD with a late reference reaches 0.60 of greedy DPO's tokens per second.", (LAZY, GREEDY), 1.67),
                at_most("shared", "AAD with a shared trunk reaches 0.85 of greedy DPO's tokens per second.", (SHARED, LORA), 1.18),
                at_most("plain", "The late reference takes less time than the plain loop.", (LAZY, EAGER), 1.0),
            ],
            curves: vec![
                throughput(BY_ALPHA, "Tokens per second over α", "α"),
                throughput(BY_BATCH, "Tokens per second over the batch, α = 0.1", "texts"),
                throughput(BY_LAG, "Tokens per second over the most tokens that wait, α = 0.1", "tokens"),
            ],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (30.0, 300.0),
        },
        body: Body::Together(run),
    }
}

fn settings(rule: Rule, reference: ReferenceMode, tokens: usize) -> AadConfig {
    AadConfig {
        rule,
        reference,
        max_new_tokens: tokens,
        no_repeat_ngram: Some(3),
        scores: false,
        check_pair: false,
        ..AadConfig::default()
    }
}

/// SmolLM2 with an adapter merged in.
pub(super) fn merged(context: &Context, adapter: &lm::lora::Adapter) -> Result<Model> {
    let options = LoadOptions { device: context.device, ..LoadOptions::default() };
    let mut model = Lm::load(&datasets::smollm2::path()?, &options)?.model;
    adapter.merge_into(&mut model)?;
    Ok(model)
}

/// The pair whose texts are timed.
pub(super) fn timed_pair(context: &Context) -> Result<std::rc::Rc<Trained>> {
    let recipe = match context.mode {
        Mode::Quick => Recipe::quick(0),
        Mode::Full => Recipe::full(0),
    };
    trained(context, recipe)
}

/// Texts one after another, each at batch 1.
fn texts(pair: &Pair<'_>, prompts: &[Vec<u32>], config: &AadConfig) -> Result<Vec<Generation>> {
    let mut all = Vec::new();
    for prompt in prompts {
        all.extend(generate(pair, std::slice::from_ref(prompt), config)?);
    }
    Ok(all)
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let (rounds, prompts, tokens) = match context.mode {
        Mode::Quick => (4, 1, 8),
        Mode::Full => (10, 3, 20),
    };
    let known = timed_pair(context)?;
    let _guard = no_grad_guard();
    let (policy, reference) = (merged(context, &known.dpo)?, merged(context, &known.sft)?);
    let full = ModelPair::models(&policy, &reference)?;
    let lora = ModelPair::lora(&known.lm.model, known.dpo.view(), Some(known.sft.view()))?;
    let lazy = ReferenceMode::Lazy { max_lag: 32 };
    let arms: [(&str, &Pair<'_>, AadConfig); 6] = [
        (GREEDY, &full, settings(Rule::GreedyDpo, lazy, tokens)),
        (EAGER, &full, settings(Rule::Aad, ReferenceMode::Eager, tokens)),
        (HEAD, &full, settings(Rule::Aad, ReferenceMode::CandidateHead, tokens)),
        (LAZY, &full, settings(Rule::Aad, lazy, tokens)),
        (LORA, &lora, settings(Rule::GreedyDpo, lazy, tokens)),
        (SHARED, &lora, settings(Rule::Aad, lazy, tokens)),
    ];
    let asked: Vec<Vec<u32>> =
        known.prompts.iter().step_by(known.prompts.len() / prompts).take(prompts).cloned().collect();
    let mut stats = Vec::new();
    let mut plain: Option<Vec<Vec<u32>>> = None;
    for (arm, pair, config) in &arms {
        let made = texts(pair, &asked, config)?;
        stats.push((
            *arm,
            Stats::sum(made.iter().map(|text| &text.stats)),
            made.iter().map(|t| t.tokens.len()).sum::<usize>(),
        ));
        if [EAGER, HEAD, LAZY].contains(arm) {
            let made: Vec<Vec<u32>> = made.into_iter().map(|text| text.tokens).collect();
            let plain = plain.get_or_insert_with(|| made.clone());
            ensure!(*plain == made, "the arm {arm} gives other tokens than the plain loop");
        }
    }
    let mut candidates: Vec<Candidate<'_>> = arms
        .iter()
        .map(|(arm, pair, config)| {
            let asked = &asked;
            let round = move || {
                let start = Instant::now();
                let made = texts(pair, asked, config)?;
                let tokens: usize = made.iter().map(|text| text.tokens.len()).sum();
                Ok(start.elapsed().as_secs_f64() / tokens as f64)
            };
            Candidate { arm: (*arm).into(), round: Box::new(round) }
        })
        .collect();
    let mut outcomes = interleave(context, TOKEN, rounds, &mut candidates)?;
    drop(candidates);
    for ((_, outcome), (_, stats, tokens)) in outcomes.iter_mut().zip(&stats) {
        outcome.set(SINGLE, stats.single_share().unwrap_or(1.0));
        outcome.set(PASSES, stats.reference_passes as f64 / *tokens as f64);
    }
    if context.mode == Mode::Full {
        for (arm, pair) in [(LAZY, &full), (SHARED, &lora)] {
            let points = scaling(context, pair, &known.prompts, tokens)?;
            if let Some((_, outcome)) = outcomes.iter_mut().find(|(name, _)| name == arm) {
                for (curve, x, y) in points {
                    outcome.point(curve, x, y);
                }
            }
        }
    }
    Ok(outcomes)
}

/// Points of the plots: throughput relative to greedy DPO of the same pair, medians of rounds in turn.
fn scaling(
    context: &Context,
    pair: &Pair<'_>,
    prompts: &[Vec<u32>],
    tokens: usize,
) -> Result<Vec<(&'static str, f64, f64)>> {
    let relative = |batch: usize, config: &AadConfig| -> Result<f64> {
        let asked = &prompts[..batch.min(prompts.len())];
        let greedy = settings(Rule::GreedyDpo, config.reference, tokens);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            context.check()?;
            for (config, times) in [(config, &mut ours), (&greedy, &mut theirs)] {
                let start = Instant::now();
                let _ = generate(pair, asked, config)?;
                times.push(start.elapsed().as_secs_f64());
            }
        }
        Ok(tensor::stats::median(&theirs)? / tensor::stats::median(&ours)?)
    };
    let lazy = ReferenceMode::Lazy { max_lag: 32 };
    let mut points = Vec::new();
    for alpha in [0.01, 0.1, 0.3, 0.6, 1.0] {
        let config = settings(Rule::Aad, lazy, tokens).with_alpha(alpha);
        points.push((BY_ALPHA, alpha, relative(1, &config)?));
    }
    for batch in [1, 8, 32] {
        points.push((BY_BATCH, batch as f64, relative(batch, &settings(Rule::Aad, lazy, tokens))?));
    }
    for max_lag in [1, 4, 16, 32] {
        let config = settings(Rule::Aad, ReferenceMode::Lazy { max_lag }, tokens);
        points.push((BY_LAG, max_lag as f64, relative(1, &config)?));
    }
    Ok(points)
}
