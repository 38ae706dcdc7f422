//! A late reference, a candidate head, a shared trunk, batches and caches change no token.

mod common;

use aligned_decoding::config::{AadConfig, ReferenceMode, Rule, StopRule};
use aligned_decoding::{Generation, ModelPair, Stats, generate, plain};
use common::{adapter, model, prompts, tiny};
use lm::lora::Layers;
use lm::model::CausalLm;

const MODES: [ReferenceMode; 5] = [
    ReferenceMode::Eager,
    ReferenceMode::CandidateHead,
    ReferenceMode::Lazy { max_lag: 1 },
    ReferenceMode::Lazy { max_lag: 3 },
    ReferenceMode::Lazy { max_lag: 32 },
];

/// α, n-gram rule, stop tokens and prompts vary with the seed.
fn settings(seed: u64) -> AadConfig {
    AadConfig {
        alpha: [0.1, 0.3, 0.6, 0.02][seed as usize % 4],
        max_new_tokens: 8,
        stop: vec![StopRule::Tokens(vec![3, 11])],
        no_repeat_ngram: (!seed.is_multiple_of(3)).then_some(3),
        banned: if seed.is_multiple_of(5) { vec![7, 19] } else { Vec::new() },
        allowed: (seed % 7 == 1).then(|| (0..24).filter(|id| id % 4 != 2).collect()),
        ..AadConfig::default()
    }
}

fn tokens(generations: &[Generation]) -> Vec<Vec<u32>> {
    generations.iter().map(|g| g.tokens.clone()).collect()
}

/// All modes against the plain loop; the log-probabilities of all modes against those of the first.
fn check<P: CausalLm, R: CausalLm>(pair: &ModelPair<P, R>, seed: u64) -> Vec<Stats> {
    let config = settings(seed);
    let prompts = prompts(seed, 1 + seed as usize % 4, 24);
    let expected = plain::generate(pair, &prompts, &config).unwrap();
    let mut stats = Vec::new();
    let mut first: Option<Vec<Generation>> = None;
    for (i, reference) in MODES.into_iter().enumerate() {
        // Both with and without log-probabilities, but not all of both for every seed.
        for scores in [true, false].into_iter().filter(|s| *s == (seed as usize + i).is_multiple_of(2) || i == 0) {
            let config = AadConfig { reference, scores, check_pair: scores, ..config.clone() };
            let found = generate(pair, &prompts, &config).unwrap();
            assert_eq!(tokens(&found), expected, "seed {seed}, {reference:?}, scores {scores}");
            stats.push(Stats::sum(found.iter().map(|g| &g.stats)));
            if !scores {
                continue;
            }
            let first = first.get_or_insert_with(|| found.clone());
            for (a, b) in first.iter().zip(&found) {
                assert_eq!(a.stop, b.stop);
                assert_eq!(b.ref_log_probs.len(), b.tokens.len());
                for (a, b) in a.ref_log_probs.iter().zip(&b.ref_log_probs) {
                    assert!((a - b).abs() < 1e-9, "seed {seed}, {reference:?}: {a} and {b}");
                }
                for (a, b) in a.policy_log_probs.iter().zip(&b.policy_log_probs) {
                    assert!((a - b).abs() < 1e-9, "seed {seed}, {reference:?}");
                }
            }
        }
    }
    stats
}

#[test]
fn two_models_decode_the_same_tokens_in_every_mode() {
    let (mut single, mut steps, mut saved) = (0, 0, 0);
    for seed in 0..60 {
        let (policy, reference) = (model(&tiny(), 2 * seed), model(&tiny(), 2 * seed + 1));
        let stats = check(&ModelPair::models(&policy, &reference).unwrap(), seed);
        single += stats[0].single;
        steps += stats[0].steps;
        // Eager first, then the others, the laziest last.
        saved += stats[0].reference_passes.saturating_sub(stats[stats.len() - 1].reference_passes);
    }
    // The test sees both kinds of steps, and the lazy reference is run less often.
    assert!(single * 20 > steps && single * 20 < steps * 19, "{single} of {steps}");
    assert!(saved > 0);
}

#[test]
fn an_adapter_over_the_bare_model_decodes_the_same_tokens_with_a_shared_trunk() {
    for seed in 0..40 {
        let base = model(&tiny(), seed);
        let lora = adapter(&tiny(), Layers::Top(1 + seed as usize % 3), seed);
        let pair = ModelPair::lora(&base, lora.view(), None).unwrap();
        assert_eq!(pair.shared_layers(), 2 - seed as usize % 3);
        check(&pair, seed);
        let apart = ModelPair::lora(&base, lora.view(), None).unwrap().without_shared_trunk();
        let (config, prompts) = (settings(seed), prompts(seed, 3, 24));
        let [a, b] = [&pair, &apart].map(|pair| tokens(&generate(pair, &prompts, &config).unwrap()));
        assert_eq!(a, b, "seed {seed}");
    }
}

#[test]
fn two_adapters_share_what_lies_below_the_lower_one() {
    for seed in 0..20 {
        let base = model(&tiny(), seed);
        let (policy, reference) =
            (adapter(&tiny(), Layers::Top(1), seed), adapter(&tiny(), Layers::Top(2), seed + 1000));
        let pair = ModelPair::lora(&base, policy.view(), Some(reference.view())).unwrap();
        assert_eq!(pair.shared_layers(), 1);
        check(&pair, seed);
    }
}

#[test]
fn other_rules_dont_depend_on_the_mode_either() {
    let rules = [
        Rule::AadSample { tau: 0.7 },
        Rule::AadMix { w: 0.5 },
        Rule::Eft { gamma: 2.0, temperature: 0.0 },
        Rule::Eft { gamma: 1.5, temperature: 1.0 },
        Rule::Contrastive,
        Rule::GreedyDpo,
        Rule::GreedyRef,
        Rule::FilterOnly { greedy: false },
        Rule::RatioTopK { k: 3 },
        Rule::RatioTopP { p: 0.6 },
    ];
    for (i, rule) in rules.into_iter().enumerate() {
        let seed = i as u64;
        let (policy, reference) = (model(&tiny(), 2 * seed + 500), model(&tiny(), 2 * seed + 501));
        let pair = ModelPair::models(&policy, &reference).unwrap();
        let prompts = prompts(seed, 3, 24);
        let config = settings(seed).with_rule(rule);
        let run = |reference, scores| {
            let config = AadConfig { reference, scores, check_pair: scores, ..config.clone() };
            tokens(&generate(&pair, &prompts, &config).unwrap())
        };
        let expected = run(ReferenceMode::Eager, true);
        for mode in MODES {
            assert_eq!(run(mode, true), expected, "{rule:?} {mode:?}");
            assert_eq!(run(mode, false), expected, "{rule:?} {mode:?}");
        }
    }
}

#[test]
fn a_reference_that_nobody_asks_is_never_run() {
    let (policy, reference) = (model(&tiny(), 1), model(&tiny(), 2));
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let config = AadConfig { rule: Rule::GreedyDpo, scores: false, ..AadConfig::default() };
    let texts = generate(&pair, &prompts(1, 2, 24), &config).unwrap();
    assert!(texts.iter().all(|g| g.stats.reference_passes == 0 && g.stats.steps > 0));
}
