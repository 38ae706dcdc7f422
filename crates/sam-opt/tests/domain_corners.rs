//! Corners of the methods for several domains that a review found: each was wrong, or could have been, without a test.
#![allow(missing_docs)]

mod common;
use common::{close, group, leaf, values};
use sam_opt::tensor::ParamSet;
use sam_opt::tensor::tch::{Kind, Tensor};
use sam_opt::{
    DaSam, DaSamConfig, DomainId, DomainLosses, Error, PassKind, Sam, SamConfig, Sgd, SharpnessOptions,
    sharpness_report,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Two bowls with their minima at 1 and −2 in every coordinate.
fn bowls(w: &Tensor) -> DomainLosses {
    let bowl = |k: u32, center: f64| (DomainId(k), (w - center).square().sum(w.kind()));
    DomainLosses::PerDomain(vec![bowl(0, 1.0), bowl(1, -2.0)])
}

fn one(loss: Tensor) -> DomainLosses {
    DomainLosses::PerDomain(vec![(DomainId(0), loss)])
}

fn da_sam(w: &Tensor, config: DaSamConfig) -> DaSam<Sgd> {
    DaSam::new(vec![group(&[("w", w)])], Sgd::new(0.01), config).unwrap()
}

/// Whether results of operations on trainable tensors have a graph in this thread.
fn autograd_is_on(w: &Tensor) -> bool {
    (w * 2.0).requires_grad()
}

#[test]
fn a_panic_in_a_pass_without_gradients_leaves_autograd_on_and_the_parameters_alone() {
    let w = leaf(&[0.3, -0.2], Kind::Float);
    let before = values(&w);
    let probe = catch_unwind(AssertUnwindSafe(|| {
        da_sam(&w, DaSamConfig::da_sam(0.1)).step(|pass| {
            assert!(!matches!(pass.kind, PassKind::Probe(_)), "broken");
            Ok(bowls(&w))
        })
    }));
    assert!(probe.is_err() && autograd_is_on(&w));
    let check = catch_unwind(AssertUnwindSafe(|| {
        let config = SamConfig { check_batch: true, ..SamConfig::sam(0.1) };
        Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap().step(|pass| {
            assert!(!matches!(pass.kind, PassKind::Probe(_)), "broken");
            Ok(w.square().sum(Kind::Float))
        })
    }));
    assert!(check.is_err() && autograd_is_on(&w));
    let report = catch_unwind(AssertUnwindSafe(|| {
        let params = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
        let mut calls = 0;
        let losses = || {
            calls += 1;
            assert!(calls < 2, "broken");
            Ok(bowls(&w))
        };
        sharpness_report(&params, losses, &SharpnessOptions::default())
    }));
    assert!(report.is_err() && autograd_is_on(&w));
    assert_eq!(values(&w), before);
}
