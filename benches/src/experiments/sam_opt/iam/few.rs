//! Few labels, many inputs without: protocol 1 of the specification `sam-opt-iam`.

use super::super::search::{Score, Tuned, run_search};
use super::arms::{Form, Iam, Method};
use super::train::{Digits, Plan, few_labels, train};
use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use anyhow::{Context as _, Result, bail};

const TUNED: &str = include_str!("../../../../tuned/few-labels.json");
/// Optimizer steps; fewer in quick runs.
const STEPS: u64 = 500;
const QUICK_STEPS: u64 = 200;
/// The arms whose hyper-parameters are searched.
pub(super) const SEARCHED: [&str; 11] = [
    "sgd",
    "smoothing",
    "sam",
    "asam",
    "entropy",
    "vat",
    "iam-d",
    "iam-d-labeled",
    "iam-d-detached",
    "iam-s",
    "iam-de",
];

pub(super) fn plan(steps: u64) -> Plan {
    Plan { steps, labeled: 50, unlabeled: 200 }
}

pub(super) fn tuned() -> Result<Tuned<Method>> {
    Tuned::parse(TUNED)
}

/// IAM-D as the search chose it.
pub(super) fn chosen_d(digits: Digits) -> Result<Iam> {
    match tuned()?.chosen("iam-d", digits.fold())? {
        Method::Iam(iam) => Ok(iam.clone()),
        other => bail!("the search chose {other:?} for iam-d"),
    }
}

/// The method of an arm.
fn method(digits: Digits, arm: &str) -> Result<Method> {
    Ok(match arm {
        "random" => Method::Iam(Iam { form: Form::Random, ..chosen_d(digits)? }),
        "iam-d-k3" => Method::Iam(Iam { inner_steps: 3, ..chosen_d(digits)? }),
        arm => tuned()?.chosen(arm, digits.fold())?.clone(),
    })
}

pub(super) fn metrics() -> Vec<Metric> {
    use Direction::{Higher, Lower, Neither};
    vec![
        Metric::new("accuracy", "test accuracy", "%", Higher, 2),
        Metric::new("nll", "test loss", "nats", Lower, 3),
        Metric::new("ece", "calibration error", "%", Lower, 2),
        Metric::new("inconsistency", "local inconsistency S at 0.1", "nats", Lower, 4),
        Metric::new(
            "passes",
            "inputs forwarded a step, in labeled batches (a backward pass counts two)",
            "",
            Neither,
            1,
        ),
    ]
}

fn arms(digits: Digits) -> Vec<Arm> {
    let tuned = tuned().ok();
    // The note of one data set: the committed file holds both.
    let note = |arm: &str| {
        let mut tuned = tuned.clone();
        if let Some(tuned) = &mut tuned {
            tuned.searches.retain(|s| s.fold == digits.fold());
        }
        tuned.and_then(|t| t.note(arm)).unwrap_or_else(|| "not tuned yet".to_owned())
    };
    let searched = |name: &str, label: &str, role| Arm::new(name, label, role, note(name));
    vec![
        searched("sgd", "SGD", Role::Baseline),
        searched("smoothing", "SGD, label smoothing", Role::Baseline),
        searched("sam", "SAM", Role::Baseline),
        searched("asam", "ASAM", Role::Baseline),
        searched("entropy", "entropy minimization", Role::Baseline),
        searched("vat", "virtual adversarial training", Role::Baseline),
        searched("iam-d", "IAM-D", Role::Method),
        searched("iam-s", "IAM-S, δ from all inputs", Role::Method),
        searched("iam-de", "IAM-DE", Role::Method),
        Arm::new("iam-d-k3", "IAM-D, three inner steps", Role::Ablation, "ρ and β as IAM-D"),
        searched("iam-d-labeled", "IAM-D on labeled inputs only", Role::Ablation),
        searched("iam-d-detached", "IAM-D, detached (the defect)", Role::Ablation),
        Arm::new("random", "IAM-D along a random direction", Role::Ablation, "ρ and β as IAM-D"),
    ]
}

