//! What the experiments over domains say about themselves.

use super::{HANDWRITING3, Protocol, ROTATED_MNIST, run_arm};
use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::experiments::sam_opt::arms::Method;
use crate::experiments::sam_opt::search::Tuned;
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Role, Spec, Test};
use anyhow::Result;

pub(super) fn metrics(held_out: &[&str]) -> Vec<Metric> {
    use Direction::{Higher, Lower, Neither};
    let mut metrics = vec![Metric::new("accuracy", "held-out accuracy", "%", Higher, 2)];
    let title = |name: &str| match name {
        "mnist" => "MNIST held out".to_owned(),
        "mfeat" => "Multiple features held out".to_owned(),
        other => format!("{other} held out"),
    };
    let per = |name: &&str| Metric::new(&format!("accuracy {name}"), &title(name), "%", Higher, 2);
    metrics.extend(held_out.iter().map(per));
    metrics.extend([
        Metric::new("validation", "source validation", "%", Higher, 2),
        Metric::new("worst source", "worst source domain", "%", Higher, 2),
        Metric::new("ascent sharpness", "sharpness along the gradient", "nats", Lower, 3),
        Metric::new("random sharpness", "mean over random directions", "nats", Lower, 3),
        Metric::new("worst sharpness", "maximum over random directions", "nats", Lower, 3),
        Metric::new("passes", "forward-backward passes", "", Neither, 0),
    ]);
    metrics
}

pub(super) fn arms(protocol: &Protocol) -> Vec<Arm> {
    let tuned = Tuned::<Method>::parse(protocol.tuned).ok();
    let arm = |name: &str, label: &str, role| {
        let note = tuned.as_ref().and_then(|t| t.note(name)).unwrap_or_else(|| "not tuned yet".to_owned());
        Arm::new(name, label, role, note)
    };
    let fixed = |name: &str, label: &str, role, note: &str| Arm::new(name, label, role, note);
    vec![
        arm("erm", "ERM (Adam)", Role::Baseline),
        arm("sam", "SAM", Role::Method),
        arm("asam", "ASAM", Role::Method),
        arm("gsam", "GSAM", Role::Method),
        arm("sagm", "SAGM", Role::Method),
        arm("da-sam", "DA-SAM", Role::Method),
        fixed("da-sam-same", "DA-SAM at SAM's ρ", Role::Method, "the ρ that was chosen for SAM, M 4, ζ 1, τ 1"),
        arm("das", "DAS only", Role::Ablation),
        arm("random", "SAM along noise", Role::Baseline),
        arm("disam", "DISAM", Role::Baseline),
        arm("dgsam", "DGSAM", Role::Baseline),
        arm("group-dro", "GroupDRO", Role::Baseline),
        arm("v-rex", "V-REx", Role::Baseline),
        fixed(
            "swad",
            "SAM with SWAD",
            Role::Baseline,
            "as SAM; validation every 20 steps, N_s 3, N_e 6, threshold 1.3",
        ),
        fixed("erm-2x", "ERM, equal passes", Role::Baseline, "as ERM, with twice the steps: as many passes as SAM"),
        fixed(
            "sam-1.67x",
            "SAM, equal passes",
            Role::Baseline,
            "as SAM, with 1.67 times the steps: as many passes as DA-SAM",
        ),
        fixed("sam-oracle", "SAM, oracle ρ", Role::Reference, ORACLE_NOTE),
        fixed("random-oracle", "SAM along noise, oracle ρ", Role::Reference, ORACLE_NOTE),
        fixed("da-sam-oracle", "DA-SAM at SAM's oracle ρ", Role::Reference, ORACLE_NOTE),
    ]
}

/// Where the oracle's radius comes from.
const ORACLE_NOTE: &str = "ρ 0.5, chosen for SAM by the specification on Handwriting-3's held-out domains";

