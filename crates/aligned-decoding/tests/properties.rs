//! What must hold for any logits (the specification's checks 1 to 5).

use aligned_decoding::rules::choose;
use aligned_decoding::select::{log_softmax, plausible, plausible_two_pass, select_array, select_by_log_softmax};
use aligned_decoding::tensor::Seed;
use aligned_decoding::tensor::ndarray::Array1;
use aligned_decoding::tree::{Tree, TreeConfig};
use aligned_decoding::{Choice, Rule, select};
use proptest::prelude::*;

const EFT: fn(f64) -> Rule = |gamma| Rule::Eft { gamma, temperature: 0.0 };

/// Two rows of logits of one length. Quarters, so that sums with other quarters are exact and ties happen.
fn logits() -> impl Strategy<Value = (Vec<f32>, Vec<f32>)> {
    (2usize..150).prop_flat_map(|n| {
        let row = || proptest::collection::vec((-40i32..40).prop_map(|q| q as f32 / 4.0), n);
        (row(), row())
    })
}

fn aad(z: &[f32], r: &[f32], alpha: f64) -> Choice {
    select(z, |v| r[v as usize], alpha).unwrap()
}

fn unique_maximum(z: &[f32]) -> bool {
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    z.iter().filter(|z| **z == max).count() == 1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_scan_is_the_two_pass_form((z, _) in logits(), alpha in 0.0..=1.0f64, forbidden in proptest::collection::vec(0usize..150, 0..20)) {
        let mut z = z;
        let n = z.len();
        for i in &forbidden {
            z[i % n] = f32::NEG_INFINITY;
        }
        let (mut a, mut b) = (Vec::new(), Vec::new());
        match (plausible(&z, alpha, &mut a), plausible_two_pass(&z, alpha, &mut b)) {
            (Ok(top), Ok(expected)) => {
                prop_assert_eq!(top, expected);
                prop_assert_eq!(a, b);
            }
            (Err(a), Err(b)) => prop_assert_eq!(a.to_string(), b.to_string()),
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn alpha_1_is_greedy_decoding_of_the_policy((z, r) in logits()) {
        prop_assume!(unique_maximum(&z));
        let greedy = choose(Rule::GreedyDpo, &z, &r, 0.1, 0.0).unwrap();
        prop_assert_eq!(aad(&z, &r, 1.0).token, greedy.token);
        prop_assert_eq!(choose(EFT(1.0), &z, &r, 0.1, 0.0).unwrap().token, greedy.token);
    }

    #[test]
    fn equal_models_decode_greedily((z, _) in logits(), alpha in 0.0..=1.0f64, shift in -20i32..20) {
        let r: Vec<f32> = z.iter().map(|z| z + shift as f32).collect();
        let choice = aad(&z, &r, alpha);
        prop_assert_eq!(choice.token, choice.top);
        prop_assert_eq!(choice.gain, 0.0);
    }

    #[test]
    fn a_huge_gamma_is_the_unfiltered_ratio((z, r) in logits()) {
        prop_assert_eq!(choose(EFT(1e6), &z, &r, 0.1, 0.0).unwrap().token, aad(&z, &r, 0.0).token);
    }

    #[test]
    fn constants_change_nothing((z, r) in logits(), alpha in 0.0..=1.0f64, a in -20i32..20, b in -20i32..20) {
        let moved = |z: &[f32], by: i32| z.iter().map(|z| z + by as f32 / 4.0).collect::<Vec<_>>();
        for rule in [Rule::Aad, Rule::AadMix { w: 0.4 }, EFT(2.0), Rule::GreedyDpo, Rule::RatioTopK { k: 5 }] {
            let expected = choose(rule, &z, &r, alpha, 0.0).unwrap();
            let found = choose(rule, &moved(&z, a), &moved(&r, b), alpha, 0.0).unwrap();
            prop_assert_eq!(found.candidates, expected.candidates);
            // Scores that mix both are of sums that round: compare tokens only where they are exact.
            if rule != (Rule::AadMix { w: 0.4 }) {
                prop_assert_eq!(found.token, expected.token);
            }
        }
    }

    #[test]
    fn a_permuted_vocabulary_permutes_the_answer((z, r) in logits(), alpha in 0.0..=1.0f64, seed in 0u64..1000) {
        let mut order: Vec<usize> = (0..z.len()).collect();
        order.sort_by_key(|&i| Seed::new(seed).index(i as u64).value());
        let permuted = |z: &[f32]| order.iter().map(|&i| z[i]).collect::<Vec<_>>();
        let (choice, expected) = (aad(&permuted(&z), &permuted(&r), alpha), aad(&z, &r, alpha));
        let (found, wanted) = (order[choice.token as usize], expected.token as usize);
        // Ties go by id, which the permutation changes: the same logits then.
        prop_assert_eq!((z[found], r[found]), (z[wanted], r[wanted]));
        prop_assert_eq!(choice.candidates, expected.candidates);
    }

    #[test]
    fn raw_logits_give_what_log_softmax_gives((z, r) in logits(), alpha in 0.001..=1.0f64) {
        // A threshold that a logit meets exactly may fall either way: these logits are quarters.
        prop_assume!((alpha.ln() * 4.0 - (alpha.ln() * 4.0).round()).abs() > 1e-6 && alpha < 0.999);
        let (raw, plain) = (aad(&z, &r, alpha), select_by_log_softmax(&z, &r, alpha).unwrap());
        prop_assert_eq!(raw.candidates, plain.candidates);
        let (l, m) = (log_softmax(&z), log_softmax(&r));
        let advantage = |token: u32| l[token as usize] - m[token as usize];
        // Exact ties of raw logits may be parted by the rounding of the normalizers.
        prop_assert!((advantage(raw.token) - advantage(plain.token)).abs() < 1e-9);
        prop_assert!((raw.gain - plain.gain).abs() < 1e-9);
        let arrays = select_array(Array1::from(z.clone()).view(), Array1::from(r.clone()).view(), alpha).unwrap();
        prop_assert_eq!(arrays, raw);
    }

    #[test]
    fn a_larger_alpha_keeps_a_subset_and_never_raises_the_advantage((z, r) in logits(), a in 0.0..=1.0f64, b in 0.0..=1.0f64) {
        let (small, large) = (a.min(b), a.max(b));
        let (mut wide, mut narrow) = (Vec::new(), Vec::new());
        plausible(&z, small, &mut wide).unwrap();
        plausible(&z, large, &mut narrow).unwrap();
        prop_assert!(narrow.iter().all(|c| wide.contains(c)));
        prop_assert!(aad(&z, &r, large).gain <= aad(&z, &r, small).gain + 1e-12);
    }

    #[test]
    fn a_step_gains_advantage_and_loses_at_most_ln_1_over_alpha((z, r) in logits(), alpha in 0.001..=1.0f64) {
        let choice = aad(&z, &r, alpha);
        prop_assert!(choice.gain >= 0.0);
        let l = log_softmax(&z);
        let max = l.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        prop_assert!(l[choice.token as usize] >= max + alpha.ln() - 1e-9);
    }

    #[test]
    fn advantages_of_the_optimum_telescope_to_the_reward(seed in 0u64..10_000, beta in 0.2..5.0f64) {
        let tree = Tree::random(&TreeConfig { depth: 3, ..TreeConfig::default() }, Seed::new(seed)).unwrap();
        let policy = tree.optimum(tree.reward(), beta).unwrap();
        for y in 0..tree.reward().len() {
            let sum = beta * policy.advantage(&tree, y);
            prop_assert!((sum - (tree.reward()[y] - policy.value())).abs() < 1e-9);
        }
        prop_assert!((tree.probabilities(&policy).iter().sum::<f64>() - 1.0).abs() < 1e-9);
        // Token by token it is the gain in soft value.
        let (l, soft) = (policy.log_probs(0).unwrap(), policy.soft_values(1).unwrap());
        let start = tree.optimum(tree.reward(), 1e12).unwrap();
        for v in 0..5 {
            let advantage = beta * (l[v] - start.log_probs(0).unwrap()[v]);
            prop_assert!((advantage - (soft[v] - policy.value())).abs() < 1e-6);
        }
    }
}

#[test]
fn for_an_additive_reward_and_a_factorised_reference_unfiltered_aad_is_optimal() {
    for seed in 0..60 {
        let config = TreeConfig { noise: 0.0, factorised: true, ..TreeConfig::default() };
        let tree = Tree::random(&config, Seed::new(seed)).unwrap();
        let best = tree.reward().iter().copied().fold(f64::NEG_INFINITY, f64::max);
        for beta in [0.3, 1.0, 4.0] {
            let policy = tree.optimum(tree.reward(), beta).unwrap();
            let found = tree.reward()[tree.decode(&policy, Rule::Aad, 0.0).unwrap()];
            assert!((found - best).abs() < 1e-6, "seed {seed}, β = {beta}: {found} of {best}");
        }
    }
}

#[test]
fn with_a_reference_that_depends_on_the_text_aad_beats_greedy_decoding_on_average_but_not_always() {
    let (mut gain, mut optimal, trees) = (0.0, 0, 100);
    for seed in 0..trees {
        let tree = Tree::random(&TreeConfig { noise: 0.0, ..TreeConfig::default() }, Seed::new(seed)).unwrap();
        let policy = tree.optimum(tree.reward(), 2.0).unwrap();
        let reward = |rule, alpha| tree.reward()[tree.decode(&policy, rule, alpha).unwrap()];
        let best = tree.reward().iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let unfiltered = reward(Rule::Aad, 0.0);
        optimal += u32::from((unfiltered - best).abs() < 1e-9);
        gain += (unfiltered - reward(Rule::GreedyDpo, 0.0)) / trees as f64;
    }
    assert!(gain > 1.0, "{gain}");
    assert!(optimal < trees as u32, "the specification says that it isn't guaranteed");
}

#[test]
fn best_of_one_is_a_draw_and_more_draws_are_better() {
    let tree = Tree::random(&TreeConfig::default(), Seed::new(3)).unwrap();
    let policy = tree.optimum(tree.reward(), 2.0).unwrap();
    let best = |n| tree.best_of(&policy, n, tree.reward()).unwrap();
    assert!((best(1) - tree.expected_reward(&policy)).abs() < 1e-12);
    assert!(best(2) > best(1) && best(50) > best(2));
    // Draws agree with the sum.
    let draws = 4000;
    let rule = Rule::Sample { from: aligned_decoding::Side::Policy, temperature: 1.0, top_p: None, min_p: None };
    let drawn = (0..draws).map(|i| tree.reward()[tree.sample(&policy, rule, 0.1, Seed::new(9).index(i)).unwrap()]);
    let mean = drawn.sum::<f64>() / draws as f64;
    // The rewards spread by less than 3: five standard errors.
    assert!((mean - tree.expected_reward(&policy)).abs() < 5.0 * 3.0 / (draws as f64).sqrt());
}
