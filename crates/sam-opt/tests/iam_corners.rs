//! Unusual parameters and batches, in each variant of IAM.
#![allow(missing_docs)]

mod common;
use common::{batch, close, group, leaf, values};
use sam_opt::tensor::tch::{Device, Kind, Tensor};
use sam_opt::{Error, Iam, IamConfig, IamStats, Sgd};

fn variants() -> [IamConfig; 3] {
    [IamConfig::d(0.5, 1.0), IamConfig::s(0.5), IamConfig::de(0.5, 1.0)]
}

/// What is special, and a step of rate 0.1 with the parameters that must have moved and those that must not.
type Case = (&'static str, fn(IamConfig) -> (IamStats, Vec<f64>, Vec<f64>));

/// Weights `[3, 4]` of a linear classifier.
fn linear(kind: Kind) -> Tensor {
    let start = Tensor::arange(12, (Kind::Float, Device::Cpu)).sin().reshape([3, 4]) * 0.3;
    start.to_kind(kind).set_requires_grad(true)
}

fn moved(before: &[f64], tensor: &Tensor) -> Vec<f64> {
    before.iter().zip(values(tensor)).map(|(b, a)| a - b).collect()
}

/// bf16 weights, at a radius that is above their spacing.
fn half(config: IamConfig) -> (IamStats, Vec<f64>, Vec<f64>) {
    let w = linear(Kind::BFloat16);
    let before = values(&w);
    let (x, y) = batch(16, 0);
    let mut iam = Iam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
    let stats = iam
        .step(|_| Ok(x.linear::<&Tensor>(&w.to_kind(Kind::Float), None)), |z| Ok(z.cross_entropy_for_logits(&y)))
        .unwrap();
    (stats, moved(&before, &w), vec![])
}

/// A tensor without gradient among those of a group.
fn frozen(config: IamConfig) -> (IamStats, Vec<f64>, Vec<f64>) {
    let (w, bias) = (linear(Kind::Float), Tensor::from_slice(&[0.1f32, 0.2, 0.3]));
    let (before, bias_before) = (values(&w), values(&bias));
    let (x, y) = batch(16, 0);
    let mut iam = Iam::new(vec![group(&[("bias", &bias), ("w", &w)])], Sgd::new(0.1), config).unwrap();
    let stats = iam
        .step(
            |_| {
                assert_eq!(values(&bias), bias_before, "it isn't perturbed");
                Ok(x.linear(&w, Some(&bias)))
            },
            |z| Ok(z.cross_entropy_for_logits(&y)),
        )
        .unwrap();
    (stats, moved(&before, &w), moved(&bias_before, &bias))
}

/// A parameter that the labeled rows don't reach: the penalty moves it, IAM-S has no gradient there.
fn unlabeled_only(config: IamConfig) -> (IamStats, Vec<f64>, Vec<f64>) {
    let (w, other) = (linear(Kind::Float), leaf(&[0.2, -0.1, 0.3], Kind::Float));
    let (before, other_before) = (values(&w), values(&other));
    let (x, y) = batch(16, 0);
    let labels = y.narrow(0, 0, 4);
    let s = config.variant == sam_opt::IamVariant::S;
    let mut iam = Iam::new(vec![group(&[("other", &other), ("w", &w)])], Sgd::new(0.1), config).unwrap();
    let stats = iam
        .step_semi(
            4,
            |_| {
                let z = x.linear::<&Tensor>(&w, None);
                Ok(Tensor::cat(&[z.narrow(0, 0, 4), z.narrow(0, 4, 12) + &other], 0))
            },
            |z| Ok(z.cross_entropy_for_logits(&labels)),
        )
        .unwrap();
    assert_eq!(stats.unlabeled, Some(12));
    let (w, other) = (moved(&before, &w), moved(&other_before, &other));
    if s { (stats, w, other) } else { (stats, [w, other].concat(), vec![]) }
}

/// One input.
fn single(config: IamConfig) -> (IamStats, Vec<f64>, Vec<f64>) {
    let w = linear(Kind::Float);
    let before = values(&w);
    let (x, y) = batch(1, 0);
    let mut iam = Iam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
    let stats = iam.step(|_| Ok(x.linear::<&Tensor>(&w, None)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
    (stats, moved(&before, &w), vec![])
}

#[test]
fn half_precision_frozen_tensors_unlabeled_parameters_and_single_inputs_work_in_every_variant() {
    let cases: [Case; 4] = [
        ("bf16 weights", half),
        ("a frozen tensor", frozen),
        ("a parameter of unlabeled rows", unlabeled_only),
        ("one input", single),
    ];
    for (what, case) in cases {
        for config in variants() {
            let (stats, moved, still) = case(config.clone());
            assert!(moved.iter().all(|d| d.is_finite()), "{what}, {config:?}");
            let changed = moved.iter().filter(|d| **d != 0.0).count();
            assert!(changed * 2 > moved.len(), "{what}, {config:?}: {moved:?}");
            assert!(still.iter().all(|d| *d == 0.0), "{what}, {config:?}: {still:?}");
            assert!(stats.inconsistency.unwrap() > 0.0 && !stats.degenerate, "{what}, {stats:?}");
        }
    }
}

#[test]
fn half_precision_weights_that_the_radius_cannot_move_are_refused() {
    for config in [IamConfig::d(1e-5, 1.0), IamConfig::s(1e-5)] {
        let w = linear(Kind::BFloat16);
        let before = values(&w);
        let (x, y) = batch(16, 0);
        let mut iam = Iam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
        let forward = |_: &sam_opt::Pass<'_>| Ok(x.linear::<&Tensor>(&w.to_kind(Kind::Float), None));
        let error = iam.step(forward, |z| Ok(z.cross_entropy_for_logits(&y))).unwrap_err();
        assert!(matches!(error, Error::LowPrecisionParams { .. }), "{error}");
        close(&values(&w), &before, 0.0);
    }
}
