//! Corners that a review found: each was wrong, or could have been, without a test.
#![allow(missing_docs)]

mod common;
use common::{bits, close, group, leaf, quadratic, values};
use sam_opt::tensor::tch::{Kind, Tensor};
use sam_opt::{
    AdamW, AsamConfig, AsamScope, Error, Gsam, GsamConfig, GsamRule, Pass, PassKind, PerturbScope, RhoSchedule, Rule,
    Sagm, SagmConfig, SagmRule, Sam, SamConfig, SamRule, Sgd, SgdConfig, StepOutcome, TwoPass, is_perturbed,
};

/// `L = ½‖h ∘ (a + b)‖²`: libtorch hands out one tensor as the gradient of both `a` and `b`.
fn summed(a: &Tensor, b: &Tensor) -> Tensor {
    let h = Tensor::from_slice(&[1.0f64, 3.0]).to_kind(a.kind());
    ((a + b) * h).square().sum(a.kind()) * 0.5
}

#[test]
fn two_parameters_that_enter_a_sum_alike_keep_their_own_gradients() {
    type Run = Box<dyn Fn(&Tensor, &Tensor)>;
    let all = Some(AsamConfig { eta: 0.5, scope: AsamScope::All });
    let runs: Vec<Run> = vec![
        Box::new(|a, b| {
            let config = SamConfig { clip_norm: Some(0.3), ..SamConfig::sam(0.2) };
            let mut sam = Sam::new(vec![group(&[("a", a), ("b", b)])], Sgd::new(0.1), config).unwrap();
            sam.step(|_| Ok(summed(a, b))).unwrap();
        }),
        Box::new(|a, b| {
            let config = SamConfig { scope: PerturbScope::PerMicroBatch, ..SamConfig::sam(0.2) };
            let mut sam = Sam::new(vec![group(&[("a", a), ("b", b)])], Sgd::new(0.1), config).unwrap();
            sam.step_accumulate(3, |pass| Ok(summed(a, b) * (1.0 + pass.micro as f64))).unwrap();
        }),
        Box::new(move |a, b| {
            let config = SamConfig { adaptive: all, ..SamConfig::sam(0.2) };
            let mut sam = Sam::new(vec![group(&[("a", a), ("b", b)])], Sgd::new(0.1), config).unwrap();
            sam.step(|_| Ok(summed(a, b))).unwrap();
        }),
        Box::new(|a, b| {
            let config = SagmConfig { alpha: 0.01, sam: SamConfig::sam(0.2) };
            let mut sagm = Sagm::new(vec![group(&[("a", a), ("b", b)])], Sgd::new(0.1), config).unwrap();
            sagm.step(|_| Ok(summed(a, b))).unwrap();
        }),
        Box::new(|a, b| {
            let config = GsamConfig { alpha: 0.4, sam: SamConfig::sam(0.2) };
            let mut gsam = Gsam::new(vec![group(&[("a", a), ("b", b)])], Sgd::new(0.1), config).unwrap();
            gsam.step_scaled(64.0, 2, |_| Ok(summed(a, b))).unwrap();
        }),
    ];
    for (i, run) in runs.iter().enumerate() {
        for kind in [Kind::Float, Kind::Double] {
            let (a, b) = (leaf(&[0.5, -0.2], kind), leaf(&[0.1, 0.4], kind));
            // The same function of parameters that don't enter alike: b = −c.
            let (a2, c) = (leaf(&[0.5, -0.2], kind), leaf(&[-0.1, -0.4], kind));
            run(&a, &b);
            let mirrored = mirror(i, &a2, &c);
            close(&values(&a), &values(&a2), 1e-6);
            close(&values(&b), &mirrored, 1e-6);
        }
    }
}

