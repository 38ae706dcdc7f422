//! Rules on trees of which everything is known: the policy is the exact optimum of the preference objective.

use crate::experiment::{Body, Context, Experiment, Outcome, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Role, Spec, Test};
use aligned_decoding::Rule;
use aligned_decoding::tree::{Tree, TreeConfig};
use anyhow::Result;
use tensor::Seed;

/// β of the optimum, noise σ of the preference signal, key and words.
const SETTINGS: [(f64, f64, &str, &str); 6] = [
    (4.0, 0.0, "b4", "β = 4"),
    (4.0, 1.0, "b4-noisy", "β = 4, noisy"),
    (2.0, 0.0, "b2", "β = 2"),
    (1.0, 0.0, "b1", "β = 1"),
    (1.0, 1.0, "b1-noisy", "β = 1, noisy"),
    (0.5, 0.0, "b0.5", "β = 0.5"),
];
/// Trees of one seed.
const TREES: u64 = 30;

/// What an arm does with a tree.
#[derive(Clone, Copy)]
enum Way {
    Greedy(Rule, f64),
    Expected,
    Reference,
    BestOf(u32),
    Largest,
}

fn arms() -> Vec<(Arm, Way)> {
    let arm = |name: &str, label: &str, role, note: &str, way| (Arm::new(name, label, role, note), way);
    let eft = |gamma| Way::Greedy(Rule::Eft { gamma, temperature: 0.0 }, 0.0);
    vec![
        arm("dpo", "Greedy DPO", Role::Baseline, "", Way::Greedy(Rule::GreedyDpo, 1.0)),
        arm("sft", "Sampled SFT", Role::Reference, "expectation", Way::Reference),
        arm("sample", "Sampled DPO", Role::Baseline, "expectation", Way::Expected),
        arm("aad-0.01", "AAD, α = 0.01", Role::Method, "", Way::Greedy(Rule::Aad, 0.01)),
        arm("aad-0.1", "AAD, α = 0.1", Role::Method, "the paper's α", Way::Greedy(Rule::Aad, 0.1)),
        arm("aad-0.3", "AAD, α = 0.3", Role::Method, "", Way::Greedy(Rule::Aad, 0.3)),
        arm("eft-2", "EFT, γ = 2", Role::Baseline, "arg-max", eft(2.0)),
        arm("eft-4", "EFT, γ = 4", Role::Baseline, "arg-max", eft(4.0)),
        arm("best-2", "Best of 2", Role::Baseline, "picked by the true reward, expectation", Way::BestOf(2)),
        arm("best-50", "Best of 50", Role::Baseline, "picked by the true reward, expectation", Way::BestOf(50)),
        arm("best", "Best text", Role::Reference, "of all 625", Way::Largest),
    ]
}

pub(super) fn experiment() -> Experiment {
    let better = |name: &str, statement: &str, metric: &str, arms: (&str, &str)| {
        Claim::new(name, statement, "paper", metric, arms, Test::Superior(0.0))
    };
    Experiment {
        spec: Spec {
            name: "aad-trees".into(),
            krate: "aligned-decoding".into(),
            title: "Exact trees".into(),
            protocol: format!(
                "Trees of 5 tokens and depth 4 with a random reference and a random reward (additive per position, with noise); \
                 the policy is the exact optimum for that reward and β, or for the reward with N(0, 1) noise on it (noisy). The \
                 numbers are true rewards, means over {TREES} trees a seed."
            ),
            data: vec![],
            kind: Kind::Core,
            metrics: SETTINGS.iter().map(|s| Metric::new(s.2, s.3, "reward", Direction::Higher, 2)).collect(),
            arms: arms().into_iter().map(|(arm, _)| arm).collect(),
            claims: vec![
                better("weak", "AAD gets more reward than greedy DPO where β is large (4).", "b4", ("aad-0.1", "dpo")),
                better("noisy", "So it does with a noisy preference signal.", "b4-noisy", ("aad-0.1", "dpo")),
                better("strong", "So it does where β is small (0.5).", "b0.5", ("aad-0.1", "dpo")),
                better(
                    "best-of-2",
                    "AAD gets more reward than the best of 2 draws at β = 1.",
                    "b1",
                    ("aad-0.1", "best-2"),
                ),
                better("eft", "AAD gets more reward than EFT with γ = 2 at β = 1.", "b1", ("aad-0.1", "eft-2")),
            ],
            curves: vec![],
            seeds: (3, 10),
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: (0.5, 0.5),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let arms = arms();
    let mut sums = vec![[0.0; SETTINGS.len()]; arms.len()];
    for number in 0..TREES {
        context.check()?;
        let seed = Seed::new(seed * TREES + number).child("tree");
        let tree = Tree::random(&TreeConfig::default(), seed)?;
        // Where nothing is preferred, the reference is optimal.
        let reference = tree.optimum(&vec![0.0; tree.reward().len()], 1.0)?;
        for (i, (beta, noise, ..)) in SETTINGS.into_iter().enumerate() {
            let signal = match noise {
                0.0 => tree.reward().to_vec(),
                _ => tree.noisy_reward(noise, seed.child("signal")),
            };
            let policy = tree.optimum(&signal, beta)?;
            for (sums, (_, way)) in sums.iter_mut().zip(&arms) {
                sums[i] += match *way {
                    Way::Greedy(rule, alpha) => tree.reward()[tree.decode(&policy, rule, alpha)?],
                    Way::Expected => tree.expected_reward(&policy),
                    Way::Reference => tree.expected_reward(&reference),
                    Way::BestOf(n) => tree.best_of(&policy, n, tree.reward())?,
                    Way::Largest => tree.reward().iter().copied().fold(f64::NEG_INFINITY, f64::max),
                } / TREES as f64;
            }
        }
    }
    let outcome = |sums: &[f64]| {
        let mut outcome = Outcome::default();
        for (setting, sum) in SETTINGS.iter().zip(sums) {
            outcome.set(setting.2, *sum);
        }
        outcome
    };
    Ok(arms.into_iter().zip(&sums).map(|((arm, _), sums)| (arm.name, outcome(sums))).collect())
}
