//! Every row of the table of known pitfalls of SAM implementations.
#![allow(missing_docs)]

mod common;
use common::{Trace, batch, bits, close, group, leaf, quadratic, values};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{self, Device, Kind, Tensor, nn::VarStore};
use sam_opt::tensor::{ParamSet, Seed, params::is_perturbed};
use sam_opt::{
    Adam, AdamConfig, AdamW, BnMode, Error, LossScaler, ParamGroup, Pass, PassKind, RhoSchedule, Sam, SamConfig, Sgd,
    SgdConfig, StepOutcome, TchOptimizer, buffers,
};
fn model(config: &MlpConfig) -> (VarStore, Mlp) {
    let store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), config, Seed::new(5)).unwrap();
    (store, net)
}

fn normed() -> MlpConfig {
    MlpConfig { batch_norm: true, ..MlpConfig::relu(&[4, 16, 3]) }
}

fn quadratic_sam(config: SamConfig) -> (Tensor, Sam<Sgd>) {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
    (w, sam)
}

// Running statistics of batch norm.

#[test]
fn running_statistics_are_those_of_one_plain_forward() {
    let (plain_store, plain) = model(&normed());
    let (store, net) = model(&normed());
    let mut sam = Sam::new(vec![ParamGroup::from_var_store(&store)], Sgd::new(0.1), SamConfig::sam(0.5))
        .unwrap()
        .with_buffers(buffers(&store));
    assert_eq!(buffers(&store).len(), 2);
    let (x, y) = batch(32, 0);
    let _ = plain.forward_with(&x, true, true);
    let mut forwards = 0;
    sam.step(|pass| {
        forwards += 1;
        Ok(net.forward_with(&x, pass.batch_statistics(), true).cross_entropy_for_logits(&y))
    })
    .unwrap();
    assert_eq!(forwards, 2);
    assert_eq!(bits(&buffers(&store)), bits(&buffers(&plain_store)));
    assert_ne!(bits(&buffers(&store)), bits(&buffers(&model(&normed()).0)));
}

#[test]
fn micro_batches_update_running_statistics_once_each() {
    for scope in [sam_opt::PerturbScope::Global, sam_opt::PerturbScope::PerMicroBatch] {
        let (plain_store, plain) = model(&normed());
        let (store, net) = model(&normed());
        let config = SamConfig { scope, ..SamConfig::sam(0.5) };
        let mut sam = Sam::new(vec![ParamGroup::from_var_store(&store)], Sgd::new(0.1), config)
            .unwrap()
            .with_buffers(buffers(&store));
        for micro in 0..3 {
            let _ = plain.forward_with(&batch(8, micro).0, true, true);
        }
        sam.step_accumulate(3, |pass| {
            let (x, y) = batch(8, pass.micro as u64);
            Ok(net.forward_with(&x, pass.batch_statistics(), true).cross_entropy_for_logits(&y))
        })
        .unwrap();
        assert_eq!(bits(&buffers(&store)), bits(&buffers(&plain_store)), "{scope:?}");
    }
}

#[test]
fn frozen_normalization_uses_and_keeps_the_running_statistics() {
    let (store, net) = model(&normed());
    let config = SamConfig { bn: BnMode::Frozen, ..SamConfig::sam(0.5) };
    let mut sam = Sam::new(vec![ParamGroup::from_var_store(&store)], Sgd::new(0.1), config)
        .unwrap()
        .with_buffers(buffers(&store));
    let before = bits(&buffers(&store));
    let (x, y) = batch(32, 0);
    sam.step(|pass| {
        assert!(!pass.batch_statistics());
        Ok(net.forward_with(&x, pass.batch_statistics(), true).cross_entropy_for_logits(&y))
    })
    .unwrap();
    assert_eq!(bits(&buffers(&store)), before);
}

// Loss scaling.

