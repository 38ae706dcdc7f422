//! Best of n, ARGS, beams, synthetic pairs and a second round.

mod common;

use aligned_decoding::args::{ArgsConfig, args};
use aligned_decoding::beam::{BeamConfig, beam};
use aligned_decoding::bestofn::{DRAW, best_of, by_implicit_reward};
use aligned_decoding::config::{AadConfig, Rule, StopReason, StopRule};
use aligned_decoding::dpo::{DpoConfig, PreferencePair};
use aligned_decoding::jsonl;
use aligned_decoding::reward::implicit_reward;
use aligned_decoding::synth::{Rejected, RoundReference, SynthConfig, build_pairs, second_round};
use aligned_decoding::tensor::tch::Device;
use aligned_decoding::{Error, ModelPair, generate};
use common::{adapter, model, prompts, tiny};
use lm::lora::Layers;

fn config() -> AadConfig {
    AadConfig { max_new_tokens: 6, ..AadConfig::default() }
}

#[test]
fn the_best_of_n_is_the_draw_that_the_picker_likes_best() {
    let (policy, reference) = (model(&tiny(), 1), model(&tiny(), 2));
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let prompts = [vec![1, 2], vec![3]];
    let best = best_of(&pair, &prompts, 4, &config().with_rule(DRAW), by_implicit_reward).unwrap();
    assert_eq!(best.len(), 2);
    for (prompt, best) in prompts.iter().zip(&best) {
        assert_eq!(best.rewards.len(), 4);
        let max = best.rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        assert_eq!(best.rewards[best.number], max);
        let again = implicit_reward(&pair, prompt, &best.generation.tokens, 1.0).unwrap().total();
        assert!((again - max).abs() < 1e-9);
        assert!(best.rewards.iter().any(|r| *r != max), "all draws are one text");
    }
    let refused = |n, config: &AadConfig| best_of(&pair, &prompts, n, config, |_, _| Ok(0.0)).unwrap_err();
    assert!(matches!(refused(0, &config().with_rule(DRAW)), Error::InvalidArgument { .. }));
    assert!(matches!(refused(2, &config()), Error::InvalidArgument { .. }));
    let nan = best_of(&pair, &prompts, 2, &config().with_rule(DRAW), |_, _| Ok(f64::NAN));
    assert!(matches!(nan, Err(Error::InvalidArgument { .. })));
    let own = best_of(&pair, &prompts, 2, &config().with_rule(DRAW), |_, _| Err(Error::closure("The picker", "tired")));
    assert!(own.unwrap_err().to_string().contains("tired"));
    let unscored = AadConfig { scores: false, ..config() }.with_rule(DRAW);
    assert!(best_of(&pair, &prompts, 2, &unscored, by_implicit_reward).is_err());
}

#[test]
fn args_without_a_reward_is_greedy_and_with_one_follows_it() {
    let (base, other) = (model(&tiny(), 3), model(&tiny(), 4));
    let pair = ModelPair::models(&base, &other).unwrap();
    let greedy = generate(&pair, &[vec![1, 2]], &config().with_rule(Rule::GreedyDpo)).unwrap().remove(0);
    let settings = ArgsConfig { max_new_tokens: 6, k: 24, ..ArgsConfig::default() };
    let run = |settings: &ArgsConfig, reward: &dyn Fn(&[u32]) -> f64| {
        args(&base, Device::Cpu, &[1, 2], settings, |_, text| Ok(reward(text)))
    };
    let text = run(&settings, &|_| 0.0).unwrap();
    assert_eq!((&text.tokens, text.calls), (&greedy.tokens, 6 * 24));
    let seven = |text: &[u32]| f64::from(u32::from(text.last() == Some(&7)));
    let weighed = ArgsConfig { weight: 1e6, ..settings.clone() };
    assert_eq!(run(&weighed, &seven).unwrap().tokens, [7; 6]);
    // Of one candidate there is no choice.
    assert_eq!(run(&ArgsConfig { k: 1, ..weighed.clone() }, &seven).unwrap().tokens, greedy.tokens);
    let stopped = ArgsConfig { stop: vec![StopRule::Tokens(vec![7])], ..weighed };
    let text = run(&stopped, &seven).unwrap();
    assert_eq!((&text.tokens[..], text.stop), (&[7][..], StopReason::Stop));
    assert!(matches!(run(&settings, &|_| f64::NAN), Err(Error::InvalidArgument { .. })));
    assert!(run(&ArgsConfig { k: 0, ..settings.clone() }, &seven).is_err());
    assert!(matches!(args(&base, Device::Cpu, &[], &settings, |_, _| Ok(0.0)), Err(Error::EmptyPrompt { .. })));
}

