//! What goes wrong in implementations of IAM and FixMatch, and must not here.
#![allow(missing_docs)]

mod common;
use common::iam::{Net, cross_entropy, inputs, normed};
use common::{batch, bits, close, group, leaf, values};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use sam_opt::tensor::{ParamSet, Seed, params::is_perturbed};
use sam_opt::{
    Error, Iam, IamConfig, IamVariant, InconsistencyOpts, MaskReduction, PassKind, PenaltyForm, Sgd, WeightEma,
    buffers, fixmatch_loss, local_inconsistency,
};

fn model() -> (VarStore, Mlp) {
    let store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), &MlpConfig::relu(&[4, 16, 3]), Seed::new(5)).unwrap();
    (store, net)
}

fn variants() -> [IamConfig; 3] {
    [IamConfig { inner_steps: 2, ..IamConfig::d(0.5, 1.0) }, IamConfig::s(0.5), IamConfig::de(0.5, 1.0)]
}

/// Parameters, running statistics, saved state.
fn observe(store: &VarStore, iam: &Iam<Sgd>) -> [Vec<Vec<u64>>; 3] {
    let state: Vec<Tensor> = iam.state_dict().unwrap().tensors.into_values().collect();
    [bits(ParamSet::from_var_store(store).unwrap().tensors()), bits(&buffers(store)), bits(&state)]
}

#[test]
fn an_error_in_any_pass_leaves_everything_as_it_was() {
    let (x, y) = batch(16, 0);
    for config in variants() {
        let (store, net) = normed(3, Kind::Float);
        let mut iam = Iam::for_store(&store, Sgd::with_momentum(0.1, 0.9), config.clone()).unwrap();
        let logits = |net: &Mlp| net.forward_with(&x, true, true);
        iam.step(|_| Ok(logits(&net)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
        let before = observe(&store, &iam);
        let mut kinds = Vec::new();
        // First to learn the passes, then to fail in each of them, in its loss, and with numbers that aren't finite.
        let mut probe = Iam::for_store(&store, Sgd::new(0.0), config.clone()).unwrap();
        probe
            .step(
                |pass| {
                    kinds.push(pass.kind);
                    Ok(logits(&net))
                },
                |z| Ok(z.cross_entropy_for_logits(&y)),
            )
            .unwrap();
        for buffer in buffers(&store).iter().zip(&before[1]) {
            // The probe's main pass has moved the running statistics.
            let back: Vec<f32> = buffer.1.iter().map(|&b| f64::from_bits(b) as f32).collect();
            buffer.0.shallow_clone().copy_(&Tensor::from_slice(&back));
        }
        for at in &kinds {
            for fault in ["error", "nan"] {
                let result = iam.step(
                    |pass| match (pass.kind == *at, fault) {
                        (true, "error") => Err(Error::closure("it broke")),
                        (true, _) => Ok(logits(&net) * f64::NAN),
                        _ => Ok(logits(&net)),
                    },
                    |z| Ok(z.cross_entropy_for_logits(&y)),
                );
                match (fault, result.unwrap_err()) {
                    ("error", Error::Closure(_)) => {}
                    ("nan", Error::NonFinite { pass, .. }) if pass == *at => {}
                    (_, error) => panic!("{config:?}, {at}: {error}"),
                }
                assert_eq!(observe(&store, &iam), before, "{config:?}, {fault} in {at}");
                assert!(!iam.is_perturbed());
            }
        }
        let error = iam.step(|_| Ok(logits(&net)), |_| Err(Error::closure("no loss"))).unwrap_err();
        assert!(matches!(error, Error::Closure(_)));
        assert_eq!(observe(&store, &iam), before);
        assert!(kinds.contains(&PassKind::Main) && kinds.contains(&PassKind::Perturbed(0)));
    }
}

#[test]
fn a_panic_in_any_pass_leaves_no_residue_of_delta_and_autograd_on() {
    for bad in [PassKind::Probe(0), PassKind::Inner(0), PassKind::Perturbed(0), PassKind::Main] {
        let (store, net) = model();
        let (x, y) = batch(16, 0);
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::d(0.5, 1.0)).unwrap();
        let before = bits(iam.params().tensors());
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            iam.step(
                |pass| {
                    assert!(pass.kind != bad, "on purpose");
                    Ok(net.forward_with(&x, true, true))
                },
                |z| Ok(z.cross_entropy_for_logits(&y)),
            )
        }));
        assert!(unwound.is_err());
        assert_eq!(bits(iam.params().tensors()), before);
        assert!(!is_perturbed(&iam.params().tensors()[0]));
        iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
    }
}

