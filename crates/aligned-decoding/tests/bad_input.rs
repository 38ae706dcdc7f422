//! Bad input without a model: every error names what came and what would be accepted. And settings in JSON.

use aligned_decoding::config::{AadConfig, ReferenceMode, StopRule};
use aligned_decoding::guard::{Action, Guard, GuardConfig, Verdict, calibrate, repetition};
use aligned_decoding::jsonl::{self, TextPair};
use aligned_decoding::rules::{Chooser, RefLogits, choose, repeating};
use aligned_decoding::tensor::Seed;
use aligned_decoding::tensor::ndarray::arr1;
use aligned_decoding::tree::{Tree, TreeConfig};
use aligned_decoding::{Error, Rule, Side, select};

#[test]
fn alpha_outside_of_0_to_1_is_refused() {
    for alpha in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        assert!(matches!(select(&[1.0, 2.0], |_| 0.0, alpha), Err(Error::BadAlpha(_))));
        assert!(matches!(AadConfig { alpha, ..AadConfig::default() }.validate(), Err(Error::BadAlpha(_))));
        assert!(matches!(calibrate(&[alpha], 1.0, |_| Ok(0.0)), Err(Error::BadAlpha(_))));
    }
}

#[test]
fn nan_and_infinite_logits_are_errors_with_their_token_and_model() {
    for bad in [f32::NAN, f32::INFINITY] {
        for at in [0, 70, 199] {
            let mut z = vec![0.0f32; 200];
            z[at] = bad;
            let Err(Error::NonFiniteLogits { id, model, .. }) = select(&z, |_| 0.0, 0.1) else {
                panic!("{bad} at {at}")
            };
            assert_eq!((id as usize, model), (at, Side::Policy));
        }
        let result = select(&[1.0, 0.9, -50.0], |v| if v == 1 { bad } else { 0.0 }, 0.1);
        let Err(Error::NonFiniteLogits { id: 1, model: Side::Reference, .. }) = result else { panic!("{result:?}") };
        // The reference isn't asked about what isn't plausible.
        assert!(select(&[1.0, 0.9, -50.0], |v| if v == 2 { bad } else { 0.0 }, 0.1).is_ok());
        for rule in [Rule::GreedyRef, Rule::Eft { gamma: 2.0, temperature: 0.0 }] {
            let error = choose(rule, &[1.0, 0.5], &[0.0, bad], 0.1, 0.0).unwrap_err();
            assert!(matches!(error, Error::NonFiniteLogits { id: 1, model: Side::Reference, .. }), "{error}");
        }
    }
}

#[test]
fn no_allowed_token_is_an_error() {
    assert!(matches!(select(&[], |_| 0.0, 0.1), Err(Error::NothingAllowed { .. })));
    assert!(matches!(select(&[f32::NEG_INFINITY; 3], |_| 0.0, 0.1), Err(Error::NothingAllowed { .. })));
}

#[test]
fn rows_of_other_lengths_are_refused() {
    assert!(matches!(choose(Rule::Aad, &[1.0], &[1.0, 2.0], 0.1, 0.0), Err(Error::InvalidArgument { .. })));
    let arrays = aligned_decoding::select::select_array(arr1(&[1.0f32]).view(), arr1(&[1.0f32, 2.0]).view(), 0.1);
    assert!(matches!(arrays, Err(Error::InvalidArgument { .. })));
    let mut chooser = Chooser::new(Rule::Aad, 30.0).unwrap();
    chooser.candidates(&[1.0, 1.0], 0.1).unwrap();
    for z in [RefLogits::None, RefLogits::Candidates(&[0.0]), RefLogits::All(&[0.0])] {
        assert!(matches!(chooser.decide(&[1.0, 1.0], z, 0.0), Err(Error::InvalidArgument { .. })), "{z:?}");
    }
}

