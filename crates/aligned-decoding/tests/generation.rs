//! Decoding: stops, bans, lists of allowed tokens, scores, traces, guards, streams, other kinds of numbers, errors.

mod common;

use aligned_decoding::config::{AadConfig, ReferenceMode, Rule, StopReason, StopRule};
use aligned_decoding::generate::Decoding;
use aligned_decoding::guard::{Action, GuardConfig, repetition};
use aligned_decoding::processor::AadProcessor;
use aligned_decoding::reward::{RewardConfig, implicit_reward, implicit_rewards};
use aligned_decoding::tensor::Seed;
use aligned_decoding::tensor::tch::{Device, Kind, Tensor};
use aligned_decoding::{Error, ModelPair, Side, View, generate, stream};
use common::{adapter, model, prompts, tiny};
use lm::config::ModelConfig;
use lm::generate::{GenerateConfig, Plugs, generate_with};
use lm::linear::Dense;
use lm::lora::Layers;
use lm::model::Model;
use std::ops::ControlFlow;

fn models(seed: u64) -> (Model, Model) {
    (model(&tiny(), seed), model(&tiny(), seed + 1))
}

fn config() -> AadConfig {
    AadConfig { max_new_tokens: 10, ..AadConfig::default() }
}

#[test]
fn a_text_ends_where_the_first_rule_says() {
    let (policy, reference) = models(10);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let run = |stop| generate(&pair, &[vec![1, 2]], &AadConfig { stop, ..config() }).unwrap().remove(0);
    let whole = run(vec![]);
    assert_eq!((whole.tokens.len(), whole.stop), (10, StopReason::Length));
    let third = whole.tokens[2];
    let first = whole.tokens.iter().position(|&t| t == third).unwrap();
    let cut = run(vec![StopRule::Tokens(vec![third])]);
    assert_eq!((&cut.tokens[..], cut.stop), (&whole.tokens[..=first], StopReason::Stop));
    let sequence = whole.tokens[3..5].to_vec();
    let end = whole.tokens.windows(2).position(|w| w == sequence).unwrap() + 2;
    let cut = run(vec![StopRule::Sequence(sequence)]);
    assert_eq!((&cut.tokens[..], cut.stop), (&whole.tokens[..end], StopReason::Stop));
    let cut = run(vec![StopRule::TotalLength(7)]);
    assert_eq!((&cut.tokens[..], cut.stop), (&whole.tokens[..5], StopReason::Length));
    let none = generate(&pair, &[vec![1, 2]], &AadConfig { max_new_tokens: 0, ..config() }).unwrap();
    assert!(none[0].tokens.is_empty() && none[0].sum_advantage == Some(0.0));
}

#[test]
fn a_text_ends_with_the_context_of_the_shorter_model() {
    let policy = model(&tiny(), 1);
    let reference = model(&ModelConfig { context: 12, ..tiny() }, 2);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let texts = generate(&pair, &[vec![1, 2, 3], vec![4]], &AadConfig { max_new_tokens: 40, ..config() }).unwrap();
    assert_eq!((texts[0].tokens.len(), texts[0].stop), (10, StopReason::Context));
    assert_eq!((texts[1].tokens.len(), texts[1].stop), (12, StopReason::Context));
}

#[test]
fn bad_prompts_are_refused_before_anything_is_computed() {
    let (policy, reference) = models(1);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let refused = |prompts: &[Vec<u32>], config: &AadConfig| generate(&pair, prompts, config).unwrap_err();
    assert!(matches!(refused(&[], &config()), Error::EmptyPrompt { row: 0 }));
    assert!(matches!(refused(&[vec![1], vec![]], &config()), Error::EmptyPrompt { row: 1 }));
    assert!(matches!(refused(&[vec![1; 49]], &config()), Error::ContextOverflow { len: 49, max: 48 }));
    assert!(matches!(refused(&[vec![1, 24]], &config()), Error::TokenOutOfRange { id: 24, row: 0, .. }));
    let allowed = AadConfig { allowed: Some(vec![1, 99]), ..config() };
    assert!(matches!(refused(&[vec![1]], &allowed), Error::TokenOutOfRange { id: 99, .. }));
    assert!(matches!(refused(&[vec![1]], &AadConfig { alpha: 2.0, ..config() }), Error::BadAlpha(_)));
    let all = AadConfig { banned: (0..24).collect(), ..config() };
    assert!(matches!(refused(&[vec![1], vec![2]], &all), Error::NothingAllowed { step: 0, row: 0 }));
}