#[test]
fn parameters_end_at_the_old_ones_plus_the_base_update() {
    // With rate 0 nothing may move: what is added to the parameters is taken away bit for bit.
    let (x, y) = batch(16, 0);
    for config in variants() {
        let (store, net) = model();
        let before = bits(ParamSet::from_var_store(&store).unwrap().tensors());
        let mut iam = Iam::for_store(&store, Sgd::new(0.0), config).unwrap();
        for _ in 0..3 {
            iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
        }
        assert_eq!(bits(iam.params().tensors()), before);
    }
}

#[test]
fn running_statistics_are_those_of_one_plain_forward() {
    let (x, y) = batch(16, 0);
    let (plain_store, plain) = normed(3, Kind::Float);
    let _ = plain.forward_with(&x, true, true);
    for config in variants() {
        let (store, net) = normed(3, Kind::Float);
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), config).unwrap();
        iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
        assert_eq!(bits(&buffers(&store)), bits(&buffers(&plain_store)));
    }
    // The functional form, in a closure that shifts nothing in place.
    let (store, net) = normed(3, Kind::Float);
    let config = IamConfig { form: PenaltyForm::Functional, ..IamConfig::d(0.5, 1.0) };
    let mut iam = Iam::for_store(&store, Sgd::new(0.1), config).unwrap();
    let before = bits(iam.params().tensors());
    let error = iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap_err();
    assert!(matches!(error, Error::OverridesIgnored { pass: PassKind::Inner(0) }), "{error}");
    assert_eq!(bits(iam.params().tensors()), before);
}

#[test]
fn the_functional_form_works_with_batch_norm_and_moves_its_statistics_once() {
    let (x, y) = batch(16, 0);
    let run = |form| {
        let store = VarStore::new(Device::Cpu);
        let first = (store.root() / "first")
            .var_copy("weight", &(Tensor::arange(24, (Kind::Float, Device::Cpu)).sin() * 0.3).reshape([6, 4]));
        let last = (store.root() / "last")
            .var_copy("weight", &(Tensor::arange(18, (Kind::Float, Device::Cpu)).cos() * 0.3).reshape([3, 6]));
        let mean = store.root().zeros_no_train("mean", &[6]);
        let var = store.root().ones_no_train("var", &[6]);
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig { form, ..IamConfig::d(0.3, 1.0) }).unwrap();
        iam.step(
            |pass| {
                let read = |name: &str, own: &Tensor| pass.param(name).unwrap_or_else(|| own.shallow_clone());
                let hidden = x.linear::<&Tensor>(&read("first.weight", &first), None);
                let hidden = hidden.batch_norm::<&Tensor>(None, None, Some(&mean), Some(&var), true, 0.1, 1e-5, false);
                Ok(hidden.relu().linear::<&Tensor>(&read("last.weight", &last), None))
            },
            |z| Ok(z.cross_entropy_for_logits(&y)),
        )
        .unwrap();
        (bits(&[mean, var]), [values(&first), values(&last)].concat())
    };
    let ((split_buffers, split), (buffers, functional)) = (run(PenaltyForm::Split), run(PenaltyForm::Functional));
    assert_eq!(split_buffers, buffers);
    close(&split, &functional, 1e-6);
}

