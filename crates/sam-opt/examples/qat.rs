//! Training with 2-bit weights on real 8×8 digits: AdamW, S-Adam, and AdamW with a constant damping.
//!
//! `cargo run --release -p sam-opt --example qat` (some 20 s; without `--release` not much longer). The data set is
//! compiled in, nothing is fetched.
//!
//! Look at three rows together. At a learning rate that is too high for AdamW any damping helps; a constant one shows how
//! much of that the probes explain; and at a smaller learning rate AdamW needs none of it.

use anyhow::Result;
use datasets::{optdigits, split};
use sam_opt::s_adam::{DampingLog, LgiKind};
use sam_opt::tensor::nn::uniform;
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore, no_grad};
use sam_opt::tensor::{Seed, interop, stats, threads};
use sam_opt::{FakeQuant, SAdam, SAdamConfig};

/// Digits to learn from, of 1,797.
const TRAIN: usize = 600;
const BATCH: i64 = 32;
const STEPS: i64 = 400;
const SEEDS: u64 = 8;
/// Too high for AdamW at two bits, and a third of it.
const RATES: (f64, f64) = (1e-2, 3e-3);

struct Samples {
    x: Tensor,
    y: Tensor,
}

impl Samples {
    fn new(rows: &[usize]) -> Result<Self> {
        let digits = optdigits::load().labeled().select(rows);
        let y: Vec<i64> = digits.y.iter().map(|&class| i64::from(class)).collect();
        let x = interop::to_tensor(&digits.x.view())?;
        Ok(Self { x: (x - 0.3) / 0.38, y: Tensor::from_slice(&y) })
    }
}

/// 64-64-64-10 with ReLU, whose weights are rounded to two bits in the forward pass.
struct Net {
    store: VarStore,
    layers: Vec<(Tensor, Tensor)>,
    quant: FakeQuant,
}

impl Net {
    fn new(seed: Seed) -> Result<Self> {
        let store = VarStore::new(Device::Cpu);
        let mut layers = Vec::new();
        for (i, size) in [[64, 64], [64, 64], [10, 64]].iter().enumerate() {
            let path = store.root() / i.to_string();
            let (seed, bound) = (seed.index(i as u64), 1.0 / 8.0);
            let weight = uniform(&path, "weight", size, bound, seed.child("weight"))?;
            layers.push((weight, uniform(&path, "bias", &size[..1], bound, seed.child("bias"))?));
        }
        Ok(Self { store, layers, quant: FakeQuant::new(2, false)? })
    }

    /// `[n, 64] → [n, 10]`. The gradient goes straight through the rounding.
    fn forward(&self, x: &Tensor) -> sam_opt::Result<Tensor> {
        let mut hidden = x.shallow_clone();
        for (i, (weight, bias)) in self.layers.iter().enumerate() {
            hidden = hidden.f_linear(&self.quant.forward(weight)?, Some(bias))?;
            if i < 2 {
                hidden = hidden.relu();
            }
        }
        Ok(hidden)
    }
}

/// What a run gives: accuracy on digits it hasn't seen in percent, mean damping, and the equivalence report in words.
struct Trained {
    accuracy: f64,
    damping: f64,
    report: String,
}

fn train(config: &SAdamConfig, seed: u64) -> Result<Trained> {
    let order = split::stratified_order(&optdigits::load().y, seed);
    let (train, test) = (Samples::new(&order[..TRAIN])?, Samples::new(&order[TRAIN..])?);
    let net = Net::new(Seed::new(seed).child("init"))?;
    let mut optimizer = SAdam::for_store(&net.store, SAdamConfig { seed, ..config.clone() })?;
    let mut log = DampingLog::new(config);
    for step in 0..STEPS {
        // The batch of the step: the same for every method, and for the probes.
        let rows = (Tensor::arange(BATCH, (Kind::Int64, Device::Cpu)) + step * BATCH).remainder(TRAIN as i64);
        let (x, y) = (train.x.index_select(0, &rows), train.y.index_select(0, &rows));
        log.push(&optimizer.step(|_| Ok(net.forward(&x)?.cross_entropy_for_logits(&y)))?);
    }
    let right = no_grad(|| net.forward(&test.x))?.argmax(1, false).eq_tensor(&test.y);
    let accuracy = 100.0 * right.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    let report = log.report().expect("there were steps");
    Ok(Trained { accuracy, damping: report.mean_damping, report: report.to_string() })
}

fn main() -> Result<()> {
    threads::set(1)?; // the network is too small to share
    let at = |lr, lgi| SAdamConfig { lr, lgi, ..SAdamConfig::default() };
    let all = |config: &SAdamConfig| (0..SEEDS).map(|seed| train(config, seed)).collect::<Result<Vec<Trained>>>();
    let accuracies = |runs: &[Trained]| runs.iter().map(|run| run.accuracy).collect::<Vec<f64>>();
    let (high, low) = RATES;

    // Without damping (a constant of 1) the steps are AdamW's, bit for bit.
    let adamw = accuracies(&all(&at(high, LgiKind::Constant(1.0)))?);
    let slower = accuracies(&all(&at(low, LgiKind::Constant(1.0)))?);
    let published = all(&at(high, LgiKind::Published))?;
    let constant = (0..SEEDS)
        .zip(&published)
        .map(|(seed, run)| Ok(train(&at(high, LgiKind::Constant(run.damping)), seed)?.accuracy))
        .collect::<Result<Vec<f64>>>()?;
    let s_adam = accuracies(&published);

    println!("2-bit weights, {TRAIN} digits of optdigits, {STEPS} steps, {SEEDS} seeds, tested on the others:");
    for (name, values) in [
        (format!("AdamW, rate {high}"), &adamw),
        (format!("S-Adam, rate {high}"), &s_adam),
        (format!("constant damping, rate {high}"), &constant),
        (format!("AdamW, rate {low}"), &slower),
    ] {
        println!("  {name:<30} {:.2} %", stats::t_interval(values, 0.95)?.mean);
    }
    for (text, a, b) in [
        ("S-Adam over AdamW at the same rate", &s_adam, &adamw),
        ("S-Adam over the constant damping", &s_adam, &constant),
        ("S-Adam over AdamW at the lower rate", &s_adam, &slower),
    ] {
        let d = stats::paired_t(a, b, 0.95)?;
        println!("  {text:<38} {:+.2} points, 95 % interval [{:.2}, {:.2}]", d.mean, d.low, d.high);
    }
    println!("First seed: {}", published[0].report);
    Ok(())
}
