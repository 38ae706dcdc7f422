//! What a step of S-Adam does and leaves alone.
#![allow(missing_docs)]

mod common;
use common::{batch, bits, close, group, leaf, quadratic, values};
use proptest::prelude::*;
use sam_opt::base::{Slot, step_on};
use sam_opt::s_adam::{LgiKind, ProbeNorm, lgi_from_probes};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore, no_grad};
use sam_opt::tensor::{ParamSet, Seed};
use sam_opt::{AdamConfig, AdamW, BaseOptimizer, BnMode, Error, ParamGroup, PassKind, SAdam, SAdamConfig, buffers};

fn model(config: &MlpConfig) -> (VarStore, Mlp) {
    let store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), config, Seed::new(5)).unwrap();
    (store, net)
}

fn plain_net() -> (VarStore, Mlp) {
    model(&MlpConfig::relu(&[4, 16, 3]))
}

fn loss(net: &Mlp, index: u64) -> Tensor {
    let (x, y) = batch(16, index);
    net.forward_with(&x, true, true).cross_entropy_for_logits(&y)
}

fn weights(store: &VarStore) -> Vec<Vec<u64>> {
    let set = ParamSet::from_var_store(store).unwrap();
    bits(set.tensors())
}

/// Without reseeding libtorch's stream, which tests in other threads share.
#[allow(clippy::needless_pass_by_value)] // a literal at every call
fn calm(config: SAdamConfig) -> SAdamConfig {
    SAdamConfig { sync_rng: false, ..config }
}

#[test]
fn without_damping_the_trajectory_is_adamws_and_no_probe_runs() {
    let (store, net) = plain_net();
    let set = ParamSet::from_var_store(&store).unwrap();
    let mut adamw = AdamW::from_config(AdamConfig { lr: 1e-2, ..AdamConfig::decoupled() });
    for i in 0..100 {
        step_on(&mut adamw, &set, &set.gradient(&loss(&net, i)).unwrap()).unwrap();
    }
    let expected = weights(&store);
    let base = calm(SAdamConfig { lr: 1e-2, ..SAdamConfig::default() });
    for config in [
        SAdamConfig { lambda: 0.0, ..base.clone() },
        SAdamConfig { k_directions: 1, ..base.clone() },
        SAdamConfig { lgi_cap: 0.0, ..base.clone() },
        SAdamConfig { lgi: LgiKind::Constant(1.0), ..base.clone() },
        SAdamConfig { lgi: LgiKind::RandomNull, lambda: 0.0, ..base.clone() },
    ] {
        let (store, net) = plain_net();
        let mut optimizer = SAdam::for_store(&store, config.clone()).unwrap();
        let mut forwards = 0;
        for i in 0..100 {
            let stats = optimizer
                .step(|_| {
                    forwards += 1;
                    Ok(loss(&net, i))
                })
                .unwrap();
            assert_eq!((stats.damping, stats.forwards, stats.lgi), (1.0, 1, None));
        }
        assert_eq!(forwards, 100);
        assert_eq!(weights(&store), expected, "{config:?}");
    }
}

#[test]
fn a_step_is_adamws_at_the_damped_rate_bit_for_bit() {
    for config in [
        SAdamConfig::default(),
        SAdamConfig { probe_norm: ProbeNorm::Global, lgi: LgiKind::Residual, ..SAdamConfig::default() },
        SAdamConfig { lgi: LgiKind::Kink, per_group_lgi: true, ..SAdamConfig::default() },
    ] {
        let (store, net) = plain_net();
        let (other, twin) = plain_net();
        let set = ParamSet::from_var_store(&other).unwrap();
        let mut optimizer =
            SAdam::for_store(&store, calm(SAdamConfig { weight_decay: 0.0, ..config.clone() })).unwrap();
        let mut adamw = AdamW::from_config(AdamConfig { weight_decay: 0.0, ..AdamConfig::default() });
        for i in 0..20 {
            let stats = optimizer.step(|_| Ok(loss(&net, i))).unwrap();
            let gradient = set.gradient(&loss(&twin, i)).unwrap();
            let slots: Vec<Slot<'_>> = set
                .iter()
                .zip(gradient.parts())
                .enumerate()
                .map(|(index, ((name, param), grad))| Slot {
                    lr_scale: stats.damping,
                    ..Slot::new(index, name, param, grad.as_ref().unwrap())
                })
                .collect();
            adamw.step(&slots).unwrap();
            assert_eq!(weights(&store), weights(&other), "step {i}");
        }
    }
}