#[test]
fn detached_stale_and_misshapen_logits_are_caught_before_anything_moves() {
    let (store, net) = model();
    let (x, y) = batch(16, 0);
    let forward = || net.forward_with(&x, true, true);
    for config in variants() {
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), config.clone()).unwrap();
        let before = bits(iam.params().tensors());
        let loss = |z: &Tensor| Ok(z.cross_entropy_for_logits(&y));
        let error = iam.step(|_| Ok(forward().detach()), loss).unwrap_err();
        assert!(matches!(error, Error::DetachedLogits { .. }), "{config:?}: {error}");
        let cached = forward();
        let error = iam.step(|_| Ok(cached.shallow_clone()), loss).unwrap_err();
        assert!(matches!(error, Error::StaleLogits { .. }), "{config:?}: {error}");
        for (bad, way_out) in [
            (forward().narrow(1, 0, 1), "two columns"),
            (forward().select(1, 0), "[16]"),
            (forward().narrow(0, 0, 0), "empty batch"),
        ] {
            let message = iam.step(|_| Ok(bad.shallow_clone()), loss).unwrap_err().to_string();
            assert!(message.contains(way_out), "{message}");
        }
        let mut calls = 0;
        let error = iam
            .step(
                |_| {
                    calls += 1;
                    Ok(if calls > 1 { forward().narrow(0, 0, 8) } else { forward() })
                },
                loss,
            )
            .unwrap_err();
        assert!(matches!(error, Error::BatchSizeChanged { first: 16, got: 8, .. }), "{config:?}: {error}");
        let error = iam.step(|_| Ok(forward()), |z| Ok(z.sum_dim_intlist([1i64].as_slice(), false, Kind::Float)));
        assert!(matches!(error.unwrap_err(), Error::LossShape { .. }));
        let error = iam.step(|_| Ok(forward()), |z| Ok(z.detach().cross_entropy_for_logits(&y))).unwrap_err();
        assert!(matches!(error, Error::Detached { .. }), "{config:?}: {error}");
        assert_eq!(bits(iam.params().tensors()), before, "{config:?}");
    }
}

#[test]
fn bad_settings_and_empty_models_are_refused() {
    let (store, _) = model();
    let build = |config| Iam::for_store(&store, Sgd::new(0.1), config).unwrap_err();
    assert!(matches!(build(IamConfig::d(f64::NAN, 1.0)), Error::InvalidRho { .. }));
    assert!(matches!(build(IamConfig::d(0.1, -1.0)), Error::InvalidBeta { beta } if beta == -1.0));
    assert!(matches!(build(IamConfig { inner_steps: 0, ..IamConfig::default() }), Error::InvalidInnerSteps));
    let frozen = Tensor::from_slice(&[1.0f32]);
    let error = Iam::new(vec![group(&[("w", &frozen)])], Sgd::new(0.1), IamConfig::default()).unwrap_err();
    assert!(matches!(error, Error::NoParams), "{error}");
    let error = local_inconsistency(&[frozen], || unreachable!(), &InconsistencyOpts::default()).unwrap_err();
    assert!(matches!(error, Error::NoParams), "{error}");
    let w = leaf(&[1.0], Kind::Float);
    let mut adaptive = group(&[("w", &w)]);
    adaptive.adaptive = Some(true);
    let message = Iam::new(vec![adaptive], Sgd::new(0.1), IamConfig::default()).unwrap_err().to_string();
    assert!(message.contains("adaptive of parameter group 0"), "{message}");
}

