//! What holds for any network and batch.
#![allow(missing_docs)]

mod common;
use common::close;
use proptest::prelude::*;
use sam_opt::baselines::{VatConfig, entropy, smoothed_cross_entropy, vat_penalty};
use sam_opt::measures::{hessian_top_eig, hessian_trace, sam_sharpness};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use sam_opt::tensor::{ParamSet, ParamVec, Seed};
use sam_opt::{
    Error, Iam, IamConfig, InconsistencyOpts, InconsistencyReport, Sgd, fisher_vector_product, local_inconsistency,
};

/// A network, and inputs with labels.
fn problem(seed: u64, classes: i64, rows: i64) -> (VarStore, Mlp, Tensor, Tensor) {
    let mut store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), &MlpConfig::relu(&[4, 7, classes]), Seed::new(seed)).unwrap();
    store.double();
    let x = Tensor::from_slice(&Seed::new(seed).child("x").normal(4 * rows as usize)).reshape([rows, 4]);
    let y = Tensor::arange(rows, (Kind::Int64, Device::Cpu)).remainder(classes);
    (store, net, x.to_kind(Kind::Double), y)
}

fn measure(store: &VarStore, opts: &InconsistencyOpts, logits: impl Fn() -> Tensor) -> InconsistencyReport {
    let params = ParamSet::from_var_store(store).unwrap();
    let params: Vec<Tensor> = params.tensors().iter().map(Tensor::shallow_clone).collect();
    local_inconsistency(&params, || Ok(logits()), opts).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_inconsistency_depends_on_the_distribution_of_inputs_only(
        seed: u64, classes in 2i64..6, rows in 1i64..12, rho in 0.01..1.0f64,
    ) {
        let (store, net, x, _) = problem(seed, classes, rows);
        let opts = InconsistencyOpts { rho, draws: 2, seed, ..InconsistencyOpts::default() };
        let forward = |x: &Tensor| net.forward_with(x, false, false);
        let s = measure(&store, &opts, || forward(&x));
        prop_assert!(s.mean.is_finite() && s.mean >= 0.0 && s.per_draw.iter().all(|&v| v >= 0.0));
        prop_assert!(s.delta_norm <= rho * (1.0 + 1e-9));
        let close = |other: &InconsistencyReport| (s.mean - other.mean).abs() <= 1e-6 * s.mean + 1e-12;
        // Batch order, a doubled batch, permuted classes, a constant added to all logits.
        prop_assert!(close(&measure(&store, &opts, || forward(&x.flip([0])))));
        prop_assert!(close(&measure(&store, &opts, || Tensor::cat(&[forward(&x), forward(&x)], 0))));
        prop_assert!(close(&measure(&store, &opts, || forward(&x).flip([1]))));
        prop_assert!(close(&measure(&store, &opts, || forward(&x) + 3.0)));
        let zero = measure(&store, &InconsistencyOpts { rho: 0.0, ..opts }, || forward(&x));
        prop_assert!(zero.mean.abs() < 1e-12);
    }

    #[test]
    fn more_power_steps_find_at_least_as_much_on_a_quadratic(seed: u64, rows in 2i64..8) {
        let (store, net, x, _) = problem(seed, 3, rows);
        let params = ParamSet::from_var_store(&store).unwrap();
        let before = params.snapshot();
        let forward = || net.forward_with(&x, false, false);
        // ½δᵀFδ by exact products, of the δ that so many steps find. So small that the search is linear.
        let at = |inner_steps| {
            let opts = InconsistencyOpts { rho: 1e-7, noise_scale: 1e-7, inner_steps, draws: 1, seed };
            let last = std::cell::RefCell::new(None);
            measure(&store, &opts, || {
                let moved = params.snapshot();
                moved.axpy(-1.0, &before).unwrap();
                *last.borrow_mut() = Some(moved);
                forward()
            });
            let delta = last.into_inner().unwrap();
            let parts: Vec<Tensor> = delta.present().iter().map(|t| t.copy()).collect();
            let product = fisher_vector_product(params.tensors(), || Ok(forward()), &parts).unwrap();
            0.5 * delta.dot(&ParamVec::new(product.into_iter().map(Some).collect())).unwrap()
        };
        let s: Vec<f64> = (1..5).map(at).collect();
        prop_assert!(s.windows(2).all(|w| w[1] >= w[0] * (1.0 - 1e-6)), "{s:?}");
    }

    #[test]
    fn every_variant_gives_finite_numbers(
        seed: u64, classes in 2i64..6, rows in 1i64..12, rho in 0.0..2.0f64, beta in 0.0..10.0f64,
    ) {
        for config in [IamConfig::d(rho, beta), IamConfig::s(rho), IamConfig::de(rho, beta)] {
            let (store, net, x, y) = problem(seed, classes, rows);
            let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig { seed, ..config }).unwrap();
            for _ in 0..2 {
                let loss = |z: &Tensor| Ok(common::iam::cross_entropy(z, &y));
                let stats = iam.step(|_| Ok(net.forward_with(&x, true, true)), loss).unwrap();
                prop_assert!(stats.loss.is_finite() && stats.final_grad_norm.is_finite());
                prop_assert!(stats.inconsistency.is_none_or(|s| s.is_finite() && s >= 0.0));
            }
            prop_assert!(iam.params().norm().is_finite());
        }
    }
}