#[test]
fn a_failed_probe_leaves_everything_as_it_was() {
    for failing in 0..2 {
        let (store, net) = plain_net();
        let mut optimizer = SAdam::for_store(&store, calm(SAdamConfig::default())).unwrap();
        optimizer.step(|_| Ok(loss(&net, 0))).unwrap();
        let before = weights(&store);
        let error = optimizer
            .step(|pass| match pass.kind {
                PassKind::Probe(i) if i == failing => Err(Error::closure("no more data")),
                _ => Ok(loss(&net, 1)),
            })
            .unwrap_err();
        assert!(error.to_string().contains("no more data"));
        assert_eq!(weights(&store), before);
        assert!(!optimizer.is_perturbed());
        optimizer.step(|_| Ok(loss(&net, 1))).unwrap();

        let (clean, net) = plain_net();
        let mut uninterrupted = SAdam::for_store(&clean, calm(SAdamConfig::default())).unwrap();
        for i in 0..2 {
            uninterrupted.step(|_| Ok(loss(&net, i))).unwrap();
        }
        assert_eq!(weights(&store), weights(&clean));
    }
}

#[test]
fn probes_lie_where_the_norm_says_and_report_what_they_saw() {
    for (probe_norm, distance) in [(ProbeNorm::PerTensor, 0.3 * 2f64.sqrt()), (ProbeNorm::Global, 0.3)] {
        for kind in [Kind::Float, Kind::Double] {
            let a = leaf(&(0..50).map(|i| f64::from(i).sin()).collect::<Vec<_>>(), kind);
            let b = leaf(&[0.5, -0.25, 2.0], kind);
            let start: Vec<f64> = [values(&a), values(&b)].concat();
            let config = calm(SAdamConfig { sigma: 0.3, probe_norm, k_directions: 3, ..SAdamConfig::default() });
            let mut optimizer = SAdam::new(vec![group(&[("a", &a), ("b", &b)])], config.clone()).unwrap();
            let (mut seen, mut points) = (Vec::new(), Vec::new());
            let stats = optimizer
                .step(|_| {
                    let loss = a.square().sum(kind) + b.pow_tensor_scalar(3).sum(kind);
                    seen.push(loss.double_value(&[]));
                    points.push([values(&a), values(&b)].concat());
                    Ok(loss)
                })
                .unwrap();
            assert_eq!(points[0], start);
            for point in &points[1..] {
                let d = point.iter().zip(&start).map(|(p, s)| (p - s).powi(2)).sum::<f64>().sqrt();
                close(&[d], &[distance], 1e-6);
            }
            assert_ne!(points[1], points[2]);
            let slopes: Vec<f64> = seen[1..].iter().map(|f| (f - seen[0]) / 0.3).collect();
            close(&stats.probe_values, &slopes, 1e-9);
            close(&[stats.lgi.unwrap()], &[lgi_from_probes(&slopes, 1e-6)], 1e-12);
            close(&[stats.damping], &[config.damping(stats.lgi.unwrap())], 1e-12);
            assert!(stats.probe_snr > 1e4 && !stats.probe_below_precision);
        }
    }
}

#[test]
fn each_group_can_have_an_lgi_of_its_own() {
    let (a, b, c) = (leaf(&[1.0; 30], Kind::Double), leaf(&[0.0; 30], Kind::Double), leaf(&[2.0], Kind::Double));
    let groups = || {
        let mut frozen = group(&[("c", &c)]);
        frozen.perturb = false;
        vec![group(&[("a", &a)]), group(&[("b", &b)]), frozen]
    };
    let config = calm(SAdamConfig { per_group_lgi: true, k_directions: 4, ..SAdamConfig::default() });
    let mut optimizer = SAdam::new(groups(), config.clone()).unwrap();
    let mut moved = Vec::new();
    let stats = optimizer
        .step(|pass| {
            let (at_a, at_b) = (values(&a) == [1.0; 30], values(&b) == [0.0; 30]);
            assert_eq!(values(&c), [2.0]);
            moved.push((pass.kind, at_a, at_b));
            Ok(a.sum(Kind::Double) + b.abs().sum(Kind::Double) + c.sum(Kind::Double))
        })
        .unwrap();
    let kinds: Vec<_> = moved.iter().map(|m| m.0).collect();
    assert_eq!(kinds[1..], (0..8).map(PassKind::Probe).collect::<Vec<_>>());
    assert!(moved[1..5].iter().all(|m| !m.1 && m.2) && moved[5..].iter().all(|m| m.1 && !m.2));
    assert_eq!((stats.forwards, stats.groups.len()), (9, 3));
    // Linear in a, a kink in b, nothing known of c.
    let lgi: Vec<_> = stats.groups.iter().map(|g| g.lgi).collect();
    assert!(lgi[0].unwrap() > 0.3 && lgi[1].unwrap() < 0.1 && lgi[2].is_none());
    assert_eq!(stats.groups[2].damping, 1.0);
    // Adam's first step is lr·a for every scalar, beside the decay.
    let step = |w: &Tensor, start: f64| start * (1.0 - 1e-5) - values(w)[0];
    close(&[step(&a, 1.0), step(&c, 2.0)], &[1e-3 * stats.groups[0].damping, 1e-3], 1e-9);
}