#[test]
fn outputs_that_are_one_hot_give_no_direction_and_no_nan() {
    let (x, y) = batch(16, 0);
    for config in variants() {
        let (store, net) = model();
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), config.clone()).unwrap();
        let peaked = Tensor::from_slice(&[1e5f32, 0.0, -1e5]);
        // The loss sees the plain logits, the penalty the peaked ones.
        let stats = iam
            .step(
                |_| Ok(net.forward_with(&x, true, true) + &peaked),
                |z| Ok((z - &peaked).cross_entropy_for_logits(&y)),
            )
            .unwrap();
        assert!(stats.degenerate, "{config:?} {stats:?}");
        assert_eq!(stats.inconsistency, Some(0.0), "{config:?}");
        assert!(config.variant == IamVariant::De || stats.delta_norm == 0.0);
        assert!(iam.params().norm().is_finite());
    }
    let (store, net) = model();
    let peaked = Tensor::from_slice(&[1e5f32, 0.0, -1e5]);
    let logits = || Ok(net.forward_with(&x, true, true) + &peaked);
    let report = local_inconsistency(&store.trainable_variables(), logits, &InconsistencyOpts::default()).unwrap();
    assert_eq!((report.mean, report.degenerate, report.delta_norm), (0.0, 10, 0.0));
}

#[test]
fn noise_that_drowns_in_rounding_is_flagged() {
    let (store, net) = model();
    let (x, y) = batch(16, 0);
    let signal = |noise_scale| {
        let config = IamConfig { noise_scale, ..IamConfig::d(0.1, 1.0) };
        let mut iam = Iam::for_store(&store, Sgd::new(0.0), config).unwrap();
        let stats = iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
        (stats.inner_signal.unwrap(), stats.weak_signal)
    };
    let (strong, weak) = (signal(1.0), signal(1e-6));
    assert!(!strong.1 && weak.1 && strong.0 > 1e4 * weak.0, "{strong:?} {weak:?}");
}

#[test]
fn a_parameter_that_the_batch_does_not_use_keeps_no_noise() {
    let (used, unused) = (leaf(&[0.3, -0.4, 0.2], Kind::Float), leaf(&[4.0], Kind::Float));
    let mut seen = Vec::new();
    let mut iam =
        Iam::new(vec![group(&[("used", &used), ("unused", &unused)])], Sgd::new(0.1), IamConfig::s(0.5)).unwrap();
    let (x, y) = batch(8, 0);
    let x = x.narrow(1, 0, 1);
    iam.step(
        |pass| {
            if pass.kind == PassKind::Perturbed(0) {
                seen = values(&unused);
            }
            Ok(&x * &used)
        },
        |z| Ok(z.cross_entropy_for_logits(&y)),
    )
    .unwrap();
    assert_eq!((seen[0], values(&unused)[0]), (4.0, 4.0));
}

#[test]
fn groups_that_are_not_perturbed_stay_and_still_learn() {
    let (store, net) = model();
    let (x, y) = batch(16, 0);
    let mut still = sam_opt::ParamGroup::matching(&store, |name| name.starts_with('0'));
    still.perturb = false;
    let last = sam_opt::ParamGroup::matching(&store, |name| name.starts_with('1'));
    let watched = still.params[0].shallow_clone();
    let before = bits(&[watched.shallow_clone()]);
    for config in [IamConfig::d(0.5, 1.0), IamConfig::s(0.5), IamConfig::de(0.5, 1.0)] {
        let groups = |rate: f64| {
            let copy = |g: &sam_opt::ParamGroup| {
                let pairs = g.names.iter().cloned().zip(g.params.iter().map(Tensor::shallow_clone));
                sam_opt::ParamGroup { perturb: g.perturb, lr_scale: rate, ..sam_opt::ParamGroup::new(pairs) }
            };
            vec![copy(&still), copy(&last)]
        };
        let mut iam = Iam::new(groups(1.0), Sgd::new(0.1), config).unwrap();
        iam.step(
            |_| {
                assert_eq!(bits(&[watched.shallow_clone()]), before);
                Ok(net.forward_with(&x, true, true))
            },
            |z| Ok(z.cross_entropy_for_logits(&y)),
        )
        .unwrap();
        assert_ne!(bits(&[watched.shallow_clone()]), before);
        let back: Vec<f32> = before[0].iter().map(|&b| f64::from_bits(b) as f32).collect();
        sam_opt::tensor::tch::no_grad(|| {
            watched.shallow_clone().copy_(&Tensor::from_slice(&back).reshape(watched.size()));
        });
    }
}