#[test]
fn one_beam_is_aad_and_more_beams_find_no_less_advantage() {
    for seed in 0..10 {
        let (policy, reference) = (model(&tiny(), 2 * seed), model(&tiny(), 2 * seed + 1));
        let pair = ModelPair::models(&policy, &reference).unwrap();
        let config = AadConfig { alpha: 0.2, ..config() };
        let aad = generate(&pair, &[vec![1, 2, 3]], &config).unwrap().remove(0);
        let find = |beams, min_entropy| {
            let search = BeamConfig { beams, min_entropy, ..BeamConfig::default() };
            beam(&pair, &[1, 2, 3], &config, &search).unwrap()
        };
        // Where no beam may branch there is one.
        for beams in [1, 4] {
            let found = find(beams, 1e9);
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].tokens, aad.tokens, "seed {seed}");
            assert!((found[0].sum_advantage - aad.sum_advantage.unwrap()).abs() < 1e-4);
        }
        let wide = find(200, -1.0);
        assert!(wide[0].sum_advantage >= aad.sum_advantage.unwrap() - 1e-4, "seed {seed}");
        for text in &wide[..3.min(wide.len())] {
            let sum = implicit_reward(&pair, &[1, 2, 3], &text.tokens, 1.0).unwrap().total();
            assert!((sum - text.sum_advantage).abs() < 1e-4, "seed {seed}: {sum} and {}", text.sum_advantage);
        }
    }
    let (policy, reference) = (model(&tiny(), 0), model(&tiny(), 1));
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let search = BeamConfig { beams: 0, ..BeamConfig::default() };
    assert!(matches!(beam(&pair, &[1], &config(), &search), Err(Error::InvalidArgument { .. })));
    assert!(matches!(beam(&pair, &[], &config(), &BeamConfig::default()), Err(Error::EmptyPrompt { .. })));
}

#[test]
fn synthetic_pairs_prefer_what_aad_writes_and_drop_what_is_the_same() {
    let (policy, reference) = (model(&tiny(), 5), model(&tiny(), 6));
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let prompts = prompts(6, 9, 24);
    let settings = SynthConfig { aad: config(), part: 4, ..SynthConfig::default() };
    let pairs = build_pairs(&pair, &prompts, &settings).unwrap();
    assert!(!pairs.is_empty());
    for p in &pairs {
        let aad = generate(&pair, std::slice::from_ref(&p.prompt), &config()).unwrap().remove(0);
        assert_eq!(p.chosen, aad.tokens);
        assert_ne!(p.chosen, p.rejected);
    }
    let greedy = SynthConfig { rejected: Rejected::GreedyDpo, ..settings.clone() };
    for p in build_pairs(&pair, &prompts, &greedy).unwrap() {
        let expected = generate(&pair, std::slice::from_ref(&p.prompt), &config().with_rule(Rule::GreedyDpo)).unwrap();
        assert_eq!(p.rejected, expected[0].tokens);
    }
    let same = ModelPair::models(&policy, &policy).unwrap();
    assert!(build_pairs(&same, &prompts, &greedy).unwrap().is_empty());
    assert!(matches!(
        build_pairs(&pair, &prompts, &SynthConfig { part: 0, ..settings }),
        Err(Error::InvalidArgument { .. })
    ));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pairs.jsonl");
    jsonl::write(&path, &pairs).unwrap();
    assert_eq!(jsonl::read::<PreferencePair>(&path).unwrap(), pairs);
    let text = serde_json::to_string(&SynthConfig::default()).unwrap();
    assert_eq!(serde_json::from_str::<SynthConfig>(&text).unwrap(), SynthConfig::default());
}

#[test]
fn a_second_round_trains_a_copy_toward_what_aad_writes() {
    let base = model(&tiny(), 7);
    let (policy, sft) = (adapter(&tiny(), Layers::Top(2), 7), adapter(&tiny(), Layers::Top(2), 8));
    let prompts = prompts(8, 8, 24);
    let settings = SynthConfig { aad: config(), rejected: Rejected::GreedyDpo, ..SynthConfig::default() };
    let mut dpo = DpoConfig::default();
    dpo.optimizer.steps = 10;
    for against in [RoundReference::Same, RoundReference::Policy] {
        let before: Vec<_> = policy.parameters().into_iter().map(|(_, t)| t.copy()).collect();
        let round = second_round(&base, &policy, Some(&sft), &prompts, &settings, against, &dpo).unwrap();
        assert!(round.logs[9].update.loss < round.logs[0].update.loss);
        if against == RoundReference::Policy {
            assert!((round.logs[0].update.loss - std::f64::consts::LN_2).abs() < 1e-9);
        }
        assert!(policy.parameters().iter().zip(&before).all(|((_, now), before)| now == before));
        // The new policy likes what was preferred more than the old one did.
        let (old, new) = (
            ModelPair::lora(&base, policy.view(), Some(sft.view())).unwrap(),
            ModelPair::lora(&base, round.adapter.view(), Some(sft.view())).unwrap(),
        );
        let margin = |pair: &ModelPair<_, _>| {
            let of = |p: &PreferencePair, text: &[u32]| implicit_reward(pair, &p.prompt, text, 1.0).unwrap().total();
            round.pairs.iter().map(|p| of(p, &p.chosen) - of(p, &p.rejected)).sum::<f64>()
        };
        assert!(margin(&new) > margin(&old));
    }
    let nothing = second_round(&base, &policy, Some(&policy), &prompts, &settings, RoundReference::Same, &dpo);
    assert!(matches!(nothing, Err(Error::InvalidArgument { .. })));
}