#[test]
fn probes_can_be_made_every_few_steps() {
    let w = leaf(&[1.0, -0.5, 2.0], Kind::Float);
    let config = calm(SAdamConfig { probe_every: 3, ..SAdamConfig::default() });
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
    let stats: Vec<_> = (0..6).map(|_| optimizer.step(|_| Ok(w.square().sum(Kind::Float))).unwrap()).collect();
    assert_eq!(stats.iter().map(|s| s.forwards).collect::<Vec<_>>(), [3, 1, 1, 3, 1, 1]);
    assert_eq!((stats[0].damping, stats[3].damping), (stats[2].damping, stats[5].damping));
    assert_ne!(stats[0].damping, stats[3].damping);
    assert!(stats[1].probe_values.is_empty() && stats[1].probe_snr.is_nan());
}

#[test]
fn a_group_whose_gradient_comes_late_is_probed_at_once_and_one_that_is_away_keeps_its_lgi() {
    let (a, b) = (leaf(&[1.0; 30], Kind::Double), leaf(&[0.5; 30], Kind::Double));
    let groups = vec![group(&[("a", &a)]), group(&[("b", &b)])];
    let config = calm(SAdamConfig { per_group_lgi: true, probe_every: 4, ..SAdamConfig::default() });
    let mut optimizer = SAdam::new(groups, config).unwrap();
    let stats: Vec<_> = (0..6)
        .map(|i| {
            // `b` is used from step 1 on, `a` is away in the probing step 4.
            let both = |i: u64| match i {
                0 => a.square().sum(Kind::Double),
                4 => b.square().sum(Kind::Double),
                _ => a.square().sum(Kind::Double) + b.square().sum(Kind::Double),
            };
            optimizer.step(|_| Ok(both(i))).unwrap()
        })
        .collect();
    assert!(stats[1].groups[1].lgi.is_some() && stats[1].forwards > 1, "{:?}", stats[1]);
    assert_eq!(stats[0].damping, stats[0].groups[0].damping, "a group that was never probed doesn't count");
    assert_eq!(stats[5].groups[0].lgi, stats[3].groups[0].lgi);
}

#[test]
fn a_panic_in_a_probe_leaves_autograd_on_and_the_weights_alone() {
    let w = leaf(&[1.0, -0.5], Kind::Float);
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], calm(SAdamConfig::default())).unwrap();
    let before = bits(&[w.shallow_clone()]);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        optimizer.step(|pass| {
            assert!(pass.kind != PassKind::Probe(1), "broken");
            Ok(w.square().sum(Kind::Float))
        })
    }));
    assert!(result.is_err());
    assert_eq!(bits(&[w.shallow_clone()]), before);
    optimizer.step(|_| Ok(w.square().sum(Kind::Float))).unwrap();
}

#[test]
fn states_that_no_training_leaves_are_refused() {
    let w = leaf(&[1.0, -0.5], Kind::Float);
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], calm(SAdamConfig::default())).unwrap();
    optimizer.step(|_| Ok(w.square().sum(Kind::Float))).unwrap();
    let refused = |change: &dyn Fn(&mut sam_opt::tensor::StateDict)| {
        let mut state = optimizer.state_dict().unwrap();
        change(&mut state);
        let mut other = SAdam::new(vec![group(&[("w", &w)])], calm(SAdamConfig::default())).unwrap();
        other.load_state_dict(&state).unwrap_err().to_string()
    };
    assert!(refused(&|s| drop(s.meta.insert("lr".into(), (-1.0).into()))).contains("lr"));
    for bad in [[-1.0f32, 0.0], [f32::NAN, 0.0]] {
        let message = refused(&|s| drop(s.tensors.insert("mean_square/w".into(), Tensor::from_slice(&bad))));
        assert!(message.contains("mean_square/w"), "{message}");
    }
    assert!(refused(&|s| drop(s.tensors.insert("steps/w".into(), Tensor::from(3i64)))).contains("steps/w"));
    for (key, value) in [("lgi", "[-5.0]"), ("slope_square", "[-3.0]")] {
        let message = refused(&|s| {
            s.meta.get_mut("memory").unwrap()[key] = serde_json::from_str(value).unwrap();
        });
        assert!(message.contains("memory"), "{message}");
    }
}

