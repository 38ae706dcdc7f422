//! Derivatives and spectra against closed forms and dense matrices.
#![cfg(feature = "torch")]
#![allow(missing_docs)]

use proptest::prelude::*;
use tensor::autograd::{GaussNewton, Hessian, gradient, gradient_check};
use tensor::spectrum::{Probe, SlqConfig, lanczos, power_iteration, slq};
use tensor::tch::{Device, Kind, Tensor};
use tensor::{Error, ParamSet, Result, Seed};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn random(n: usize, seed: u64) -> Tensor {
    Tensor::from_slice(&Seed::new(seed).normal(n)).to_kind(Kind::Double)
}

/// A two-layer network in f64: its parameters, inputs and targets.
struct Net {
    params: ParamSet,
    x: Tensor,
    y: Tensor,
}

impl Net {
    fn new() -> Self {
        let leaf = |n: usize, shape: &[i64], seed| (random(n, seed).reshape(shape) * 0.5).set_requires_grad(true);
        let named = [("a", leaf(12, &[4, 3], 1)), ("b", leaf(4, &[4], 2)), ("c", leaf(8, &[2, 4], 3))];
        let params = ParamSet::new(named.map(|(name, t)| (name.to_owned(), t))).unwrap();
        Self { params, x: random(15, 4).reshape([5, 3]), y: Tensor::from_slice(&[0i64, 1, 1, 0, 1]) }
    }

    fn outputs(&self) -> Tensor {
        let [a, b, c] = self.params.tensors() else { unreachable!("three tensors") };
        self.x.linear(a, Some(b)).tanh().matmul(&c.tr())
    }

    fn loss(&self) -> Tensor {
        self.cross_entropy(&self.outputs())
    }

    /// In f64; tch's `cross_entropy_for_logits` goes through f32.
    fn cross_entropy(&self, logits: &Tensor) -> Tensor {
        logits.log_softmax(1, Kind::Double).nll_loss(&self.y)
    }
}

/// The dense matrix of an operator.
fn dense(n: usize, apply: impl Fn(&Tensor) -> Result<Tensor>) -> Tensor {
    let eye = Tensor::eye(n as i64, F64);
    let columns: Vec<Tensor> = (0..n as i64).map(|i| apply(&eye.get(i)).unwrap()).collect();
    Tensor::stack(&columns, 1)
}

fn largest(t: &Tensor) -> f64 {
    t.abs().max().double_value(&[])
}

#[test]
fn gradients_agree_with_finite_differences() {
    let net = Net::new();
    // Central differences in f64 with h = 1e-5: error about 1e-10.
    assert!(gradient_check(&net.params, 1e-5, || Ok(net.loss())).unwrap() < 1e-8);
    let before = net.params.snapshot();
    before.axpy(-1.0, &net.params.snapshot()).unwrap();
    assert_eq!(before.norm(), 0.0, "the check puts every value back");
}

#[test]
fn a_wrong_gradient_fails_the_check() {
    let w = Tensor::from_slice(&[0.7f64, -0.3]).set_requires_grad(true);
    let params = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    // The detached factor hides half of the derivative.
    let deviation = gradient_check(&params, 1e-5, || Ok((&w * w.detach()).sum(Kind::Double))).unwrap();
    assert!(deviation > 0.1, "{deviation}");
}

#[test]
fn hessian_products_agree_with_finite_differences_and_are_symmetric() {
    let net = Net::new();
    let n = net.params.numel();
    let hessian = Hessian::new(&net.loss(), &net.params).unwrap();
    let h = dense(n, |v| hessian.apply(v));
    assert!(largest(&(&h - h.tr())) < 1e-12);
    let v = random(n, 9);
    // Before the parameters move: libtorch refuses a kept graph whose inputs have changed.
    let (product, here) = (hessian.apply(&v).unwrap(), hessian.gradient());
    let step = net.params.unflatten(&v).unwrap();
    let gradient_at = |t: f64| {
        let _guard = net.params.perturb(&[t; 3], &step, None).unwrap();
        gradient(&net.loss(), &net.params).unwrap().flatten(&net.params).unwrap()
    };
    let difference = (gradient_at(1e-5) - gradient_at(-1e-5)) / 2e-5;
    assert!(largest(&(product - difference)) < 1e-8);
    assert!(largest(&(here - gradient_at(0.0))) < 1e-15);
}