#[test]
fn measuring_moves_nothing_and_repeats() {
    let (x, _) = inputs(16, 3, Kind::Float);
    let (store, net) = model();
    let before = bits(ParamSet::from_var_store(&store).unwrap().tensors());
    let measure = |seed| {
        let opts = InconsistencyOpts { draws: 4, seed, ..InconsistencyOpts::default() };
        local_inconsistency(&store.trainable_variables(), || Ok(net.forward_with(&x, false, false)), &opts).unwrap()
    };
    let report = measure(1);
    assert_eq!(report, measure(1));
    assert_ne!(report.per_draw, measure(2).per_draw);
    assert_eq!(bits(ParamSet::from_var_store(&store).unwrap().tensors()), before);
    let (low, high) = report.interval.unwrap();
    assert!(low < report.mean && report.mean < high && report.mean > 0.0);
    // Under no_grad, and with an error in the middle.
    let outside = sam_opt::tensor::tch::no_grad(|| measure(1));
    assert_eq!(outside, report);
    let mut calls = 0;
    let failing = || {
        calls += 1;
        if calls == 3 { Err(Error::closure("it broke")) } else { Ok(net.forward_with(&x, false, false)) }
    };
    assert!(local_inconsistency(&store.trainable_variables(), failing, &InconsistencyOpts::default()).is_err());
    assert_eq!(bits(ParamSet::from_var_store(&store).unwrap().tensors()), before);
}

#[test]
fn fixmatch_divides_as_it_is_told_and_sends_no_gradient_through_the_weak_view() {
    let weak = leaf(&[9.0, 0.0, 0.0, 8.0, 0.1, 0.0, 0.0, 0.1], Kind::Double);
    let strong = leaf(&[0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 5.0, 0.0], Kind::Double);
    let table = |t: &Tensor| t.reshape([4, 2]);
    let (batch, mask) = fixmatch_loss(&table(&weak), &table(&strong), 0.95, MaskReduction::Batch).unwrap();
    assert_eq!((mask.kept, mask.total), (2, 4));
    // Rows 0 and 1 are kept, with the classes 0 and 1.
    let by_hand = 2f64.ln() + (1.0 + 1f64.exp()).ln();
    close(&[batch.double_value(&[])], &[by_hand / 4.0], 1e-12);
    let (kept, _) = fixmatch_loss(&table(&weak), &table(&strong), 0.95, MaskReduction::Kept).unwrap();
    close(&[kept.double_value(&[])], &[by_hand / 2.0], 1e-12);
    batch.backward();
    assert!(!weak.grad().defined());
    assert_eq!(values(&strong.grad())[4..], [0.0; 4]);
    let (none, mask) = fixmatch_loss(&table(&weak), &table(&strong), 1.0, MaskReduction::Kept).unwrap();
    assert_eq!((none.double_value(&[]), mask.kept), (0.0, 0));
    assert!(mask.mean_conf > 0.7 && mask.mean_conf < 0.8);
    assert!(fixmatch_loss(&table(&weak), &table(&strong), 1.5, MaskReduction::Kept).is_err());
    let three = Tensor::zeros([4, 3], (Kind::Double, Device::Cpu));
    let error = fixmatch_loss(&table(&weak), &three, 0.95, MaskReduction::Kept).unwrap_err();
    assert!(matches!(&error, Error::BadLogitsShape { got, .. } if *got == [4, 3]), "{error}");
    let one = table(&strong).narrow(1, 0, 1);
    let message = fixmatch_loss(&one, &one, 0.95, MaskReduction::Kept).unwrap_err().to_string();
    assert!(message.contains("two columns"), "{message}");
}