#[test]
fn running_statistics_are_those_of_one_plain_forward() {
    let normed = MlpConfig { batch_norm: true, ..MlpConfig::relu(&[4, 16, 3]) };
    let (plain_store, plain) = model(&normed);
    let (store, net) = model(&normed);
    let mut optimizer = SAdam::for_store(&store, calm(SAdamConfig::default())).unwrap();
    let (x, y) = batch(32, 0);
    let _ = plain.forward_with(&x, true, true);
    let stats = optimizer
        .step(|pass| Ok(net.forward_with(&x, pass.batch_statistics(), true).cross_entropy_for_logits(&y)))
        .unwrap();
    assert_eq!(stats.forwards, 3);
    assert_eq!(bits(&buffers(&store)), bits(&buffers(&plain_store)));
    let frozen = SAdamConfig { bn: BnMode::Frozen, ..SAdamConfig::default() };
    let mut optimizer = SAdam::for_store(&store, calm(frozen)).unwrap();
    optimizer
        .step(|pass| {
            assert!(!pass.batch_statistics());
            Ok(net.forward_with(&x, pass.batch_statistics(), true).cross_entropy_for_logits(&y))
        })
        .unwrap();
    assert_eq!(bits(&buffers(&store)), bits(&buffers(&plain_store)));
}

#[test]
fn losses_a_sample_are_averaged_in_f64_for_the_probes() {
    let x = Tensor::from_slice(&Seed::new(1).normal(4096));
    let run = |per_sample: bool| {
        let w = leaf(&[0.3; 8], Kind::Float);
        let config = calm(SAdamConfig { lr: 0.0, sigma: 1e-4, ..SAdamConfig::default() });
        let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
        optimizer
            .step(|_| {
                let losses = (w.sum(Kind::Float) * &x).square() + 1000.0;
                Ok(if per_sample { losses } else { losses.mean(Kind::Float) })
            })
            .unwrap()
    };
    let (scalar, samples) = (run(false), run(true));
    close(&[samples.loss, samples.grad_norm], &[scalar.loss, scalar.grad_norm], 1e-3);
    assert!(samples.probe_snr > 30.0 * scalar.probe_snr, "{} and {}", samples.probe_snr, scalar.probe_snr);
}

#[test]
fn probes_that_are_not_finite_are_dropped_and_counted() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let run = |bad: usize, lgi| {
        let config = calm(SAdamConfig { lr: 0.0, k_directions: 3, lgi, ..SAdamConfig::default() });
        let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
        optimizer
            .step(|pass| match pass.kind {
                PassKind::Probe(i) if i < bad => Ok(Tensor::from(f64::NAN)),
                _ => Ok(quadratic(&w)),
            })
            .unwrap()
    };
    let one = run(1, LgiKind::Published);
    assert_eq!((one.probes_dropped, one.probe_values.len(), one.forwards), (1, 2, 4));
    close(&[one.lgi.unwrap()], &[lgi_from_probes(&one.probe_values, 1e-6)], 1e-12);
    let two = run(2, LgiKind::Published);
    assert_eq!((two.probes_dropped, two.lgi, two.damping), (2, Some(0.0), 1.0));
    // One residual is enough for the calibrated form.
    assert!(run(2, LgiKind::Residual).lgi.unwrap() > 0.0);
    assert_eq!(run(3, LgiKind::Residual).lgi, Some(0.0));
}

