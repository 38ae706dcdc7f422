//! The specification's worked numbers (computed there in f64 NumPy from the formulas).
#![allow(missing_docs)]

mod common;
use common::{Trace, close, group, leaf, quadratic, values};
use sam_opt::tensor::tch::{Kind, Tensor};
use sam_opt::{AsamConfig, AsamScope, Gsam, GsamConfig, Sagm, SagmConfig, Sam, SamConfig, Sgd};

/// The perturbation of one SAM step at `w` with `config`, and its statistics.
fn epsilon(w: &[f64], config: SamConfig, loss: impl Fn(&Tensor) -> Tensor) -> (Vec<f64>, sam_opt::SamStats) {
    let w = leaf(w, Kind::Double);
    let start = values(&w);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
    let mut trace = Trace::new();
    let stats = sam
        .step(|pass| {
            trace.record(pass, &w);
            Ok(loss(&w))
        })
        .unwrap();
    (trace.points[1].iter().zip(&start).map(|(a, b)| a - b).collect(), stats)
}

#[test]
fn sam_on_a_quadratic() {
    let w = leaf(&[1.0, 1.0], Kind::Double);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), SamConfig::sam(0.05)).unwrap();
    let mut trace = Trace::new();
    let stats = sam
        .step(|pass| {
            trace.record(pass, &w);
            Ok(quadratic(&w))
        })
        .unwrap();
    close(&trace.points[1], &[1.004975186, 1.049751860], 1e-9);
    close(&[stats.grad_norm, stats.loss], &[10.049875621, 5.5], 1e-9);
    close(&[stats.perturbed_loss.unwrap()], &[6.014882395], 1e-9);
    // One step of rate 1 subtracts the gradient at the perturbed point.
    close(&values(&w), &[1.0 - 1.004975186, 1.0 - 10.497518595], 1e-8);
    close(&[stats.epsilon_norm], &[0.05], 1e-12);
}

#[test]
fn gsam_on_a_quadratic() {
    let w = leaf(&[1.0, 1.0], Kind::Double);
    let config = GsamConfig { alpha: 0.4, sam: SamConfig::sam(0.05) };
    let mut gsam = Gsam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
    gsam.step(|_| Ok(quadratic(&w))).unwrap();
    let update: Vec<f64> = values(&w).iter().map(|v| 1.0 - v).collect();
    close(&update, &[0.988068327, 10.499137166], 1e-8);
    // g_p − update = α g_⊥, which is orthogonal to g_p.
    let perturbed = [1.004975186, 10.497518595];
    let orthogonal = [(perturbed[0] - update[0]) / 0.4, (perturbed[1] - update[1]) / 0.4];
    close(&orthogonal, &[0.042267149, -0.004046426], 1e-7);
    close(&[orthogonal[0] * perturbed[0] + orthogonal[1] * perturbed[1]], &[0.0], 1e-7);
}

#[test]
fn sagm_steps_with_the_mean_of_both_gradients_at_the_pulled_back_point() {
    let w = leaf(&[1.0, 1.0], Kind::Double);
    let config = SagmConfig { alpha: 0.001, sam: SamConfig::sam(0.05) };
    let mut sagm = Sagm::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
    sagm.step(|_| Ok(quadratic(&w))).unwrap();
    // By hand: factor f = 0.05/‖g‖ − 0.001, g_p = g + f H g, update ½ (g + g_p) = g + ½ f H g.
    let f = 0.05 / 101f64.sqrt() - 0.001;
    close(&values(&w), &[1.0 - (1.0 + 0.5 * f), 1.0 - (10.0 + 0.5 * f * 100.0)], 1e-9);
}

#[test]
fn asam_without_and_with_eta() {
    // The spec's vector is treated as a weight, so the scope is all tensors.
    for (eta, norm, expected) in
        [(0.0, 40.012498047, [0.012496096, -0.999687646]), (0.01, 40.212685809, [0.012683808, -1.004682955])]
    {
        let config = SamConfig { adaptive: Some(AsamConfig { eta, scope: AsamScope::All }), ..SamConfig::sam(0.5) };
        let (got, stats) = epsilon(&[1.0, -2.0], config, quadratic);
        close(&got, &expected, 1e-9);
        close(&[stats.grad_norm], &[norm], 1e-8);
        let relative = ((got[0] / (1.0 + eta)).powi(2) + (got[1] / (2.0 + eta)).powi(2)).sqrt();
        close(&[relative], &[0.5], 1e-9);
        let length = got[0].hypot(got[1]);
        close(&[stats.epsilon_norm], &[length], 1e-9);
    }
}

#[test]
fn the_mixed_scaling_of_a_public_script_breaks_the_radius_and_ours_does_not() {
    // |θ| + 0.01 in the norm, but θ² + 0.01 in the step.
    let (w, g) = ([1.0f64, -2.0], [1.0f64, -20.0]);
    let norm = ((1.01 * g[0]).powi(2) + (2.01 * g[1]).powi(2)).sqrt();
    let mixed: Vec<f64> = w.iter().zip(g).map(|(w, g)| 0.5 * (w * w + 0.01) * g / norm).collect();
    let relative = |e: &[f64]| ((e[0] / 1.01).powi(2) + (e[1] / 2.01).powi(2)).sqrt();
    assert!((relative(&mixed) - 0.5).abs() > 1e-3);
    let config = SamConfig { adaptive: Some(AsamConfig { eta: 0.01, scope: AsamScope::All }), ..SamConfig::sam(0.5) };
    let (ours, _) = epsilon(&w, config, quadratic);
    close(&[relative(&ours)], &[0.5], 1e-12);
}

#[test]
fn asam_scales_weights_but_not_biases_unless_told() {
    let loss = |w: &Tensor| quadratic(&w.reshape([-1]));
    let vector = |scope| SamConfig { adaptive: Some(AsamConfig { eta: 0.0, scope }), ..SamConfig::sam(0.5) };
    let (plain, _) = epsilon(&[1.0, -2.0], SamConfig::sam(0.5), loss);
    let (bias, _) = epsilon(&[1.0, -2.0], vector(AsamScope::Weights), loss);
    assert_eq!(plain, bias);
    let (all, _) = epsilon(&[1.0, -2.0], vector(AsamScope::All), loss);
    assert_ne!(plain, all);
}

#[test]
fn on_a_quadratic_the_sam_gradient_is_g_plus_rho_h_g_over_norm() {
    let h = Tensor::from_slice(&[4.0f64, 1.0, 0.5, 1.0, 3.0, -0.2, 0.5, -0.2, 2.0]).reshape([3, 3]);
    let start = [0.3, -1.2, 0.7];
    let w = leaf(&start, Kind::Double);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), SamConfig::sam(0.3)).unwrap();
    sam.step(|_| Ok(w.dot(&h.mv(&w)) * 0.5)).unwrap();
    let g = h.mv(&Tensor::from_slice(&start));
    let expected = &g + h.mv(&g) * (0.3 / g.norm().double_value(&[]));
    let update = Tensor::from_slice(&start) - w.detach();
    close(&values(&update), &values(&expected), 1e-12);
}

#[test]
fn the_f32_path_gives_the_same_numbers() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), SamConfig::sam(0.05)).unwrap();
    let stats = sam.step(|_| Ok(quadratic(&w))).unwrap();
    close(&[stats.perturbed_loss.unwrap()], &[6.014882395], 1e-5);
    close(&values(&w), &[1.0 - 1.004975186, 1.0 - 10.497518595], 1e-5);
}
