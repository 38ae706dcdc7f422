//! Made-up analyses for the tests of the report. No number here was measured.

use crate::analysis::{Analysis, analyse};
use crate::experiment::{Body, Experiment, Outcome};
use crate::record::{Cost, Meta, Provenance, Record, Skipped};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use std::sync::LazyLock;

/// Text that breaks whatever doesn't escape it.
pub(super) const HOSTILE: &str =
    "</script><script>alert(\"1\")</script> | a 'b' & \u{1b}[31m <img src=x onerror=y>\nnext\u{0} *line*";

fn claim(name: &str, statement: &str, (arm, metric, reference): (&str, &str, &str), test: Test) -> Claim {
    Claim {
        name: name.into(),
        statement: statement.into(),
        source: if name.len().is_multiple_of(2) { "paper" } else { "ours" }.into(),
        metric: metric.into(),
        arm: arm.into(),
        reference: reference.into(),
        test,
    }
}

fn spec(krate: &str, name: &str, title: &str) -> Spec {
    let accuracy = Metric::new("accuracy", "target accuracy", "%", Direction::Higher, 2);
    let loss = Metric::new("loss", "target loss", "nats", Direction::Lower, 3);
    let passes = Metric::new("passes", "Gradient passes", "", Direction::Neither, 0);
    Spec {
        name: name.into(),
        krate: krate.into(),
        title: title.into(),
        protocol: "Three writers' sets of digits; each in turn is the target that no arm sees. A small convolutional \
                   net trains on the other two for 20 epochs; rho is chosen on seeds that are not evaluated, the same \
                   number of trials for every arm."
            .into(),
        data: vec!["optdigits".into(), "mnist-10k".into()],
        kind: Kind::Core,
        metrics: vec![accuracy, loss, passes],
        arms: vec![
            Arm::new("erm", "ERM", Role::Baseline, "Adam, learning rate 0.001"),
            Arm::new("sam", "SAM", Role::Method, "rho 0.05, tuned on seeds 1000 to 1004"),
            Arm::new("asam", "ASAM (element-wise)", Role::Method, "rho 0.5, eta 0.01"),
            Arm::new("sam-m", "SAM without m-sharpness", Role::Ablation, "rho 0.05"),
            Arm::new("oracle", "ERM with target data", Role::Reference, "sees what no user has"),
        ],
        claims: vec![
            claim(
                "gain",
                "SAM generalizes better than ERM to unseen writers.",
                ("sam", "accuracy", "erm"),
                Test::Superior(0.0),
            ),
            claim(
                "scale",
                "ASAM is at least half a point better than ERM.",
                ("asam", "accuracy", "erm"),
                Test::Superior(0.5),
            ),
            claim(
                "no-harm",
                "ASAM costs no accuracy against SAM.",
                ("asam", "accuracy", "sam"),
                Test::NonInferior(0.25),
            ),
            claim(
                "same",
                "Without m-sharpness SAM is no different.",
                ("sam-m", "accuracy", "sam"),
                Test::Equivalent(0.1),
            ),
            claim("loss", "SAM has the lower loss on the target.", ("sam", "loss", "erm"), Test::Superior(0.0)),
            claim(
                "shown",
                "How far ERM is from training on the target.",
                ("oracle", "accuracy", "erm"),
                Test::Descriptive,
            ),
        ],
        curves: vec![],
        seeds: (2, 20),
        seeds_for_verdict: 10,
        seconds_per_seed: (2.0, 2.0),
        threads: 1,
    }
}