#[test]
fn every_error_has_its_name_and_changes_nothing() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let other = leaf(&[1.0], Kind::Float);
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], calm(SAdamConfig::default())).unwrap();
    let error = |optimizer: &mut SAdam, loss: &dyn Fn(PassKind) -> Tensor| {
        let error = optimizer.step(|pass| Ok(loss(pass.kind))).unwrap_err();
        assert_eq!(values(&w), [1.0, 1.0], "{error}");
        assert_eq!(optimizer.step_count(), 0);
        error
    };
    let nan = |_| quadratic(&w) * f64::NAN;
    assert!(matches!(error(&mut optimizer, &nan), Error::NonFinite { what: "loss", pass: PassKind::Main, .. }));
    let infinite_gradient = |_| (&w - 1.0).square().sum(Kind::Float).sqrt();
    assert!(matches!(error(&mut optimizer, &infinite_gradient), Error::NonFinite { what: "gradient norm", .. }));
    let matrix = |_| w.square().outer(&w);
    assert!(
        matches!(error(&mut optimizer, &matrix), Error::NonScalarLoss { pass: PassKind::Main, got } if got == [2, 2])
    );
    let late = |kind| if kind == PassKind::Main { quadratic(&w) } else { w.outer(&w) };
    assert!(matches!(error(&mut optimizer, &late), Error::NonScalarLoss { pass: PassKind::Probe(0), .. }));
    let detached = |_| quadratic(&w).detach();
    assert!(matches!(error(&mut optimizer, &detached), Error::Detached { .. }));
    let foreign = |_| other.sum(Kind::Float);
    assert!(matches!(error(&mut optimizer, &foreign), Error::NoGradient { .. }));
    let kept = quadratic(&w);
    let stale = |_| kept.shallow_clone();
    assert!(matches!(error(&mut optimizer, &stale), Error::StaleLoss { pass: PassKind::Probe(0) }));
    let guard = optimizer.params().guard().unwrap();
    assert!(matches!(error(&mut optimizer, &|_| quadratic(&w)), Error::NestedPerturbation { .. }));
    drop(guard);

    let build = |config| SAdam::new(vec![group(&[("w", &w)])], config).unwrap_err();
    assert!(matches!(build(SAdamConfig { k_directions: 0, ..SAdamConfig::default() }), Error::InvalidK { k: 0 }));
    assert!(matches!(build(SAdamConfig { sigma: 0.0, ..SAdamConfig::default() }), Error::InvalidSigma { .. }));
    assert!(matches!(build(SAdamConfig { lambda: -1.0, ..SAdamConfig::default() }), Error::InvalidLambda { .. }));
    assert!(matches!(build(SAdamConfig { betas: (0.9, 1.0), ..SAdamConfig::default() }), Error::InvalidConfig { .. }));
    assert!(matches!(SAdam::new(vec![], SAdamConfig::default()), Err(Error::EmptyGroup { group: 0 })));
}

#[test]
fn a_state_of_another_shape_is_refused_with_both_shapes() {
    let (w, narrow) = (leaf(&[1.0, 1.0], Kind::Float), leaf(&[1.0], Kind::Float));
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], calm(SAdamConfig::default())).unwrap();
    optimizer.step(|_| Ok(quadratic(&w))).unwrap();
    let state = optimizer.state_dict().unwrap();
    let mut other = SAdam::new(vec![group(&[("w", &narrow)])], calm(SAdamConfig::default())).unwrap();
    let error = other.load_state_dict(&state).unwrap_err();
    assert!(matches!(&error, Error::StateMismatch { name, expected, got }
        if name.ends_with("/w") && *expected == [1] && *got == [2]));
    assert_eq!(other.step_count(), 0);
    // A schedule has moved the rate: it is restored, not compared.
    optimizer.set_lr(0.5).unwrap();
    let state = optimizer.state_dict().unwrap();
    let mut fresh = SAdam::new(vec![group(&[("w", &w)])], calm(SAdamConfig::default())).unwrap();
    fresh.load_state_dict(&state).unwrap();
    assert_eq!((fresh.lr(), fresh.step_count()), (0.5, 1));
    let mut fewer = state;
    fewer.meta.insert("memory".into(), serde_json::json!({ "slope_square": [], "lgi": [] }));
    assert!(matches!(fresh.load_state_dict(&fewer), Err(Error::State { .. })));
}

#[test]
fn half_precision_parameters_that_a_probe_cannot_move_are_refused() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let w = leaf(&[1.0; 256], kind);
        let step = |sigma| {
            let config = calm(SAdamConfig { sigma, ..SAdamConfig::default() });
            let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
            optimizer.step(|_| Ok(w.to_kind(Kind::Float).square().sum(Kind::Float)))
        };
        let error = step(0.01).unwrap_err();
        assert!(matches!(&error, Error::ProbeBelowPrecision { percent, .. } if *percent == 100.0), "{error}");
        assert_eq!(values(&w), [1.0; 256]);
        assert!(step(1.0).unwrap().lgi.is_some());
    }
    let w = leaf(&[1e6; 100], Kind::Float);
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], calm(SAdamConfig::default())).unwrap();
    assert!(optimizer.step(|_| Ok(w.sum(Kind::Float))).unwrap().probe_below_precision);
}