/// A model whose head gives NaN for one token.
fn broken(seed: u64, id: i64) -> Model {
    let mut model = model(&ModelConfig { tied: false, ..tiny() }, seed);
    let weight = model.head_layer().weight().unwrap().copy();
    let _ = weight.get(id).fill_(f64::NAN);
    let _old = model.set_head(Box::new(Dense::new(weight, None).unwrap())).unwrap();
    model
}

#[test]
fn a_nan_is_reported_with_step_row_token_and_model() {
    let (policy, reference) = models(3);
    let bad = broken(3, 7);
    let pair = ModelPair::models(&bad, &reference).unwrap();
    let error = generate(&pair, &[vec![1], vec![2]], &config()).unwrap_err();
    assert!(matches!(error, Error::NonFiniteLogits { step: 0, row: 0, model: Side::Policy, id: 7, .. }), "{error}");
    let pair = ModelPair::models(&policy, &bad).unwrap();
    let error = generate(&pair, &[vec![1]], &config().with_rule(Rule::GreedyRef)).unwrap_err();
    assert!(matches!(error, Error::NonFiniteLogits { model: Side::Reference, id: 7, .. }), "{error}");
    let allowed = AadConfig { allowed: Some(vec![2, 4, 7, 9]), ..config() };
    let error = generate(&pair, &[vec![1]], &allowed.with_rule(Rule::GreedyRef)).unwrap_err();
    assert!(matches!(error, Error::NonFiniteLogits { id: 7, .. }), "{error}");
    let mut decoding = Decoding::new(&pair, &[vec![1]], &config().with_rule(Rule::GreedyRef)).unwrap();
    assert!(decoding.step().is_err());
    assert!(matches!(decoding.step(), Err(Error::InvalidArgument { .. })));
}

#[test]
fn scores_are_the_implicit_reward_of_the_text() {
    let base = model(&tiny(), 4);
    let (high, low) = (adapter(&tiny(), Layers::Top(1), 4), adapter(&tiny(), Layers::Top(2), 5));
    let pair = ModelPair::lora(&base, high.view(), Some(low.view())).unwrap();
    let prompts = prompts(9, 5, 24);
    for allowed in [None, Some((0..24).filter(|id| id % 3 != 1).collect::<Vec<u32>>())] {
        let config = AadConfig { stop: vec![StopRule::Tokens(vec![3])], allowed: allowed.clone(), ..config() };
        let texts = generate(&pair, &prompts, &config).unwrap();
        let asked: Vec<(&[u32], &[u32])> = prompts.iter().zip(&texts).map(|(p, g)| (&p[..], &g.tokens[..])).collect();
        let rewards = implicit_rewards(&pair, &asked, &RewardConfig { beta: 0.5, allowed, part: 2 }).unwrap();
        for (g, r) in texts.iter().zip(&rewards) {
            let same = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9);
            assert!(same(&g.policy_log_probs, &r.policy) && same(&g.ref_log_probs, &r.reference));
            assert!((r.total() - 0.5 * g.sum_advantage.unwrap()).abs() < 1e-9);
            assert!((r.logp_ref() - g.logp_ref.unwrap()).abs() < 1e-9);
        }
    }
    let one = implicit_reward(&pair, &[1, 2], &[3, 4, 5], 0.1).unwrap();
    assert_eq!(one.policy.len(), 3);
    assert_eq!(implicit_reward(&pair, &[1], &[], 0.1).unwrap().total(), 0.0);
    assert!(matches!(implicit_reward(&pair, &[], &[1], 0.1), Err(Error::EmptyPrompt { .. })));
    assert!(matches!(implicit_reward(&pair, &[1], &[24], 0.1), Err(Error::TokenOutOfRange { .. })));
    assert!(matches!(implicit_reward(&pair, &[1], &[2; 48], 0.1), Err(Error::ContextOverflow { .. })));
    assert!(matches!(implicit_reward(&pair, &[1], &[2], 0.0), Err(Error::InvalidArgument { .. })));
    let restricted = RewardConfig { allowed: Some(vec![1]), ..RewardConfig::default() };
    assert!(matches!(implicit_rewards(&pair, &[(&[1], &[2])], &restricted), Err(Error::InvalidArgument { .. })));
}

