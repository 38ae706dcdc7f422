//! Numbers from the specification and by hand.

use aligned_decoding::rules::{choose, cross_size};
use aligned_decoding::select::{Candidate, plausible, select_by_log_softmax};
use aligned_decoding::tensor::Seed;
use aligned_decoding::tree::{Tree, TreeConfig};
use aligned_decoding::{Rule, select};

fn logs(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

/// π_sft = (.70, .25, .05), r = (0, 1, 2), β = 1.
fn one_step() -> (Tree, Vec<f64>) {
    let reference = vec![vec![0.70f64.ln(), 0.25f64.ln(), 0.05f64.ln()]];
    let reward = vec![0.0, 1.0, 2.0];
    (Tree::new(3, reference, reward.clone()).unwrap(), reward)
}

#[test]
fn the_one_step_optimum_is_the_specifications() {
    let (tree, reward) = one_step();
    let optimum = tree.optimum(&reward, 1.0).unwrap();
    let close = |got: &[f64], expected: &[f64]| {
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?}, expected {expected:?}");
    };
    close(&[optimum.value().exp()], &[1.749023]);
    close(&tree.probabilities(&optimum), &[0.400223, 0.388543, 0.211234]);
    let advantages: Vec<f64> = (0..3).map(|y| optimum.advantage(&tree, y)).collect();
    close(&advantages, &[-0.559057, 0.440943, 1.440943]);
    close(&[tree.expected_reward(&optimum)], &[0.811011]);
    // With an infinite β the optimum is the reference.
    close(&[tree.expected_reward(&tree.optimum(&reward, 1e12).unwrap())], &[0.35]);
}

#[test]
fn the_one_step_choices_are_the_specifications() {
    let (tree, reward) = one_step();
    let policy = logs(&tree.probabilities(&tree.optimum(&reward, 1.0).unwrap()));
    let reference = logs(&[0.70, 0.25, 0.05]);
    let decide = |rule, alpha| choose(rule, &policy, &reference, alpha, 0.0).unwrap();
    assert_eq!(decide(Rule::GreedyDpo, 0.1).token, 0);
    for (alpha, token, candidates) in [(0.1, 2, 3), (0.6, 1, 2), (1.0, 0, 1)] {
        let choice = decide(Rule::Aad, alpha);
        assert_eq!((choice.token, choice.candidates, choice.top), (token, candidates, 0), "α = {alpha}");
        assert_eq!(select(&policy, |v| reference[v as usize], alpha).unwrap(), choice);
        let plain = select_by_log_softmax(&policy, &reference, alpha).unwrap();
        assert_eq!((plain.token, plain.candidates), (token, candidates));
        assert!((plain.gain - choice.gain).abs() < 1e-6);
    }
    // A(2) − A(0) = 2, the difference of the rewards.
    assert!((decide(Rule::Aad, 0.1).gain - 2.0).abs() < 1e-6);
}

#[test]
fn every_rule_chooses_what_its_formula_says() {
    let (policy, reference) = (logs(&[0.40, 0.38, 0.21, 0.01]), logs(&[0.70, 0.25, 0.048, 0.002]));
    // A = (−0.560, 0.419, 1.476, 1.609).
    let table = [
        (Rule::Aad, 2),
        (Rule::Contrastive, 2),
        (Rule::AadMix { w: 1.0 }, 2),
        (Rule::AadMix { w: 0.0 }, 0),
        // 0.3·A + 0.7·ℓ: −0.809, −0.552, −0.650.
        (Rule::AadMix { w: 0.3 }, 1),
        (Rule::GreedyDpo, 0),
        (Rule::GreedyRef, 0),
        (Rule::FilterOnly { greedy: true }, 0),
        (Rule::Eft { gamma: 0.0, temperature: 0.0 }, 0),
        (Rule::Eft { gamma: 1.0, temperature: 0.0 }, 0),
        // ℓ + 0.5 A: −1.196, −0.758, −0.823.
        (Rule::Eft { gamma: 1.5, temperature: 0.0 }, 1),
        (Rule::Eft { gamma: 2.0, temperature: 0.0 }, 2),
        (Rule::Eft { gamma: 1e6, temperature: 0.0 }, 3),
        (Rule::RatioTopK { k: 1 }, 0),
        (Rule::RatioTopK { k: 2 }, 1),
        (Rule::RatioTopK { k: 9 }, 3),
        (Rule::RatioTopP { p: 0.39 }, 0),
        (Rule::RatioTopP { p: 0.77 }, 1),
        (Rule::RatioTopP { p: 1.0 }, 3),
    ];
    for (rule, token) in table {
        assert_eq!(choose(rule, &policy, &reference, 0.1, 0.0).unwrap().token, token, "{rule:?}");
    }
    // Unfiltered, the rarest token wins.
    assert_eq!(choose(Rule::Aad, &policy, &reference, 0.0, 0.0).unwrap().token, 3);
}