#[test]
fn groups_without_a_gradient_are_neither_probed_nor_moved() {
    let (a, b) = (leaf(&[1.0; 5], Kind::Float), leaf(&[3.0; 5], Kind::Float));
    for per_group_lgi in [false, true] {
        let groups = vec![group(&[("a", &a)]), group(&[("b", &b)])];
        let mut optimizer = SAdam::new(groups, calm(SAdamConfig { per_group_lgi, ..SAdamConfig::default() })).unwrap();
        let stats = optimizer
            .step(|_| {
                assert_eq!(values(&b), [3.0; 5]);
                Ok(a.square().sum(Kind::Float))
            })
            .unwrap();
        assert_eq!(stats.forwards, 3);
        assert_eq!(values(&b), [3.0; 5]);
    }
    let before = values(&a);
    let mut unprobed = group(&[("a", &a)]);
    unprobed.perturb = false;
    let mut optimizer = SAdam::new(vec![unprobed], calm(SAdamConfig::default())).unwrap();
    let stats = optimizer.step(|_| Ok(a.square().sum(Kind::Float))).unwrap();
    assert_eq!((stats.forwards, stats.damping), (1, 1.0));
    assert_ne!(values(&a), before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_damping_and_the_step_have_their_bounds(
        w in proptest::collection::vec(-2.0f64..2.0, 1..12), zero in any::<bool>(), single in any::<bool>(),
        lambda in 0.01f64..5.0, lgi_cap in 0.1f64..3.0, kind in 0usize..3, double in any::<bool>(),
    ) {
        let precision = if double { Kind::Double } else { Kind::Float };
        let start: Vec<f64> = if zero { vec![0.0; w.len()] } else { w };
        let start = if single { vec![start[0]] } else { start };
        let lgi = [LgiKind::Published, LgiKind::Residual, LgiKind::Kink][kind];
        let loss = |w: &Tensor| (w.pow_tensor_scalar(4) + w.abs() * 0.1).sum(precision);

        let twin = leaf(&start, precision);
        let set = ParamSet::new([("w".to_owned(), twin.shallow_clone())]).unwrap();
        let mut adam = AdamW::from_config(AdamConfig { lr: 0.01, weight_decay: 0.0, ..AdamConfig::default() });
        step_on(&mut adam, &set, &set.gradient(&loss(&twin)).unwrap()).unwrap();

        let w = leaf(&start, precision);
        let config = calm(SAdamConfig { lr: 0.01, weight_decay: 0.1, lambda, lgi_cap, lgi, ..SAdamConfig::default() });
        let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
        let begin = values(&w);
        let stats = optimizer.step(|_| Ok(loss(&w))).unwrap();
        prop_assert!(stats.damping <= 1.0 && stats.damping >= (-lambda * lgi_cap).exp() - 1e-12);
        let length = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        let decay = 0.01 * 0.1 * length(&begin, &vec![0.0; begin.len()]);
        prop_assert!(length(&values(&w), &begin) <= stats.damping * length(&values(&twin), &begin) + decay + 1e-6);
        prop_assert!(values(&w).iter().all(|v| v.is_finite()) && stats.lgi.unwrap().is_finite());
        for _ in 0..3 {
            // Zero gradient.
            let stats = optimizer.step(|_| Ok(loss(&w) * 0.0)).unwrap();
            prop_assert!(stats.damping.is_finite());
        }
        prop_assert!(values(&w).iter().all(|v| v.is_finite()));
    }
}

#[test]
fn the_optimizer_is_built_from_groups_and_shows_the_gradient() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let mut halved = ParamGroup::new([("w".to_owned(), w.shallow_clone())]);
    halved.lr_scale = 0.5;
    halved.weight_decay = Some(0.0);
    let config = calm(SAdamConfig { lgi: LgiKind::Constant(0.5), lr: 0.1, ..SAdamConfig::default() });
    let mut optimizer = SAdam::new(vec![halved], config).unwrap();
    let mut seen = Vec::new();
    optimizer.step_observed(|_| Ok(quadratic(&w)), |g| seen = values(g.present()[0])).unwrap();
    assert_eq!(seen, [1.0, 10.0]);
    close(&values(&w), &[0.975, 0.975], 1e-6);
    let _ = no_grad(|| w.shallow_clone().zero_());
}