#[test]
fn loss_scaling_changes_neither_epsilon_nor_the_update() {
    let run = |scale: Option<f64>| {
        let (w, mut sam) = quadratic_sam(SamConfig { clip_norm: Some(5.0), ..SamConfig::sam(0.05) });
        let stats = match scale {
            Some(scale) => sam.step_scaled(scale, 1, |_| Ok(quadratic(&w))),
            None => sam.step(|_| Ok(quadratic(&w))),
        };
        (values(&w), stats.unwrap())
    };
    let (plain, s) = run(None);
    let (scaled, t) = run(Some(1024.0));
    close(&scaled, &plain, 1e-6);
    close(&[t.loss, t.grad_norm, t.epsilon_norm, t.rho], &[s.loss, s.grad_norm, s.epsilon_norm, s.rho], 1e-6);
    close(&[t.final_grad_norm], &[s.final_grad_norm], 1e-5);
}

#[test]
fn a_scaled_step_that_overflows_is_skipped_and_the_scaler_shrinks() {
    for bad in [PassKind::Main, PassKind::Perturbed(0)] {
        let (w, mut sam) = quadratic_sam(SamConfig::sam(0.05));
        let before = bits(&[w.shallow_clone()]);
        let mut scaler = LossScaler::default();
        let start = scaler.scale;
        let stats = sam
            .step_scaled(scaler.scale, 1, |pass| {
                Ok(if pass.kind == bad { quadratic(&w) * f64::INFINITY } else { quadratic(&w) })
            })
            .unwrap();
        assert_eq!(stats.outcome, StepOutcome::SkippedNonFinite { pass: bad });
        // What was done before it broke off counts.
        assert_eq!(stats.passes, usize::from(bad != PassKind::Main));
        assert_eq!(stats.perturbed_loss, None);
        assert_eq!(bits(&[w.shallow_clone()]), before);
        scaler.update(stats.outcome);
        assert_eq!(scaler.scale, start / 2.0);
        assert!(!sam.is_perturbed());
        assert_eq!(sam.step_scaled(scaler.scale, 1, |_| Ok(quadratic(&w))).unwrap().outcome, StepOutcome::Updated);
    }
}

#[test]
fn a_gradient_that_overflows_under_the_scale_is_skipped() {
    let (w, mut sam) = quadratic_sam(SamConfig::sam(0.05));
    let stats = sam.step_scaled(1e38, 1, |_| Ok(quadratic(&w) * 100.0)).unwrap();
    assert!(matches!(stats.outcome, StepOutcome::SkippedNonFinite { .. }));
    assert_eq!(values(&w), [1.0, 1.0]);
}

// Half-precision parameters.

#[test]
fn half_precision_parameters_that_cannot_move_are_refused_with_the_share() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let w = leaf(&[1.0; 8], kind);
        let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(1e-4)).unwrap();
        let error = sam.step(|_| Ok(w.square().sum(Kind::Float))).unwrap_err();
        assert!(matches!(&error, Error::LowPrecisionParams { percent, .. } if *percent == 100.0), "{error}");
        assert_eq!(values(&w), [1.0; 8]);
    }
}

#[test]
fn half_precision_parameters_that_can_move_do_and_zero_gradients_stay_finite() {
    let w = leaf(&[1.0; 8], Kind::BFloat16);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.5), SamConfig::sam(0.5)).unwrap();
    let mut trace = Trace::new();
    sam.step(|pass| {
        trace.record(pass, &w);
        Ok(w.to_kind(Kind::Float).square().sum(Kind::Float))
    })
    .unwrap();
    assert_ne!(trace.points[0], trace.points[1]);
    sam.step(|_| Ok(w.to_kind(Kind::Float).sum(Kind::Float) * 0.0)).unwrap();
    assert!(values(&w).iter().all(|v| v.is_finite()));
}

// Zero gradient, restoring, radius.

#[test]
fn a_zero_gradient_gives_a_zero_perturbation_and_no_nan() {
    for norm_eps in [1e-12, 0.0] {
        let (w, mut sam) = quadratic_sam(SamConfig { norm_eps, ..SamConfig::sam(0.05) });
        let stats = sam.step(|_| Ok(quadratic(&w) * 0.0)).unwrap();
        assert_eq!((stats.grad_norm, stats.epsilon_norm), (0.0, 0.0));
        assert_eq!(values(&w), [1.0, 1.0]);
    }
}