#[test]
fn gauss_newton_products_are_jt_h_j_and_positive() {
    let net = Net::new();
    let n = net.params.numel();
    let outputs = net.outputs();
    let products = GaussNewton::new(&outputs, |z| net.cross_entropy(z), &net.params).unwrap();
    let g = dense(n, |v| products.apply(v));
    // The Jacobian, one output at a time.
    let rows: Vec<Tensor> = (0..10)
        .map(|i| gradient(&net.outputs().reshape([-1]).get(i), &net.params).unwrap().flatten(&net.params).unwrap())
        .collect();
    let j = Tensor::stack(&rows, 0); // [outputs, n]
    // Of the mean cross entropy: (diag(p) − p pᵀ)/5 for each sample.
    let p = outputs.detach().softmax(1, Kind::Double);
    let h = Tensor::zeros([10, 10], F64);
    for s in 0..5 {
        let row = p.get(s);
        let block = (Tensor::diag_embed(&row, 0, -2, -1) - row.outer(&row)) / 5.0;
        h.narrow(0, 2 * s, 2).narrow(1, 2 * s, 2).copy_(&block);
    }
    assert!(largest(&(&g - j.tr().matmul(&h).matmul(&j))) < 1e-12);
    let (values, _) = g.linalg_eigh("L");
    assert!(values.min().double_value(&[]) > -1e-12);
}

#[test]
fn losses_without_a_graph_or_a_single_value_are_refused() {
    let net = Net::new();
    assert!(matches!(gradient(&net.loss().detach(), &net.params), Err(Error::Detached { .. })));
    assert!(matches!(gradient(&net.outputs(), &net.params), Err(Error::Shape { .. })));
    let detached = net.outputs().detach();
    assert!(matches!(GaussNewton::new(&detached, |z| z.sum(Kind::Double), &net.params), Err(Error::Detached { .. })));
    let hessian = Hessian::new(&net.loss(), &net.params).unwrap();
    assert!(matches!(hessian.apply(&Tensor::zeros([3], F64)), Err(Error::Shape { .. })));
}

#[test]
fn an_affine_loss_has_a_zero_hessian() {
    let w = Tensor::from_slice(&[1.0f64, 2.0]).set_requires_grad(true);
    let params = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let hessian = Hessian::new(&(&w * 3.0).sum(Kind::Double), &params).unwrap();
    assert_eq!(Vec::<f64>::try_from(hessian.apply(&Tensor::ones([2], F64)).unwrap()).unwrap(), [0.0, 0.0]);
}

// Spectra. Numbers: specification qat-winq, check 5.

#[test]
fn lanczos_on_three_eigenvalues_is_exact() {
    let d = Tensor::from_slice(&[1.0f64, 2.0, 4.0]);
    let t = lanczos(|v| Ok(v * &d), &Tensor::ones([3], F64), 10).unwrap();
    let (nodes, weights) = t.quadrature().unwrap();
    for (got, expected) in nodes.iter().zip([1.0, 2.0, 4.0]) {
        assert!((got - expected).abs() < 1e-12, "{nodes:?}");
    }
    assert_eq!(nodes.len(), 3);
    assert!(weights.iter().all(|w| (w - 1.0 / 3.0).abs() < 1e-12), "{weights:?}");
}

#[test]
fn slq_on_the_specifications_diagonal() {
    let mut values = vec![0.0f64; 150];
    values.extend((0..50).map(|i| -2.0 + 7.0 * f64::from(i) / 49.0));
    let d = Tensor::from_slice(&values);
    let config = SlqConfig { probes: 20, steps: 30, probe: Probe::Rademacher, seed: 1 };
    let s = slq(|v| Ok(v * &d), 200, Kind::Double, Device::Cpu, &config).unwrap();
    // Rademacher probes are exact on a diagonal.
    assert!((s.trace() / 200.0 - 0.375).abs() < 1e-9, "{}", s.trace());
    assert!((s.hutchinson_trace / 200.0 - 0.375).abs() < 1e-9);
    assert!((s.zero_mass(1e-3) - 0.75).abs() < 0.03, "{}", s.zero_mass(1e-3));
    assert!((s.lambda_min + 2.0).abs() < 1e-7 && (s.lambda_max - 5.0).abs() < 1e-7);
    let squares = values.iter().map(|v| v * v).sum::<f64>() / 200.0;
    assert!((s.rms - squares.sqrt()).abs() < 1e-9);
    let masses = s.zero_mass(1e-3) + s.positive_mass(1e-3) + s.negative_mass(1e-3);
    assert!((masses - 1.0).abs() < 1e-9);
    let integral: f64 = (0..2000).map(|i| s.density(-4.0 + 0.006 * f64::from(i), 0.05) * 0.006).sum();
    assert!((integral - 1.0).abs() < 1e-3, "{integral}");
}

#[test]
fn slq_repeats_and_refuses_counts_of_zero() {
    let d = random(30, 5);
    let run = |config: &SlqConfig| slq(|v| Ok(v * &d), 30, Kind::Double, Device::Cpu, config);
    // All Rademacher probes are alike to a diagonal.
    let config = SlqConfig { steps: 10, probe: Probe::Gaussian, ..SlqConfig::default() };
    assert_eq!(run(&config).unwrap(), run(&config).unwrap());
    assert_ne!(run(&config).unwrap().nodes, run(&SlqConfig { seed: 1, ..config.clone() }).unwrap().nodes);
    let message = run(&SlqConfig { probes: 0, ..config }).unwrap_err().to_string();
    assert!(message.contains("probes"), "{message}");
    assert!(serde_json::from_str::<SlqConfig>("{\"probe\":\"gaussian\",\"stepz\":3}").is_err());
}