#[test]
fn the_average_of_weights_is_used_only_while_its_guard_is_open() {
    for kind in [Kind::Float, Kind::Double] {
        let net = Net::new(&[4, 5, 3], kind);
        let (x, y) = inputs(8, 3, kind);
        let mut iam = Iam::for_store(&net.store, Sgd::new(0.5), IamConfig::s(0.1)).unwrap();
        let mut ema = WeightEma::new(&net.store, 0.75).unwrap();
        let start = values(&iam.params().tensors()[1]);
        let step =
            |iam: &mut Iam<Sgd>| iam.step(|_| Ok(net.logits(None, &x)), |z| Ok(cross_entropy(z, &y))).map(|_| ());
        step(&mut iam).unwrap();
        ema.update().unwrap();
        let now = values(&iam.params().tensors()[1]);
        let guard = ema.evaluate().unwrap();
        let mean: Vec<f64> = start.iter().zip(&now).map(|(s, n)| 0.75 * s + 0.25 * n).collect();
        close(&values(&iam.params().tensors()[1]), &mean, 1e-7);
        assert!(matches!(step(&mut iam), Err(Error::NestedPerturbation { .. })));
        assert!(matches!(ema.update(), Err(Error::NestedPerturbation { .. })));
        drop(guard);
        assert_eq!(values(&iam.params().tensors()[1]), now);
        let mut other = WeightEma::new(&net.store, 0.75).unwrap();
        other.load_state_dict(&ema.state_dict()).unwrap();
        let _open = other.evaluate().unwrap();
        close(&values(&iam.params().tensors()[1]), &mean, 1e-7);
    }
    assert!(WeightEma::new(&model().0, 1.0).is_err());
    // A step of 0.001 of the way is below bf16's rounding; the average must move all the same, also after loading.
    let mut store = VarStore::new(Device::Cpu);
    let w = store.root().var_copy("w", &Tensor::from_slice(&[1.0f32]));
    store.bfloat16();
    let mut ema = WeightEma::new(&store, 0.999).unwrap();
    let _ = sam_opt::tensor::tch::no_grad(|| w.shallow_clone().fill_(2.0));
    for _ in 0..2 {
        for _ in 0..500 {
            ema.update().unwrap();
        }
        let state = ema.state_dict();
        ema = WeightEma::new(&store, 0.999).unwrap();
        ema.load_state_dict(&state).unwrap();
    }
    let _open = ema.evaluate().unwrap();
    close(&values(&w), &[2.0 - 0.999f64.powi(1000)], 5e-3);
}

#[test]
fn de_keeps_its_direction_and_saves_it() {
    let (store, net) = model();
    let (x, y) = batch(16, 0);
    let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::de(0.5, 1.0)).unwrap();
    let step = |iam: &mut Iam<Sgd>| {
        iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap()
    };
    // It starts from noise of length about σ = 1, then has the radius.
    let first = step(&mut iam);
    assert!((first.delta_norm - 1.0).abs() < 0.3 && first.delta_norm != 0.5);
    let second = step(&mut iam);
    close(&[second.delta_norm], &[0.5], 1e-6);
    assert!(second.inconsistency.unwrap() > 0.0);
    let state = iam.state_dict().unwrap();
    let saved = state.tensors.iter().filter(|(key, _)| key.starts_with("delta/")).count();
    assert_eq!(saved, iam.params().len());
    let mut bad = iam.state_dict().unwrap();
    bad.tensors.insert("delta/0.bias".into(), Tensor::from_slice(&[0.0f32; 2]));
    let error = iam.load_state_dict(&bad).unwrap_err();
    assert!(matches!(&error, Error::StateMismatch { name, .. } if name == "delta/0.bias"), "{error}");
    bad.tensors.insert("delta/0.bias".into(), Tensor::full([16], f64::NAN, (Kind::Float, Device::Cpu)));
    let message = iam.load_state_dict(&bad).unwrap_err().to_string();
    assert!(message.contains("delta/0.bias") && message.contains("finite"), "{message}");
    // One part missing, and all of them.
    let mut missing = iam.state_dict().unwrap();
    missing.tensors.remove("delta/0.bias");
    assert!(matches!(iam.load_state_dict(&missing), Err(Error::State { .. })));
    missing.tensors.retain(|key, _| !key.starts_with("delta/"));
    assert!(matches!(iam.load_state_dict(&missing), Err(Error::State { .. })));
    iam.load_state_dict(&state).unwrap();
}

