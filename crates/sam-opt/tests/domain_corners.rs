//! Corners of the methods for several domains that a review found: each was wrong, or could have been, without a test.
#![allow(missing_docs)]

mod common;
use common::{close, group, leaf, values};
use sam_opt::tensor::tch::{Kind, Tensor};
use sam_opt::tensor::{ParamSet, StateDict};
use sam_opt::{
    AmdfConfig, DaSam, DaSamConfig, DaSamStats, DomainId, DomainLosses, Error, PassKind, Sam, SamConfig, Sgd,
    SharpnessOptions, sharpness_report,
};
use serde_json::json;
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

// Saved states.

fn every_third(directions: usize) -> DaSamConfig {
    let amdf = AmdfConfig { probe_every: 3, directions, ..AmdfConfig::default() };
    DaSamConfig { amdf: Some(amdf), ..DaSamConfig::da_sam(0.1) }
}

/// A step whose probes `bad` aren't finite.
fn step_with_bad_probes(optimizer: &mut DaSam<Sgd>, w: &Tensor, bad: &[usize]) -> DaSamStats {
    let step = optimizer.step(|pass| {
        let nan = matches!(pass.kind, PassKind::Probe(m) if bad.contains(&m));
        Ok(one((w - 1.0).square().sum(w.kind()) * if nan { f64::NAN } else { 1.0 }))
    });
    step.unwrap()
}

/// Through a file's text and back.
fn reread(state: &StateDict) -> StateDict {
    let file = tempfile::NamedTempFile::new().unwrap();
    state.save(file.path()).unwrap();
    StateDict::load(file.path()).unwrap()
}

#[test]
fn probes_that_all_failed_are_not_reused_and_the_state_after_them_can_be_loaded() {
    let w = leaf(&[0.3, -0.2], Kind::Double);
    let mut optimizer = da_sam(&w, every_third(2));
    let failed = step_with_bad_probes(&mut optimizer, &w, &[0, 1]);
    assert_eq!((failed.probe_failures, failed.forwards), (2, 4));
    assert!(failed.sharpness.is_nan());
    let mut loaded = da_sam(&w, every_third(2));
    loaded.load_state_dict(&reread(&optimizer.state_dict().unwrap())).unwrap();
    let next = step_with_bad_probes(&mut loaded, &w, &[]);
    assert_eq!((next.forwards, next.probe_failures), (4, 0), "it probes anew");
}

#[test]
fn a_step_that_reuses_probes_has_no_failures_of_its_own() {
    let w = leaf(&[0.3, -0.2], Kind::Double);
    let mut optimizer = da_sam(&w, every_third(4));
    assert_eq!(step_with_bad_probes(&mut optimizer, &w, &[2]).probe_failures, 1);
    let reused = step_with_bad_probes(&mut optimizer, &w, &[]);
    assert_eq!((reused.probe_failures, reused.forwards, reused.directions_used), (0, 2, 3));
}

#[test]
fn malformed_memory_in_a_saved_state_is_refused_before_anything_changes() {
    let w = leaf(&[0.3, -0.2], Kind::Double);
    let config = DaSamConfig { loss_ema: 0.5, ..every_third(2) };
    let mut optimizer = da_sam(&w, config.clone());
    step_with_bad_probes(&mut optimizer, &w, &[]);
    let good = optimizer.state_dict().unwrap();
    let bad = [
        ("/probe/step", json!(1)),
        ("/probe/step", json!(u64::MAX)),
        ("/probe/scale", json!(2.1)),
        ("/probe/scale", json!(-1.0)),
        ("/probe/weights", json!([0.5, 0.6])),
        ("/probe/weights", json!([1.5, -0.5])),
        ("/probe/weights", json!([])),
        ("/probe/weights", json!([0.5, 0.25, 0.25])),
        ("/probe/sharpness", json!(null)),
        ("/level", json!(0.0)),
        ("/level", json!(-1.0)),
        ("/losses/0", json!(null)),
    ];
    let mut loaded = da_sam(&w, config);
    for (path, value) in bad {
        let mut state = reread(&good);
        *state.meta.get_mut("memory").unwrap().pointer_mut(path).unwrap() = value.clone();
        assert!(matches!(loaded.load_state_dict(&state), Err(Error::State { .. })), "{path} = {value}");
        assert_eq!(loaded.step_count(), 0);
    }
    loaded.load_state_dict(&good).unwrap();
}

#[test]
fn a_step_without_a_gradient_does_not_probe_and_leaves_the_level() {
    let run = |zero_at: u64| {
        let w = leaf(&[0.3, -0.2], Kind::Double);
        let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), DaSamConfig::da_sam(0.1)).unwrap();
        let mut step = |factor: f64| optimizer.step(|_| Ok(one((&w - 1.0).square().sum(w.kind()) * factor))).unwrap();
        let all: Vec<DaSamStats> = (0..3).map(|i| step(if i == zero_at { 0.0 } else { 1.0 })).collect();
        all
    };
    let stats = run(1);
    assert_eq!((stats[1].forwards, stats[1].epsilon_norm), (2, 0.0));
    assert!(stats[1].sharpness.is_nan());
    // The level after step 0 is its sharpness, whatever came between.
    let level = 0.9 * stats[0].sharpness + 0.1 * stats[2].sharpness;
    close(&[stats[2].rho_t], &[0.1 * stats[2].sharpness / level], 1e-12);
}
