//! AAD beside the naive loop in transformers, its kernel beside PyTorch, and a single model beside candle.

use super::super::sentiment::DATA;
use super::cost::{merged, timed_pair};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::peer::Peer;
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave, merge};
use aligned_decoding::select::{RATIO_CLIP, Selector};
use aligned_decoding::{AadConfig, ModelPair, ReferenceMode, Rule, generate};
use anyhow::{Context as _, Result, ensure};
use std::cell::RefCell;
use std::time::Instant;
use tensor::Seed;
use tensor::tch::no_grad_guard;

const SCRIPT: &str = include_str!("../../../peers/aad_transformers.py");
const TOKEN: &str = "token";
const GREEDY: &str = "greedy";
const SELECT: &str = "select";
const NAIVE: &str = "transformers";
const OURS: &str = "ours";
const SHARED: &str = "shared";
const VOCAB: usize = 49_152;

pub(super) fn experiment() -> Experiment {
    let faster = |name: &str, statement: &str, metric: &str, arm: &str, ratio| {
        Claim::new(name, statement, "ours", metric, (arm, NAIVE), Test::SpeedupAtLeast(ratio))
    };
    Experiment {
        spec: Spec {
            name: "aad-peers".into(),
            krate: "aligned-decoding".into(),
            title: "AAD beside the naive loop in transformers".into(),
            protocol: "The pair of `aad-cost` at batch 1, α = 0.1. transformers 5.24.0 on PyTorch 2.11.0 generates with the policy and a \
                       logits processor that asks the reference, both with caches, in f32: the loop that one would write. Both sides \
                       must give the same tokens, or the experiment fails. The kernel chooses among 49,152 tokens from two arrays of \
                       logits of which some ten are plausible; the peer takes two log-softmaxes, a mask and an arg-max in PyTorch. \
                       \"Greedy\" is greedy decoding of the policy alone on either side."
                .into(),
            data: vec!["smollm2".into(), DATA.into()],
            kind: Kind::Peers,
            metrics: vec![
                Metric::new(TOKEN, "a token of AAD", "ms", Direction::Lower, 1),
                Metric::new(GREEDY, "a token of greedy DPO", "ms", Direction::Lower, 1),
                Metric::new(SELECT, "choosing from logits", "ms", Direction::Lower, 4),
            ],
            arms: vec![
                Arm::new(NAIVE, "transformers", Role::Peer, "generate with a logits processor"),
                Arm::new(OURS, "aligned-decoding, full weights", Role::Method, "late reference, head of the candidates"),
                Arm::new(SHARED, "aligned-decoding, LoRA", Role::Method, "shared trunk below the top 4 layers"),
            ],
            claims: vec![
                faster("token", "AAD on two full models is at least 1.2 times as fast as the naive loop.", TOKEN, OURS, 1.2),
                faster("shared", "AAD with a shared trunk is at least 1.7 times as fast as the naive loop.", TOKEN, SHARED, 1.7),
                faster("select", "Choosing from logits is at least 5 times as fast as in PyTorch.", SELECT, OURS, 5.0),
            ],
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (60.0, 200.0),
        },
        body: Body::Together(run),
    }
}

/// A number that other tokens would change.
fn digest(tokens: &[u32]) -> f64 {
    tokens.iter().enumerate().map(|(i, &id)| (i as f64 + 1.0) * f64::from(id)).sum()
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let (rounds, tokens) = match context.mode {
        Mode::Quick => (4, 8),
        Mode::Full => (12, 20),
    };
    let known = timed_pair(context)?;
    let _guard = no_grad_guard();
    let (policy, reference) = (merged(context, &known.dpo)?, merged(context, &known.sft)?);
    let folder = tempfile::tempdir()?;
    let (at_policy, at_reference) = (folder.path().join("policy"), folder.path().join("reference"));
    policy.save_hugging_face(&at_policy)?;
    reference.save_hugging_face(&at_reference)?;
    let peer = RefCell::new(Peer::start(context, SCRIPT)?);
    let ask = |task: &str, what: &str, n: usize| peer.borrow_mut().number(task, what, n);
    for (task, path) in [("policy", &at_policy), ("reference", &at_reference)] {
        ask(task, path.to_str().context("the folder's name isn't UTF-8, which the peer's protocol needs")?, 0)?;
    }
    let full = ModelPair::models(&policy, &reference)?;
    let lora = ModelPair::lora(&known.lm.model, known.dpo.view(), Some(known.sft.view()))?;
    let prompt = known.prompts.first().context("a prompt")?;
    let words = prompt.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let settings = |rule| AadConfig {
        rule,
        reference: ReferenceMode::Lazy { max_lag: 32 },
        max_new_tokens: tokens,
        scores: false,
        check_pair: false,
        ..AadConfig::default()
    };
    let mut outcomes = Outcomes::new();
    for (metric, task, rule) in [(TOKEN, "aad", Rule::Aad), (GREEDY, "greedy", Rule::GreedyDpo)] {
        let config = settings(rule);
        let made = generate(&full, std::slice::from_ref(prompt), &config)?;
        let theirs = ask(&format!("{task}-digest"), &words, tokens)?;
        let mine = digest(&made[0].tokens);
        ensure!(mine == theirs, "{task}: our tokens have the digest {mine}, transformers' {theirs}");
        let ours = |pair| {
            let config = &config;
            move || {
                let start = Instant::now();
                let made = generate(pair, std::slice::from_ref(prompt), config)?;
                Ok(start.elapsed().as_secs_f64() / made[0].tokens.len() as f64)
            }
        };
        let mut candidates = vec![
            Candidate { arm: NAIVE.into(), round: Box::new(|| ask(task, &words, tokens)) },
            Candidate { arm: OURS.into(), round: Box::new(ours(&full)) },
            Candidate { arm: SHARED.into(), round: Box::new(ours(&lora)) },
        ];
        merge(&mut outcomes, interleave(context, metric, rounds, &mut candidates)?);
    }
    let (z_policy, z_reference) = logits();
    let mut selector = Selector::default();
    let kernel = move || {
        let start = Instant::now();
        for _ in 0..200 {
            let _ = selector.select(&z_policy, |id| z_reference[id as usize], 0.1, RATIO_CLIP)?;
        }
        Ok(start.elapsed().as_secs_f64() / 200.0)
    };
    let mut candidates = vec![
        Candidate { arm: NAIVE.into(), round: Box::new(|| ask("select", "x", 50)) },
        Candidate { arm: OURS.into(), round: Box::new(kernel) },
    ];
    merge(&mut outcomes, interleave(context, SELECT, rounds, &mut candidates)?);
    Ok(outcomes)
}

/// Normal logits of spread 3, as the peer's: some ten tokens are plausible.
fn logits() -> (Vec<f32>, Vec<f32>) {
    let of = |name: &str| Seed::new(0).child(name).normal(VOCAB).into_iter().map(|z| 3.0 * z).collect();
    (of("policy"), of("reference"))
}
