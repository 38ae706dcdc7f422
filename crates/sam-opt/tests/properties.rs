//! Invariants over random problems.
#![allow(missing_docs)]

mod common;
use common::{Trace, group, leaf, values};
use proptest::prelude::*;
use sam_opt::tensor::tch::{Kind, Tensor};
use sam_opt::{AsamConfig, AsamScope, Gsam, GsamConfig, Sam, SamConfig, Sgd};

fn finite() -> impl Strategy<Value = f64> {
    (-3.0f64..3.0).prop_filter("away from 0", |x| x.abs() > 1e-3)
}

fn length(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn epsilon_has_the_length_rho_and_parameters_come_back(
        w in proptest::collection::vec(finite(), 1..20), rho in 0.001f64..2.0, double in any::<bool>(),
    ) {
        let kind = if double { Kind::Double } else { Kind::Float };
        let w = leaf(&w, kind);
        let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), SamConfig::sam(rho)).unwrap();
        let mut trace = Trace::new();
        sam.step(|pass| {
            trace.record(pass, &w);
            Ok((&w * &w * &w).sum(kind))
        }).unwrap();
        prop_assert!((length(&trace.points[1], &trace.points[0]) - rho).abs() < 1e-5);
        prop_assert_eq!(&values(&w), &trace.points[0]);
    }

    #[test]
    fn scaling_the_loss_leaves_epsilon_unchanged(
        w in proptest::collection::vec(finite(), 2..10), factor in 1e-3f64..1e3,
    ) {
        let points = |c: f64| {
            let w = leaf(&w, Kind::Double);
            let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), SamConfig::sam(0.3)).unwrap();
            let mut trace = Trace::new();
            sam.step(|pass| { trace.record(pass, &w); Ok((&w * &w * &w).sum(Kind::Double) * c) }).unwrap();
            trace.points.remove(1)
        };
        prop_assert!(length(&points(1.0), &points(factor)) < 1e-9);
    }

    #[test]
    fn asam_does_not_see_how_layers_share_their_scale(
        a in proptest::collection::vec(finite(), 4), b in proptest::collection::vec(finite(), 4), c in 0.1f64..10.0,
    ) {
        // A bias-free pair w₂·relu(w₁ x): (c w₁, w₂/c) is the same function, and with η = 0 ASAM's perturbed
        // loss is the same too; plain SAM's isn't.
        let x = Tensor::from_slice(&[0.7f64, -1.1, 0.4, 2.0]).reshape([2, 2]);
        let perturbed = |c: f64, adaptive| {
            let w1 = Tensor::from_slice(&a).reshape([2, 2]).f_mul_scalar(c).unwrap().set_requires_grad(true);
            let w2 = Tensor::from_slice(&b).reshape([2, 2]).f_mul_scalar(1.0 / c).unwrap().set_requires_grad(true);
            let mut sam = Sam::new(
                vec![group(&[("w1", &w1), ("w2", &w2)])], Sgd::new(0.0), SamConfig { adaptive, ..SamConfig::sam(0.1) },
            ).unwrap();
            sam.step(|_| Ok((x.matmul(&w1).relu().matmul(&w2) - 1.0).square().sum(Kind::Double))).unwrap()
        };
        let asam = Some(AsamConfig { eta: 0.0, scope: AsamScope::Weights });
        let (one, other) = (perturbed(1.0, asam), perturbed(c, asam));
        prop_assert!(one.perturbed && other.perturbed);
        let (one, other) = (one.perturbed_loss.unwrap(), other.perturbed_loss.unwrap());
        prop_assert!((one - other).abs() < 1e-8 * one.abs().max(1.0), "{} and {}", one, other);
        let (plain, scaled) = (perturbed(1.0, None), perturbed(10.0, None));
        if plain.grad_norm > 1e-3 {
            let (plain, scaled) = (plain.perturbed_loss.unwrap(), scaled.perturbed_loss.unwrap());
            prop_assert!((plain - scaled).abs() > 1e-8 * plain.abs(), "SAM should see the scale");
        }
    }

    #[test]
    fn gsams_correction_is_orthogonal_to_the_perturbed_gradient(
        w in proptest::collection::vec(finite(), 3), alpha in 0.01f64..1.0,
    ) {
        let start = w.clone();
        let run = |alpha: f64| {
            let w = leaf(&start, Kind::Double);
            let config = GsamConfig { alpha, sam: SamConfig::sam(0.3) };
            let mut gsam = Gsam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
            gsam.step(|_| Ok((w.pow_tensor_scalar(4) + w.square()).sum(Kind::Double))).unwrap();
            values(&w).iter().zip(&start).map(|(a, b)| b - a).collect::<Vec<f64>>()
        };
        let (g_p, mixed) = (run(0.0), run(alpha));
        let scale: f64 = g_p.iter().map(|g| g * g).sum();
        let inner: f64 = g_p.iter().zip(&mixed).map(|(g, m)| g * (g - m)).sum();
        prop_assert!(inner.abs() < 1e-9 * scale);
    }
}
