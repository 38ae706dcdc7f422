//! Pairs: what is one, and what isn't.

mod common;

use aligned_decoding::config::ReferenceMode;
use aligned_decoding::doctor::{self, examine};
use aligned_decoding::pair::shared_tokens;
use aligned_decoding::reward::implicit_reward;
use aligned_decoding::tensor::Seed;
use aligned_decoding::tensor::tch::{Device, Kind, Tensor, no_grad_guard};
use aligned_decoding::{AadConfig, Error, ModelPair, Rule, View, generate};
use common::{adapter, model, prompts, tiny};
use lm::config::ModelConfig;
use lm::generate::GenerateConfig;
use lm::lora::{Adapter, Layers, LoraConfig};
use lm::model::{CausalLm as _, Model, Pass};
use lm::tokenizer::Tokenizer;
use lm::train::{Decoder, DpoConfig, DpoTrainer, Layout, PreferencePair, score_pairs};

#[test]
fn the_model_without_its_adapter_is_the_reference() {
    let base = model(&tiny(), 1);
    let lora = adapter(&tiny(), Layers::Top(2), 1);
    let pair = ModelPair::lora(&base, lora.view(), None).unwrap();
    let _guard = no_grad_guard();
    let ids = Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]);
    let hidden = |view: &View| view.forward_hidden(&ids, None, &mut base.new_cache()).unwrap();
    let bare = base.hidden(&ids, &mut Pass::default()).unwrap();
    let difference = |a: &Tensor, b: &Tensor| (a - b).abs().max().double_value(&[]);
    assert!(difference(&hidden(pair.reference()), &bare) < 1e-12);
    assert!(difference(&hidden(pair.policy()), &bare) > 1e-3);
}

#[test]
fn an_adapter_that_changes_nothing_decodes_greedily_for_every_alpha() {
    let base = model(&tiny(), 1);
    let fresh = Adapter::new(&tiny(), &LoraConfig::default(), Kind::Double, Device::Cpu).unwrap();
    let pair = ModelPair::lora(&base, fresh.view(), None).unwrap();
    let prompts = prompts(3, 4, 24);
    let greedy = GenerateConfig { max_new_tokens: 8, ..GenerateConfig::default() };
    let expected: Vec<Vec<u32>> =
        lm::generate::generate(&base, &prompts, &greedy).unwrap().into_iter().map(|g| g.tokens).collect();
    for (rule, alpha) in
        [(Rule::Aad, 0.0), (Rule::Aad, 0.1), (Rule::Aad, 1.0), (Rule::GreedyDpo, 0.1), (Rule::GreedyRef, 0.1)]
    {
        let config = AadConfig { max_new_tokens: 8, alpha, rule, ..AadConfig::default() };
        for (found, expected) in generate(&pair, &prompts, &config).unwrap().iter().zip(&expected) {
            assert_eq!(&found.tokens, expected, "{rule:?} {alpha}");
            assert!(found.sum_advantage.unwrap().abs() < 1e-9);
        }
    }
}

#[test]
fn equal_models_in_f32_decode_greedily_in_every_mode() {
    // Passes of other shapes round otherwise: without a tolerance noise would decide.
    let config = ModelConfig { width: 64, ffn: 96, vocab: 500, initializer_range: 0.1, ..tiny() };
    let base = Model::random(&config, Seed::new(1), Kind::Float, Device::Cpu).unwrap();
    let pair = ModelPair::models(&base, &base).unwrap();
    let modes = [ReferenceMode::Eager, ReferenceMode::CandidateHead, ReferenceMode::Lazy { max_lag: 32 }];
    for reference in modes {
        for alpha in [0.5, 0.1, 0.01] {
            let config = AadConfig { reference, alpha, max_new_tokens: 20, ..AadConfig::default() };
            for g in generate(&pair, &prompts(3, 4, 24), &config).unwrap() {
                assert_eq!(g.stats.departures, 0, "{reference:?}, α = {alpha}");
            }
        }
    }
}