#[test]
fn draws_invert_the_distribution_function() {
    let (policy, reference) = (logs(&[0.40, 0.40, 0.20]), logs(&[0.50, 0.25, 0.25]));
    let draw = |rule, uniform| choose(rule, &policy, &reference, 0.1, uniform).unwrap().token;
    // softmax(A) has the weights 0.8, 1.6, 0.8: shares 1/4, 1/2, 1/4.
    let aad = Rule::AadSample { tau: 1.0 };
    assert_eq!([0.0, 0.24, 0.26, 0.74, 0.76, 0.999].map(|u| draw(aad, u)), [0, 0, 1, 1, 2, 2]);
    assert_eq!(draw(Rule::AadSample { tau: 1e-9 }, 0.999), 1);
    let sample = |top_p, min_p| Rule::Sample { from: aligned_decoding::Side::Policy, temperature: 1.0, top_p, min_p };
    assert_eq!([0.39, 0.41, 0.81].map(|u| draw(sample(None, None), u)), [0, 1, 2]);
    assert_eq!(draw(sample(Some(0.7), None), 0.999), 1);
    assert_eq!(draw(sample(None, Some(0.6)), 0.999), 1);
    let filter = Rule::FilterOnly { greedy: false };
    assert_eq!([0.0, 0.34, 0.67].map(|u| draw(filter, u)), [0, 1, 2]);
    let from_reference =
        Rule::Sample { from: aligned_decoding::Side::Reference, temperature: 1.0, top_p: None, min_p: None };
    assert_eq!([0.49, 0.51, 0.76].map(|u| draw(from_reference, u)), [0, 1, 2]);
    // γ = 2: weights p²/q = 0.32, 0.64, 0.16.
    let eft = Rule::Eft { gamma: 2.0, temperature: 1.0 };
    assert_eq!([0.28, 0.29, 0.85, 0.86].map(|u| draw(eft, u)), [0, 1, 1, 2]);
}

#[test]
fn a_small_pairs_advantage_moves_a_large_model() {
    let (big, policy, reference) = (logs(&[0.6, 0.3, 0.1]), logs(&[0.2, 0.4, 0.4]), logs(&[0.4, 0.4, 0.2]));
    // A = (−ln 2, 0, ln 2).
    for (gamma, token) in [(0.0, 0), (1.2, 1), (4.0, 2)] {
        assert_eq!(cross_size(&big, &policy, &reference, gamma).unwrap(), token, "γ = {gamma}");
    }
    let forbidden = [f32::NEG_INFINITY, big[1], big[2]];
    assert_eq!(cross_size(&forbidden, &policy, &reference, 0.0).unwrap(), 1);
}

#[test]
fn equal_advantages_go_to_the_higher_logit_and_then_to_the_lower_id() {
    let decide = |z: [f32; 3], r: [f32; 3]| select(&z, |v| r[v as usize], 0.01).unwrap().token;
    assert_eq!(decide([1.0, 2.0, 2.0], [0.0, 1.0, 1.0]), 1);
    assert_eq!(decide([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]), 0);
    assert_eq!(decide([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]), 2);
}

