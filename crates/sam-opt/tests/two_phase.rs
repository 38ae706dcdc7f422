//! Use without a closure: the guard.
#![allow(missing_docs)]

mod common;
use common::{bits, close, group, leaf, quadratic, values};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::BatchNormConfig, nn::ModuleT, nn::VarStore};
use sam_opt::tensor::{ParamVec, params};
use sam_opt::{
    AsamConfig, AsamScope, Error, GsamConfig, GsamRule, Rule, SagmConfig, SagmRule, Sam, SamConfig, SamRule, Sgd,
    TwoPass, is_perturbed,
};

/// Three steps through the closure and three through the guard, from the same point.
fn both_ways<R: Rule>(config: &R::Config) {
    let make = || {
        let w = leaf(&[1.0, -0.5], Kind::Float);
        let base = Sgd::with_momentum(0.1, 0.9);
        let optimizer = TwoPass::<_, R>::new(vec![group(&[("w", &w)])], base, config.clone()).unwrap();
        (w, optimizer)
    };
    let ((w, mut closure), (v, mut two_phase)) = (make(), make());
    for _ in 0..3 {
        let expected = closure.step(|_| Ok(quadratic(&w))).unwrap();
        let g = two_phase.params().gradient(&quadratic(&v)).unwrap();
        let before = g.norm();
        let guard = two_phase.perturb(&g).unwrap();
        assert_eq!(guard.is_perturbed(), expected.perturbed);
        assert_eq!(is_perturbed(&v), expected.perturbed);
        close(&[guard.epsilon_norm()], &[expected.epsilon_norm], 1e-12);
        let at = guard.params().gradient(&quadratic(&v)).unwrap();
        let stats = guard.step(&at).unwrap();
        assert!(!is_perturbed(&v));
        assert_eq!(g.norm(), before, "the caller's gradient is left alone");
        close(&[stats.final_grad_norm], &[expected.final_grad_norm], 1e-12);
        assert_eq!((stats.passes, stats.perturbed), (expected.passes, expected.perturbed));
        assert!(stats.loss.is_nan(), "the optimizer hasn't seen the loss");
    }
    assert_eq!(bits(&[w]), bits(&[v]));
    assert_eq!(two_phase.step_count(), 3);
}

#[test]
fn the_guard_and_the_closure_do_the_same_steps() {
    let sam = SamConfig { clip_norm: Some(3.0), ..SamConfig::sam(0.05) };
    both_ways::<SamRule>(&sam);
    both_ways::<SamRule>(&SamConfig { interval: 2, ..sam.clone() });
    both_ways::<SamRule>(&SamConfig::sam(0.0));
    let adaptive = Some(AsamConfig { eta: 0.01, scope: AsamScope::All });
    both_ways::<SamRule>(&SamConfig { adaptive, ..SamConfig::sam(0.5) });
    both_ways::<GsamRule>(&GsamConfig { alpha: 0.4, sam: sam.clone() });
    both_ways::<SagmRule>(&SagmConfig { alpha: 0.01, sam });
}

#[test]
fn gradients_that_do_not_fit_are_refused_in_both_phases_and_nothing_moves() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let v = leaf(&[2.0], Kind::Float);
    let groups = || vec![group(&[("w", &w), ("v", &v)])];
    let mut sam = Sam::new(groups(), Sgd::with_momentum(0.1, 0.9), SamConfig::asam(0.05)).unwrap();
    let good = || ParamVec::new(vec![Some(Tensor::from_slice(&[1.0f32, 2.0])), Some(Tensor::from_slice(&[3.0f32]))]);
    let bad = || {
        let (pair, one) = (|| Some(Tensor::from_slice(&[1.0f32, 2.0])), || Some(Tensor::from_slice(&[3.0f32])));
        vec![
            ParamVec::new(vec![pair()]),
            ParamVec::new(vec![pair(), one(), one()]),
            ParamVec::new(vec![one(), one()]),
            ParamVec::new(vec![pair(), pair()]),
        ]
    };
    for gradient in bad() {
        assert!(matches!(sam.perturb(&gradient).map(|_| ()), Err(Error::Tensor(_))));
        let guard = sam.perturb(&good()).unwrap();
        assert!(matches!(guard.step(&gradient), Err(Error::Tensor(_))));
    }
    let nan = ParamVec::new(vec![Some(Tensor::from_slice(&[f32::NAN, 2.0])), None]);
    assert!(matches!(sam.perturb(&nan).map(|_| ()), Err(Error::NonFinite { .. })));
    assert!(matches!(sam.perturb(&good()).unwrap().step(&nan), Err(Error::NonFinite { .. })));
    assert_eq!((values(&w), values(&v)), (vec![1.0, 1.0], vec![2.0]));
    assert!(sam.state_dict().unwrap().tensors.is_empty(), "no momentum has begun");
    assert_eq!(sam.step_count(), 0);
    assert!(!params::is_perturbed(&w));
}

#[test]
fn a_dropped_guard_restores_parameters_and_buffers() {
    let store = VarStore::new(Device::Cpu);
    let norm = sam_opt::tensor::tch::nn::batch_norm1d(store.root(), 2, BatchNormConfig::default());
    let mut sam = Sam::for_store(&store, Sgd::new(0.1), SamConfig::sam(0.5)).unwrap();
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 5.0]).reshape([2, 2]);
    let loss = || norm.forward_t(&x, true).pow_tensor_scalar(3).sum(Kind::Float);
    let everything = || {
        let ordered: std::collections::BTreeMap<_, _> = store.variables().into_iter().collect();
        bits(&ordered.into_values().collect::<Vec<_>>())
    };
    let g = sam.params().gradient(&loss()).unwrap();
    let after_main = everything();
    {
        let guard = sam.perturb(&g).unwrap();
        let _ = loss();
        assert_ne!(everything(), after_main);
        drop(guard);
    }
    assert_eq!(everything(), after_main);
}

#[test]
fn a_loss_budget_needs_the_closure() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let rho_schedule = sam_opt::RhoSchedule::LossBudget { fraction: 0.1, rho_max: 1.0 };
    let config = SamConfig { rho_schedule, ..SamConfig::sam(0.05) };
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
    let g = sam.params().gradient(&quadratic(&w)).unwrap();
    let message = sam.perturb(&g).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("rho_schedule"), "{message}");
}