/// The `i`-th run on `a − c`, whose two gradients are different tensors; returns `−c`.
fn mirror(i: usize, a: &Tensor, c: &Tensor) -> Vec<f64> {
    let loss = || {
        let h = Tensor::from_slice(&[1.0f64, 3.0]).to_kind(a.kind());
        ((a - c) * h).square().sum(a.kind()) * 0.5
    };
    let groups = || vec![group(&[("a", a), ("c", c)])];
    let sam = |config| Sam::new(groups(), Sgd::new(0.1), config).unwrap();
    match i {
        0 => drop(sam(SamConfig { clip_norm: Some(0.3), ..SamConfig::sam(0.2) }).step(|_| Ok(loss())).unwrap()),
        1 => {
            let config = SamConfig { scope: PerturbScope::PerMicroBatch, ..SamConfig::sam(0.2) };
            sam(config).step_accumulate(3, |pass| Ok(loss() * (1.0 + pass.micro as f64))).unwrap();
        }
        2 => {
            let adaptive = Some(AsamConfig { eta: 0.5, scope: AsamScope::All });
            sam(SamConfig { adaptive, ..SamConfig::sam(0.2) }).step(|_| Ok(loss())).unwrap();
        }
        3 => {
            let config = SagmConfig { alpha: 0.01, sam: SamConfig::sam(0.2) };
            Sagm::new(groups(), Sgd::new(0.1), config).unwrap().step(|_| Ok(loss())).unwrap();
        }
        _ => {
            let config = GsamConfig { alpha: 0.4, sam: SamConfig::sam(0.2) };
            Gsam::new(groups(), Sgd::new(0.1), config).unwrap().step_scaled(64.0, 2, |_| Ok(loss())).unwrap();
        }
    }
    values(c).iter().map(|v| -v).collect()
}

#[test]
fn sagm_with_rho_equal_to_alpha_is_still_perturbed() {
    let w = leaf(&[1.0, 1.0], Kind::Double);
    let config = SagmConfig { alpha: 0.1, sam: SamConfig::sam(0.1) };
    let mut sagm = Sagm::new(vec![group(&[("w", &w)])], Sgd::new(0.0), config).unwrap();
    let stats = sagm.step(|_| Ok(quadratic(&w))).unwrap();
    let n = 101f64.sqrt();
    assert!(stats.perturbed);
    close(&[stats.epsilon_norm], &[(0.1 / n - 0.1).abs() * n], 1e-9);
}

/// One step over `n` micro-batches, with or without loss scaling: the parameters and the statistics.
fn one_step<R: Rule>(config: R::Config, n: usize, scale: Option<f64>) -> (Vec<f64>, Vec<f64>) {
    let w = leaf(&[1.0, -0.7], Kind::Double);
    let mut optimizer = TwoPass::<_, R>::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
    let closure = |pass: &Pass<'_>| Ok(quadratic(&w) * (1.0 + pass.micro as f64));
    let stats = match scale {
        None => optimizer.step_accumulate(n, closure),
        Some(scale) => optimizer.step_scaled(scale, n, closure),
    }
    .unwrap();
    (values(&w), vec![stats.loss, stats.grad_norm, stats.final_grad_norm, stats.epsilon_norm, stats.rho])
}

fn scale_does_not_show<R: Rule>(config: &R::Config) {
    for n in [1, 3] {
        let ((w, s), (v, t)) = (one_step::<R>(config.clone(), n, None), one_step::<R>(config.clone(), n, Some(4096.0)));
        close(&w, &v, 1e-10);
        close(&s, &t, 1e-9);
    }
}

#[test]
fn loss_scaling_changes_nothing_for_any_method_and_any_number_of_micro_batches() {
    let sam = SamConfig { clip_norm: Some(4.0), ..SamConfig::sam(0.3) };
    let adaptive = Some(AsamConfig { eta: 0.01, scope: AsamScope::All });
    scale_does_not_show::<SamRule>(&sam);
    scale_does_not_show::<SamRule>(&SamConfig { adaptive, ..sam.clone() });
    scale_does_not_show::<GsamRule>(&GsamConfig { alpha: 0.4, sam: sam.clone() });
    scale_does_not_show::<SagmRule>(&SagmConfig { alpha: 0.05, sam });
}