#[test]
fn a_product_that_is_not_finite_or_of_another_length_is_an_error() {
    let nan = |v: &Tensor| Ok(v * f64::NAN);
    assert!(matches!(lanczos(nan, &Tensor::ones([3], F64), 2), Err(Error::NonFinite { .. })));
    let short = |v: &Tensor| Ok(v.narrow(0, 0, 2));
    assert!(matches!(lanczos(short, &Tensor::ones([3], F64), 2), Err(Error::Shape { .. })));
    assert!(lanczos(nan, &Tensor::zeros([3], F64), 2).is_err());
}

#[test]
fn without_ghosts_a_long_lanczos_finds_each_eigenvalue_once() {
    // One huge eigenvalue converges at once; without re-orthogonalization copies of it would appear.
    let mut values: Vec<f64> = (0..60).map(|i| f64::from(i) / 60.0).collect();
    values.push(1000.0);
    let d = Tensor::from_slice(&values);
    let t = lanczos(|v| Ok(v * &d), &random(61, 6), 61).unwrap();
    let (nodes, _) = t.quadrature().unwrap();
    assert_eq!(nodes.iter().filter(|&&x| x > 500.0).count(), 1);
    assert_eq!(nodes.len(), 61);
}

#[test]
fn power_iteration_finds_the_eigenvalue_of_largest_magnitude_with_its_sign() {
    for (values, expected) in [([1.0f64, -5.0, 3.0], -5.0), ([4.0, -1.0, 0.5], 4.0)] {
        let d = Tensor::from_slice(&values);
        let pair = power_iteration(|v| Ok(v * &d), 3, Kind::Double, Device::Cpu, Seed::new(0), 500, 1e-10).unwrap();
        assert!(pair.converged && (pair.value - expected).abs() < 1e-9, "{pair:?}");
        assert!(pair.residual <= 1e-10 * expected.abs());
    }
    let zero = power_iteration(|v| Ok(v * 0.0), 3, Kind::Float, Device::Cpu, Seed::new(0), 10, 1e-6).unwrap();
    assert_eq!((zero.value, zero.converged, zero.iterations), (0.0, true, 1));
    let few = power_iteration(
        |v| Ok(v * Tensor::from_slice(&[1.0f64, 0.99])),
        2,
        Kind::Double,
        Device::Cpu,
        Seed::new(0),
        2,
        1e-12,
    )
    .unwrap();
    assert!(!few.converged && few.iterations == 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_full_lanczos_run_reproduces_the_dense_spectrum(n in 2usize..12, seed in any::<u64>()) {
        let m = random(n * n, seed).reshape([n as i64, n as i64]);
        let a = &m + m.tr();
        let (values, _) = a.linalg_eigh("L");
        let values = Vec::<f64>::try_from(values).unwrap();
        let (nodes, weights) = lanczos(|v| Ok(a.mv(v)), &random(n, seed ^ 1), n).unwrap().quadrature().unwrap();
        let scale = values.iter().map(|v| v.abs()).fold(0.0, f64::max);
        for node in &nodes {
            let nearest = values.iter().map(|v| (v - node).abs()).fold(f64::INFINITY, f64::min);
            prop_assert!(nearest < 1e-6 * scale, "{node} isn't among {values:?}");
        }
        prop_assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    }
}

#[test]
fn gradients_of_parameters_that_enter_alike_are_separate_tensors() {
    let leaf = || Tensor::from_slice(&[1.0f32, 2.0]).set_requires_grad(true);
    let (a, b) = (leaf(), leaf());
    let params = ParamSet::new([("a".to_owned(), a.shallow_clone()), ("b".to_owned(), b.shallow_clone())]).unwrap();
    let gradient = params.gradient(&(&a + &b).square().sum(Kind::Float)).unwrap();
    gradient.scale(0.5).unwrap();
    assert_eq!(gradient.norm(), (2.0 * (4.0 + 16.0f64)).sqrt() * 0.5 * 2.0);
}

#[test]
fn a_frozen_set_has_no_gradient_and_nobodys_grad_field_changes() {
    let w = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
    let frozen = Tensor::from_slice(&[2.0f32]);
    let params = ParamSet::new([("frozen".to_owned(), frozen.shallow_clone())]).unwrap();
    let gradient = params.gradient(&(&w * &frozen).sum(Kind::Float)).unwrap();
    assert!(gradient.is_empty() && !w.grad().defined());
}

#[test]
fn the_gradient_check_puts_values_back_when_the_loss_fails() {
    let w = Tensor::from_slice(&[0.7f64, -0.3]).set_requires_grad(true);
    let params = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let mut calls = 0;
    let result = gradient_check(&params, 1e-3, || {
        calls += 1;
        if calls == 3 {
            return Err(Error::Detached { what: "the third call".into() });
        }
        Ok(w.square().sum(Kind::Double))
    });
    assert!(result.is_err());
    assert_eq!(Vec::<f64>::try_from(w.detach()).unwrap(), [0.7, -0.3]);
}
