//! A small natively routed mixture of experts, trained on the bytes of a novel beside a dense model of equal active size.

use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::spec::{Arm, Claim, Curve, Direction, Kind, Metric, Mode, Role, Spec, Test};
use anyhow::{Context as _, Result, bail};
use lm::config::ModelConfig;
use lm::model::{Model, Pass};
use lm::moe::LayerRouting;
use lm::train::{AdamW, OptimizerConfig, Schedule};
use rand::Rng as _;
use tensor::Seed;
use tensor::tch::{Device, Kind as TensorKind, Tensor, no_grad_guard};

const NLL: &str = "nll";
const LOAD: &str = "load";
const DEAD: &str = "dead";
const STEP: &str = "step";
const CURVE: &str = "loss";
/// Bytes of a window.
const TIME: i64 = 128;
const BATCH: usize = 8;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const LEARNING_RATE: f64 = 3e-3;
const CLIP: f64 = 1.0;

pub(super) fn experiment() -> Experiment {
    Experiment {
        spec: Spec {
            name: "moe-lm".into(),
            krate: "lm".into(),
            title: "A mixture of experts trained from scratch on a novel".into(),
            protocol: format!(
                "Byte-level Llama-style decoders on the text of Moby-Dick (first 90 % of the characters; the last 10 % are held \
                 out), windows of {TIME} bytes, batches of {BATCH}, AdamW at {LEARNING_RATE} with warm-up and half a cosine to 0, \
                 gradients clipped at {CLIP}; full: 4 layers of width 128, 300 steps; quick: 2 layers of width 64, 50 steps. The \
                 mixture has {EXPERTS} experts a layer of which a token uses {TOP_K}; the dense model's feed-forward is as wide as \
                 {TOP_K} experts, so both compute as much for a token. Arms of a seed share windows, and starting weights where \
                 names and shapes agree. The learning rate is the same for all arms and wasn't searched. \"Load\" is the largest number of assignments to an expert over the mean, on held-out text, \
                 averaged over layers."
            ),
            data: vec!["moby-dick".into()],
            kind: Kind::Core,
            metrics: vec![
                Metric::new(NLL, "held-out loss", "nats/byte", Direction::Lower, 4),
                Metric::new(LOAD, "largest load over mean", "", Direction::Lower, 2),
                Metric::new(DEAD, "experts without a token", "", Direction::Lower, 1),
                Metric::new(STEP, "time of a step", "ms", Direction::Neither, 0),
            ],
            arms: vec![
                Arm::new("dense", "Dense", Role::Baseline, "one feed-forward as wide as two experts"),
                Arm::new("moe", "Mixture of experts", Role::Method, "8 experts, top 2, balance loss 0.01"),
                Arm::new("unbalanced", "Mixture without balance loss", Role::Ablation, "8 experts, top 2"),
            ],
            claims: vec![
                Claim::new(
                    "moe",
                    "At equal computation a token, experts lower the held-out loss.",
                    "prior work",
                    NLL,
                    ("moe", "dense"),
                    Test::Superior(0.0),
                ),
                Claim::new(
                    "balance",
                    "The balance loss lowers the largest load.",
                    "prior work",
                    LOAD,
                    ("moe", "unbalanced"),
                    Test::Superior(0.0),
                ),
                Claim::new(
                    "balance-cost",
                    "The balance loss costs at most 0.02 nats a byte.",
                    "ours",
                    NLL,
                    ("moe", "unbalanced"),
                    Test::NonInferior(0.02),
                ),
            ],
            curves: vec![Curve::new(CURVE, "Held-out loss while training", "steps", "nats a byte", 3)],
            seeds: (1, 3),
            seeds_for_verdict: 3,
            threads: 1,
            seconds_per_seed: (12.0, 110.0),
        },
        body: Body::PerArm(run),
    }
}

struct Size {
    layers: usize,
    width: i64,
    steps: usize,
    /// Steps between points of the curve.
    every: usize,
    /// Windows of held-out text.
    held_out: usize,
}