#[test]
fn half_precision_gradients_are_unscaled_in_f32() {
    // 1e-6 is below f16's smallest number after division, but not before.
    let w = leaf(&[1.0, 1.0], Kind::Half);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(2e5), SamConfig::sam(0.0)).unwrap();
    let scale = 65536.0;
    let stats = sam.step_scaled(scale, 1, |_| Ok(w.to_kind(Kind::Float).sum(Kind::Float) * 1e-8)).unwrap();
    assert_eq!(stats.outcome, StepOutcome::Updated);
    close(&[stats.final_grad_norm], &[2f64.sqrt() * 1e-8], 1e-10);
    close(&values(&w), &[1.0 - 2e-3; 2], 1e-3);
    assert!(values(&w)[0] < 1.0);
}

#[test]
fn bfloat16_weights_near_zero_are_not_taken_for_lost() {
    let w = leaf(&[0.0; 16], Kind::BFloat16);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(1e-7)).unwrap();
    let mut perturbed = Vec::new();
    sam.step(|_| {
        perturbed.push(values(&w)[0]);
        Ok(w.to_kind(Kind::Float).sum(Kind::Float))
    })
    .unwrap();
    assert!(perturbed[1] > 0.0);
}

#[test]
fn decay_inside_the_perturbation_is_refused_where_the_base_can_not_hand_it_over() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let config = SamConfig { perturb_weight_decay: true, ..SamConfig::sam(0.1) };
    let error = Sam::new(vec![group(&[("w", &w)])], AdamW::new(0.1), config.clone()).unwrap_err();
    assert!(error.to_string().contains("perturb_weight_decay") && error.to_string().contains("AdamW"), "{error}");
    Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
}

#[test]
fn a_batch_that_leaves_the_perturbed_group_out_gives_epsilon_zero() {
    let (used, idle) = (leaf(&[2.0], Kind::Float), leaf(&[3.0], Kind::Float));
    let mut still = group(&[("used", &used)]);
    still.perturb = false;
    let mut sam = Sam::new(vec![still, group(&[("idle", &idle)])], Sgd::new(0.1), SamConfig::sam(0.1)).unwrap();
    let stats = sam.step(|_| Ok(used.square().sum(Kind::Float))).unwrap();
    assert_eq!((stats.epsilon_norm, stats.grad_norm, stats.passes), (0.0, 0.0, 2));
    close(&[values(&used)[0], values(&idle)[0]], &[1.6, 3.0], 1e-6);
}

#[test]
fn group_radii_follow_the_schedule_from_its_largest_radius() {
    let at = |lr: f64| {
        let (a, b) = (leaf(&[3.0], Kind::Double), leaf(&[4.0], Kind::Double));
        let mut own = group(&[("b", &b)]);
        own.rho = Some(0.1);
        let rho_schedule = RhoSchedule::ProportionalToLr { rho_min: 0.0, rho_max: 0.5, lr_min: 0.0, lr_max: 1.0 };
        let config = SamConfig { rho_schedule, ..SamConfig::sam(0.05) };
        let mut sam = Sam::new(vec![group(&[("a", &a)]), own], Sgd::new(lr), config).unwrap();
        let mut seen = Vec::new();
        sam.step(|_| {
            seen.push((values(&a)[0], values(&b)[0]));
            Ok(((&a * &a + &b * &b) * 0.5).sum(Kind::Double))
        })
        .unwrap();
        [seen[1].0 - 3.0, seen[1].1 - 4.0]
    };
    close(&at(1.0), &[0.5 * 0.6, 0.1 * 0.8], 1e-12);
    close(&at(0.5), &[0.25 * 0.6, 0.05 * 0.8], 1e-12);
}