#[test]
fn restoring_copies_and_keeps_the_tensor_object() {
    let w = leaf(&[0.1, 1e8, -3.3e-7, 7.0], Kind::Float);
    let view = w.detach().slice(0, 1, 3, 1);
    let (before, address) = (bits(&[w.shallow_clone()]), w.data_ptr());
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), SamConfig::sam(0.7)).unwrap();
    for _ in 0..3 {
        sam.step(|_| Ok(w.sin().sum(Kind::Float))).unwrap();
    }
    // A learning rate of 0: anything but a bit-exact restore shows.
    assert_eq!(bits(&[w.shallow_clone()]), before);
    assert_eq!(w.data_ptr(), address);
    assert_eq!(values(&view), values(&w)[1..3]);
}

#[test]
fn the_perturbation_really_applied_has_the_length_rho() {
    for kind in [Kind::Float, Kind::Double] {
        let w = leaf(&(0..500).map(|i| f64::from(i).sin()).collect::<Vec<_>>(), kind);
        let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(0.3)).unwrap();
        let mut trace = Trace::new();
        let stats = sam
            .step(|pass| {
                trace.record(pass, &w);
                Ok(w.pow_tensor_scalar(3).sum(kind))
            })
            .unwrap();
        let length = trace.points[1].iter().zip(&trace.points[0]).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        close(&[length, stats.epsilon_norm], &[0.3, 0.3], 1e-6);
    }
}

// Weight decay, clipping, schedulers, groups.

#[test]
fn weight_decay_is_outside_the_perturbation_unless_asked_for() {
    let step = |perturb_weight_decay| {
        let w = leaf(&[1.0, 1.0], Kind::Double);
        let base = Sgd::from_config(SgdConfig { lr: 1.0, momentum: 0.0, weight_decay: 0.5, ..SgdConfig::default() });
        let config = SamConfig { perturb_weight_decay, ..SamConfig::sam(0.1) };
        let mut sam = Sam::new(vec![group(&[("w", &w)])], base, config).unwrap();
        sam.step(|_| Ok(quadratic(&w))).unwrap();
        values(&w).iter().map(|v| 1.0 - v).collect::<Vec<_>>()
    };
    // Outside: ε along (1, 10), one decay of 0.5 w at w.
    let n = 101f64.sqrt();
    let e = [0.1 / n, 1.0 / n];
    close(&step(false), &[1.0 + e[0] + 0.5, 10.0 * (1.0 + e[1]) + 0.5], 1e-9);
    // Inside: the loss is L + ¼‖w‖², so ε is along (1.5, 10.5) and decay is taken at w + ε.
    let n = (1.5f64.powi(2) + 10.5f64.powi(2)).sqrt();
    let e = [0.15 / n, 1.05 / n];
    close(&step(true), &[1.5 * (1.0 + e[0]), 10.5 * (1.0 + e[1])], 1e-9);
}

#[test]
fn clipping_acts_on_the_final_gradient_only() {
    let (w, mut sam) = quadratic_sam(SamConfig { clip_norm: Some(1.0), ..SamConfig::sam(0.05) });
    let stats = sam.step(|_| Ok(quadratic(&w))).unwrap();
    assert!(stats.clipped && stats.final_grad_norm > 10.0);
    close(&[stats.epsilon_norm], &[0.05], 1e-7);
    let moved = values(&w).iter().map(|v| (1.0 - v).powi(2)).sum::<f64>().sqrt();
    close(&[moved], &[0.1], 1e-6);
}

#[test]
fn the_wrapper_and_the_base_share_one_learning_rate() {
    let (w, mut sam) = quadratic_sam(SamConfig::sam(0.0));
    sam.set_lr(0.0).unwrap();
    assert!(sam.set_lr(f64::NAN).is_err() && sam.set_lr(-1.0).is_err());
    assert_eq!((sam.lr(), sam_opt::BaseOptimizer::lr(sam.base())), (0.0, 0.0));
    assert_eq!(sam.step(|_| Ok(quadratic(&w))).unwrap().lr, 0.0);
    assert_eq!(values(&w), [1.0, 1.0]);
}