fn run(context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    let size = match context.mode {
        Mode::Quick => Size { layers: 2, width: 64, steps: 50, every: 10, held_out: 16 },
        Mode::Full => Size { layers: 4, width: 128, steps: 300, every: 20, held_out: 64 },
    };
    let text = datasets::moby_dick::load()?;
    let (train, held_out) = datasets::moby_dick::train_held_out(&text);
    let held_out = windows(held_out.as_bytes(), size.held_out, Seed::new(0).child("held-out"), context.device)?;
    let seed = Seed::new(seed).child("moe-lm");

    let mut model = Model::random(&config(arm, &size)?, seed.child("init"), TensorKind::Float, context.device)?;
    model.set_trainable(true);
    let steps = size.steps as u64;
    let settings = OptimizerConfig {
        lr: LEARNING_RATE,
        weight_decay: 0.01,
        warmup: steps / 20,
        schedule: Schedule::Cosine,
        steps,
        clip: Some(CLIP),
        ..OptimizerConfig::default()
    };
    let mut optimizer = AdamW::new(settings, model.parameters())?;

    let mut outcome = Outcome::default();
    outcome.point(CURVE, 0.0, evaluate(&model, &held_out)?.0);
    let mut training = std::time::Duration::ZERO;
    for step in 0..size.steps {
        context.check()?;
        let start = std::time::Instant::now();
        let batch = windows(train.as_bytes(), BATCH, seed.child("batch").index(step as u64), context.device)?;
        let mut routings = Vec::new();
        optimizer.step(1, |_| {
            let loss = loss(&model, &batch, Some(&mut routings))?;
            let losses = routings.iter().flat_map(|r| &r.routing.losses);
            Ok(losses.fold(loss, |sum, (_, more)| sum + more))
        })?;
        model.post_step(&routings)?;
        training += start.elapsed();
        if (step + 1) % size.every == 0 {
            outcome.point(CURVE, (step + 1) as f64, evaluate(&model, &held_out)?.0);
        }
    }
    let (nll, routings) = evaluate(&model, &held_out)?;
    outcome.set(NLL, nll);
    outcome.set(STEP, 1e3 * training.as_secs_f64() / size.steps as f64);
    let loads = loads(&routings);
    let layers = loads.len().max(1) as f64;
    let largest = |counts: &Vec<usize>| {
        let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
        counts.iter().copied().max().unwrap_or(0) as f64 / mean
    };
    // A dense feed-forward is one expert that gets everything.
    outcome.set(LOAD, if loads.is_empty() { 1.0 } else { loads.iter().map(largest).sum::<f64>() / layers });
    outcome.set(DEAD, loads.iter().flatten().filter(|n| **n == 0).count() as f64);
    Ok(outcome)
}

fn config(arm: &str, size: &Size) -> Result<ModelConfig> {
    let expert = size.width;
    let base = |ffn| ModelConfig { context: TIME, ..ModelConfig::llama(256, size.width, size.layers, 4, 4, ffn) };
    let mut mixture = base(expert).mixtral(EXPERTS, TOP_K);
    match arm {
        "dense" => return Ok(base(expert * TOP_K as i64)),
        "moe" => {}
        "unbalanced" => mixture.moe.as_mut().context("a mixture has experts")?.balance = 0.0,
        _ => bail!("no arm \"{arm}\""),
    }
    Ok(mixture)
}

/// `[count, TIME + 1]` of i64, from random places.
fn windows(bytes: &[u8], count: usize, seed: Seed, device: Device) -> Result<Tensor> {
    let length = TIME as usize + 1;
    let last = bytes.len().checked_sub(length).context("the text is shorter than a window")?;
    let mut rng = seed.rng();
    let all: Vec<i64> = (0..count)
        .flat_map(|_| {
            let at = rng.random_range(0..=last);
            bytes[at..at + length].iter().map(|&b| i64::from(b))
        })
        .collect();
    Ok(Tensor::from_slice(&all).view([count as i64, length as i64]).to_device(device))
}

/// Mean negative log-likelihood of the bytes after the first.
fn loss(model: &Model, windows: &Tensor, routings: Option<&mut Vec<LayerRouting>>) -> lm::Result<Tensor> {
    let training = routings.is_some();
    let mut pass = Pass { routings, training, ..Pass::default() };
    let logits = model.logits(&windows.narrow(1, 0, TIME), &mut pass)?; // (b, t, 256)
    Ok(logits.reshape([-1, 256]).cross_entropy_for_logits(&windows.narrow(1, 1, TIME).reshape([-1])))
}

fn evaluate(model: &Model, held_out: &Tensor) -> Result<(f64, Vec<LayerRouting>)> {
    let _guard = no_grad_guard();
    let mut routings = Vec::new();
    let mut sum = 0.0;
    let count = held_out.size()[0];
    for first in (0..count).step_by(BATCH) {
        let part = held_out.narrow(0, first, (count - first).min(BATCH as i64));
        let mut pass = Pass { routings: Some(&mut routings), ..Pass::default() };
        let logits = model.logits(&part.narrow(1, 0, TIME), &mut pass)?.reshape([-1, 256]);
        let nll = logits.cross_entropy_for_logits(&part.narrow(1, 1, TIME).reshape([-1]));
        sum += nll.double_value(&[]) * part.size()[0] as f64;
    }
    Ok((sum / count as f64, routings))
}

/// Assignments by expert, a list a layer.
fn loads(routings: &[LayerRouting]) -> Vec<Vec<usize>> {
    let mut by_layer = std::collections::BTreeMap::<usize, Vec<usize>>::new();
    for routing in routings {
        let sums = by_layer.entry(routing.layer).or_insert_with(|| vec![0; routing.counts.len()]);
        sums.iter_mut().zip(&routing.counts).for_each(|(sum, n)| *sum += n);
    }
    by_layer.into_values().collect()
}