#[test]
fn only_allowed_tokens_exist_for_every_rule_and_banned_ones_are_never_chosen() {
    let (policy, reference) = models(6);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let sample = |from| Rule::Sample { from, temperature: 1.0, top_p: None, min_p: None };
    let rules = [
        Rule::Aad,
        Rule::GreedyRef,
        Rule::GreedyDpo,
        Rule::Eft { gamma: 2.0, temperature: 0.0 },
        sample(Side::Policy),
        sample(Side::Reference),
        Rule::FilterOnly { greedy: false },
        Rule::RatioTopK { k: 4 },
    ];
    for rule in rules {
        // Unsorted and with a repetition.
        let config = AadConfig { allowed: Some(vec![20, 2, 3, 5, 8, 13, 2]), banned: vec![5, 17], ..config() };
        for g in generate(&pair, &prompts(2, 4, 24), &config.with_rule(rule)).unwrap() {
            assert!(g.tokens.iter().all(|id| [2, 3, 8, 13, 20].contains(id)), "{rule:?}: {:?}", g.tokens);
        }
        let config = AadConfig { no_repeat_ngram: Some(1), ..config };
        for g in generate(&pair, &[vec![2]], &AadConfig { max_new_tokens: 4, ..config }.with_rule(rule)).unwrap() {
            assert_eq!(repetition(&g.tokens, 1), 0.0, "{rule:?}: {:?}", g.tokens);
        }
    }
}

#[test]
fn a_trace_shows_each_steps_candidates_with_both_models_log_probabilities() {
    let (policy, reference) = models(8);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    for mode in [ReferenceMode::Eager, ReferenceMode::CandidateHead, ReferenceMode::Lazy { max_lag: 4 }] {
        for rule in [Rule::Aad, Rule::GreedyRef] {
            let config = AadConfig { trace: true, reference: mode, rule, alpha: 0.2, ..config() };
            for g in generate(&pair, &prompts(1, 3, 24), &config).unwrap() {
                let trace = g.trace.as_ref().unwrap();
                assert_eq!(trace.len(), g.tokens.len());
                for (i, step) in trace.iter().enumerate() {
                    assert_eq!(step.chosen, g.tokens[i]);
                    let chosen = step.candidates.iter().find(|c| c.id == step.chosen).unwrap();
                    assert!((chosen.policy - g.policy_log_probs[i]).abs() < 1e-5);
                    assert!((chosen.reference - g.ref_log_probs[i]).abs() < 1e-9);
                    assert!((chosen.advantage() - step.advantage).abs() < 1e-5);
                    assert_eq!(step.candidates[0].id, step.policy_top);
                    if rule == Rule::Aad {
                        assert_eq!(step.candidates.len(), step.plausible);
                        let best = step.candidates.iter().all(|c| c.advantage() <= step.advantage + 1e-5);
                        assert!(best, "{step:?}");
                        let floor = step.candidates[0].policy + 0.2f64.ln() - 1e-5;
                        assert!(step.candidates.iter().all(|c| c.policy >= floor));
                    }
                }
            }
        }
    }
}

#[test]
fn a_stream_gives_the_same_tokens_and_a_row_can_be_ended() {
    let (policy, reference) = models(11);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let prompts = prompts(4, 3, 24);
    let config = AadConfig { stop: vec![StopRule::Tokens(vec![3])], ..config() };
    let expected = generate(&pair, &prompts, &config).unwrap();
    let mut texts = vec![Vec::new(); 3];
    for token in stream(&pair, &prompts, &config).unwrap() {
        let token = token.unwrap();
        texts[token.row].push(token.id);
        assert_eq!(token.gain > 0.0, token.id != token.policy_top);
    }
    assert!(texts.iter().zip(&expected).all(|(a, b)| *a == b.tokens));
    let mut stream = stream(&pair, &prompts, &config).unwrap();
    stream.end(1);
    assert!(stream.all(|token| token.unwrap().row != 1));
    let config = AadConfig { stop: Vec::new(), ..config };
    let mut decoding = Decoding::new(&pair, &prompts, &config).unwrap();
    let _ = decoding.step().unwrap();
    decoding.end(0);
    let _ = decoding.step().unwrap();
    let texts = decoding.finish().unwrap();
    assert_eq!((texts[0].tokens.len(), texts[0].stop), (1, StopReason::Caller));
    assert!(texts.iter().all(|g| g.ref_log_probs.len() == g.tokens.len()));
}

#[test]
fn the_guard_ends_a_text_or_raises_alpha() {
    let (policy, reference) = models(12);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let guard = GuardConfig {
        window: 3,
        max_mean_advantage: Some(-100.0),
        ngram: 1,
        max_repetition: None,
        action: Action::Stop,
    };
    let run = |guard, scores| {
        let config = AadConfig { guard, alpha: 0.05, scores, ..config() };
        generate(&pair, &[vec![1, 2], vec![3]], &config).unwrap()
    };
    for scores in [true, false] {
        for g in run(Some(guard.clone()), scores) {
            assert_eq!((g.tokens.len(), g.stop), (3, StopReason::Guard));
        }
    }
    let raise = GuardConfig { action: Action::RaiseAlpha { factor: 1e6 }, ..guard.clone() };
    for (g, free) in run(Some(raise), true).iter().zip(run(None, true)) {
        assert_eq!(g.tokens[..3], free.tokens[..3]);
        assert_eq!(g.tokens.len(), 10);
        // From then on it is greedy decoding of the policy.
        assert!(g.stats.departures <= 3 && free.stats.departures > 3, "{:?}", free.stats);
    }
    let never = GuardConfig { max_mean_advantage: None, ..guard };
    assert_eq!(run(Some(never), true)[0].tokens, run(None, true)[0].tokens);
}

