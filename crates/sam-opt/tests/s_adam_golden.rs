//! S-Adam against the specification's worked numbers and the laws of its statistics.
#![allow(missing_docs)]

mod common;
use common::{close, group, leaf, values};
use proptest::prelude::*;
use sam_opt::s_adam::{
    EpsMode, LgiKind, lgi_from_probes, lgi_from_residuals, null_lgi_mean_damping, null_lgi_p_value, null_lgi_sd,
};
use sam_opt::tensor::Seed;
use sam_opt::tensor::tch::{Kind, Tensor, no_grad};
use sam_opt::{PassKind, SAdam, SAdamConfig};

#[test]
fn the_published_statistic_on_two_slopes() {
    close(&[lgi_from_probes(&[3.0, 1.0], 1e-6)], &[0.39999992], 1e-8);
    close(&[SAdamConfig::default().damping(lgi_from_probes(&[3.0, 1.0], 1e-6))], &[0.449329036], 1e-9);
    assert_eq!(lgi_from_probes(&[0.7, 0.7], 1e-6), 0.0);
    close(&[lgi_from_probes(&[0.7, -0.7], 0.0)], &[2.0], 1e-12);
    assert_eq!(
        [lgi_from_probes(&[5.0], 1e-6), lgi_from_probes(&[], 1e-6), lgi_from_probes(&[0.0, 0.0], 0.0)],
        [0.0; 3]
    );
}

/// One step at θ = 1 with g = 0.5 whose probes see the slopes 3 and 1.
fn one_step(config: SAdamConfig) -> (f64, sam_opt::SAdamStats) {
    let w = leaf(&[1.0], Kind::Double);
    let sigma = config.sigma;
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
    let stats = optimizer
        .step(|pass| {
            let slope = match pass.kind {
                PassKind::Probe(0) => 3.0,
                PassKind::Probe(1) => 1.0,
                _ => return Ok((&w * 0.5).sum(Kind::Double)),
            };
            Ok(Tensor::from(0.5 + slope * sigma))
        })
        .unwrap();
    (values(&w)[0], stats)
}

#[test]
fn one_step_with_both_places_for_epsilon() {
    let (torch, stats) = one_step(SAdamConfig::default());
    close(&[torch], &[0.99954067097], 5e-12);
    close(&stats.probe_values, &[3.0, 1.0], 1e-12);
    close(
        &[stats.lgi.unwrap(), stats.damping, stats.loss, stats.grad_norm],
        &[0.39999992, 0.449329036, 0.5, 0.5],
        1e-8,
    );
    assert_eq!((stats.forwards, stats.probes_dropped), (3, 0));
    let (official, _) = one_step(SAdamConfig { eps_mode: EpsMode::Official, ..SAdamConfig::default() });
    close(&[official], &[0.99954067125], 5e-12);
}

#[test]
fn damped_decay_shrinks_by_the_damping() {
    let decay = |damp_weight_decay| {
        let config = |weight_decay| SAdamConfig { weight_decay, damp_weight_decay, ..SAdamConfig::default() };
        one_step(config(0.0)).0 - one_step(config(0.1)).0
    };
    close(&[decay(false), decay(true)], &[1e-4, 1e-4 * 0.449329036], 1e-12);
}

#[test]
fn mean_damping_and_spread_on_smooth_losses() {
    // Bessel: exp(−2) I₀(2) = 0.3085083.
    close(&[null_lgi_mean_damping(2, 2.0)], &[0.308_508_3], 1e-7);
    close(
        &[null_lgi_mean_damping(2, 2.0), null_lgi_mean_damping(4, 2.0), null_lgi_mean_damping(8, 2.0)],
        &[0.3085, 0.1766, 0.1451],
        5e-5,
    );
    close(&[null_lgi_mean_damping(1_000_000, 2.0)], &[(-2f64).exp()], 1e-5);
    assert_eq!([null_lgi_mean_damping(1, 2.0), null_lgi_mean_damping(5, 0.0)], [1.0, 1.0]);
    let far = null_lgi_mean_damping(2, 1e4);
    assert!(far > 0.0 && far < 0.01, "{far}");
    let sd = [null_lgi_sd(2), null_lgi_sd(3), null_lgi_sd(8)];
    close(&sd, &[0.5f64.sqrt(), 0.4472, 0.1690], 5e-5);
}