#[test]
fn rho_follows_the_learning_rate_the_loss_or_a_function() {
    let rho = |rho_schedule, lr| {
        let (w, mut sam) = quadratic_sam(SamConfig { rho_schedule, ..SamConfig::sam(0.05) });
        sam.set_lr(lr).unwrap();
        sam.step(|_| Ok(quadratic(&w))).unwrap().rho
    };
    let follow = RhoSchedule::ProportionalToLr { rho_min: 0.1, rho_max: 0.5, lr_min: 0.0, lr_max: 0.2 };
    close(&[rho(follow, 0.0), rho(follow, 0.1), rho(follow, 0.2)], &[0.1, 0.3, 0.5], 1e-12);
    // L = 5.5, ‖g‖ = 10.0499: ρ‖g‖ = 0.1 L.
    let budget = RhoSchedule::LossBudget { fraction: 0.1, rho_max: 1.0 };
    close(&[rho(budget, 0.1)], &[0.55 / 101f64.sqrt()], 1e-6);
    let bounded = RhoSchedule::LossBudget { fraction: 100.0, rho_max: 0.2 };
    close(&[rho(bounded, 0.1)], &[0.2], 1e-12);
    let (w, mut sam) = quadratic_sam(SamConfig { rho_schedule: RhoSchedule::Function, ..SamConfig::sam(0.05) });
    let message = sam.step(|_| Ok(quadratic(&w))).unwrap_err().to_string();
    assert!(message.contains("set_rho_fn"), "{message}");
    sam.set_rho_fn(|step| 0.1 * (step + 1) as f64);
    let got: Vec<f64> = (0..3).map(|_| sam.step(|_| Ok(quadratic(&w))).unwrap().rho).collect();
    close(&got, &[0.1, 0.2, 0.3], 1e-12);
    sam.set_rho(0.7).unwrap();
    assert_eq!(sam.step(|_| Ok(quadratic(&w))).unwrap().rho, 0.7);
    assert!(matches!(sam.set_rho(-0.1), Err(Error::InvalidRho { .. })));
}

#[test]
fn a_group_that_is_not_perturbed_stays_out_of_the_norm_and_of_epsilon() {
    let (a, b) = (leaf(&[3.0], Kind::Double), leaf(&[4.0], Kind::Double));
    let mut still = group(&[("b", &b)]);
    still.perturb = false;
    let mut sam = Sam::new(vec![group(&[("a", &a)]), still], Sgd::new(0.5), SamConfig::sam(0.1)).unwrap();
    let mut seen = Vec::new();
    let stats = sam
        .step(|_| {
            seen.push((values(&a)[0], values(&b)[0]));
            Ok(((&a * &a + &b * &b) * 0.5).sum(Kind::Double))
        })
        .unwrap();
    close(&[seen[1].0, seen[1].1, stats.grad_norm], &[3.1, 4.0, 3.0], 1e-12);
    close(&[values(&a)[0], values(&b)[0]], &[3.0 - 0.5 * 3.1, 2.0], 1e-12);
}

#[test]
fn groups_share_one_norm_and_keep_their_own_radius_rate_and_decay() {
    let (a, b) = (leaf(&[3.0], Kind::Double), leaf(&[4.0], Kind::Double));
    let mut own = group(&[("b", &b)]);
    (own.rho, own.lr_scale, own.weight_decay) = (Some(1.0), 0.1, Some(0.5));
    let mut sam = Sam::new(vec![group(&[("a", &a)]), own], Sgd::new(0.5), SamConfig::sam(0.1)).unwrap();
    let mut seen = Vec::new();
    let stats = sam
        .step(|_| {
            seen.push((values(&a)[0], values(&b)[0]));
            Ok(((&a * &a + &b * &b) * 0.5).sum(Kind::Double))
        })
        .unwrap();
    close(&[seen[1].0, seen[1].1], &[3.0 + 0.1 * 0.6, 4.0 + 1.0 * 0.8], 1e-12);
    close(&[stats.epsilon_norm], &[0.06f64.hypot(0.8)], 1e-12);
    close(&[values(&a)[0], values(&b)[0]], &[3.0 - 0.5 * 3.06, 4.0 - 0.05 * (4.8 + 2.0)], 1e-12);
}

// The closure's batch and graph.

