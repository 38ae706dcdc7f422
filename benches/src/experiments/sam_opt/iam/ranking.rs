//! Does the local inconsistency rank models by their generalization gap? Protocol 3 of the specification `sam-opt-iam`.

use super::train::{Digits, Epochs, Samples, Trained, he_network};
use crate::experiment::{Body, Context, Experiment, Outcome, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Role, Spec, Test};
use anyhow::{Context as _, Result};
use datasets::split;
use rand::Rng;
use sam_opt::base::step_on;
use sam_opt::measures::{hessian_top_eig, hessian_trace, sam_sharpness};
use sam_opt::{BaseOptimizer, InconsistencyOpts, Sgd, SgdConfig, local_inconsistency};
use tensor::stats::{Bootstrap, bootstrap_interval, kendall_tau};
use tensor::tch::{Tensor, nn::VarStore};
use tensor::{ParamSet, Seed};

const DIGITS: Digits = Digits::Mnist;
const LABELS: usize = 300;
const TEST: usize = 3000;
const UNLABELED: usize = 2000;
const STEPS: u64 = 400;
const LABEL_NOISE: f64 = 0.2;
/// Most Hessian-vector products for the top eigenvalue, and probes for the trace.
const PRODUCTS: usize = 30;
const PROBES: usize = 10;
/// The arms: measures, the last one knowing nothing.
const MEASURES: [(&str, &str, Role, &str); 6] = [
    ("inconsistency", "local inconsistency S at 0.1", Role::Method, "2,000 unlabeled inputs, 3 inner steps, 10 draws"),
    ("hessian", "largest eigenvalue of the Hessian", Role::Baseline, "of the training loss, at most 30 products"),
    ("trace", "trace of the Hessian", Role::Baseline, "of the training loss, 10 probes"),
    ("sharpness", "SAM's sharpness at 0.1", Role::Baseline, "of the training loss"),
    ("norm", "norm of the weights", Role::Baseline, ""),
    ("nothing", "no relation", Role::Reference, "τ 0: what a measure without any relation has"),
];

/// Settings of one network.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Setting {
    lr: f64,
    weight_decay: f64,
    batch: i64,
    width: i64,
    noisy: bool,
}

/// 36 settings on clean labels, and 12 of them with label noise.
fn settings() -> Vec<Setting> {
    let mut all = Vec::new();
    for noisy in [false, true] {
        for lr in [0.02, 0.05, 0.1] {
            for weight_decay in [0.0, 5e-4, 5e-3] {
                for batch in [10, 50] {
                    for width in [32, 128] {
                        if !noisy || (weight_decay < 5e-3 && width == 32) {
                            all.push(Setting { lr, weight_decay, batch, width, noisy });
                        }
                    }
                }
            }
        }
    }
    all
}

pub(super) fn experiment() -> Experiment {
    use Direction::{Higher, Neither};
    let against = |name: &str, statement: &str, source: &str, reference: &str, test| {
        Claim::new(name, statement, source, "tau", ("inconsistency", reference), test)
    };
    Experiment {
        spec: Spec {
            name: "inconsistency-ranking".into(),
            krate: "sam-opt".into(),
            title: "Ranking 48 networks by flatness, MNIST with 300 labels".into(),
            protocol: "48 networks on 300 labels of MNIST (14×14), 400 steps of SGD with momentum 0.9: rate 0.02, 0.05 or \
                0.1, weight decay 0, 5e-4 or 5e-3, batch 10 or 50, two hidden layers of 32 or 128; twelve of the settings \
                again with a fifth of the labels drawn at random. The generalization gap is test error (3,000 digits) \
                minus training error. Each seed is a population of its own: another split, other networks. The metric is \
                Kendall's τ between gap and measure; its bootstrap interval over the networks of a population is shown \
                beside it. S ranks gaps, not test errors: τ with the test error is shown too. Protocol 3 of the \
                specification."
                .into(),
            data: vec!["mnist-10k".into()],
            kind: Kind::FullOnly,
            metrics: vec![
                Metric::new("tau", "τ with the gap", "", Higher, 2),
                Metric::new("tau low", "bootstrap interval of one population, lower end", "", Neither, 2),
                Metric::new("tau high", "upper end", "", Neither, 2),
                Metric::new("tau error", "τ with the test error", "", Neither, 2),
                Metric::new("tau clean", "τ with the gap, networks on clean labels", "", Neither, 2),
            ],
            arms: MEASURES.map(|(name, label, role, note)| Arm::new(name, label, role, note)).into(),
            claims: vec![
                against("ranks", "S ranks gaps better than nothing.", "paper", "nothing", Test::Superior(0.0)),
                against(
                    "no-worse-than-hessian",
                    "S ranks gaps at least as well as the largest eigenvalue of the Hessian, within 0.05 of τ.",
                    "paper (at least as well), ours (0.05)",
                    "hessian",
                    Test::NonInferior(0.05),
                ),
                against("trace", "S ranks gaps better than the trace of the Hessian.", "ours", "trace", Test::Superior(0.0)),
            ],
            curves: vec![],
            seeds: (1, 5),
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: (13.0, 13.0),
        },
        body: Body::Together(run),
    }
}

