//! Protocols A (quantization-aware training) and B (small noisy batches) of the specification `sam-opt-s-adam`: every
//! optimizer over a grid of learning rates.

use super::super::search::{Candidate, Tuned, run_search};
use super::data::{Data, Draw};
use super::nets::Shape;
use super::train::{Plan, Rule, Trained, train};
use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The learning rates of every arm [specification].
pub(super) const GRID: [f64; 5] = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2];
/// Those of a quick run.
const QUICK: [f64; 2] = [3e-3, 1e-2];
/// The data set, as the search's one fold.
const FOLD: &str = "mnist-10k";
/// Arms with a search, in the tables' order.
const ARMS: [&str; 5] = ["adamw", "s-adam", "residual", "constant", "sam"];

/// One of the three experiments.
pub(super) struct Curve {
    pub(super) name: &'static str,
    pub(super) plan: Plan,
    pub(super) draw: Draw,
    /// A learning rate of the grid that is too high for AdamW [specification: measured; with 4 bits the search].
    too_high: f64,
    tuned: &'static str,
}

pub(super) static NOISY: Curve = Curve {
    name: "noisy-batches",
    plan: Plan { shape: Shape::Mlp { bits: None }, batch: 8, epochs: 3 },
    draw: Draw { train: 1500, label_noise: 0.4 },
    too_high: 1e-2,
    tuned: include_str!("../../../../tuned/noisy-batches.json"),
};

pub(super) static QAT2: Curve = Curve {
    name: "qat-2bit",
    plan: Plan { shape: Shape::Mlp { bits: Some(2) }, batch: 64, epochs: 6 },
    draw: Draw { train: 2500, label_noise: 0.0 },
    too_high: 1e-2,
    tuned: include_str!("../../../../tuned/qat-2bit.json"),
};

pub(super) static QAT4: Curve = Curve {
    name: "qat-4bit",
    plan: Plan { shape: Shape::Mlp { bits: Some(4) }, batch: 64, epochs: 6 },
    draw: Draw { train: 2500, label_noise: 0.0 },
    too_high: 3e-2,
    tuned: include_str!("../../../../tuned/qat-4bit.json"),
};

/// A learning rate of an arm, for the search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rate {
    arm: String,
    lr: f64,
}

impl Candidate for Rate {
    fn name(&self) -> &'static str {
        "learning rate"
    }

    fn varied(&self) -> String {
        self.lr.to_string()
    }
}

/// Accuracies at a learning rate, as a metric's name.
pub(super) fn at(lr: f64) -> String {
    format!("accuracy {lr}")
}

/// Mean of the accuracies over the logarithm of the learning rate, by the trapezoidal rule; in percent.
pub(super) fn area(points: &[(f64, f64)]) -> Option<f64> {
    let (first, last) = (points.first()?, points.last()?);
    let under = |pair: &[(f64, f64)]| 0.5 * (pair[0].1 + pair[1].1) * (pair[1].0 / pair[0].0).ln();
    let sum: f64 = points.windows(2).map(under).sum();
    (last.0 > first.0).then(|| sum / (last.0 / first.0).ln())
}

/// Runs of this process, so that arms that need each other's mean damping don't train twice.
type Runs = HashMap<(&'static str, &'static str, bool, u64, u64), Trained>;
static RUNS: LazyLock<Mutex<Runs>> = LazyLock::new(Mutex::default);

impl Curve {
    fn data(&self, context: &Context, search: bool, seed: u64) -> Result<Data> {
        let data = if search { Data::searched } else { Data::evaluated };
        data(self.draw, seed, context.device)
    }