#[test]
fn a_closure_that_draws_new_data_is_caught_when_checked() {
    let (w, mut sam) = quadratic_sam(SamConfig { check_batch: true, ..SamConfig::sam(0.05) });
    sam.step(|_| Ok(quadratic(&w))).unwrap();
    let mut calls = 0.0;
    let error = sam
        .step(|_| {
            calls += 1.0;
            Ok(quadratic(&w) * calls)
        })
        .unwrap_err();
    assert!(matches!(error, Error::BatchChanged { .. }), "{error}");
}

#[test]
fn detached_and_stale_and_foreign_losses_are_caught() {
    let (w, mut sam) = quadratic_sam(SamConfig::sam(0.05));
    let error = sam.step(|_| Ok(quadratic(&w).detach())).unwrap_err();
    assert!(matches!(error, Error::Detached { pass: PassKind::Main }), "{error}");
    let kept = quadratic(&w);
    let error = sam.step(|_| Ok(kept.shallow_clone())).unwrap_err();
    assert!(matches!(error, Error::StaleLoss { pass: PassKind::Perturbed(0) }), "{error}");
    let other = leaf(&[1.0, 1.0], Kind::Float);
    let error = sam.step(|_| Ok(quadratic(&other))).unwrap_err();
    assert!(matches!(error, Error::NoGradient { pass: PassKind::Main }), "{error}");
    let error = sam.step(|_| Ok(w.square())).unwrap_err();
    assert!(matches!(&error, Error::LossShape { got, .. } if *got == [2]), "{error}");
    assert_eq!(values(&w), [1.0, 1.0]);
}

#[test]
fn parameters_without_a_gradient_are_left_alone() {
    let (a, b) = (leaf(&[3.0], Kind::Float), leaf(&[4.0], Kind::Float));
    let frozen = Tensor::from_slice(&[5.0f32]);
    let groups = vec![group(&[("a", &a), ("b", &b), ("frozen", &frozen)])];
    let mut sam = Sam::new(groups, Adam::new(0.1), SamConfig::sam(0.1)).unwrap();
    let stats = sam.step(|_| Ok((&a * &a * &frozen).sum(Kind::Float))).unwrap();
    close(&[stats.grad_norm, stats.epsilon_norm], &[30.0, 0.1], 1e-5);
    assert_eq!((values(&b)[0], values(&frozen)[0]), (4.0, 5.0));
    assert_ne!(values(&a)[0], 3.0);
}

#[test]
fn the_users_grad_fields_are_not_touched() {
    let (w, mut sam) = quadratic_sam(SamConfig::sam(0.05));
    (&w * 2.0).sum(Kind::Float).backward();
    sam.step(|_| Ok(quadratic(&w))).unwrap();
    assert_eq!(values(&w.grad()), [2.0, 2.0]);
}

// Guards.

#[test]
fn two_phase_use_equals_the_closure() {
    let (w, mut sam) = quadratic_sam(SamConfig::sam(0.05));
    let (v, mut other) = quadratic_sam(SamConfig::sam(0.05));
    for _ in 0..3 {
        sam.step(|_| Ok(quadratic(&w))).unwrap();
        let g = other.params().gradient(&quadratic(&v)).unwrap();
        let guard = other.perturb(&g).unwrap();
        assert!(is_perturbed(&v));
        close(&[guard.epsilon_norm()], &[0.05], 1e-7);
        let g = guard.params().gradient(&quadratic(&v)).unwrap();
        guard.step(&g).unwrap();
        assert!(!is_perturbed(&v));
    }
    assert_eq!(bits(&[w]), bits(&[v]));
    assert_eq!(other.step_count(), 3);
}