/// One network's errors in percent, and its measures in the order of [`MEASURES`].
struct Network {
    noisy: bool,
    gap: f64,
    test_error: f64,
    measures: [f64; 5],
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let set = DIGITS.load()?;
    let order = split::stratified_order(&set.y, seed);
    let samples = |rows: &[usize]| Samples::of(set, rows, context.device);
    let (test, rest) = order.split_at(TEST);
    let (train, rest) = rest.split_at(LABELS);
    let (test, train, unlabeled) = (samples(test)?, samples(train)?, samples(&rest[..UNLABELED])?.x);
    let settings = settings();
    let mut networks = Vec::with_capacity(settings.len());
    for (i, setting) in settings.iter().enumerate() {
        context.check()?;
        let seed = Seed::new(seed).child("ranking").index(i as u64);
        networks.push(network(context, setting, &train, &test, &unlabeled, seed)?);
    }
    rank(&networks)
}

/// τ of every measure over a population.
fn rank(networks: &[Network]) -> Result<Outcomes> {
    let gap: Vec<f64> = networks.iter().map(|n| n.gap).collect();
    let error: Vec<f64> = networks.iter().map(|n| n.test_error).collect();
    let clean: Vec<usize> = (0..networks.len()).filter(|&i| !networks[i].noisy).collect();
    let mut outcomes = Vec::new();
    for (m, (name, ..)) in MEASURES.iter().enumerate() {
        let mut outcome = Outcome::default();
        if m < MEASURES.len() - 1 {
            let values: Vec<f64> = networks.iter().map(|n| n.measures[m]).collect();
            let of = |rows: &[usize]| -> (Vec<f64>, Vec<f64>) { rows.iter().map(|&i| (gap[i], values[i])).unzip() };
            outcome.set("tau", kendall_tau(&gap, &values)?.tau);
            outcome.set("tau error", kendall_tau(&error, &values)?.tau);
            let (gaps, measures) = of(&clean);
            outcome.set("tau clean", kendall_tau(&gaps, &measures)?.tau);
            // Networks are resampled; a resample of one network only has no ranks, and no relation.
            let rows: Vec<f64> = (0..networks.len()).map(|i| i as f64).collect();
            let statistic = |rows: &mut [f64]| {
                let rows: Vec<usize> = rows.iter().map(|&i| i as usize).collect();
                let (gaps, measures) = of(&rows);
                kendall_tau(&gaps, &measures).map_or(0.0, |k| k.tau)
            };
            let config = Bootstrap { resamples: 2000, ..Bootstrap::default() };
            let interval = bootstrap_interval(&rows, statistic, &config)?;
            outcome.set("tau low", interval.low);
            outcome.set("tau high", interval.high);
        } else {
            for metric in ["tau", "tau low", "tau high", "tau error", "tau clean"] {
                outcome.set(metric, 0.0);
            }
        }
        outcomes.push(((*name).to_owned(), outcome));
    }
    Ok(outcomes)
}

