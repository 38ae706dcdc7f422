//! What S-Adam's settings do, and its other controls: run by name.

use super::curves::{GRID, QAT2, area, at};
use super::data::{Data, Draw};
use super::nets::Shape;
use super::train::{Plan, Rule, train};
use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Role, Spec, Test};
use anyhow::{Context as _, Result};
use sam_opt::SAdamConfig;
use sam_opt::s_adam::{EpsMode, LgiKind, ProbeNorm};

/// The learning rate of the main metric, of every arm: the one at which the paper-style comparison shows an effect.
const RATE: f64 = 1e-2;

/// Key, words, role and rule of every arm.
fn rules() -> Vec<(&'static str, &'static str, Role, Rule)> {
    use Role::{Ablation, Baseline, Method};
    let variant = |config| Rule::SAdam(config);
    let base = SAdamConfig::default;
    let k = |k_directions| variant(SAdamConfig { k_directions, ..base() });
    let sigma = |sigma| variant(SAdamConfig { sigma, ..base() });
    let lambda = |lambda| variant(SAdamConfig { lambda, ..base() });
    let kind = |lgi, lambda| variant(SAdamConfig { lgi, lambda, ..base() });
    vec![
        ("adamw", "AdamW", Baseline, Rule::AdamW),
        ("cosine", "AdamW, cosine decay", Baseline, Rule::Cosine),
        ("adam", "Adam", Baseline, Rule::Adam),
        ("sgd", "SGD with momentum", Baseline, Rule::Sgd),
        ("rmsprop", "RMSprop", Baseline, Rule::RmsProp),
        ("prox-sgd", "Prox-SGD", Baseline, Rule::ProxSgd),
        ("s-adam", "S-Adam", Method, Rule::s_adam()),
        ("random", "Random damping", Baseline, kind(LgiKind::RandomNull, 2.0)),
        ("k 4", "S-Adam, k 4", Ablation, k(4)),
        ("k 8", "S-Adam, k 8", Ablation, k(8)),
        ("k 1", "S-Adam, k 1", Ablation, k(1)),
        ("sigma 1e-4", "S-Adam, σ 0.0001", Ablation, sigma(1e-4)),
        ("sigma 1e-3", "S-Adam, σ 0.001", Ablation, sigma(1e-3)),
        ("sigma 0.1", "S-Adam, σ 0.1", Ablation, sigma(0.1)),
        ("lambda 0.5", "S-Adam, λ 0.5", Ablation, lambda(0.5)),
        ("lambda 1", "S-Adam, λ 1", Ablation, lambda(1.0)),
        ("lambda 4", "S-Adam, λ 4", Ablation, lambda(4.0)),
        ("global", "S-Adam, global norm", Ablation, variant(SAdamConfig { probe_norm: ProbeNorm::Global, ..base() })),
        (
            "official eps",
            "S-Adam, official ε",
            Ablation,
            variant(SAdamConfig { eps_mode: EpsMode::Official, ..base() }),
        ),
        ("per group", "S-Adam, an LGI a layer", Ablation, variant(SAdamConfig { per_group_lgi: true, ..base() })),
        ("every 4", "S-Adam, probes every 4 steps", Ablation, variant(SAdamConfig { probe_every: 4, ..base() })),
        ("damped decay", "S-Adam, damped decay", Ablation, variant(SAdamConfig { damp_weight_decay: true, ..base() })),
        ("residual", "Residual form, λ 1", Ablation, kind(LgiKind::Residual, 1.0)),
        ("residual 2", "Residual form, λ 2", Ablation, kind(LgiKind::Residual, 2.0)),
        ("kink", "Kink form, λ 1", Ablation, kind(LgiKind::Kink, 1.0)),
    ]
}

pub(super) fn experiment() -> Experiment {
    use Direction::{Higher, Neither};
    let mut metrics = vec![
        Metric::new("accuracy", &format!("accuracy at {RATE}"), "%", Higher, 2),
        Metric::new("area", "mean accuracy over log η", "%", Higher, 2),
        Metric::new("best", "best of the five rates (on the test digits)", "%", Neither, 2),
    ];
    metrics.extend(
        GRID.iter()
            .filter(|lr| **lr != RATE)
            .map(|lr| Metric::new(&at(*lr), &format!("accuracy at {lr}"), "%", Higher, 2)),
    );
    metrics.extend([
        Metric::new("lgi", "mean LGI", "", Neither, 3),
        Metric::new("damping", "mean damping", "", Neither, 3),
    ]);
    let arms = rules().into_iter().map(|(key, label, role, _)| Arm::new(key, label, role, "not tuned")).collect();
    let against = |name: &str, statement: &str, arms: (&str, &str)| Claim {
        name: format!("s-adam-{name}"),
        statement: statement.into(),
        source: "ours".into(),
        metric: "accuracy".into(),
        arm: arms.0.into(),
        reference: arms.1.into(),
        test: Test::Descriptive,
    };
    Experiment {
        spec: Spec {
            name: "s-adam-ablations".into(),
            krate: "sam-opt".into(),
            title: "S-Adam, settings and controls".into(),
            protocol: format!(
                "The 2-bit protocol of \"{}\" with other settings of S-Adam, one at a time, and with further baselines. \
                 Every arm runs at five learning rates; nothing is tuned, so look at the whole curve. \"Random damping\" \
                 draws the LGI from the law that two probes have on a smooth loss, without probing.",
                QAT2.name
            ),
            data: vec!["mnist-10k".into()],
            kind: Kind::ByName,
            metrics,
            arms,
            claims: vec![
                against(
                    "random",
                    "S-Adam against a random damping of the same law on smooth losses.",
                    ("s-adam", "random"),
                ),
                against("k8", "Eight probes against two.", ("k 8", "s-adam")),
                against("cosine", "S-Adam against AdamW with cosine decay.", ("s-adam", "cosine")),
            ],
            curves: vec![],
            seeds: (1, 3),
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: (35.0, 35.0),
        },
        body: Body::PerArm(run),
    }
}