#[test]
fn settings_outside_their_domain_name_the_field() {
    let config = AadConfig::default();
    let bad = [
        ("tau", config.with_rule(Rule::AadSample { tau: 0.0 })),
        ("w ", config.with_rule(Rule::AadMix { w: 1.5 })),
        ("gamma", config.with_rule(Rule::Eft { gamma: f64::NAN, temperature: 0.0 })),
        ("temperature", config.with_rule(Rule::Eft { gamma: 1.0, temperature: -1.0 })),
        ("k ", config.with_rule(Rule::RatioTopK { k: 0 })),
        ("p ", config.with_rule(Rule::RatioTopP { p: 0.0 })),
        ("ratio_clip", AadConfig { ratio_clip: 0.0, ..config.clone() }),
        ("max_lag", AadConfig { reference: ReferenceMode::Lazy { max_lag: 0 }, ..config.clone() }),
        ("no_repeat_ngram", AadConfig { no_repeat_ngram: Some(0), ..config.clone() }),
        ("allowed", AadConfig { allowed: Some(vec![]), ..config.clone() }),
        ("trace", AadConfig { trace: true, scores: false, ..config.clone() }),
        ("sequence", AadConfig { stop: vec![StopRule::Sequence(vec![])], ..config.clone() }),
        ("total length", AadConfig { stop: vec![StopRule::TotalLength(0)], ..config.clone() }),
        ("window", AadConfig { guard: Some(GuardConfig { window: 0, ..GuardConfig::default() }), ..config.clone() }),
        ("ngram", AadConfig { guard: Some(GuardConfig { ngram: 99, ..GuardConfig::default() }), ..config.clone() }),
    ];
    for (name, config) in bad {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(name), "{name}: {error}");
    }
}