    /// Trains an arm at a learning rate. Runs are kept for the arm's own other metrics and for the constant arm.
    fn trained(&self, context: &Context, arm: &str, data: &Data, lr: f64, seed: u64, search: bool) -> Result<Trained> {
        let arm = ARMS.into_iter().find(|known| *known == arm).with_context(|| format!("no arm \"{arm}\""))?;
        let key = (self.name, arm, search, lr.to_bits(), seed);
        let known = RUNS.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if let Some(known) = known {
            return Ok(known);
        }
        let rule = self.rule(context, arm, data, lr, seed, search)?;
        let run = train(context, &self.plan, data, &rule, lr, seed, false)?;
        RUNS.lock().unwrap_or_else(PoisonError::into_inner).insert(key, run);
        Ok(run)
    }

    fn rule(&self, context: &Context, arm: &str, data: &Data, lr: f64, seed: u64, search: bool) -> Result<Rule> {
        Ok(match arm {
            "adamw" => Rule::AdamW,
            "s-adam" => Rule::s_adam(),
            "residual" => Rule::residual(),
            // The mean damping of S-Adam on the same data, start, batches and learning rate.
            "constant" => Rule::constant(self.trained(context, "s-adam", data, lr, seed, search)?.damping),
            "sam" => Rule::Sam,
            other => bail!("no arm \"{other}\""),
        })
    }

    /// A run of the arm whose mean step is as long as S-Adam's at its chosen rate, watched for chatter.
    fn watched(&self, context: &Context, arm: &str, data: &Data, reference: f64, seed: u64) -> Result<Trained> {
        let effective = reference * self.trained(context, "s-adam", data, reference, seed, false)?.damping;
        let lr = match arm {
            "s-adam" | "constant" => reference,
            "residual" => effective / self.trained(context, arm, data, reference, seed, false)?.damping,
            _ => effective,
        };
        let rule = self.rule(context, arm, data, lr, seed, false)?;
        train(context, &self.plan, data, &rule, lr, seed, true)
    }

    fn run(&self, context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
        let tuned = Tuned::<Rate>::parse(self.tuned)?;
        tuned.check_seed(seed)?;
        let data = self.data(context, false, seed)?;
        let full = context.mode == Mode::Full;
        let grid: &[f64] = if full { &GRID } else { &QUICK };
        let trained = |lr| self.trained(context, arm, &data, lr, seed, false);
        let mut outcome = Outcome::default();
        let mut points = Vec::new();
        for &lr in grid {
            let accuracy = trained(lr)?.score.accuracy;
            outcome.set(&at(lr), accuracy);
            points.push((lr, accuracy));
        }
        if let (true, Some(area)) = (full, area(&points)) {
            outcome.set("area", area);
        }
        let own = trained(tuned.chosen(arm, FOLD)?.lr)?;
        outcome.set("accuracy", own.score.accuracy);
        outcome.set("damping", own.damping);
        if let Some(lgi) = own.lgi {
            outcome.set("lgi", lgi);
        }
        let reference = tuned.chosen("s-adam", FOLD)?.lr;
        outcome.set("paired", trained(reference)?.score.accuracy);
        if full && let Some(chatter) = self.watched(context, arm, &data, reference, seed)?.chatter {
            outcome.set("flips", chatter.flips);
            outcome.set("cosine", chatter.cosine);
            if let Some(oscillation) = chatter.oscillation {
                outcome.set("oscillation", oscillation);
            }
        }
        Ok(outcome)
    }
}

/// Searches the learning rate of every arm on a fifth of the training digits.
pub(super) fn search(context: &Context, curve: &'static Curve) -> Result<String> {
    let grid = |arm: &'static str| (arm, GRID.iter().map(|&lr| Rate { arm: arm.into(), lr }).collect());
    let arms: Vec<(&str, Vec<Rate>)> = ARMS.into_iter().map(grid).collect();
    run_search(curve.name, &arms, &[FOLD], |rate, _, seed| {
        let data = curve.data(context, true, seed)?;
        Ok(curve.trained(context, &rate.arm, &data, rate.lr, seed, true)?.score)
    })
}