fn run(context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    let (.., rule) = rules().into_iter().find(|(key, ..)| *key == arm).with_context(|| format!("no arm \"{arm}\""))?;
    let data = Data::evaluated(QAT2.draw, seed, context.device)?;
    let mut outcome = Outcome::default();
    let mut points = Vec::new();
    for lr in GRID {
        let trained = train(context, &QAT2.plan, &data, &rule, lr, seed, false)?;
        points.push((lr, trained.score.accuracy));
        if lr == RATE {
            outcome.set("accuracy", trained.score.accuracy);
            outcome.set("damping", trained.damping);
            if let Some(lgi) = trained.lgi {
                outcome.set("lgi", lgi);
            }
        } else {
            outcome.set(&at(lr), trained.score.accuracy);
        }
    }
    if let Some(area) = area(&points) {
        outcome.set("area", area);
    }
    outcome.set("best", points.iter().map(|point| point.1).fold(0.0, f64::max));
    Ok(outcome)
}

/// The paper's kind of network, small.
const CNN: Plan = Plan { shape: Shape::Cnn { bits: 2, dropout: 0.25 }, batch: 64, epochs: 6 };
const CNN_DRAW: Draw = Draw { train: 2500, label_noise: 0.0 };
/// Learning rate of every arm on it [specification: measured].
const CNN_RATE: f64 = 3e-3;

fn cnn_rules() -> Vec<(&'static str, &'static str, Role, Rule)> {
    let base = SAdamConfig::default;
    vec![
        ("adamw", "AdamW", Role::Baseline, Rule::AdamW),
        ("s-adam", "S-Adam", Role::Method, Rule::s_adam()),
        ("fresh masks", "S-Adam, fresh masks", Role::Ablation, Rule::SAdam(SAdamConfig { sync_rng: false, ..base() })),
        ("k 8", "S-Adam, k 8", Role::Ablation, Rule::SAdam(SAdamConfig { k_directions: 8, ..base() })),
        ("constant 0.45", "Constant damping 0.45", Role::Baseline, Rule::constant(0.45)),
        ("constant 0.2", "Constant damping 0.2", Role::Baseline, Rule::constant(0.2)),
    ]
}

pub(super) fn cnn() -> Experiment {
    use Direction::{Higher, Neither};
    let arms = cnn_rules().into_iter().map(|(key, label, role, _)| Arm::new(key, label, role, "learning rate 0.003"));
    let descriptive = |name: &str, statement: &str, arms: (&str, &str)| Claim {
        name: format!("s-adam-cnn-{name}"),
        statement: statement.into(),
        source: "ours".into(),
        metric: "accuracy".into(),
        arm: arms.0.into(),
        reference: arms.1.into(),
        test: Test::Descriptive,
    };
    Experiment {
        spec: Spec {
            name: "s-adam-cnn".into(),
            krate: "sam-opt".into(),
            title: "S-Adam on a small quantized network with dropout".into(),
            protocol: "2,500 MNIST digits pooled to 14×14; convolution 16, pool, convolution 32, pool, linear, with 2-bit \
                weights and activations and dropout 0.25; batch 64, 6 epochs, learning rate 0.003 for every arm. \"Fresh \
                masks\" draws new dropout masks for the probes, as the official code does, so that its LGI measures dropout."
                .into(),
            data: vec!["mnist-10k".into()],
            kind: Kind::ByName,
            metrics: vec![
                Metric::new("accuracy", "accuracy", "%", Higher, 2),
                Metric::new("lgi", "mean LGI", "", Neither, 3),
                Metric::new("damping", "mean damping", "", Neither, 3),
            ],
            arms: arms.collect(),
            claims: vec![
                descriptive("adamw", "S-Adam against AdamW at the same rate.", ("s-adam", "adamw")),
                descriptive("masks", "One dropout mask a step against fresh ones.", ("s-adam", "fresh masks")),
            ],
            curves: vec![],
            seeds: (1, 3),
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: (20.0, 20.0),
        },
        body: Body::PerArm(run_cnn),
    }
}

fn run_cnn(context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    let found = cnn_rules().into_iter().find(|(key, ..)| *key == arm);
    let (.., rule) = found.with_context(|| format!("no arm \"{arm}\""))?;
    let data = Data::evaluated(CNN_DRAW, seed, context.device)?;
    let trained = train(context, &CNN, &data, &rule, CNN_RATE, seed, false)?;
    let mut outcome = Outcome::default();
    outcome.set("accuracy", trained.score.accuracy);
    outcome.set("damping", trained.damping);
    if let Some(lgi) = trained.lgi {
        outcome.set("lgi", lgi);
    }
    Ok(outcome)
}
