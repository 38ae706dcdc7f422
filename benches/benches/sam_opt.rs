//! Step cost of each optimizer over the base optimizer: `cargo bench -p benches --bench sam_opt`.
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use sam_opt::base::step_on;
use sam_opt::{
    AdamW, Gsam, GsamConfig, Iam, IamConfig, InconsistencyOpts, ParamGroup, SAdam, SAdamConfig, Sagm, SagmConfig, Sam,
    SamConfig, Sgd, local_inconsistency,
};
use std::time::Duration;
use tensor::nn::{Mlp, MlpConfig};
use tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use tensor::{ParamSet, Seed};

struct Problem {
    store: VarStore,
    net: Mlp,
    x: Tensor,
    y: Tensor,
}

impl Problem {
    fn new(widths: &[i64], batch: i64) -> Self {
        let store = VarStore::new(Device::Cpu);
        let net = Mlp::new(&store.root(), &MlpConfig::relu(widths), Seed::new(0)).expect("the widths are valid");
        let x = Tensor::randn([batch, widths[0]], (Kind::Float, Device::Cpu));
        let y = Tensor::randint(10, [batch], (Kind::Int64, Device::Cpu));
        Self { store, net, x, y }
    }

    fn groups(&self) -> Vec<ParamGroup> {
        vec![ParamGroup::from_var_store(&self.store)]
    }

    fn loss(&self) -> Tensor {
        self.net.forward_with(&self.x, true, true).cross_entropy_for_logits(&self.y)
    }
}

fn step_cost(criterion: &mut Criterion) {
    let base = || Sgd::with_momentum(0.01, 0.9);
    for (net, widths) in [("small", &[64, 128, 128, 10][..]), ("large", &[784, 2048, 2048, 2048, 10][..])] {
        for batch in [64, 256] {
            let problem = Problem::new(widths, batch);
            let mut group = criterion.benchmark_group(format!("{net} net, batch {batch}"));
            group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
            let params = ParamSet::from_var_store(&problem.store).expect("the network has parameters");
            // Without any of our wrapper: what every cost is measured against.
            let mut sgd = base();
            group.bench_function(BenchmarkId::from_parameter("sgd"), |b| {
                b.iter(|| {
                    let gradient = params.gradient(&problem.loss()).expect("the loss depends on the parameters");
                    step_on(&mut sgd, &params, &gradient).expect("the shapes are the parameters' own");
                });
            });
            for (name, config) in
                [("sgd wrapped", SamConfig::sam(0.0)), ("sam", SamConfig::sam(0.05)), ("asam", SamConfig::asam(0.5))]
            {
                let mut sam = Sam::new(problem.groups(), base(), config).expect("valid settings");
                group.bench_function(BenchmarkId::from_parameter(name), |b| {
                    b.iter(|| sam.step(|_| Ok(problem.loss())).expect("a finite loss"));
                });
            }
            let config = GsamConfig { alpha: 0.1, sam: SamConfig::sam(0.05) };
            let mut gsam = Gsam::new(problem.groups(), base(), config).expect("valid settings");
            group.bench_function(BenchmarkId::from_parameter("gsam"), |b| {
                b.iter(|| gsam.step(|_| Ok(problem.loss())).expect("a finite loss"));
            });
            let config = SagmConfig { alpha: 0.001, sam: SamConfig::sam(0.05) };
            let mut sagm = Sagm::new(problem.groups(), base(), config).expect("valid settings");
            group.bench_function(BenchmarkId::from_parameter("sagm"), |b| {
                b.iter(|| sagm.step(|_| Ok(problem.loss())).expect("a finite loss"));
            });
            let mut adamw = AdamW::new(1e-4);
            group.bench_function(BenchmarkId::from_parameter("adamw"), |b| {
                b.iter(|| {
                    let gradient = params.gradient(&problem.loss()).expect("the loss depends on the parameters");
                    step_on(&mut adamw, &params, &gradient).expect("the shapes are the parameters' own");
                });
            });
            let config = SAdamConfig { lr: 1e-4, ..SAdamConfig::default() };
            let mut s_adam = SAdam::new(problem.groups(), config).expect("valid settings");
            group.bench_function(BenchmarkId::from_parameter("s-adam"), |b| {
                b.iter(|| s_adam.step(|_| Ok(problem.loss())).expect("a finite loss"));
            });
            group.finish();
        }
    }
}

/// IAM's steps and its estimator over sizes of network and batch: linear in both.
fn iam_scaling(criterion: &mut Criterion) {
    for (size, widths) in [
        ("1e4", &[64, 128, 10][..]),
        ("1e5", &[64, 256, 256, 10][..]),
        ("1e6", &[256, 832, 832, 10][..]),
        ("1e7", &[784, 2048, 2048, 2048, 10][..]),
    ] {
        for batch in [32, 256] {
            let problem = Problem::new(widths, batch);
            let mut group = criterion.benchmark_group(format!("IAM, {size} weights, batch {batch}"));
            group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
            let logits = || problem.net.forward_with(&problem.x, true, true);
            for (name, config) in [
                ("iam-s", IamConfig::s(0.05)),
                ("iam-d", IamConfig::d(0.05, 1.0)),
                ("iam-de", IamConfig::de(0.05, 1.0)),
            ] {
                let base = Sgd::with_momentum(0.01, 0.9);
                let mut iam = Iam::new(problem.groups(), base, config).expect("valid settings");
                group.bench_function(BenchmarkId::from_parameter(name), |b| {
                    b.iter(|| {
                        iam.step(|_| Ok(logits()), |z| Ok(z.cross_entropy_for_logits(&problem.y))).expect("finite")
                    });
                });
            }
            let params = ParamSet::from_var_store(&problem.store).expect("the network has parameters");
            let opts = InconsistencyOpts { draws: 1, ..InconsistencyOpts::default() };
            group.bench_function(BenchmarkId::from_parameter("inconsistency, one draw"), |b| {
                b.iter(|| local_inconsistency(params.tensors(), || Ok(logits()), &opts).expect("finite"));
            });
            group.finish();
        }
    }
}

criterion_group!(benches, step_cost, iam_scaling);
criterion_main!(benches);