fn timing(krate: &str, name: &str) -> Spec {
    let metric = |name: &str, label: &str| Metric::new(name, label, "ms", Direction::Lower, 3);
    Spec {
        title: "Step cost against the Python peer".into(),
        protocol: "Both sides train the same nets with the same threads, interleaved A B A B.".into(),
        data: vec![],
        kind: Kind::Peers,
        metrics: vec![metric("small", "Small net"), metric("large", "Large net")],
        arms: vec![
            Arm::new("base", "Base step", Role::Baseline, "Adam alone"),
            Arm::new("sam", "SAM, ours", Role::Method, "rho 0.05"),
            Arm::new("peer", "SAM, pytorch_optimizer", Role::Peer, "PyTorch 2.11"),
        ],
        claims: vec![
            claim(
                "cost",
                "A SAM step costs at most 2.05 base steps.",
                ("sam", "large", "base"),
                Test::RatioAtMost(2.05),
            ),
            claim(
                "fast",
                "Faster than the peer on the small net.",
                ("sam", "small", "peer"),
                Test::SpeedupAtLeast(1.5),
            ),
            claim(
                "large",
                "No slower than the peer on the large net.",
                ("sam", "large", "peer"),
                Test::SpeedupAtLeast(1.0),
            ),
        ],
        curves: vec![],
        seeds: (1, 1),
        threads: 0,
        ..spec(krate, name, "")
    }
}