fn metrics(curve: &Curve) -> Vec<Metric> {
    use Direction::{Higher, Lower, Neither};
    let mut metrics = vec![
        Metric::new("accuracy", "accuracy at the chosen rate", "%", Higher, 2),
        Metric::new("area", "mean accuracy over log η", "%", Higher, 2),
        Metric::new("paired", "accuracy at S-Adam's rate", "%", Higher, 2),
    ];
    metrics.extend(GRID.iter().map(|lr| Metric::new(&at(*lr), &format!("accuracy at {lr}"), "%", Higher, 2)));
    metrics.extend([
        Metric::new("lgi", "mean LGI", "", Neither, 3),
        Metric::new("damping", "mean damping", "", Neither, 3),
        Metric::new("flips", "updates that flip their sign", "%", Lower, 2),
        Metric::new("cosine", "cosine of successive gradients", "", Neither, 3),
    ]);
    if matches!(curve.plan.shape, Shape::Mlp { bits: Some(_) }) {
        metrics.push(Metric::new("oscillation", "oscillating weights", "%", Lower, 2));
    }
    metrics
}

fn arms(curve: &Curve) -> Vec<Arm> {
    let tuned = Tuned::<Rate>::parse(curve.tuned).ok();
    let note = |arm: &str, text: &str| {
        let chosen = tuned.as_ref().and_then(|t| t.note(arm)).unwrap_or_else(|| "not tuned yet".to_owned());
        format!("{text}{chosen}")
    };
    vec![
        Arm::new("adamw", "AdamW", Role::Baseline, note("adamw", "")),
        Arm::new("s-adam", "S-Adam", Role::Method, note("s-adam", "published form, k 2, λ 2, σ 0.01; ")),
        Arm::new(
            "residual",
            "S-Adam, residual",
            Role::Ablation,
            note("residual", "calibrated form [reconstruction], k 2, λ 1, σ 0.01; "),
        ),
        Arm::new(
            "constant",
            "Constant damping",
            Role::Baseline,
            note("constant", "at each rate and seed the mean damping of the paired S-Adam run; "),
        ),
        Arm::new(
            "sam",
            "SAM, equal passes",
            Role::Baseline,
            note("sam", "over AdamW, ρ 0.05, five sixths of the steps; "),
        ),
    ]
}

fn claims(curve: &Curve) -> Vec<Claim> {
    let claim = |name: &str, statement: String, source: &str, metric: &str, arms: (&str, &str), test| Claim {
        name: format!("{}-{name}", curve.name),
        statement,
        source: source.into(),
        metric: metric.into(),
        arm: arms.0.into(),
        reference: arms.1.into(),
        test,
    };
    let superior = Test::Superior(0.0);
    vec![
        claim(
            "same-rate",
            format!(
                "At the learning rate {}, which is too high for AdamW, S-Adam is better than AdamW.",
                curve.too_high
            ),
            "paper",
            &at(curve.too_high),
            ("s-adam", "adamw"),
            superior,
        ),
        claim(
            "best-rates",
            "Each at its own chosen learning rate, S-Adam is better than AdamW.".into(),
            "paper",
            "accuracy",
            ("s-adam", "adamw"),
            superior,
        ),
        claim(
            "constant",
            "At S-Adam's learning rate, S-Adam is better than AdamW with a constant damping of the same mean.".into(),
            "ours",
            "paired",
            ("s-adam", "constant"),
            superior,
        ),
        claim(
            "robust",
            "Over the whole range of learning rates, S-Adam is better than AdamW on average.".into(),
            "ours",
            "area",
            ("s-adam", "adamw"),
            superior,
        ),
        claim(
            "residual",
            "Each at its own chosen learning rate, the residual form is better than AdamW.".into(),
            "ours",
            "accuracy",
            ("residual", "adamw"),
            superior,
        ),
        claim(
            "sam",
            "Each at its own chosen learning rate, S-Adam is better than SAM with as many passes.".into(),
            "ours",
            "accuracy",
            ("s-adam", "sam"),
            superior,
        ),
        claim(
            "chatter",
            "At equal mean step size, fewer updates of S-Adam flip their sign than of AdamW.".into(),
            "paper",
            "flips",
            ("s-adam", "adamw"),
            superior,
        ),
    ]
}