#[test]
fn alpha_1_is_greedy_decoding_of_the_policy() {
    let (policy, reference) = (model(&tiny(), 1), model(&tiny(), 2));
    let pair = ModelPair::models(&policy, &reference).unwrap();
    let prompts = prompts(5, 4, 24);
    let run = |rule, alpha| {
        let config = AadConfig { max_new_tokens: 10, alpha, rule, ..AadConfig::default() };
        generate(&pair, &prompts, &config).unwrap().into_iter().map(|g| g.tokens).collect::<Vec<_>>()
    };
    let settings = GenerateConfig { max_new_tokens: 10, ..GenerateConfig::default() };
    let greedy = |model| -> Vec<Vec<u32>> {
        lm::generate::generate(model, &prompts, &settings).unwrap().into_iter().map(|g| g.tokens).collect()
    };
    assert_eq!(run(Rule::Aad, 1.0), greedy(&policy));
    assert_eq!(run(Rule::GreedyDpo, 0.1), greedy(&policy));
    assert_eq!(run(Rule::Eft { gamma: 1.0, temperature: 0.0 }, 0.1), greedy(&policy));
    assert_eq!(run(Rule::GreedyRef, 0.1), greedy(&reference));
    assert_ne!(greedy(&policy), greedy(&reference));
}

#[test]
fn other_vocabularies_are_refused_unless_padding_is_allowed() {
    let small = model(&tiny(), 1);
    let large = model(&ModelConfig { vocab: 32, ..tiny() }, 1);
    let Err(Error::VocabMismatch { policy: 24, reference: 32 }) = ModelPair::models(&small, &large) else { panic!() };
    assert!(matches!(
        ModelPair::padded(View::bare(&small), View::bare(&large), 25),
        Err(Error::InvalidArgument { .. })
    ));
    assert!(matches!(ModelPair::padded(View::bare(&small), View::bare(&large), 0), Err(Error::InvalidArgument { .. })));
    // Of 20 tokens none of the padding is chosen, by any rule.
    let pair = ModelPair::padded(View::bare(&small), View::bare(&large), 20).unwrap();
    for rule in [Rule::Aad, Rule::GreedyRef, Rule::Eft { gamma: 3.0, temperature: 0.0 }] {
        let config = AadConfig { max_new_tokens: 12, alpha: 0.0, rule, ..AadConfig::default() };
        let texts = generate(&pair, &prompts(1, 4, 20), &config).unwrap();
        assert!(texts.iter().all(|g| g.tokens.iter().all(|&id| id < 20)));
    }
    let outside = generate(&pair, &[vec![1], vec![2, 21]], &AadConfig::default());
    assert!(matches!(outside, Err(Error::TokenOutOfRange { id: 21, row: 1, vocab: 20 })));
}

/// A tokenizer of words with these tokens.
fn tokenizer(folder: &std::path::Path, words: &[&str]) -> Tokenizer {
    let vocab: serde_json::Map<String, serde_json::Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": words[0] }
    });
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::from_hugging_face(folder).unwrap()
}

#[test]
fn tokenizers_that_differ_are_refused_with_the_first_id() {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &str, words: &[&str]| tokenizer(&folder.path().join(name), words);
    let one = make("one", &["?", "a", "b", "c"]);
    let other = make("other", &["?", "a", "x", "c"]);
    let longer = make("longer", &["?", "a", "b", "c", "<pad>"]);
    assert_eq!(shared_tokens(&one, &one, false).unwrap(), 4);
    for allow in [false, true] {
        let Err(Error::TokenizerMismatch { id: 2, policy, reference, .. }) = shared_tokens(&one, &other, allow) else {
            panic!("allowed {allow}")
        };
        assert_eq!((policy.as_deref(), reference.as_deref()), (Some("b"), Some("x")));
    }
    assert!(matches!(shared_tokens(&one, &longer, false), Err(Error::TokenizerMismatch { id: 4, .. })));
    assert_eq!(shared_tokens(&one, &longer, true).unwrap(), 4);
}

#[test]
fn a_stranger_is_reported_as_no_pair() {
    // Weights this large make every distribution a point.
    let config = ModelConfig { initializer_range: 2.0, ..tiny() };
    let (policy, stranger) = (model(&config, 1), model(&config, 2));
    let pair = ModelPair::models(&policy, &stranger).unwrap();
    let prompts = [vec![1, 5, 9, 3, 7, 2], vec![4, 4, 8, 1]];
    let warned = generate(&pair, &prompts, &AadConfig { max_new_tokens: 2, ..AadConfig::default() }).unwrap();
    let warning = warned[0].warning.expect("a warning");
    assert!(warning.to_string().contains("probably not"));
    let findings = doctor::findings(&examine(&pair, &prompts, 0.1).unwrap(), &[]);
    assert!(findings[0].contains("probably not"), "{findings:?}");
    let off = AadConfig { max_new_tokens: 2, check_pair: false, ..AadConfig::default() };
    assert_eq!(generate(&pair, &prompts, &off).unwrap()[0].warning, None);
    let base = model(&tiny(), 1);
    let lora = adapter(&tiny(), Layers::Top(1), 1);
    let pair = ModelPair::lora(&base, lora.view(), None).unwrap();
    assert_eq!(generate(&pair, &prompts, &AadConfig::default()).unwrap()[0].warning, None);
}