/// A number in [-1, 1) that depends only on its arguments.
fn noise(arm: u64, seed: u64, metric: u64) -> f64 {
    let mut z = (arm * 31 + seed * 1009 + metric * 7).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

fn outcome(spec: &Spec, arm: usize, seed: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let a = arm as u64;
    if spec.kind == Kind::Peers {
        for (i, (metric, base)) in spec.metrics.iter().zip([0.21, 6.4]).enumerate() {
            let factor = [[1.0, 1.9, 3.9], [1.0, 1.98, 1.9]][i][arm.min(2)];
            let times: Vec<f64> = (0..40).map(|t| base * factor * (1.0 + 0.05 * noise(a, t, i as u64))).collect();
            outcome.set(&metric.name, times.iter().sum::<f64>() / times.len() as f64);
            outcome.samples.insert(metric.name.clone(), times);
        }
    } else {
        let shared = noise(99, seed, 0);
        let gain = [0.0, 0.9, 0.7, 0.88, 6.0][arm.min(4)];
        outcome.set("accuracy", 91.0 + gain + shared + 0.35 * noise(a, seed, 1));
        outcome.set("loss", 0.31 - 0.02 * gain + 0.02 * shared + 0.03 * noise(a, seed, 2));
        outcome.set("passes", if arm == 0 { 1200.0 } else { 2400.0 });
    }
    outcome
}

fn records(spec: &Spec, mode: Mode, seeds: u64) -> Vec<Record> {
    let mut all = Vec::new();
    for seed in 0..seeds {
        for (i, arm) in spec.arms.iter().enumerate() {
            let cost = Cost { wall_s: 1.1 + i as f64, cpu_s: 2.1 + i as f64, peak_mib: 310.0 };
            let key = (spec.name.as_str(), arm.name.as_str(), seed);
            let mut record = Record::new(key, mode, Ok(outcome(spec, i, seed)), cost, &provenance());
            record.finished = 1_772_368_200;
            all.push(record);
        }
    }
    all
}

fn provenance() -> Provenance {
    Provenance {
        commit: "0123456789ab".into(),
        dirty: true,
        cpu: "Example CPU @ 2.10GHz".into(),
        cores: 2,
        threads: 1,
        device: "Cpu".into(),
        libtorch: "2.11.0".into(),
        version: "0.1.0".into(),
    }
}

fn meta(mode: Mode, skipped: Vec<Skipped>) -> Meta {
    Meta {
        mode,
        names: vec![],
        seeds: None,
        peers: true,
        device: "cpu".into(),
        shard: None,
        threads: 2,
        started: 1_772_368_000,
        skipped,
    }
}

fn experiments(specs: Vec<Spec>) -> Vec<Experiment> {
    let body = Body::PerArm(|_, _, _| Ok(Outcome::default()));
    specs.into_iter().map(|spec| Experiment { spec, body }).collect()
}

/// Two crates with everything that happens: effects of all kinds, timings, a failed run, a partial and a
/// skipped experiment.
pub(super) fn example(mode: Mode) -> Analysis {
    static QUICK: LazyLock<Analysis> = LazyLock::new(|| make_example(Mode::Quick));
    static FULL: LazyLock<Analysis> = LazyLock::new(|| make_example(Mode::Full));
    match mode {
        Mode::Quick => QUICK.clone(),
        Mode::Full => FULL.clone(),
    }
}

fn make_example(mode: Mode) -> Analysis {
    let specs = vec![
        spec("sam-opt", "handwriting3", "Handwriting-3, leave one writer set out"),
        timing("sam-opt", "sam-peers"),
        spec("sam-opt", "rotated", "Rotated MNIST, protocol B"),
        spec("qat", "grids", "Quantization grids on real digits"),
    ];
    let seeds = specs[0].default_seeds(mode);
    let mut all = records(&specs[0], mode, seeds);
    all.extend(records(&specs[1], mode, 1));
    all.extend(records(&specs[3], mode, seeds - 1));
    all.iter_mut().filter(|r| r.experiment == "sam-peers").for_each(|r| r.provenance.threads = 2);
    if let Some(failed) = all.iter_mut().find(|r| r.arm == "asam") {
        failed.error = Some("The loss became infinite in the second pass at step 31. Lower rho.".into());
        failed.metrics.clear();
    }
    let reason = "the data set mnist-10k isn't in the cache; fetch it with `cargo xtask data fetch mnist-10k`.".into();
    let meta = meta(mode, vec![Skipped { experiment: "rotated".into(), reason }]);
    analyse(&experiments(specs), &[meta], &all)
}

/// Every free text is [`HOSTILE`].
pub(super) fn hostile() -> Analysis {
    let mut spec = spec("sam-opt", "handwriting3", HOSTILE);
    spec.krate = HOSTILE.into();
    spec.protocol = HOSTILE.into();
    spec.data = vec![HOSTILE.into()];
    for metric in &mut spec.metrics {
        metric.label = HOSTILE.into();
        metric.unit = HOSTILE.into();
    }
    for arm in &mut spec.arms {
        arm.label = HOSTILE.into();
        arm.note = HOSTILE.into();
    }
    for claim in &mut spec.claims {
        claim.statement = HOSTILE.into();
        claim.source = HOSTILE.into();
    }
    let mut all = records(&spec, Mode::Full, 3);
    for record in &mut all {
        record.provenance = Provenance { commit: HOSTILE.into(), cpu: HOSTILE.into(), ..provenance() };
    }
    all[1].error = Some(HOSTILE.into());
    let skipped = Skipped { experiment: spec.name.clone(), reason: HOSTILE.into() };
    analyse(&experiments(vec![spec]), &[meta(Mode::Full, vec![skipped])], &all)
}

/// Values that no experiment should report.
pub(super) fn not_finite() -> Analysis {
    let specs = vec![spec("sam-opt", "handwriting3", "Handwriting-3"), timing("sam-opt", "sam-peers")];
    let mut all: Vec<Record> = specs.iter().flat_map(|spec| records(spec, Mode::Full, 4)).collect();
    for (i, record) in all.iter_mut().enumerate() {
        let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e308][i % 4];
        record.metrics.values_mut().for_each(|value| *value = bad);
        record.samples.values_mut().flatten().for_each(|value| *value = bad);
        record.cost = Cost { wall_s: bad, cpu_s: bad, peak_mib: bad };
    }
    let mut analysis = analyse(&experiments(specs), &[meta(Mode::Full, vec![])], &all);
    for arm in analysis.experiments.iter_mut().flat_map(|e| &mut e.arms) {
        for estimate in arm.metrics.values_mut().chain(arm.differences.values_mut()) {
            estimate.interval = Some((f64::NEG_INFINITY, f64::NAN));
        }
    }
    analysis
}

/// As many experiments as the whole workspace may have.
pub(super) fn many(n: usize) -> Analysis {
    let specs: Vec<Spec> = (0..n)
        .map(|i| spec(&format!("crate-{}", i / 3), &format!("experiment-{i}"), "A title of usual length"))
        .collect();
    let all: Vec<Record> = specs.iter().flat_map(|spec| records(spec, Mode::Full, 12)).collect();
    analyse(&experiments(specs), &[meta(Mode::Full, vec![])], &all)
}

/// A run without a single result.
pub(super) fn empty() -> Analysis {
    analyse(&[], &[], &[])
}
