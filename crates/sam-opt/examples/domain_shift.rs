//! Train on two digit collections, read a third: Adam, SAM and DA-SAM side by side.
//!
//! `cargo run --release -p sam-opt --example domain_shift` (about 20 s). It needs the sets `mnist-10k` and `mfeat`:
//! `cargo xtask data fetch mnist-10k mfeat`.
//!
//! Radii are chosen as a user can: by accuracy on held-back rows of the collections that are trained on. What would be best
//! on the third collection isn't known.

use anyhow::{Context as _, Result};
use datasets::domains::{Domain, handwriting3};
use ndarray::{Array2, Axis, concatenate};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Reduction, Tensor, nn::VarStore, no_grad};
use sam_opt::tensor::{ParamSet, Seed, interop, ndarray, stats, threads};
use sam_opt::{
    Adam, DaSam, DaSamConfig, DomainFold, DomainId, DomainLosses, DomainSampler, LeaveOneDomainOut, SharpnessOptions,
    sharpness_report,
};

/// Samples of each collection in a batch.
const BATCH: usize = 32;
const STEPS: u64 = 300;
const SEEDS: u64 = 4;

/// All rows of all collections.
struct Data {
    x: Tensor,
    y: Tensor,
    domains: Vec<DomainId>,
}

impl Data {
    fn load() -> Result<(Self, Vec<String>)> {
        let collections = handwriting3().context("fetch them with `cargo xtask data fetch mnist-10k mfeat`")?;
        let views: Vec<_> = collections.iter().map(|c| c.x.view()).collect();
        let x: Array2<f32> = concatenate(Axis(0), &views)?;
        let y: Vec<i64> = collections.iter().flat_map(|c| &c.y).map(|&class| i64::from(class)).collect();
        let of = |(k, c): (usize, &Domain)| vec![DomainId(k as u32); c.y.len()];
        let domains = collections.iter().enumerate().flat_map(of).collect();
        let names = collections.into_iter().map(|c| c.name).collect();
        Ok((Self { x: interop::to_tensor(&x.view())?, y: Tensor::from_slice(&y), domains }, names))
    }

    fn rows(&self, rows: &[usize]) -> (Tensor, Tensor) {
        let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
        let rows = Tensor::from_slice(&rows);
        (self.x.index_select(0, &rows), self.y.index_select(0, &rows))
    }

    /// Losses by collection, from one forward pass.
    fn losses(&self, net: &Mlp, rows: &[usize]) -> DomainLosses {
        let (x, y) = self.rows(rows);
        let log_p = net.forward_with(&x, true, true).log_softmax(-1, Kind::Float);
        let losses = log_p.nll_loss_nd(&y, None::<Tensor>, Reduction::None, -100);
        DomainLosses::PerSample { losses, domains: rows.iter().map(|&row| self.domains[row]).collect() }
    }

    fn accuracy(&self, net: &Mlp, rows: &[usize]) -> f64 {
        let (x, y) = self.rows(rows);
        let right = no_grad(|| net.forward_with(&x, false, false).argmax(1, false).eq_tensor(&y));
        100.0 * right.to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
    }
}

/// A trained network with its accuracy on held-back source rows, on the held-out collection, and its sharpness.
struct Trained {
    validation: f64,
    test: f64,
    sharpness: f64,
}

fn train(data: &Data, fold: &DomainFold, config: &DaSamConfig, seed: u64) -> Result<Trained> {
    let store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), &MlpConfig::relu(&[64, 128, 128, 10]), Seed::new(seed).child("init"))?;
    let config = DaSamConfig { seed, ..config.clone() };
    let mut optimizer = DaSam::for_store(&store, Adam::new(1e-3), config)?;
    let sources: Vec<DomainId> = fold.train.iter().map(|&row| data.domains[row]).collect();
    let sampler = DomainSampler::new(&sources, BATCH, seed)?;
    for step in 0..STEPS {
        let rows: Vec<usize> = sampler.batch(step).into_iter().map(|i| fold.train[i]).collect();
        optimizer.step(|_| Ok(data.losses(&net, &rows)))?;
    }
    let params = ParamSet::from_var_store(&store)?;
    let report = sharpness_report(&params, || Ok(data.losses(&net, &fold.train)), &SharpnessOptions::default())?;
    Ok(Trained {
        validation: data.accuracy(&net, &fold.validation),
        test: data.accuracy(&net, &fold.test),
        sharpness: report.mean_ascent(),
    })
}

fn main() -> Result<()> {
    threads::set(1)?; // the network is too small to share
    let (data, names) = Data::load()?;
    let held_out = DomainId(1);
    println!("Trained on {} and {}, tested on {}:", names[0], names[2], names[1]);
    let radius = |make: fn(f64) -> DaSamConfig| [0.05, 0.2].map(make).to_vec();
    let methods = [
        ("Adam", vec![DaSamConfig::da_sam(0.0)]),
        ("SAM", radius(|rho| DaSamConfig { das: sam_opt::DasRule::Uniform, ..DaSamConfig::das_only(rho) })),
        ("DA-SAM", radius(DaSamConfig::da_sam)),
    ];
    let mut baseline: Option<Vec<f64>> = None;
    for (name, configs) in methods {
        let (mut tests, mut sharpness) = (Vec::new(), 0.0);
        for seed in 0..SEEDS {
            let fold = LeaveOneDomainOut::new(&data.domains, 0.2, seed)?.fold(held_out)?;
            let runs = configs.iter().map(|config| train(&data, &fold, config, seed)).collect::<Result<Vec<_>>>()?;
            let best = runs.into_iter().max_by(|a, b| a.validation.total_cmp(&b.validation));
            let best = best.context("every method has a configuration")?;
            tests.push(best.test);
            sharpness += best.sharpness / SEEDS as f64;
        }
        let mean = stats::t_interval(&tests, 0.95)?.mean;
        print!("  {name:<7} {mean:.1} %, the loss rises by {sharpness:.3} nats along the gradient");
        match &baseline {
            None => println!(),
            Some(baseline) => {
                let d = stats::paired_t(&tests, baseline, 0.95)?;
                println!("; {:+.1} points over Adam, 95 % interval [{:.1}, {:.1}]", d.mean, d.low, d.high);
            }
        }
        baseline.get_or_insert(tests);
    }
    Ok(())
}