#[test]
fn what_the_reference_forbids_counts_as_the_clip_and_is_counted() {
    let z = [1.0f32, 0.5, 0.5];
    let r = [1.0f32, f32::NEG_INFINITY, 0.0];
    let choice = select(&z, |v| r[v as usize], 0.1).unwrap();
    assert_eq!((choice.token, choice.clipped, choice.gain), (1, 1, 30.0));
    // Nothing is left to compare with: the policy's favourite.
    assert_eq!(select(&z, |_| f32::NEG_INFINITY, 0.1).unwrap().token, 0);
}

#[test]
fn a_forbidden_token_is_no_candidate() {
    let mut found = Vec::new();
    let z = [f32::NEG_INFINITY, 0.0, -1.0, f32::NEG_INFINITY];
    let top = plausible(&z, 0.0, &mut found).unwrap();
    assert_eq!((top.id, found.len()), (1, 2));
    assert_eq!(found[1], Candidate { id: 2, z: -1.0 });
}

/// Means over trees of the specification's protocol A.
fn protocol_a(beta: f64, sigma: f64, trees: u64) -> Vec<(&'static str, f64)> {
    let mut sums = [0.0; 9];
    for i in 0..trees {
        let seed = Seed::new(7).child("protocol").index(i);
        let tree = Tree::random(&TreeConfig::default(), seed).unwrap();
        let signal = tree.noisy_reward(sigma, seed);
        let policy = tree.optimum(&signal, beta).unwrap();
        let reward = |rule, alpha| tree.reward()[tree.decode(&policy, rule, alpha).unwrap()];
        let eft = |gamma| reward(Rule::Eft { gamma, temperature: 0.0 }, 0.1);
        let values = [
            reward(Rule::GreedyDpo, 0.1),
            reward(Rule::Aad, 0.01),
            reward(Rule::Aad, 0.1),
            reward(Rule::Aad, 0.3),
            eft(2.0),
            eft(4.0),
            tree.best_of(&policy, 2, &signal).unwrap(),
            tree.best_of(&policy, 50, &signal).unwrap(),
            tree.expected_reward(&policy),
        ];
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value / trees as f64);
    }
    let names = ["DPO", "AAD .01", "AAD .1", "AAD .3", "EFT 2", "EFT 4", "Bo2", "Bo50", "sample"];
    names.into_iter().zip(sums).collect()
}

#[test]
fn the_tree_table_is_the_specifications_within_sampling() {
    let table = [
        (4.0, 0.0, [0.73, 4.10, 3.43, 2.49, 1.54, 2.72, 1.51, 3.80, 0.73]),
        (4.0, 1.0, [0.70, 3.64, 3.11, 2.23, 1.49, 2.61, 1.45, 3.35, 0.74]),
        (2.0, 0.0, [1.57, 4.20, 3.78, 3.04, 2.82, 3.62, 2.20, 4.12, 1.32]),
        (1.0, 0.0, [2.93, 4.37, 4.11, 3.71, 3.71, 4.21, 3.17, 4.49, 2.49]),
        (1.0, 1.0, [2.95, 3.87, 3.77, 3.47, 3.54, 3.82, 3.02, 4.03, 2.44]),
        (0.5, 0.0, [3.98, 4.64, 4.49, 4.33, 4.42, 4.56, 4.07, 4.78, 3.63]),
    ];
    for (beta, sigma, expected) in table {
        let got = protocol_a(beta, sigma, 300);
        eprintln!("β = {beta}, σ = {sigma}: {got:.2?}");
        for ((name, got), expected) in got.iter().zip(expected) {
            // A mean of 300 trees whose rewards spread by about 2 has a standard error of 0.12; two such means differ by 3√2 of it
            // at most.
            assert!((got - expected).abs() < 0.5, "β = {beta}, σ = {sigma}, {name}: {got:.2}, expected {expected}");
        }
    }
}