#[test]
fn a_new_radius_acts_from_the_next_step_on() {
    let (x, y) = batch(16, 0);
    let step = |iam: &mut Iam<Sgd>, net: &Mlp| {
        iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap()
    };
    for config in [IamConfig::d(0.5, 1.0), IamConfig::s(0.5)] {
        let (store, net) = model();
        let config = IamConfig { refresh_every: 100, ..config };
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), config).unwrap();
        close(&[step(&mut iam, &net).delta_norm, step(&mut iam, &net).delta_norm], &[0.5; 2], 1e-6);
        iam.set_rho(0.25).unwrap();
        let stats = step(&mut iam, &net);
        assert!(stats.refreshed);
        close(&[stats.delta_norm, step(&mut iam, &net).delta_norm], &[0.25; 2], 1e-6);
    }
    // DE's δ has half the length and the same direction; the noise that it starts from has no radius yet.
    let (store, net) = model();
    let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::de(0.5, 1.0)).unwrap();
    iam.set_rho(0.4).unwrap();
    assert!((step(&mut iam, &net).delta_norm - 1.0).abs() < 0.3);
    iam.set_rho(0.2).unwrap();
    close(&[step(&mut iam, &net).delta_norm], &[0.2], 1e-6);
    iam.set_rho(0.0).unwrap();
    assert_eq!(step(&mut iam, &net).inconsistency, None);
    iam.set_rho(0.2).unwrap();
    assert!((step(&mut iam, &net).delta_norm - 1.0).abs() < 0.3, "nothing is left to scale");
    // A group's own radius stays.
    let (store, net) = model();
    let mut first = sam_opt::ParamGroup::matching(&store, |name| name.starts_with('0'));
    let last = sam_opt::ParamGroup::matching(&store, |name| name.starts_with('1'));
    first.rho = Some(0.5);
    let mut iam = Iam::new(vec![first, last], Sgd::new(0.0), IamConfig::de(0.5, 1.0)).unwrap();
    step(&mut iam, &net);
    let parts = |iam: &Iam<Sgd>| {
        let state = iam.state_dict().unwrap();
        ["delta/0.weight", "delta/1.weight"].map(|key| state.tensors[key].norm().double_value(&[]))
    };
    let before = parts(&iam);
    iam.set_rho(0.25).unwrap();
    close(&parts(&iam), &[before[0], before[1] / 2.0], 1e-6);
    // Noise that came because nothing moved has no radius either.
    let (store, net) = model();
    let mut iam = Iam::for_store(&store, Sgd::new(0.0), IamConfig::de(0.5, 1.0)).unwrap();
    let peaked = Tensor::from_slice(&[1e5f32, 0.0, -1e5]);
    let peaked_step = |iam: &mut Iam<Sgd>| {
        let loss = |z: &Tensor| Ok((z - &peaked).cross_entropy_for_logits(&y));
        iam.step(|_| Ok(net.forward_with(&x, true, true) + &peaked), loss).unwrap()
    };
    assert!(peaked_step(&mut iam).degenerate);
    let saved = iam.state_dict().unwrap();
    iam.load_state_dict(&saved).unwrap();
    iam.set_rho(1e-3).unwrap();
    assert!((peaked_step(&mut iam).delta_norm - 1.0).abs() < 0.3);
}
