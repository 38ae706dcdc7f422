//! Real 8×8 digits from few labels: plain Adam, SAM and ASAM side by side.
//!
//! `cargo run --release -p sam-opt --example digits` (about 20 s; without `--release` about 40 s). The data set is
//! compiled in, nothing is fetched.

use anyhow::Result;
use datasets::{optdigits, split};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore, no_grad};
use sam_opt::tensor::{Seed, interop, stats, threads};
use sam_opt::{Adam, ParamGroup, Sam, SamConfig};

/// Labels to learn from, of 1,797.
const TRAIN: usize = 200;
const BATCH: i64 = 32;
const STEPS: i64 = 600;
const SEEDS: u64 = 5;

struct Samples {
    x: Tensor,
    y: Tensor,
}

impl Samples {
    fn new(rows: &[usize]) -> Result<Self> {
        let digits = optdigits::load().labeled().select(rows);
        let y: Vec<i64> = digits.y.iter().map(|&class| i64::from(class)).collect();
        Ok(Self { x: interop::to_tensor(&digits.x.view())?, y: Tensor::from_slice(&y) })
    }
}

/// Trains one network; its accuracy on the digits that it hasn't seen, in percent.
fn train(config: SamConfig, seed: u64) -> Result<f64> {
    let order = split::stratified_order(&optdigits::load().y, seed);
    let (train, test) = (Samples::new(&order[..TRAIN])?, Samples::new(&order[TRAIN..])?);

    let store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), &MlpConfig::relu(&[64, 128, 128, 10]), Seed::new(seed).child("init"))?;
    let mut optimizer = Sam::new(vec![ParamGroup::from_var_store(&store)], Adam::new(1e-3), config)?;
    for step in 0..STEPS {
        // The batch of the step: the same for every method and in both passes.
        let start = (step * BATCH) % TRAIN as i64;
        let rows = Tensor::arange(BATCH, (Kind::Int64, Device::Cpu)) + start;
        let rows = rows.remainder(TRAIN as i64);
        let (x, y) = (train.x.index_select(0, &rows), train.y.index_select(0, &rows));
        optimizer.step(|_| Ok(net.forward_with(&x, true, true).cross_entropy_for_logits(&y)))?;
    }
    let right = no_grad(|| net.forward_with(&test.x, false, false).argmax(1, false).eq_tensor(&test.y));
    Ok(100.0 * right.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]))
}

fn main() -> Result<()> {
    threads::set(1)?; // the network is too small to share
    let methods =
        [("Adam", SamConfig::sam(0.0)), ("SAM, rho 0.2", SamConfig::sam(0.2)), ("ASAM, rho 1", SamConfig::asam(1.0))];
    println!("{TRAIN} labels of optdigits, {STEPS} steps, tested on the other {}:", 1797 - TRAIN);
    let mut baseline: Option<Vec<f64>> = None;
    for (name, config) in methods {
        let accuracies = (0..SEEDS).map(|seed| train(config.clone(), seed)).collect::<Result<Vec<f64>>>()?;
        let mean = stats::t_interval(&accuracies, 0.95)?;
        print!("  {name:<14} {:.2} %", mean.mean);
        match &baseline {
            None => println!(),
            Some(baseline) => {
                let d = stats::paired_t(&accuracies, baseline, 0.95)?;
                println!("   {:+.2} points over Adam, 95 % interval [{:.2}, {:.2}]", d.mean, d.low, d.high);
            }
        }
        baseline.get_or_insert(accuracies);
    }
    Ok(())
}