fn network(
    context: &Context,
    setting: &Setting,
    train: &Samples,
    test: &Samples,
    unlabeled: &Tensor,
    seed: Seed,
) -> Result<Network> {
    let store = VarStore::new(context.device);
    let side = DIGITS.widths()[0];
    let net = he_network(&store, &[side, setting.width, setting.width, 10], seed.child("init"))?;
    let params = ParamSet::from_var_store(&store)?;
    let labels = if setting.noisy { with_noise(&train.y, seed)? } else { train.y.shallow_clone() };
    let train = Samples { x: train.x.shallow_clone(), y: labels };
    let Setting { lr, weight_decay, .. } = *setting;
    let mut base = Sgd::from_config(SgdConfig { lr, momentum: 0.9, weight_decay, ..SgdConfig::default() });
    let mut epochs = Epochs::new(train.len(), seed.child("batches"), context.device);
    for step in 0..STEPS {
        base.set_lr(0.5 * lr * (1.0 + (std::f64::consts::PI * step as f64 / STEPS as f64).cos()));
        let rows = epochs.next(setting.batch);
        let (x, y) = (train.x.index_select(0, &rows), train.y.index_select(0, &rows));
        let gradient = params.gradient(&net.forward_with(&x, true, true).cross_entropy_for_logits(&y))?;
        step_on(&mut base, &params, &gradient)?;
    }
    let trained = Trained { store, net, passes: 3.0 };
    let error = |on: &Samples| 100.0 - trained.score(on).accuracy;
    let (test_error, train_error) = (error(test), error(&train));
    let loss = || trained.logits(&train.x).cross_entropy_for_logits(&train.y);
    let opts = InconsistencyOpts { rho: 0.1, inner_steps: 3, draws: 10, ..InconsistencyOpts::default() };
    let s = local_inconsistency(params.tensors(), || Ok(trained.logits(unlabeled)), &opts)?.mean;
    let top = hessian_top_eig(&params, &loss(), PRODUCTS, 1e-2, 0)?;
    let trace = hessian_trace(&params, &loss(), PROBES, 0)?;
    let sharpness = sam_sharpness(&params, || Ok(loss()), 0.1)?;
    let measures = [s, top, trace, sharpness, params.norm()];
    Ok(Network { noisy: setting.noisy, gap: test_error - train_error, test_error, measures })
}

/// A fifth of the labels drawn anew, uniformly.
fn with_noise(y: &Tensor, seed: Seed) -> Result<Tensor> {
    let mut rng = seed.child("label noise").rng();
    let mut labels = Vec::<i64>::try_from(y).context("labels are whole numbers")?;
    for label in &mut labels {
        if rng.random_bool(LABEL_NOISE) {
            *label = rng.random_range(0..10);
        }
    }
    Ok(Tensor::from_slice(&labels).to_device(y.device()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_48_settings_a_quarter_of_them_noisy() {
        let settings = settings();
        assert_eq!((settings.len(), settings.iter().filter(|s| s.noisy).count()), (48, 12));
    }

    #[test]
    fn a_measure_that_is_the_gap_ranks_perfectly_and_every_arm_reports() {
        let network = |i: usize| {
            let gap = ((i * 7) % 20) as f64;
            Network {
                noisy: i.is_multiple_of(4),
                gap,
                test_error: -gap,
                measures: [gap, -gap, i as f64, gap * gap, 1.0 / (1.0 + i as f64)],
            }
        };
        let networks: Vec<Network> = (0..20).map(network).collect();
        let outcomes = rank(&networks).unwrap();
        let names: Vec<&str> = outcomes.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, MEASURES.map(|(name, ..)| name));
        let tau = |i: usize, metric: &str| outcomes[i].1.metrics[metric];
        assert_eq!((tau(0, "tau"), tau(0, "tau error"), tau(1, "tau"), tau(3, "tau clean")), (1.0, -1.0, -1.0, 1.0));
        assert!(tau(2, "tau low") < tau(2, "tau") && tau(2, "tau") < tau(2, "tau high"));
        assert_eq!(tau(5, "tau"), 0.0);
    }

    #[test]
    fn label_noise_changes_about_a_sixth_of_the_labels() {
        let y = Tensor::zeros([1000], (tensor::tch::Kind::Int64, tensor::tch::Device::Cpu));
        let changed = with_noise(&y, Seed::new(1)).unwrap().ne(0).sum(tensor::tch::Kind::Int64).int64_value(&[]);
        // 20 % drawn anew, nine tenths of them to another class: 180, standard deviation 12.
        assert!((130..=230).contains(&changed), "{changed}");
    }
}
