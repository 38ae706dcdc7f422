//! Protocols A (Handwriting-3) and B (Rotated MNIST) of the specification `sam-opt-da-sam`.

use super::arms::Method;
use super::search::{Score, Tuned};
use super::sharpness;
use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Role, Spec, Test};
use anyhow::{Context as _, Result};
use datasets::domains::{self, Domain};
use rand::seq::SliceRandom;
use sam_opt::ParamGroup;
use std::sync::OnceLock;
use tensor::nn::{Mlp, MlpConfig};
use tensor::tch::{Device, Kind as Element, Tensor, nn::VarStore, no_grad};
use tensor::{ParamSet, Seed, interop};

/// Samples of each domain in a batch.
const BATCH: usize = 32;
/// Optimizer steps.
pub(super) const STEPS: u64 = 400;
/// Most samples of a source domain, and the share kept for validation.
const CAP: usize = 1200;
const VALIDATION: f64 = 0.2;

/// A leave-one-out protocol over digit domains.
pub(super) struct Protocol {
    pub(super) name: &'static str,
    /// The domains. They are the same for every seed: a digit that is tested on in one seed must not be trained or
    /// validated on in another, nor in the search.
    load: fn() -> Result<&'static [Domain]>,
    /// Names of the held-out domains.
    pub(super) held_out: &'static [&'static str],
    widths: &'static [i64],
    /// The committed search.
    tuned: &'static str,
}

pub(super) static HANDWRITING3: Protocol = Protocol {
    name: "handwriting3",
    load: || {
        static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
        once(&DOMAINS, domains::handwriting3)
    },
    held_out: &["mnist", "optdigits", "mfeat"],
    widths: &[64, 128, 128, 10],
    tuned: include_str!("../../../tuned/handwriting3.json"),
};

pub(super) static ROTATED_MNIST: Protocol = Protocol {
    name: "rotated-mnist",
    load: || {
        static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
        once(&DOMAINS, || domains::rotated_mnist(PARTITION))
    },
    held_out: &["0°", "75°"],
    widths: &[196, 128, 128, 10],
    tuned: include_str!("../../../tuned/rotated-mnist.json"),
};

/// Seed of the one partition of MNIST into the domains of Rotated MNIST.
const PARTITION: u64 = 0;

/// Loads domains on the first call.
fn once(
    cell: &'static OnceLock<Vec<Domain>>,
    load: impl FnOnce() -> datasets::Result<Vec<Domain>>,
) -> Result<&'static [Domain]> {
    if let Some(domains) = cell.get() {
        return Ok(domains);
    }
    let domains = load()?;
    Ok(cell.get_or_init(|| domains))
}

/// The oracle's radius: the specification chose it by looking at the held-out domains.
const ORACLE: Method = Method::Sam { rho: 0.5 };