const SHARED: &str = "Learning rates 0.0003 to 0.03 in five steps, for every arm with the same seeds. The chosen rate was \
    searched on seeds that aren't evaluated, five trials an arm, with a fifth of the training digits as validation. \
    AdamW, S-Adam and their kin have weight decay 0.01, not damped. The 3,000 test digits are the same for every seed and \
    in no training or validation part. Chatter is compared at equal mean step size: S-Adam and constant damping at S-Adam's \
    chosen rate, the others at a rate at which their mean damping times the rate is the same.";

fn experiment(curve: &'static Curve, title: &str, text: &str, kind: Kind, seconds: (f64, f64)) -> Experiment {
    let run: fn(&Context, &str, u64) -> Result<Outcome> = match curve.name {
        "noisy-batches" => |context, arm, seed| NOISY.run(context, arm, seed),
        "qat-2bit" => |context, arm, seed| QAT2.run(context, arm, seed),
        _ => |context, arm, seed| QAT4.run(context, arm, seed),
    };
    Experiment {
        spec: Spec {
            name: curve.name.into(),
            krate: "sam-opt".into(),
            title: title.into(),
            protocol: format!("{text} {SHARED}"),
            data: vec![FOLD.into()],
            kind,
            metrics: metrics(curve),
            arms: arms(curve),
            claims: claims(curve),
            curves: vec![],
            seeds: (2, 10),
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: seconds,
        },
        body: Body::PerArm(run),
    }
}

pub(super) fn noisy_batches() -> Experiment {
    let text = "S-Adam on small noisy batches: 1,500 MNIST digits pooled to 14×14 and standardized, 40 % of their labels \
        redrawn uniformly, network 196-64-64-10, batch 8, 3 epochs; clean test labels. Protocol B of the specification.";
    experiment(&NOISY, "S-Adam, small noisy batches", text, Kind::Core, (3.0, 7.5))
}

pub(super) fn qat_2bit() -> Experiment {
    experiment(&QAT2, "S-Adam, 2-bit weights", &qat_text(2), Kind::FullOnly, (3.0, 6.0))
}

pub(super) fn qat_4bit() -> Experiment {
    experiment(&QAT4, "S-Adam, 4-bit weights", &qat_text(4), Kind::FullOnly, (3.0, 6.5))
}

fn qat_text(bits: u32) -> String {
    format!(
        "Quantization-aware training: 2,500 MNIST digits pooled to 14×14 and standardized, network 196-64-64-10 with \
         {bits}-bit weights (symmetric max scaling, straight-through gradient), batch 64, 6 epochs. Protocol A of the \
         specification."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_area_is_the_mean_over_the_logarithm() {
        assert_eq!(area(&[(0.1, 50.0), (1.0, 50.0), (10.0, 50.0)]), Some(50.0));
        assert!((area(&[(0.1, 0.0), (1.0, 60.0), (10.0, 0.0)]).unwrap() - 30.0).abs() < 1e-9);
        assert_eq!(area(&[(0.1, 3.0)]), None);
    }

    #[test]
    fn every_arm_has_its_committed_rate() {
        for curve in [&NOISY, &QAT2, &QAT4] {
            let tuned = Tuned::<Rate>::parse(curve.tuned).unwrap();
            for arm in ARMS {
                assert!(GRID.contains(&tuned.chosen(arm, FOLD).unwrap().lr), "{} {arm}", curve.name);
            }
            assert!(tuned.check_seed(1000).is_err() && tuned.check_seed(0).is_ok());
        }
    }
}