#[test]
fn the_doctor_sees_which_weights_moved() {
    let (base, lora) = (model(&tiny(), 1), adapter(&tiny(), Layers::Top(1), 1));
    let mut merged = model(&tiny(), 1);
    lora.merge_into(&mut merged).unwrap();
    let (whole, parts) =
        (doctor::weight_deltas(&merged, &base).unwrap(), doctor::adapter_deltas(&base, &lora).unwrap());
    assert_eq!(parts.len(), 7);
    for part in &parts {
        let same = whole.iter().find(|w| w.name == part.name).unwrap();
        assert!((same.relative - part.relative).abs() < 1e-9 && part.relative > 0.0);
    }
    assert!(whole.iter().filter(|w| !w.name.starts_with("layers.2")).all(|w| w.norm == 0.0));
    let pair = ModelPair::lora(&base, lora.view(), None).unwrap();
    let e = examine(&pair, &[vec![1, 2, 3, 4, 5], vec![6]], 0.1).unwrap();
    assert_eq!(e.tokens, 4);
    assert!(e.divergence > 0.0 && e.mean_abs_advantage >= e.mean_advantage.abs() && e.agreement <= 1.0);
    assert!((e.mean_advantage - (e.reference_nll - e.policy_nll)).abs() < 1e-9);
    let same = ModelPair::models(&base, &base).unwrap();
    let same = examine(&same, &[vec![1, 2, 3]], 0.1).unwrap();
    assert!(doctor::findings(&same, &[])[0].contains("the same"));
    assert!(matches!(examine(&pair, &[vec![1]], 0.1), Err(Error::InvalidArgument { .. })));
    let deeper = model(&ModelConfig { layers: 4, ..tiny() }, 1);
    assert!(doctor::weight_deltas(&deeper, &base).is_err());
}

#[test]
fn preference_training_starts_at_ln_2_and_makes_a_pair_that_decodes_what_was_preferred() {
    let config = ModelConfig { initializer_range: 0.2, ..tiny() };
    let base = model(&config, 1);
    let lora = LoraConfig { rank: 4, alpha: 8.0, ..LoraConfig::default() };
    let policy = Adapter::new(&config, &lora, Kind::Double, Device::Cpu).unwrap();
    // Token 5 is better than token 6, whatever the prompt.
    let pairs: Vec<PreferencePair> =
        (0..8).map(|i| PreferencePair { prompt: vec![i, 2 * i], chosen: vec![5], rejected: vec![6] }).collect();
    let scores = score_pairs(&mut Decoder::new(&base, None), &pairs, &Layout::default(), 8).unwrap();
    let mut settings = DpoConfig::default();
    settings.optimizer.lr = 1e-2;
    settings.loss.beta = 0.5;
    let mut trainer = DpoTrainer::new(settings, pairs, &scores, policy.parameters()).unwrap();
    let logs = trainer.run(&mut Decoder::new(&base, Some(&policy)), |_| std::ops::ControlFlow::Continue(())).unwrap();
    assert!((logs[0].update.loss - std::f64::consts::LN_2).abs() < 1e-9, "{}", logs[0].update.loss);
    assert!(logs[logs.len() - 1].update.loss < 0.5, "{:?}", logs[logs.len() - 1]);
    let pair = ModelPair::lora(&base, policy.view(), None).unwrap();
    let reward = |token| implicit_reward(&pair, &[3, 6], &[token], 0.5).unwrap().total();
    assert!(reward(5) > 0.0 && reward(6) < 0.0 && reward(5) - reward(6) > 0.4, "{} and {}", reward(5), reward(6));
    let decode = |rule| {
        let config = AadConfig { alpha: 0.01, rule, max_new_tokens: 1, ..AadConfig::default() };
        generate(&pair, &[vec![3, 6]], &config).unwrap().remove(0)
    };
    let (aad, greedy) = (decode(Rule::Aad), decode(Rule::GreedyDpo));
    assert_ne!(aad.tokens, [6]);
    assert!(aad.sum_advantage.unwrap() >= greedy.sum_advantage.unwrap());
}