fn claims() -> Vec<Claim> {
    let of =
        |name, statement, arms, margin| Claim::new(name, statement, "ours", "accuracy", arms, Test::Superior(margin));
    vec![
        Claim::new(
            "iam-d-beats-sam",
            "IAM-D is better than SAM by more than 2 points.",
            "paper (better), ours (2 points)",
            "accuracy",
            ("iam-d", "sam"),
            Test::Superior(2.0),
        ),
        of("iam-d-beats-asam", "IAM-D is better than ASAM by more than 2 points.", ("iam-d", "asam"), 2.0),
        of("unlabeled-helps", "Unlabeled inputs add more than 1.5 points to IAM-D.", ("iam-d", "iam-d-labeled"), 1.5),
        of(
            "both-sides-matter",
            "The gradient through both outputs is better than the detached one by more than 1.5 points.",
            ("iam-d", "iam-d-detached"),
            1.5,
        ),
        of(
            "power-step-matters",
            "The power step is better than a random direction of the same length by more than 2 points.",
            ("iam-d", "random"),
            2.0,
        ),
        Claim::new(
            "nll",
            "IAM-D has a lower test loss than SAM.",
            "ours",
            "nll",
            ("iam-d", "sam"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "flatter",
            "IAM-D has a lower local inconsistency than SAM.",
            "paper",
            "inconsistency",
            ("iam-d", "sam"),
            Test::Superior(0.0),
        ),
        of("iam-d-beats-vat", "IAM-D is better than virtual adversarial training.", ("iam-d", "vat"), 0.0),
        of("iam-s-beats-sam", "IAM-S is better than SAM.", ("iam-s", "sam"), 0.0),
        Claim::new(
            "one-step-is-enough",
            "Three inner steps are at most one point better than one.",
            "ours",
            "accuracy",
            ("iam-d", "iam-d-k3"),
            Test::NonInferior(1.0),
        ),
    ]
}

pub(super) fn mnist() -> Experiment {
    let text = "10,000 digits of MNIST, pooled to 14×14 and standardized. Per seed 3,000 to test on, 10 of each class \
        with their label, all others (6,900) without. Network 196-128-128-10 with ReLU and He's initial weights; SGD, \
        momentum 0.9, weight decay 5e-4, rate 0.05 on a cosine to 0; 500 steps of 50 labeled and 200 unlabeled digits; \
        the last step is evaluated. Hyper-parameters were chosen by accuracy (then loss) on three tenths of the labels, \
        five candidates an arm, on three seeds that aren't evaluated; a random direction and three inner steps take \
        IAM-D's. Each seed permutes all digits anew, so that a label which the search has seen may belong to a test digit \
        of an evaluated seed, for every arm alike. S at 0.1 (3 inner steps, 10 draws) is of 500 of the unlabeled digits \
        that were trained on. Splits, initial weights and batches are shared by all arms of a seed. Protocol 1 of the specification.";
    experiment(
        "few-labels-mnist",
        "Few labels, MNIST with 100",
        text,
        &["mnist-10k"],
        Kind::FullOnly,
        (7.0, 17.0),
        |c, a, s| run(Digits::Mnist, c, a, s),
        arms(Digits::Mnist),
    )
}

pub(super) fn digits() -> Experiment {
    let text = "The 1,797 digits of optdigits, standardized: 600 to test on, 5 of each class with their label, the other \
        1,147 without. Network 64-128-128-10, everything else as in the experiment on MNIST; quick runs have 200 steps. In \
        the search a step has 35 labeled digits, not 50: three tenths of the 50 labels are held out. \
        Protocol 1 of the specification.";
    experiment(
        "few-labels-digits",
        "Few labels, optdigits with 50",
        text,
        &["optdigits"],
        Kind::Core,
        (5.0, 12.0),
        |c, a, s| run(Digits::Opt, c, a, s),
        arms(Digits::Opt),
    )
}

#[allow(clippy::too_many_arguments)] // the parts in which two descriptions differ
fn experiment(
    name: &str,
    title: &str,
    protocol: &str,
    data: &[&str],
    kind: Kind,
    seconds_per_seed: (f64, f64),
    run: fn(&Context, &str, u64) -> Result<Outcome>,
    arms: Vec<Arm>,
) -> Experiment {
    Experiment {
        spec: Spec {
            name: name.into(),
            krate: "sam-opt".into(),
            title: title.into(),
            protocol: protocol.into(),
            data: data.iter().map(|s| (*s).to_owned()).collect(),
            kind,
            metrics: metrics(),
            arms,
            claims: claims(),
            curves: vec![],
            seeds: (2, 10),
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed,
        },
        body: Body::PerArm(run),
    }
}

fn run(digits: Digits, context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    tuned()?.check_seed(seed)?;
    evaluate(digits, context, &method(digits, arm)?, seed)
}

/// Trains a method with few labels and tests it.
fn evaluate(digits: Digits, context: &Context, method: &Method, seed: u64) -> Result<Outcome> {
    let steps = if context.mode == Mode::Quick { QUICK_STEPS } else { STEPS };
    let split = few_labels(digits, seed, false, context.device)?;
    let trained = train(context, &digits.widths(), &split, method, plan(steps), seed)?;
    let unlabeled = split.unlabeled.as_ref().context("this protocol has unlabeled inputs")?;
    trained.outcome(&split.test, unlabeled)
}

/// The search of all arms on both collections.
pub(super) fn search(context: &Context) -> Result<String> {
    let grid = |arm: &'static str| Ok((arm, Method::grid(arm).context("every arm has a grid")?));
    let arms = SEARCHED.into_iter().map(grid).collect::<Result<Vec<_>>>()?;
    run_search("few-labels", &arms, &[Digits::Mnist.fold(), Digits::Opt.fold()], |candidate, fold, seed| {
        let digits = if fold == Digits::Mnist.fold() { Digits::Mnist } else { Digits::Opt };
        validation(context, digits, candidate, seed)
    })
}

/// A candidate's score on the held-out labels.
fn validation(context: &Context, digits: Digits, candidate: &Method, seed: u64) -> Result<Score> {
    let split = few_labels(digits, seed, true, context.device)?;
    Ok(train(context, &digits.widths(), &split, candidate, plan(STEPS), seed)?.score(&split.test))
}

/// The sweeps: one setting of IAM-D varied around the search's choice, on optdigits.
pub(super) fn sweeps() -> Vec<Experiment> {
    let describe = |name: &str, title: &str, run: fn(&Context, &str, u64) -> Result<Outcome>| {
        let any = Iam::new(Form::D, 0.5, 1.0);
        let arms = sweep(name, &any).into_iter().enumerate().map(|(i, (arm, _))| {
            let role = if i == 0 { Role::Method } else { Role::Ablation };
            Arm::new(&arm, &arm, role, "all else as IAM-D in few-labels-digits")
        });
        Experiment {
            spec: Spec {
                name: name.into(),
                krate: "sam-opt".into(),
                title: title.into(),
                protocol: "One setting of IAM-D varied, everything else as in few-labels-digits.".into(),
                data: vec!["optdigits".into()],
                kind: Kind::ByName,
                metrics: metrics(),
                arms: arms.collect(),
                claims: vec![],
                curves: vec![],
                seeds: (2, 10),
                seeds_for_verdict: 5,
                threads: 1,
                seconds_per_seed: (10.0, 10.0),
            },
            body: Body::PerArm(run),
        }
    };
    vec![
        describe("iam-inner-steps", "IAM-D, number of inner steps", |c, a, s| run_sweep("iam-inner-steps", c, a, s)),
        describe("iam-noise-scale", "IAM-D, length of the noise", |c, a, s| run_sweep("iam-noise-scale", c, a, s)),
        describe("iam-refresh", "IAM-D, steps between searches", |c, a, s| run_sweep("iam-refresh", c, a, s)),
        describe("iam-strength", "IAM-D, radius and weight of the penalty", |c, a, s| {
            run_sweep("iam-strength", c, a, s)
        }),
    ]
}

/// Arms of a sweep around a setting, which comes first.
fn sweep(name: &str, around: &Iam) -> Vec<(String, Iam)> {
    let iam = || around.clone();
    match name {
        "iam-inner-steps" => {
            [1, 2, 3, 5].map(|inner_steps| (format!("K {inner_steps}"), Iam { inner_steps, ..iam() })).into()
        }
        "iam-noise-scale" => {
            let scales = [1.0, 0.001, 0.01, 0.1, 3.0, 10.0];
            scales.map(|noise_scale| (format!("σ {noise_scale}"), Iam { noise_scale, ..iam() })).into()
        }
        "iam-refresh" => {
            [1, 2, 5, 10].map(|refresh_every| (format!("every {refresh_every}"), Iam { refresh_every, ..iam() })).into()
        }
        _ => {
            let pairs = [
                (0.5, 1.0),
                (0.1, 0.1),
                (0.1, 1.0),
                (0.1, 10.0),
                (0.1, 25.0),
                (0.5, 0.1),
                (0.5, 10.0),
                (1.0, 0.1),
                (1.0, 1.0),
            ];
            pairs.map(|(rho, beta)| (format!("ρ {rho} β {beta}"), Iam { rho, beta, ..iam() })).into()
        }
    }
}

fn run_sweep(name: &str, context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    tuned()?.check_seed(seed)?;
    let arms = sweep(name, &chosen_d(Digits::Opt)?);
    let found = arms.into_iter().find(|(known, _)| known == arm);
    let (_, iam) = found.with_context(|| format!("no arm \"{arm}\""))?;
    evaluate(Digits::Opt, context, &Method::Iam(iam), seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_search_has_every_arm_on_both_collections() {
        let tuned = tuned().unwrap();
        for arm in SEARCHED {
            for digits in [Digits::Mnist, Digits::Opt] {
                let search = tuned.searches.iter().find(|s| s.arm == arm && s.fold == digits.fold()).unwrap();
                let candidates: Vec<Method> = search.trials.iter().map(|t| t.candidate.clone()).collect();
                assert_eq!(candidates, Method::grid(arm).unwrap(), "{arm}: search again");
            }
        }
    }

    #[test]
    fn every_arm_has_a_method_and_a_control_shares_the_settings() {
        for digits in [Digits::Mnist, Digits::Opt] {
            for arm in arms(digits) {
                method(digits, &arm.name).unwrap();
                assert!(!arm.note.contains("not tuned"), "{}", arm.name);
            }
            let (Method::Iam(random), d) = (method(digits, "random").unwrap(), chosen_d(digits).unwrap()) else {
                panic!("a form of IAM")
            };
            assert_eq!((random.rho, random.beta, random.form), (d.rho, d.beta, Form::Random));
        }
        assert!(run(Digits::Opt, &super::super::train::tests_context(), "sgd", 1000).is_err());
    }
}