#[test]
fn draws_repeat_with_their_seed_and_rows_have_their_own() {
    let (policy, reference) = models(13);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    for rule in [Rule::AadSample { tau: 1.0 }, Rule::FilterOnly { greedy: false }] {
        let run = |seed| {
            let config = AadConfig { seed, alpha: 0.01, ..config() }.with_rule(rule);
            generate(&pair, &[vec![1], vec![1]], &config).unwrap().into_iter().map(|g| g.tokens).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        assert_ne!(run(1)[0], run(1)[1]);
    }
}

#[test]
fn lms_own_loop_decodes_the_same_tokens_with_the_plug() {
    for seed in 0..8 {
        let (policy, reference) = models(50 + seed);
        let pair = ModelPair::models(&policy, &reference).unwrap();
        let prompts = prompts(seed, 3, 24);
        for rule in [Rule::Aad, Rule::Eft { gamma: 2.0, temperature: 0.0 }, Rule::GreedyDpo] {
            let config = AadConfig { no_repeat_ngram: Some(3), ..config() }.with_rule(rule);
            let expected = generate(&pair, &prompts, &config).unwrap();
            let mut plug = AadProcessor::new(&reference, Device::Cpu, &config).unwrap();
            let mut ban = lm::generate::NoRepeatNgram(3);
            for _ in 0..2 {
                // A second generation with the same plug starts anew.
                let plugs = Plugs { processors: vec![&mut ban, &mut plug], ..Plugs::default() };
                let settings = GenerateConfig { max_new_tokens: 10, ..GenerateConfig::default() };
                let found = generate_with(&policy, &prompts, &settings, plugs, |_| ControlFlow::Continue(())).unwrap();
                for (a, b) in found.iter().zip(&expected) {
                    assert_eq!(a.tokens, b.tokens, "seed {seed}, {rule:?}");
                }
            }
        }
    }
    let reference = model(&tiny(), 0);
    let draws = config().with_rule(Rule::AadSample { tau: 1.0 });
    assert!(matches!(AadProcessor::new(&reference, Device::Cpu, &draws), Err(Error::InvalidArgument { .. })));
    let mut plug = AadProcessor::new(&reference, Device::Cpu, &config()).unwrap();
    let larger = model(&ModelConfig { vocab: 30, ..tiny() }, 1);
    let plugs = Plugs { processors: vec![&mut plug], ..Plugs::default() };
    let result = generate_with(&larger, &[vec![1]], &GenerateConfig::default(), plugs, |_| ControlFlow::Continue(()));
    assert!(result.unwrap_err().to_string().contains("30 tokens"));
}

#[test]
fn half_precision_logits_are_compared_in_f32() {
    let random = |seed| Model::random(&tiny(), Seed::new(seed), Kind::BFloat16, Device::Cpu).unwrap();
    let (policy, reference) = (random(1), random(2));
    let pair = ModelPair::new(View::bare(&policy), View::bare(&reference)).unwrap();
    let texts = generate(&pair, &[vec![1, 2, 3], vec![4]], &config()).unwrap();
    for g in texts {
        assert_eq!(g.tokens.len(), 10);
        // Logits of bf16 are exact in f32, so normalized probabilities sum to 1 far better than bf16 could.
        assert!(g.policy_log_probs.iter().all(|l| *l <= 1e-6));
    }
    let ids = Tensor::from_slice(&[1i64]).view([1, 1]);
    assert_eq!(policy.logits(&ids, &mut lm::model::Pass::default()).unwrap().kind(), Kind::BFloat16);
}

#[test]
fn a_generation_survives_json() {
    let (policy, reference) = models(14);
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let g = generate(&pair, &[vec![1]], &AadConfig { trace: true, ..config() }).unwrap().remove(0);
    let text = serde_json::to_string(&g).unwrap();
    assert_eq!(serde_json::from_str::<aligned_decoding::Generation>(&text).unwrap(), g);
    assert!((g.ref_nll().unwrap() + g.logp_ref.unwrap() / 10.0).abs() < 1e-12);
    assert!(g.stats.mean_candidates().unwrap() >= 1.0 && g.stats.single_share().unwrap() <= 1.0);
}
