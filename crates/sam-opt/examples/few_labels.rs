//! Five labels a class and 1,100 digits without: plain SGD, SAM and IAM-D side by side.
//!
//! `cargo run --release -p sam-opt --example few_labels` (about 20 s). The data set is compiled in, nothing is fetched.

use anyhow::Result;
use datasets::{optdigits, split};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore, no_grad};
use sam_opt::tensor::{ParamSet, Seed, interop, stats, threads};
use sam_opt::{Iam, IamConfig, InconsistencyOpts, ParamGroup, Sam, SamConfig, Sgd, SgdConfig, local_inconsistency};

const LABELED: usize = 50;
const TEST: usize = 600;
/// Inputs of a step: all labeled ones, and as many again three times without labels.
const UNLABELED_BATCH: i64 = 150;
const STEPS: u64 = 400;
const SEEDS: u64 = 5;

enum Method {
    Sam(f64),
    Iam(IamConfig),
}

struct Digits {
    x: Tensor,
    y: Tensor,
}

impl Digits {
    fn new(rows: &[usize]) -> Result<Self> {
        let digits = optdigits::load().labeled().select(rows);
        let y: Vec<i64> = digits.y.iter().map(|&class| i64::from(class)).collect();
        // Pixels have mean 0.3 and deviation 0.38.
        Ok(Self { x: (interop::to_tensor(&digits.x.view())? - 0.3) / 0.38, y: Tensor::from_slice(&y) })
    }
}

/// Trains one network; test accuracy in percent, and the local inconsistency on the unlabeled digits.
fn train(method: &Method, seed: u64) -> Result<(f64, f64)> {
    let order = split::stratified_order(&optdigits::load().y, seed);
    let test = Digits::new(&order[..TEST])?;
    let labeled = Digits::new(&order[TEST..TEST + LABELED])?;
    let unlabeled = Digits::new(&order[TEST + LABELED..])?;

    let store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), &MlpConfig::relu(&[64, 128, 128, 10]), Seed::new(seed).child("init"))?;
    let base = || Sgd::from_config(SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 5e-4, ..SgdConfig::default() });
    let group = || vec![ParamGroup::from_var_store(&store)];
    match method {
        Method::Sam(rho) => {
            let mut sam = Sam::new(group(), base(), SamConfig::sam(*rho))?;
            for step in 0..STEPS {
                sam.set_lr(cosine(step))?;
                sam.step(|_| Ok(net.forward_with(&labeled.x, true, true).cross_entropy_for_logits(&labeled.y)))?;
            }
        }
        Method::Iam(config) => {
            let mut iam = Iam::new(group(), base(), IamConfig { seed, ..config.clone() })?;
            let mut first = 0;
            for step in 0..STEPS {
                iam.set_lr(cosine(step))?;
                // The same inputs in every pass of the step, labeled ones first.
                let rows = (Tensor::arange(UNLABELED_BATCH, (Kind::Int64, Device::Cpu)) + first)
                    .remainder(unlabeled.x.size()[0]);
                first += UNLABELED_BATCH;
                let x = Tensor::cat(&[labeled.x.shallow_clone(), unlabeled.x.index_select(0, &rows)], 0);
                iam.step_semi(
                    LABELED as i64,
                    |_pass| Ok(net.forward_with(&x, true, true)),
                    |logits| Ok(logits.cross_entropy_for_logits(&labeled.y)),
                )?;
            }
        }
    }

    let right = no_grad(|| net.forward_with(&test.x, false, false).argmax(1, false).eq_tensor(&test.y));
    let accuracy = 100.0 * right.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    let params = ParamSet::from_var_store(&store)?;
    let logits = || Ok(net.forward_with(&unlabeled.x, false, false));
    let flatness = local_inconsistency(params.tensors(), logits, &InconsistencyOpts::default())?;
    Ok((accuracy, flatness.mean))
}

fn cosine(step: u64) -> f64 {
    0.025 * (1.0 + (std::f64::consts::PI * step as f64 / STEPS as f64).cos())
}

fn main() -> Result<()> {
    threads::set(1)?; // the network is too small to share
    let methods = [
        ("SGD", Method::Sam(0.0)),
        ("SAM, rho 0.2", Method::Sam(0.2)),
        ("IAM-S, rho 0.5", Method::Iam(IamConfig::s(0.5))),
        ("IAM-D, rho 0.5", Method::Iam(IamConfig::d(0.5, 1.0))),
    ];
    println!("{LABELED} labels of optdigits, {STEPS} steps, {SEEDS} splits, tested on {TEST} others:");
    let mut baseline: Option<Vec<f64>> = None;
    for (name, method) in methods {
        let runs = (0..SEEDS).map(|seed| train(&method, seed)).collect::<Result<Vec<_>>>()?;
        let (accuracies, flatness): (Vec<f64>, Vec<f64>) = runs.into_iter().unzip();
        let mean = stats::t_interval(&accuracies, 0.95)?.mean;
        let s = stats::t_interval(&flatness, 0.95)?.mean;
        print!("  {name:<15} {mean:.2} %, inconsistency {s:.4} nats");
        match &baseline {
            None => println!(),
            Some(baseline) => {
                let d = stats::paired_t(&accuracies, baseline, 0.95)?;
                println!("   {:+.2} points over SGD, 95 % interval [{:.2}, {:.2}]", d.mean, d.low, d.high);
            }
        }
        baseline.get_or_insert(accuracies);
    }
    Ok(())
}