#[test]
fn the_mean_damping_has_its_limits() {
    assert_eq!(null_lgi_mean_damping(2, f64::INFINITY), 0.0);
    assert!(null_lgi_mean_damping(2, -1.0).is_nan() && null_lgi_mean_damping(2, f64::NAN).is_nan());
    // The series and its leading term meet.
    for k in [2, 3, 8] {
        let at = |x: f64| null_lgi_mean_damping(k, x * (k as f64 - 1.0) / k as f64);
        let ratio = at(10_001.0) / at(9_999.0) * (10_001.0f64 / 9_999.0).powf(0.5 * (k as f64 - 1.0));
        close(&[ratio], &[1.0], 1e-3);
    }
}

#[test]
fn p_values_are_uniform_under_the_null_and_small_at_a_kink() {
    // k = 2: B is arcsine distributed, F(b) = (2/π) asin √b; an LGI of 1 is its median.
    close(&[null_lgi_p_value(1.0, 2).unwrap()], &[1.0], 1e-9);
    let b: f64 = 0.9;
    let expected = 2.0 * (1.0 - 2.0 / std::f64::consts::PI * b.sqrt().asin());
    close(&[null_lgi_p_value(2.0 * (1.0 - b), 2).unwrap()], &[expected], 1e-9);
    assert!(null_lgi_p_value(0.3634, 16).unwrap() < 1e-3);
    assert_eq!(null_lgi_p_value(0.0, 1), None);
    let p: Vec<f64> = (0..2000)
        .map(|i| {
            let d: Vec<f64> = Seed::new(3).index(i).normal(6).into_iter().map(f64::from).collect();
            null_lgi_p_value(lgi_from_probes(&d, 0.0), 6).unwrap()
        })
        .collect();
    let below = |level: f64| p.iter().filter(|p| **p < level).count() as f64 / p.len() as f64;
    // Three standard errors of a proportion.
    close(&[below(0.05), below(0.5)], &[0.05, 0.5], 0.034);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_statistic_is_a_function_of_the_mean_over_the_root_mean_square(
        d in proptest::collection::vec(-5.0f64..5.0, 2..12), c in 1e-3f64..1e3,
    ) {
        let k = d.len() as f64;
        let (mean, square) = (d.iter().sum::<f64>() / k, d.iter().map(|x| x * x).sum::<f64>() / k);
        prop_assume!(square > 1e-6);
        let lgi = lgi_from_probes(&d, 0.0);
        prop_assert!((lgi - k / (k - 1.0) * (1.0 - mean * mean / square)).abs() < 1e-10);
        prop_assert!(lgi >= 0.0 && lgi <= k / (k - 1.0) + 1e-12);
        let scaled: Vec<f64> = d.iter().map(|x| x * c).collect();
        prop_assert!((lgi_from_probes(&scaled, 0.0) - lgi).abs() < 1e-10);
        let residual = lgi_from_residuals(&d, square);
        prop_assert!((residual - 0.5).abs() < 1e-12);
    }
}

const D: usize = 1000;

/// LGI, damping and residual or kink values of many steps that don't move, at `at`.
fn probes(
    kind: LgiKind,
    k: usize,
    steps: usize,
    at: &[f64],
    loss: &dyn Fn(&Tensor) -> Tensor,
) -> Vec<(f64, f64, Vec<f64>)> {
    let w = leaf(at, Kind::Double);
    let config = SAdamConfig { lr: 0.0, k_directions: k, lgi: kind, ..SAdamConfig::default() };
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
    (0..steps)
        .map(|_| {
            let stats = optimizer.step(|_| Ok(loss(&w))).unwrap();
            (stats.lgi.unwrap(), stats.damping, stats.probe_values)
        })
        .collect()
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    values.iter().sum::<f64>() / values.len() as f64
}

fn random(seed: u64) -> Vec<f64> {
    Seed::new(seed).normal(D).into_iter().map(f64::from).collect()
}

#[test]
fn on_a_linear_loss_the_published_mean_is_one_and_the_residual_zero() {
    let c = Tensor::from_slice(&random(5));
    let linear = |w: &Tensor| w.dot(&c);
    // With two probes the statistic is a coin between 0 and 2; 4,000 steps bring its mean's error to 0.011.
    for (k, steps, tolerance, damping, damping_tolerance) in [(2, 4000, 0.04, 0.308, 0.04), (8, 400, 0.04, 0.145, 0.01)]
    {
        let seen = probes(LgiKind::Published, k, steps, &random(6), &linear);
        close(&[mean(seen.iter().map(|s| s.0))], &[1.0], tolerance);
        close(&[mean(seen.iter().map(|s| s.1))], &[damping], damping_tolerance);
    }
    let residual = probes(LgiKind::Residual, 2, 20, &random(6), &linear);
    assert!(residual.iter().all(|s| s.0 < 1e-8));
}