#[test]
fn vat_finds_the_input_direction_and_leaves_the_weights_alone() {
    // Two classes, logits (0, wᵀx): the worst direction is ±w/‖w‖, the same for every input.
    let w = common::leaf(&[3.0, 4.0], Kind::Double);
    let logits = |x: &Tensor| {
        let z = x.mv(&w).unsqueeze(1);
        Ok(Tensor::cat(&[z.zeros_like(), z], 1))
    };
    let x = Tensor::from_slice(&[0.1f64, 0.0, 0.0, -0.1]).reshape([2, 2]);
    let config = VatConfig { epsilon: 0.2, ..VatConfig::default() };
    let penalty = vat_penalty(&x, logits, &config, 0).unwrap();
    let kl = |p: f64, q: f64| p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln();
    let sigma = |z: f64| 1.0 / (1.0 + (-z).exp());
    let sides = |z: f64| [kl(sigma(z), sigma(z + 1.0)), kl(sigma(z), sigma(z - 1.0))];
    let (a, b) = (sides(0.3), sides(-0.4));
    let got = penalty.double_value(&[]);
    let possible: Vec<f64> = a.iter().flat_map(|a| b.iter().map(move |b| (a + b) / 2.0)).collect();
    assert!(possible.iter().any(|p| (p - got).abs() < 1e-9), "{got} is none of {possible:?}");
    // Its gradient reaches the weights.
    let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    assert!(set.gradient(&penalty).unwrap().norm() > 0.0);
    assert!(!w.grad().defined());
    assert!(vat_penalty(&x, logits, &VatConfig { xi: 0.0, ..config.clone() }, 0).is_err());
    assert!(vat_penalty(&x, |x| Ok(x.detach()), &config, 0).is_err());
}

#[test]
fn vat_works_on_half_precision_inputs_and_refuses_what_is_no_table_of_classes() {
    let w = common::leaf(&[3.0, 4.0], Kind::Float);
    // One input doesn't matter: its slope is zero, and its direction must not become 0/0.
    let logits = |x: &Tensor| {
        let z = (x.to_kind(Kind::Float).relu() * &w).sum_dim_intlist([1i64].as_slice(), true, Kind::Float);
        Ok(Tensor::cat(&[z.zeros_like(), z], 1))
    };
    let x = Tensor::from_slice(&[0.1f32, 0.2, -5.0, -5.0]).reshape([2, 2]);
    let config = VatConfig { epsilon: 0.2, ..VatConfig::default() };
    let full = vat_penalty(&x, logits, &config, 0).unwrap().double_value(&[]);
    let half = vat_penalty(&x.to_kind(Kind::Half), logits, &config, 0).unwrap().double_value(&[]);
    assert!(full > 0.0 && (half / full - 1.0).abs() < 0.05, "{half} {full}");
    let refused = |change: &dyn Fn(Tensor, usize) -> Tensor| {
        let mut calls = 0;
        let changed = |x: &Tensor| {
            calls += 1;
            Ok(change(logits(x)?, calls))
        };
        vat_penalty(&x, changed, &config, 0).unwrap_err()
    };
    assert!(matches!(refused(&|z, _| z.narrow(1, 0, 1)), Error::BadLogitsShape { .. }));
    assert!(matches!(refused(&|z, _| z.narrow(0, 0, 0)), Error::EmptyBatch { .. }));
    assert!(matches!(refused(&|z, _| z * f64::NAN), Error::NonFinite { .. }));
    let halved = refused(&|z, call| if call == 2 { z.narrow(0, 0, 1) } else { z });
    assert!(matches!(halved, Error::BatchSizeChanged { first: 2, got: 1, .. }), "{halved}");
}

#[test]
fn smoothing_refuses_an_empty_batch() {
    let (logits, y) =
        (Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)), Tensor::zeros([0], (Kind::Int64, Device::Cpu)));
    assert!(matches!(smoothed_cross_entropy(&logits, &y, 0.1), Err(Error::EmptyBatch { .. })));
}

#[test]
fn entropy_is_largest_when_nothing_is_known() {
    let even = Tensor::zeros([3, 5], (Kind::Float, Device::Cpu));
    close(&[entropy(&even).unwrap().double_value(&[])], &[5f64.ln()], 1e-6);
    let sure = Tensor::from_slice(&[1e4f32, 0.0, 0.0]).reshape([1, 3]);
    assert_eq!(entropy(&sure).unwrap().double_value(&[]), 0.0);
    assert!(entropy(&Tensor::zeros([3, 1], (Kind::Float, Device::Cpu))).is_err());
}

#[test]
fn measures_of_a_quadratic_are_its_eigenvalue_trace_and_rise() {
    let w = common::leaf(&[1.0, 1.0], Kind::Double);
    let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let loss = common::quadratic(&w);
    close(&[hessian_top_eig(&set, &loss, 200, 1e-10, 0).unwrap()], &[10.0], 1e-8);
    // Random signs give the trace of a diagonal matrix exactly.
    close(&[hessian_trace(&set, &loss, 3, 0).unwrap()], &[11.0], 1e-9);
    close(&[sam_sharpness(&set, || Ok(common::quadratic(&w)), 0.05).unwrap()], &[6.014882395 - 5.5], 1e-8);
    assert!(hessian_trace(&set, &loss, 0, 0).is_err());
    assert!(sam_sharpness(&set, || Ok(common::quadratic(&w)), -1.0).is_err());
}