#[test]
fn a_second_perturbation_of_the_same_parameters_is_refused() {
    let (w, mut sam) = quadratic_sam(SamConfig::sam(0.05));
    let mut second = Sam::new(vec![group(&[("same", &w)])], Sgd::new(0.1), SamConfig::sam(0.05)).unwrap();
    let g = sam.params().gradient(&quadratic(&w)).unwrap();
    let guard = sam.perturb(&g).unwrap();
    let error = second.step(|_| Ok(quadratic(&w))).unwrap_err();
    assert!(matches!(&error, Error::NestedPerturbation { name } if name == "same"), "{error}");
    let state = second.state_dict().unwrap();
    assert!(matches!(second.load_state_dict(&state), Err(Error::NestedPerturbation { .. })));
    drop(guard);
    assert_eq!(values(&w), [1.0, 1.0]);
    second.step(|_| Ok(quadratic(&w))).unwrap();
    let inner = leaf(&[1.0, 1.0], Kind::Float);
    let (mut a, mut b) = (
        Sam::new(vec![group(&[("w", &inner)])], Sgd::new(0.1), SamConfig::sam(0.05)).unwrap(),
        Sam::new(vec![group(&[("w", &inner)])], Sgd::new(0.1), SamConfig::sam(0.05)).unwrap(),
    );
    let error = a
        .step(|pass: &Pass<'_>| {
            if pass.kind == PassKind::Perturbed(0) {
                b.step(|_| Ok(quadratic(&inner)))?;
            }
            Ok(quadratic(&inner))
        })
        .unwrap_err();
    assert!(matches!(error, Error::NestedPerturbation { .. }), "{error}");
}

// Base optimizers.

#[test]
fn own_base_optimizers_equal_libtorchs() {
    use tch::nn::OptimizerConfig;
    fn run<B: sam_opt::BaseOptimizer>(make: impl Fn(&VarStore) -> B, config: &SamConfig) -> Vec<f64> {
        let (store, net) = model(&MlpConfig::relu(&[4, 16, 3]));
        let mut sam = Sam::new(vec![ParamGroup::from_var_store(&store)], make(&store), config.clone()).unwrap();
        for _ in 0..10 {
            sam.step(|pass| {
                let (x, y) = batch(32, pass.step);
                Ok(net.forward_with(&x, true, true).cross_entropy_for_logits(&y))
            })
            .unwrap();
        }
        ParamSet::from_var_store(&store).unwrap().tensors().iter().flat_map(values).collect()
    }
    let config = SamConfig::sam(0.1);
    let wrap = |inner, lr| TchOptimizer::new(inner, lr);
    for nesterov in [false, true] {
        close(
            &run(
                |_| {
                    Sgd::from_config(SgdConfig {
                        lr: 0.05,
                        momentum: 0.9,
                        nesterov,
                        weight_decay: 0.01,
                        ..SgdConfig::default()
                    })
                },
                &config,
            ),
            &run(|s| wrap(tch::nn::sgd(0.9, 0.0, 0.01, nesterov).build(s, 0.05).unwrap(), 0.05), &config),
            2e-6,
        );
    }
    close(
        &run(|_| Adam::from_config(AdamConfig { lr: 0.01, weight_decay: 0.01, ..AdamConfig::default() }), &config),
        &run(|s| wrap(tch::nn::adam(0.9, 0.999, 0.01).build(s, 0.01).unwrap(), 0.01), &config),
        2e-5,
    );
    close(
        &run(|_| AdamW::from_config(AdamConfig { lr: 0.01, weight_decay: 0.1, ..AdamConfig::default() }), &config),
        &run(|s| wrap(tch::nn::adamw(0.9, 0.999, 0.1).build(s, 0.01).unwrap(), 0.01), &config),
        2e-5,
    );
}

#[test]
fn the_adapter_says_what_it_cannot_do() {
    use tch::nn::OptimizerConfig;
    let (store, net) = model(&MlpConfig::relu(&[4, 16, 3]));
    let base = TchOptimizer::new(tch::nn::Sgd::default().build(&store, 0.1).unwrap(), 0.1);
    let mut groups = vec![ParamGroup::from_var_store(&store)];
    groups[0].lr_scale = 0.5;
    let mut sam = Sam::new(groups, base, SamConfig::sam(0.1)).unwrap();
    let message = sam.state_dict().unwrap_err().to_string();
    assert!(message.contains("use Sgd, Adam or AdamW"), "{message}");
    let before = bits(sam.params().tensors());
    let (x, y) = batch(8, 0);
    let error = sam.step(|_| Ok(net.forward_with(&x, true, true).cross_entropy_for_logits(&y))).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert_eq!(bits(sam.params().tensors()), before);
}
