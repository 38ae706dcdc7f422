//! Reward against likelihood: AAD over α beside EFT over γ.

use super::super::sentiment::DATA;
use super::pair::{Recipe, trained};
use super::sentiment::{Judged, NLL, ORACLE, REPEATED, VADER, settings};
use crate::experiment::{Body, Context, Experiment, Outcome, Outcomes};
use crate::spec::{Arm, Curve, Direction, Kind, Metric, Mode, Role, Spec};
use aligned_decoding::{ModelPair, Rule, generate};
use anyhow::Result;

const RATED: &str = "rated";
const RATED_NLL: &str = "rated-nll";
const BY_VADER: &str = "by-vader";
const ALPHAS: [f64; 8] = [0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.6, 1.0];
const GAMMAS: [f64; 4] = [1.0, 1.5, 2.0, 4.0];
const WEIGHTS: [f64; 4] = [0.0, 0.3, 0.6, 1.0];

pub(super) fn experiment() -> Experiment {
    let frontier = |name: &str, title: &str, y: &str| {
        Curve::new(name, title, "negative log-likelihood under the reference (nats/token)", y, 3).over(RATED_NLL)
    };
    Experiment {
        spec: Spec {
            name: "aad-frontier".into(),
            krate: "aligned-decoding".into(),
            title: "Reward against likelihood".into(),
            protocol: "The pairs, prompts and judges of `aad-sentiment`, all 80 prompts of a training seed together (quick: as there). \
                       AAD with α from 1 to 0, EFT with γ from 1 to 4, and our mixture of A and log-probability with α = 0.1. A point \
                       further up and further left is better. The table shows AAD at α = 0.1, EFT at γ = 2, the mixture at 0.6."
                .into(),
            data: vec!["smollm2".into(), DATA.into()],
            kind: Kind::FullOnly,
            metrics: vec![
                Metric::new(ORACLE, "judge's rating", "", Direction::Higher, 3),
                Metric::new(VADER, "VADER", "", Direction::Higher, 3),
                Metric::new(NLL, "NLL under the reference", "nats/token", Direction::Lower, 2),
                Metric::new(REPEATED, "repeated 3-grams", "share", Direction::Lower, 3),
            ],
            arms: vec![
                Arm::new("aad", "AAD over α", Role::Method, "α = 1, 0.6, 0.3, 0.2, 0.1, 0.05, 0.01, 0"),
                Arm::new("eft", "EFT over γ", Role::Baseline, "γ = 1, 1.5, 2, 4, arg-max"),
                Arm::new("mix", "Mixture over w", Role::Method, "w A + (1 − w) ℓ, α = 0.1, w = 0, 0.3, 0.6, 1 (ours)"),
            ],
            claims: vec![],
            curves: vec![
                frontier(RATED, "Judge's rating against likelihood", "judge's rating"),
                frontier(BY_VADER, "VADER against likelihood", "VADER"),
            ],
            seeds: (1, 3),
            seeds_for_verdict: 3,
            threads: 0,
            seconds_per_seed: (25.0, 200.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let (recipe, tokens) = match context.mode {
        Mode::Quick => (Recipe::quick(seed), 8),
        Mode::Full => (Recipe::full(seed), 20),
    };
    let trained = trained(context, recipe)?;
    let pair = ModelPair::lora(&trained.lm.model, trained.dpo.view(), Some(trained.sft.view()))?;
    let line = |rules: Vec<(f64, Rule, f64)>, shown: f64| -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let mut points = Vec::new();
        for (setting, rule, alpha) in rules {
            context.check()?;
            let config = settings(&trained, rule, alpha, tokens, seed);
            let judged = Judged::new(&trained, &generate(&pair, &trained.prompts, &config)?)?.outcome();
            points.push((setting, judged.metrics[NLL], judged.metrics[ORACLE], judged.metrics[VADER]));
            if setting == shown {
                outcome.metrics = judged.metrics;
            }
        }
        for (setting, nll, oracle, vader) in points {
            outcome.point(RATED_NLL, setting, nll);
            outcome.point(RATED, setting, oracle);
            outcome.point(BY_VADER, setting, vader);
        }
        let shown = [ORACLE, VADER, NLL, REPEATED];
        outcome.metrics.retain(|metric, _| shown.contains(&metric.as_str()));
        Ok(outcome)
    };
    Ok(vec![
        ("aad".into(), line(ALPHAS.iter().map(|&a| (a, Rule::Aad, a)).collect(), 0.1)?),
        (
            "eft".into(),
            line(GAMMAS.iter().map(|&gamma| (gamma, Rule::Eft { gamma, temperature: 0.0 }, 0.1)).collect(), 2.0)?,
        ),
        ("mix".into(), line(WEIGHTS.iter().map(|&w| (w, Rule::AadMix { w }, 0.1)).collect(), 0.6)?),
    ])
}