fn claims() -> Vec<Claim> {
    let ours = "ours";
    let prior = "prior work";
    vec![
        Claim::new(
            "sam-beats-erm",
            "SAM is better than ERM on a domain it wasn't trained on.",
            prior,
            "accuracy",
            ("sam", "erm"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "sam-beats-erm-equal-passes",
            "SAM is better than ERM given as many passes.",
            ours,
            "accuracy",
            ("sam", "erm-2x"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "sam-is-flatter",
            "SAM ends where the loss rises less along the gradient than ERM does.",
            prior,
            "ascent sharpness",
            ("sam", "erm"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "asam-no-worse",
            "ASAM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("asam", "sam"),
            Test::NonInferior(0.5),
        ),
        Claim::new(
            "gsam-no-worse",
            "GSAM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("gsam", "sam"),
            Test::NonInferior(0.5),
        ),
        Claim::new(
            "sagm-no-worse",
            "SAGM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("sagm", "sam"),
            Test::NonInferior(0.5),
        ),
        Claim::new(
            "oracle-beats-erm",
            "SAM at ρ 0.5, chosen by looking at Handwriting-3's held-out domains, against ERM, which had no such help.",
            ours,
            "accuracy",
            ("sam-oracle", "erm"),
            Test::Descriptive,
        ),
        Claim::new(
            "oracle-gap",
            "SAM at ρ 0.5, chosen by looking at Handwriting-3's held-out domains, against SAM at the ρ of the source domains.",
            ours,
            "accuracy",
            ("sam-oracle", "sam"),
            Test::Descriptive,
        ),
        Claim::new(
            "da-sam-beats-sam",
            "DA-SAM is better than SAM at the same ρ.",
            "paper",
            "accuracy",
            ("da-sam-same", "sam"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "da-sam-beats-sam-equal-passes",
            "DA-SAM is better than SAM given as many passes.",
            ours,
            "accuracy",
            ("da-sam", "sam-1.67x"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "da-sam-beats-sam-oracle",
            "DA-SAM is better than SAM, both at the ρ 0.5 that was chosen for SAM on Handwriting-3's held-out domains.",
            ours,
            "accuracy",
            ("da-sam-oracle", "sam-oracle"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "da-sam-no-worse",
            "DA-SAM is at most half a point worse than SAM, each at its own ρ.",
            ours,
            "accuracy",
            ("da-sam", "sam"),
            Test::NonInferior(0.5),
        ),
        Claim::new(
            "da-sam-flatter",
            "DA-SAM ends flatter than SAM along random directions, at the same ρ.",
            "paper",
            "random sharpness",
            ("da-sam-same", "sam"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "da-sam-worst-source",
            "DA-SAM is better than SAM on its worst source domain, at the same ρ.",
            ours,
            "worst source",
            ("da-sam-same", "sam"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "gradient-matters",
            "The gradient's direction matters: SAM is better than noise of the same length (ρ 0.5).",
            ours,
            "accuracy",
            ("sam-oracle", "random-oracle"),
            Test::Superior(0.0),
        ),
        Claim::new(
            "dgsam-no-worse",
            "DGSAM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("dgsam", "sam"),
            Test::NonInferior(0.5),
        ),
        Claim::new(
            "disam-no-worse",
            "DISAM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("disam", "sam"),
            Test::NonInferior(0.5),
        ),
    ]
}

pub(crate) fn handwriting3() -> Experiment {
    let protocol = "Three real digit collections (MNIST of the US, optdigits of Turkey, mfeat of the Netherlands), \
        all made 8×8. Train on two (at most 1,200 each, 80/20), test on all of the third; the metric is the mean over \
        the three. Network 64-128-128-10 with ReLU, Adam 1e-3, 32 of each domain a batch, 400 steps, last step \
        evaluated. For each of the three folds, hyper-parameters were chosen by accuracy on the validation parts of the \
        two collections that it trains on, seven candidates a method, on three seeds that aren't evaluated; settings \
        are listed in the order mnist / optdigits / mfeat held out. Splits, initial weights and batches are shared \
        by all arms of a seed. Protocol A of the specification.";
    describe(&HANDWRITING3, "Handwriting-3, leave one collection out", protocol, (2, 10), (5.0, 20.0))
}

pub(crate) fn rotated_mnist() -> Experiment {
    let protocol = "Six domains of 1,000 different MNIST digits each, turned by 0° to 75° (bilinear) and pooled to \
        14×14. Hold out 0° and 75° in turn, train on the other five; the metric is the mean over the two. Network \
        196-128-128-10 with ReLU, Adam 1e-3, 32 of each domain a batch, 400 steps. Selection for each of the two \
        folds, splits and sharing as in Handwriting-3; settings are listed in the order 0° / 75° held out. Protocol B of the specification.";
    let title = "Rotated MNIST, hold out the outer angles";
    let mut experiment = describe(&ROTATED_MNIST, title, protocol, (2, 5), (6.0, 28.0));
    experiment.spec.kind = Kind::FullOnly;
    experiment
}

/// An experiment over a protocol's searched arms.
pub(super) fn describe(
    protocol: &'static Protocol,
    title: &str,
    text: &str,
    seeds: (u64, u64),
    seconds: (f64, f64),
) -> Experiment {
    let metrics_text = " ERM's candidates are weight decays, the others have none. Sharpness is measured after training, on \
        the training rows, in nats: the rise of each source domain's loss at distance 0.1 along its own gradient, and its mean \
        and maximum over 20 random directions with a quarter of the norm of each row of the weights.";
    let quick = " A quick run holds out the first domain only and takes 150 steps.";
    let run: fn(&Context, &str, u64) -> Result<Outcome> = match protocol.name {
        "handwriting3" => |context, arm, seed| run_arm(&HANDWRITING3, context, arm, seed),
        _ => |context, arm, seed| run_arm(&ROTATED_MNIST, context, arm, seed),
    };
    Experiment {
        spec: Spec {
            name: protocol.name.into(),
            krate: "sam-opt".into(),
            title: title.into(),
            protocol: format!("{text}{metrics_text}{quick}"),
            data: protocol.data.iter().map(|s| (*s).to_owned()).collect(),
            kind: Kind::Core,
            metrics: metrics(protocol.held_out),
            arms: arms(protocol),
            claims: claims(),
            curves: vec![],
            seeds,
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: seconds,
        },
        body: Body::PerArm(run),
    }
}