#[test]
fn settings_survive_json_and_unknown_fields_dont() {
    let config = AadConfig {
        rule: Rule::Sample { from: Side::Reference, temperature: 0.7, top_p: Some(0.9), min_p: None },
        stop: vec![StopRule::Tokens(vec![1]), StopRule::Sequence(vec![2, 3]), StopRule::TotalLength(9)],
        guard: Some(GuardConfig { action: Action::RaiseAlpha { factor: 2.0 }, ..GuardConfig::default() }),
        allowed: Some(vec![1, 2]),
        ..AadConfig::default()
    };
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<AadConfig>(&text).unwrap(), config);
    assert_eq!(serde_json::from_str::<AadConfig>("{}").unwrap(), AadConfig::default());
    assert_eq!(AadConfig::default().alpha, 0.1);
    assert!(serde_json::from_str::<AadConfig>(r#"{"alhpa": 0.1}"#).is_err());
    let rule: Rule = serde_json::from_str(r#"{"eft": {"gamma": 2.0}}"#).unwrap();
    assert_eq!(rule, Rule::Eft { gamma: 2.0, temperature: 0.0 });
    assert!(serde_json::from_str::<TreeConfig>(r#"{"depht": 3}"#).is_err());
}

#[test]
fn trees_that_cant_be_are_refused() {
    for (vocab, depth) in [(1, 2), (5, 0), (5, 40), (1 << 20, 2)] {
        let config = TreeConfig { vocab, depth, ..TreeConfig::default() };
        assert!(matches!(Tree::random(&config, Seed::new(0)), Err(Error::InvalidArgument { .. })), "{vocab} {depth}");
    }
    let tree = Tree::random(&TreeConfig::default(), Seed::new(0)).unwrap();
    let policy = tree.optimum(tree.reward(), 1.0).unwrap();
    assert!(tree.optimum(&[1.0], 1.0).is_err());
    assert!(tree.optimum(tree.reward(), 0.0).is_err());
    assert!(tree.best_of(&policy, 0, tree.reward()).is_err());
    assert!(tree.decode(&policy, Rule::AadSample { tau: 1.0 }, 0.1).is_err());
    assert!(Tree::new(2, vec![vec![0.0]], vec![0.0, 1.0]).is_err());
}

#[test]
fn the_guard_waits_for_a_window_and_sees_eagerness_and_repetition() {
    let config = GuardConfig {
        window: 4,
        max_mean_advantage: Some(1.0),
        ngram: 2,
        max_repetition: Some(0.3),
        action: Action::Stop,
    };
    let mut guard = Guard::new(config.clone()).unwrap();
    assert!((0..3).all(|i| guard.observe(i, 9.0) == Verdict::Fine));
    assert_eq!(guard.observe(3, 9.0), Verdict::Eager { mean: 9.0 });
    assert_eq!(guard.react(0.1), None);
    let mut guard = Guard::new(GuardConfig { action: Action::RaiseAlpha { factor: 3.0 }, ..config }).unwrap();
    let verdicts: Vec<Verdict> = [1, 2, 1, 2].into_iter().map(|token| guard.observe(token, 0.0)).collect();
    let Verdict::Repeats { share } = verdicts[3] else { panic!("{verdicts:?}") };
    assert!((share - 1.0 / 3.0).abs() < 1e-12);
    assert!((guard.react(0.1).unwrap() - 0.3).abs() < 1e-12);
    assert_eq!(guard.react(0.9), Some(1.0));
    // The window starts anew.
    assert_eq!(guard.observe(1, 9.0), Verdict::Fine);
    assert_eq!(repetition(&[1, 1, 1, 1], 1), 0.75);
    assert_eq!((repetition(&[1], 3), repetition(&[1, 2], 0)), (0.0, 0.0));
}

#[test]
fn calibration_says_why_it_found_nothing() {
    let text =
        |result: Result<_, Error>| result.map(|_: aligned_decoding::guard::Calibration| ()).unwrap_err().to_string();
    assert!(text(calibrate(&[], 1.0, |_| Ok(0.0))).contains("alphas"));
    assert!(text(calibrate(&[0.1, 1.0], 1.0, |_| Ok(2.0))).contains("budget"));
    assert!(text(calibrate(&[0.1], 1.0, |_| Ok(f64::NAN))).contains("measure"));
    let own = calibrate(&[0.1], 1.0, |_| Err(Error::closure("The measure", "no prompts".to_owned())));
    assert!(text(own).contains("no prompts"));
    // A measure that falls again below is not trusted: larger values of α must be within the budget too.
    let found = calibrate(&[0.1, 0.5, 1.0], 1.0, |a| Ok(if a == 0.5 { 2.0 } else { 0.0 })).unwrap();
    assert_eq!(found.alpha, 1.0);
}

#[test]
fn repeated_ngrams_are_found_as_the_definition_says() {
    let found = |text: &[u32], n| repeating(text, n).collect::<Vec<_>>();
    assert_eq!(found(&[1, 2, 3, 1, 2], 3), [3]);
    assert_eq!(found(&[1, 2, 3, 1, 2], 2), [3]);
    assert_eq!(found(&[1, 2], 1), [1, 2]);
    assert!(found(&[1], 3).is_empty());
    assert!(found(&[], 1).is_empty());
    assert!(found(&[1, 2], 0).is_empty());
}

#[test]
fn preference_data_survive_their_file_and_a_bad_line_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pairs.jsonl");
    let pair = TextPair { prompt: "a\nb".into(), chosen: "c".into(), rejected: "d \"e\"".into() };
    jsonl::write(&path, &[pair.clone(), pair.clone()]).unwrap();
    assert_eq!(jsonl::read::<TextPair>(&path).unwrap(), [pair.clone(), pair]);
    std::fs::write(&path, "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n\n{\"prompt\": 3}\n").unwrap();
    assert!(matches!(jsonl::read::<TextPair>(&path), Err(Error::Line { line: 3, .. })));
    assert!(matches!(jsonl::read::<TextPair>(&folder.path().join("none")), Err(Error::Io { .. })));
}