#[test]
fn at_kinks_the_published_statistic_falls_and_the_residual_is_one() {
    let a = Tensor::from_slice(&random(7));
    let origin = vec![0.0; D];
    let kink = |w: &Tensor| w.dot(&a).abs();
    let seen = probes(LgiKind::Published, 8, 1000, &origin, &kink);
    close(&[mean(seen.iter().map(|s| s.0))], &[0.374], 0.02);
    let residual = probes(LgiKind::Residual, 8, 5, &origin, &kink);
    assert!(residual.iter().all(|s| s.0 > 0.999));
    let norm = probes(LgiKind::Published, 8, 20, &origin, &|w| w.abs().sum(Kind::Double));
    assert!(mean(norm.iter().map(|s| s.0)) < 1e-3);
}

#[test]
fn on_a_quadratic_both_statistics_know_their_bounds() {
    let start: Vec<f64> = vec![(1.0 / D as f64).sqrt(); D];
    let half_square = |w: &Tensor| w.square().sum(Kind::Double) * 0.5;
    let seen = probes(LgiKind::Published, 8, 400, &start, &half_square);
    close(&[mean(seen.iter().map(|s| s.0))], &[0.98], 0.03);
    // r = σ/2 in every direction, s = 1/d.
    let r2 = 0.005f64.powi(2);
    let residual = probes(LgiKind::Residual, 8, 3, &start, &half_square);
    close(&[residual[0].0, residual[2].0], &[r2 / (r2 + 1e-3); 2], 1e-9);
    assert!(residual[0].0 > 0.016 && residual[0].0 < 0.044);

    let w = leaf(&start, Kind::Double);
    let config = SAdamConfig { lr: 0.0, lgi: LgiKind::Residual, ..SAdamConfig::default() };
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
    optimizer.step(|_| Ok(half_square(&w))).unwrap();
    let _ = no_grad(|| w.shallow_clone().zero_());
    let at_minimum = optimizer.step(|_| Ok(half_square(&w))).unwrap();
    // The running slope keeps the ratio small where the gradient vanishes.
    close(&[at_minimum.lgi.unwrap()], &[r2 / (r2 + 0.99e-3)], 1e-9);
    assert!(at_minimum.lgi.unwrap() < 0.05);
}

#[test]
fn the_kink_form_is_zero_on_quadratics_and_twice_the_slope_at_a_kink() {
    let (a, b) = (Tensor::from_slice(&random(8)), Tensor::from_slice(&random(9)));
    let quadratic = |w: &Tensor| w.dot(&a) + (w.square() * &b).sum(Kind::Double) * 0.3;
    let seen = probes(LgiKind::Kink, 3, 5, &random(10), &quadratic);
    assert!(seen.iter().flat_map(|s| &s.2).all(|k| k.abs() < 1e-9));
    assert!(seen.iter().all(|s| s.0 < 1e-12));

    let kink = |w: &Tensor| w.dot(&a).abs();
    let at = vec![0.0; D];
    let (kinks, slopes) = (probes(LgiKind::Kink, 3, 5, &at, &kink), probes(LgiKind::Published, 3, 5, &at, &kink));
    for (kinks, slopes) in kinks.iter().zip(&slopes) {
        // The same directions, so D_i = |aᵀu_i| and K_i = 2|aᵀu_i|.
        close(&kinks.2, &slopes.2.iter().map(|d| 2.0 * d).collect::<Vec<_>>(), 1e-9);
    }
}

#[test]
fn the_control_draws_from_the_same_law_without_probes() {
    let w = leaf(&[1.0; 4], Kind::Float);
    let config = SAdamConfig { lr: 0.0, lgi: LgiKind::RandomNull, ..SAdamConfig::default() };
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
    let mut dampings = Vec::new();
    for _ in 0..4000 {
        let stats = optimizer.step(|_| Ok(w.sum(Kind::Float))).unwrap();
        assert_eq!(stats.forwards, 1);
        dampings.push(stats.damping);
    }
    close(&[mean(dampings.into_iter())], &[0.3085], 0.015);
}