fn metrics(held_out: &[&str]) -> Vec<Metric> {
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

fn arms(protocol: &Protocol) -> Vec<Arm> {
    let tuned = Tuned::<Method>::parse(protocol.tuned).ok();
    let note = |arm: &str| tuned.as_ref().and_then(|t| t.note(arm)).unwrap_or_else(|| "not tuned yet".to_owned());
    let twice = "as ERM, with twice the steps: as many passes as SAM";
    vec![
        Arm::new("erm", "ERM (Adam)", Role::Baseline, note("erm")),
        Arm::new("sam", "SAM", Role::Method, note("sam")),
        Arm::new("asam", "ASAM", Role::Method, note("asam")),
        Arm::new("gsam", "GSAM", Role::Method, note("gsam")),
        Arm::new("sagm", "SAGM", Role::Method, note("sagm")),
        Arm::new("erm-2x", "ERM, equal passes", Role::Baseline, twice),
        Arm::new(
            "sam-oracle",
            "SAM, oracle ρ",
            Role::Reference,
            "ρ 0.5, chosen by the specification on the held-out domains",
        ),
    ]
}

fn claim(name: &str, statement: &str, source: &str, metric: &str, arms: (&str, &str), test: Test) -> Claim {
    Claim {
        name: name.into(),
        statement: statement.into(),
        source: source.into(),
        metric: metric.into(),
        arm: arms.0.into(),
        reference: arms.1.into(),
        test,
    }
}

fn claims() -> Vec<Claim> {
    let ours = "ours";
    let prior = "prior work";
    vec![
        claim(
            "sam-beats-erm",
            "SAM is better than ERM on a domain it wasn't trained on.",
            prior,
            "accuracy",
            ("sam", "erm"),
            Test::Superior(0.0),
        ),
        claim(
            "sam-beats-erm-equal-passes",
            "SAM is better than ERM given as many passes.",
            ours,
            "accuracy",
            ("sam", "erm-2x"),
            Test::Superior(0.0),
        ),
        claim(
            "sam-is-flatter",
            "SAM ends where the loss rises less along the gradient than ERM does.",
            prior,
            "ascent sharpness",
            ("sam", "erm"),
            Test::Superior(0.0),
        ),
        claim(
            "asam-no-worse",
            "ASAM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("asam", "sam"),
            Test::NonInferior(0.5),
        ),
        claim(
            "gsam-no-worse",
            "GSAM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("gsam", "sam"),
            Test::NonInferior(0.5),
        ),
        claim(
            "sagm-no-worse",
            "SAGM is at most half a point worse than SAM.",
            ours,
            "accuracy",
            ("sagm", "sam"),
            Test::NonInferior(0.5),
        ),
        claim(
            "oracle-beats-erm",
            "SAM at the ρ that the specification chose on the held-out domains is better than ERM.",
            ours,
            "accuracy",
            ("sam-oracle", "erm"),
            Test::Superior(0.0),
        ),
        claim(
            "oracle-gap",
            "What choosing ρ on the held-out domains adds over choosing it on the source domains.",
            ours,
            "accuracy",
            ("sam-oracle", "sam"),
            Test::Descriptive,
        ),
    ]
}

pub(super) fn handwriting3() -> Experiment {
    let protocol = "Three real digit collections (MNIST of the US, optdigits of Turkey, mfeat of the Netherlands), \
        all made 8×8. Train on two (at most 1,200 each, 80/20), test on all of the third; the metric is the mean over \
        the three. Network 64-128-128-10 with ReLU, Adam 1e-3, 32 of each domain a batch, 400 steps, last step \
        evaluated. For each of the three folds, hyper-parameters were chosen by accuracy on the validation parts of the \
        two collections that it trains on, seven candidates a method, on three seeds that aren't evaluated; settings \
        are listed in the order mnist / optdigits / mfeat held out. Splits, initial weights and batches are shared \
        by all arms of a seed. Protocol A of the specification.";
    experiment(
        &HANDWRITING3,
        "Handwriting-3, leave one collection out",
        protocol,
        &["mnist-10k", "optdigits", "mfeat"],
        (2, 10),
        8.5,
    )
}

pub(super) fn rotated_mnist() -> Experiment {
    let protocol = "Six domains of 1,000 different MNIST digits each, turned by 0° to 75° (bilinear) and pooled to \
        14×14. Hold out 0° and 75° in turn, train on the other five; the metric is the mean over the two. Network \
        196-128-128-10 with ReLU, Adam 1e-3, 32 of each domain a batch, 400 steps. Selection for each of the two \
        folds, splits and sharing as in Handwriting-3; settings are listed in the order 0° / 75° held out. Protocol B of the specification.";
    experiment(&ROTATED_MNIST, "Rotated MNIST, hold out the outer angles", protocol, &["mnist-10k"], (2, 5), 11.5)
}

fn experiment(
    protocol: &'static Protocol,
    title: &str,
    text: &str,
    data: &[&str],
    seeds: (u64, u64),
    seconds: f64,
) -> Experiment {
    let run: fn(&Context, &str, u64) -> Result<Outcome> = match protocol.name {
        "handwriting3" => |context, arm, seed| run_arm(&HANDWRITING3, context, arm, seed),
        _ => |context, arm, seed| run_arm(&ROTATED_MNIST, context, arm, seed),
    };
    Experiment {
        spec: Spec {
            name: protocol.name.into(),
            krate: "sam-opt".into(),
            title: title.into(),
            protocol: text.into(),
            data: data.iter().map(|s| (*s).to_owned()).collect(),
            kind: Kind::Core,
            metrics: metrics(protocol.held_out),
            arms: arms(protocol),
            claims: claims(),
            seeds,
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: seconds,
        },
        body: Body::PerArm(run),
    }
}

fn run_arm(protocol: &Protocol, context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    let tuned = Tuned::<Method>::parse(protocol.tuned)?;
    tuned.check_seed(seed)?;
    let domains = (protocol.load)()?;
    let folds = protocol.held_out.iter().map(|name| {
        let (method, steps) = match arm {
            "sam-oracle" => (&ORACLE, STEPS),
            "erm-2x" => (tuned.chosen("erm", name)?, 2 * STEPS),
            arm => (tuned.chosen(arm, name)?, STEPS),
        };
        Ok((*name, Trained::new(protocol, context, method, steps, domains, name, seed)?.test()?))
    });
    Ok(mean_over_folds(&folds.collect::<Result<Vec<_>>>()?))
}

/// The mean of every metric over the folds, and each fold's own accuracy.
fn mean_over_folds(folds: &[(&str, Outcome)]) -> Outcome {
    let mut outcome = Outcome::default();
    for (name, fold) in folds {
        outcome.set(&format!("accuracy {name}"), fold.metrics["accuracy"]);
        for (metric, value) in &fold.metrics {
            *outcome.metrics.entry(metric.clone()).or_insert(0.0) += value / folds.len() as f64;
        }
    }
    outcome
}

/// Trains with `held_out` held out and looks at the source domains only: what a search may know.
pub(super) fn source_validation(
    protocol: &Protocol,
    context: &Context,
    method: &Method,
    steps: u64,
    held_out: &str,
    seed: u64,
) -> Result<Score> {
    let domains = (protocol.load)()?;
    Ok(Trained::new(protocol, context, method, steps, domains, held_out, seed)?.validation())
}

/// A domain on the device: inputs `[n, features]`, classes `[n]`.
struct Samples {
    x: Tensor,
    y: Tensor,
}

impl Samples {
    fn new(domain: &Domain, device: Device) -> Result<Self> {
        let x = interop::to_tensor(&domain.x.view())?.to_device(device);
        let y: Vec<i64> = domain.y.iter().map(|&class| i64::from(class)).collect();
        Ok(Self { x, y: Tensor::from_slice(&y).to_device(device) })
    }

    fn accuracy(&self, net: &Mlp) -> f64 {
        let right = no_grad(|| net.forward_with(&self.x, false, false).argmax(1, false).eq_tensor(&self.y));
        100.0 * right.to_kind(Element::Double).mean(Element::Double).double_value(&[])
    }

    fn loss(&self, net: &Mlp) -> Tensor {
        net.forward_with(&self.x, false, false).cross_entropy_for_logits(&self.y)
    }
}

/// Row numbers of one domain, in the order in which batches use them.
fn row_order(rows: usize, needed: usize, seed: Seed) -> Vec<i64> {
    let mut rng = seed.rng();
    let mut order = Vec::with_capacity(needed + rows);
    while order.len() < needed {
        let mut epoch: Vec<i64> = (0..rows as i64).collect();
        epoch.shuffle(&mut rng);
        order.extend(epoch);
    }
    order.truncate(needed);
    order
}

/// A network after its last step, with the data of its fold.
struct Trained {
    store: VarStore,
    net: Mlp,
    train: Vec<Samples>,
    validation: Vec<Samples>,
    test: Samples,
    passes: usize,
    /// Stream of the random directions.
    directions: Seed,
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

impl Trained {
    fn new(
        protocol: &Protocol,
        context: &Context,
        method: &Method,
        steps: u64,
        domains: &[Domain],
        held_out: &str,
        seed: u64,
    ) -> Result<Self> {
        let index = domains.iter().position(|d| d.name == held_out).with_context(|| format!("no domain {held_out}"))?;
        let fold = domains::leave_one_out(domains, index, CAP, VALIDATION, seed)?;
        let streams = Seed::new(seed).child(protocol.name);
        let samples = |parts: &[Domain]| -> Result<Vec<Samples>> {
            parts.iter().map(|domain| Samples::new(domain, context.device)).collect()
        };
        let (train, validation) = (samples(&fold.train)?, samples(&fold.validation)?);
        let test = Samples::new(&fold.test, context.device)?;

        let store = VarStore::new(context.device);
        let net = Mlp::new(&store.root(), &MlpConfig::relu(protocol.widths), streams.child("init"))?;
        let mut optimizer = method.build(ParamGroup::from_var_store(&store), seed)?;
        let orders: Vec<Tensor> = fold
            .train
            .iter()
            .map(|domain| {
                let stream = streams.child("batches").child(&domain.name);
                let order = row_order(domain.y.len(), steps as usize * BATCH, stream);
                Tensor::from_slice(&order).to_device(context.device)
            })
            .collect();
        let mut passes = 0;
        for step in 0..steps as i64 {
            context.check()?;
            let rows: Vec<Tensor> = orders.iter().map(|o| o.narrow(0, step * BATCH as i64, BATCH as i64)).collect();
            let parts = train.iter().zip(&rows);
            let x = Tensor::cat(&parts.clone().map(|(d, rows)| d.x.index_select(0, rows)).collect::<Vec<_>>(), 0);
            let y = Tensor::cat(&parts.map(|(d, rows)| d.y.index_select(0, rows)).collect::<Vec<_>>(), 0);
            // Every domain has the same share of the batch, so this is the mean of the domains' means.
            let stats = optimizer.step(|_| Ok(net.forward_with(&x, true, true).cross_entropy_for_logits(&y)))?;
            passes += stats.passes;
        }
        Ok(Self { store, net, train, validation, test, passes, directions: streams.child("directions") })
    }

    fn validation_accuracies(&self) -> Vec<f64> {
        self.validation.iter().map(|d| d.accuracy(&self.net)).collect()
    }

    fn validation(&self) -> Score {
        let loss = |d: &Samples| no_grad(|| d.loss(&self.net)).double_value(&[]);
        let losses: Vec<f64> = self.validation.iter().map(loss).collect();
        Score { accuracy: mean(&self.validation_accuracies()), loss: mean(&losses) }
    }

    /// All metrics of the fold, the held-out domain's among them.
    fn test(&self) -> Result<Outcome> {
        let params = ParamSet::from_var_store(&self.store)?;
        let (mut ascents, mut means, mut maxima) = (Vec::new(), Vec::new(), Vec::new());
        for domain in &self.train {
            let loss = || domain.loss(&self.net);
            ascents.push(sharpness::ascent(&params, loss)?);
            let (mean, max) = sharpness::random_directions(&params, self.directions, loss)?;
            means.push(mean);
            maxima.push(max);
        }
        let validation = self.validation();
        let mut outcome = Outcome::default();
        outcome.set("accuracy", self.test.accuracy(&self.net));
        outcome.set("validation", validation.accuracy);
        outcome.set("validation loss", validation.loss);
        outcome.set("worst source", self.validation_accuracies().into_iter().fold(f64::INFINITY, f64::min));
        outcome.set("ascent sharpness", mean(&ascents));
        outcome.set("random sharpness", mean(&means));
        outcome.set("worst sharpness", mean(&maxima));
        outcome.set("passes", self.passes as f64);
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::super::arms::SEARCHED;
    use super::super::search::Trial;
    use super::*;
    use crate::spec::Mode;
    use std::collections::HashSet;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn batches_use_every_row_once_before_any_row_twice() {
        let order = row_order(10, 25, Seed::new(1));
        assert_eq!(order.len(), 25);
        for epoch in order[..20].chunks(10) {
            assert_eq!(epoch.iter().collect::<HashSet<_>>().len(), 10);
        }
        assert_eq!(order, row_order(10, 25, Seed::new(1)));
        assert_ne!(order, row_order(10, 25, Seed::new(2)));
        // A longer run starts with the same batches.
        assert_eq!(order[..], row_order(10, 50, Seed::new(1))[..25]);
    }

    #[test]
    fn the_committed_searches_tried_the_whole_grid_for_every_arm_and_fold_and_chose_the_best() {
        for protocol in [&HANDWRITING3, &ROTATED_MNIST] {
            let tuned = Tuned::<Method>::parse(protocol.tuned).unwrap();
            assert_eq!(tuned.searches.len(), SEARCHED.len() * protocol.held_out.len());
            for arm in SEARCHED {
                for held_out in protocol.held_out {
                    let search = tuned.searches.iter().find(|s| s.arm == arm && s.fold == *held_out).unwrap();
                    let tried: Vec<Method> = search.trials.iter().map(|t| t.candidate.clone()).collect();
                    assert_eq!(tried, Method::grid(arm).unwrap(), "{arm}, {held_out} held out");
                    let best = &Trial::best(&search.trials).unwrap().candidate;
                    assert_eq!(search.chosen, *best, "{arm}, {held_out} held out: the choice isn't the best trial");
                }
            }
            let evaluated = seeds(protocol);
            assert!(tuned.seeds.iter().all(|&s| s >= evaluated), "a search seed is evaluated too");
        }
    }

    #[test]
    fn notes_list_the_choices_of_the_folds() {
        for (protocol, folds) in [(&HANDWRITING3, 3), (&ROTATED_MNIST, 2)] {
            for arm in arms(protocol).iter().filter(|arm| SEARCHED.contains(&arm.name.as_str())) {
                assert!(arm.note.ends_with("chosen for each fold on validation among 7"), "{}", arm.note);
                assert_eq!(arm.note.matches(" / ").count(), folds - 1, "{}", arm.note);
            }
        }
    }

    #[test]
    fn a_fold_keeps_its_accuracy_and_shares_in_the_means() {
        let fold = |accuracy: f64, passes: f64| {
            let mut outcome = Outcome::default();
            outcome.set("accuracy", accuracy);
            outcome.set("passes", passes);
            outcome
        };
        let mean = mean_over_folds(&[("x", fold(40.0, 400.0)), ("y", fold(60.0, 800.0))]).metrics;
        let expected = [("accuracy", 50.0), ("accuracy x", 40.0), ("accuracy y", 60.0), ("passes", 600.0)];
        assert_eq!(mean, expected.map(|(name, value)| (name.to_owned(), value)).into());
    }

    /// Two domains of random points in four dimensions beside one that is held out.
    fn toy(held_out: f32) -> Vec<Domain> {
        let domain = |name: &str, add: f32| {
            let mut x = vec![0.0f32; 160];
            Seed::new(0).child(name).fill_normal(&mut x, 0);
            let x = ndarray::Array2::from_shape_fn((40, 4), |(i, j)| x[4 * i + j] + add);
            Domain { name: name.into(), x, y: (0..40).map(|i| i % 10).collect() }
        };
        vec![domain("a", 0.0), domain("b", 0.0), domain("c", held_out)]
    }

    const TOY: Protocol = Protocol {
        name: "toy",
        load: || {
            static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
            once(&DOMAINS, || Ok(toy(0.0)))
        },
        held_out: &["a", "c"],
        widths: &[4, 10],
        tuned: r#"{"seeds": [9], "searches": [
            {"arm": "sam", "fold": "a", "chosen": {"method": "erm", "weight_decay": 0.0}, "trials": []},
            {"arm": "sam", "fold": "c", "chosen": {"method": "sam", "rho": 0.5}, "trials": []}]}"#,
    };

    fn context() -> Context {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Context { mode: Mode::Quick, device: Device::Cpu, threads: 1, peer_python: None, interrupted: &NEVER }
    }

    #[test]
    fn a_search_learns_nothing_from_the_held_out_domain() {
        let score = |protocol: &Protocol, held_out: &str| {
            let score = source_validation(protocol, &context(), &ORACLE, 20, held_out, 3).unwrap();
            (score.accuracy, score.loss)
        };
        let load: fn() -> Result<&'static [Domain]> = || {
            static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
            once(&DOMAINS, || Ok(toy(5.0)))
        };
        let moved = Protocol { load, ..TOY };
        assert_eq!(score(&TOY, "c"), score(&moved, "c"));
        // The same change in a source domain is seen.
        assert_ne!(score(&TOY, "a"), score(&moved, "a"));
    }

    #[test]
    fn every_fold_trains_with_its_own_choice() {
        let outcome = run_arm(&TOY, &context(), "sam", 3).unwrap();
        // ERM's one pass a step where a is held out, SAM's two where c is.
        assert_eq!(outcome.metrics["passes"], 1.5 * STEPS as f64);
        let domains = toy(0.0);
        let alone = Trained::new(&TOY, &context(), &ORACLE, STEPS, &domains, "c", 3).unwrap().test().unwrap();
        assert_eq!(outcome.metrics["accuracy c"], alone.metrics["accuracy"]);
    }

    #[test]
    fn seeds_of_the_search_are_not_evaluated() {
        let message = run_arm(&TOY, &context(), "sam", 9).unwrap_err().to_string();
        assert!(message.contains("Seed 9"), "{message}");
    }

    fn seeds(protocol: &Protocol) -> u64 {
        let spec = if protocol.name == "handwriting3" { handwriting3().spec } else { rotated_mnist().spec };
        spec.seeds.1
    }
}