#[test]
fn parameters_are_perturbed_in_the_second_pass_and_only_there() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let config = SamConfig { check_batch: true, ..SamConfig::sam(0.1) };
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
    let mut seen = Vec::new();
    sam.step(|pass| {
        assert!(pass.batch_statistics(), "training mode in every pass");
        seen.push((pass.kind, is_perturbed(&w)));
        Ok(quadratic(&w))
    })
    .unwrap();
    assert_eq!(seen, [(PassKind::Main, false), (PassKind::Probe(0), false), (PassKind::Perturbed(0), true)]);
}

#[test]
fn a_failure_in_the_check_pass_changes_nothing() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let config = SamConfig { check_batch: true, ..SamConfig::sam(0.1) };
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::with_momentum(0.1, 0.9), config).unwrap();
    let before = bits(&[w.shallow_clone()]);
    let error = sam
        .step(|pass| match pass.kind {
            PassKind::Probe(_) => Err(Error::closure("no more data")),
            _ => Ok(quadratic(&w)),
        })
        .unwrap_err();
    assert!(matches!(error, Error::Closure(_)));
    assert_eq!(bits(&[w.shallow_clone()]), before);
    assert_eq!(sam.step_count(), 0);
}

#[test]
fn a_changed_radius_and_a_scheduled_rate_survive_saving() {
    let make = || {
        let w = leaf(&[1.0, 1.0], Kind::Float);
        let config = SamConfig { rho: 0.1 + 0.2, ..SamConfig::default() };
        let base = Sgd::from_config(SgdConfig { lr: 0.1, momentum: 0.9, ..SgdConfig::default() });
        let sam = Sam::new(vec![group(&[("w", &w)])], base, config).unwrap();
        (w, sam)
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    // Rates of a cosine schedule, with all their digits.
    for t in 1..20 {
        let lr = 0.05 * (1.0 + (std::f64::consts::PI * f64::from(t) / 20.0).cos());
        let (w, mut saved) = make();
        saved.set_lr(lr).unwrap();
        saved.set_rho(lr / 3.0).unwrap();
        saved.step(|_| Ok(quadratic(&w))).unwrap();
        saved.state_dict().unwrap().save(file.path()).unwrap();
        let (v, mut loaded) = make();
        loaded.load_state_dict(&sam_opt::tensor::StateDict::load(file.path()).unwrap()).unwrap();
        assert_eq!(loaded.lr().to_bits(), lr.to_bits());
        assert_eq!(loaded.step(|_| Ok(quadratic(&v))).unwrap().rho.to_bits(), (lr / 3.0).to_bits());
    }
}

#[test]
fn a_radius_function_must_be_given_again_before_loading() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let make = || Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(0.1)).unwrap();
    let mut saved = make();
    saved.set_rho_fn(|step| 0.1 * step as f64);
    saved.step(|_| Ok(quadratic(&w))).unwrap();
    let state = saved.state_dict().unwrap();
    let mut loaded = make();
    let message = loaded.load_state_dict(&state).unwrap_err().to_string();
    assert!(message.contains("set_rho_fn"), "{message}");
    loaded.set_rho_fn(|step| 0.1 * step as f64);
    loaded.load_state_dict(&state).unwrap();
    close(&[loaded.step(|_| Ok(quadratic(&w))).unwrap().rho], &[0.1], 1e-12);
}

#[test]
fn a_malformed_count_in_a_saved_state_is_an_error() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], AdamW::new(0.1), SamConfig::sam(0.1)).unwrap();
    sam.step(|_| Ok(quadratic(&w))).unwrap();
    for bad in [Tensor::from_slice(&[1i64, 2]), Tensor::from_slice(&[1.0f32]), Tensor::from_slice(&[-1i64])] {
        let mut state = sam.state_dict().unwrap();
        state.tensors.insert("steps/w".into(), bad);
        assert!(matches!(sam.load_state_dict(&state), Err(Error::State { .. })));
    }
}

#[test]
fn the_optimizer_can_be_sent_to_another_thread() {
    fn sendable<T: Send>(_: &T) {}
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(0.1)).unwrap();
    sam.set_rho_fn(|_| 0.1);
    sendable(&sam);
}
