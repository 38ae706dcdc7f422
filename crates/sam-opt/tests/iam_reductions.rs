//! IAM reduces to what it is made of, bit for bit.
#![allow(missing_docs)]

mod common;
use common::iam::{Net, cross_entropy, inputs};
use common::{batch, bits, close, group, leaf, values};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use sam_opt::tensor::{ParamSet, Seed};
use sam_opt::{
    Adam, AdamW, Iam, IamConfig, IamDirection, IamStats, IamVariant, ParamGroup, PassKind, PenaltyForm,
    PenaltyGradient, Sam, SamConfig, Sgd,
};
use std::cell::RefCell;

fn model() -> (VarStore, Mlp) {
    let store = VarStore::new(Device::Cpu);
    let net = Mlp::new(&store.root(), &MlpConfig::relu(&[4, 16, 3]), Seed::new(5)).unwrap();
    (store, net)
}

fn weights(store: &VarStore) -> Vec<Vec<u64>> {
    bits(ParamSet::from_var_store(store).unwrap().tensors())
}

/// Weights after a few steps, and the last statistics.
fn train(config: IamConfig) -> (Vec<Vec<u64>>, IamStats) {
    let (store, net) = model();
    let mut iam = Iam::for_store(&store, AdamW::new(0.01), config).unwrap();
    let mut last = None;
    for _ in 0..5 {
        let stats = iam
            .step(
                |pass| Ok(net.forward_with(&batch(16, pass.step).0, true, true)),
                |z| Ok(z.cross_entropy_for_logits(&batch(16, last.map_or(0, |s: IamStats| s.step + 1)).1)),
            )
            .unwrap();
        last = Some(stats);
    }
    (weights(&store), last.unwrap())
}

fn train_sam(config: SamConfig) -> Vec<Vec<u64>> {
    let (store, net) = model();
    let mut sam = Sam::for_store(&store, AdamW::new(0.01), config).unwrap();
    for _ in 0..5 {
        sam.step(|pass| {
            let (x, y) = batch(16, pass.step);
            Ok(net.forward_with(&x, true, true).cross_entropy_for_logits(&y))
        })
        .unwrap();
    }
    weights(&store)
}

#[test]
fn without_penalty_or_radius_the_step_is_the_base_optimizers() {
    let base = train_sam(SamConfig::sam(0.0));
    for config in [IamConfig::d(0.5, 0.0), IamConfig::d(0.0, 1.0), IamConfig::s(0.0), IamConfig::de(0.5, 0.0)] {
        let (iam, stats) = train(config.clone());
        assert_eq!(iam, base, "{config:?}");
        assert_eq!((stats.forwards, stats.backwards, stats.inconsistency), (1, 1, None));
    }
    assert_ne!(train(IamConfig::d(0.5, 1.0)).0, base);
    assert_ne!(train(IamConfig::s(0.5)).0, base);
    assert_ne!(train(IamConfig::de(0.5, 1.0)).0, base);
}

#[test]
fn iam_s_along_the_loss_gradient_is_sam() {
    let config = IamConfig { direction: IamDirection::LossGradient, ..IamConfig::s(0.3) };
    let (iam, stats) = train(config);
    assert_eq!(iam, train_sam(SamConfig::sam(0.3)));
    assert_eq!((stats.forwards, stats.backwards), (2, 2));
    close(&[stats.delta_norm], &[0.3], 1e-9);
}

#[test]
fn the_same_seed_gives_the_same_direction_and_another_step_another_one() {
    let deltas = |seed: u64| {
        let (store, net) = model();
        let set = ParamSet::from_var_store(&store).unwrap();
        let (x, y) = batch(16, 0);
        let deltas = RefCell::new(Vec::new());
        // Rate 0: only the noise differs from step to step.
        let mut iam = Iam::for_store(&store, Sgd::new(0.0), IamConfig { seed, ..IamConfig::d(0.5, 1.0) }).unwrap();
        for _ in 0..2 {
            iam.step(
                |pass| {
                    if pass.kind == PassKind::Perturbed(0) {
                        deltas.borrow_mut().push(bits(set.tensors()));
                    }
                    Ok(net.forward_with(&x, true, true))
                },
                |z| Ok(z.cross_entropy_for_logits(&y)),
            )
            .unwrap();
        }
        deltas.into_inner()
    };
    let first = deltas(1);
    assert_eq!(first, deltas(1));
    assert_ne!(first[0], first[1]);
    assert_ne!(first, deltas(2));
}

#[test]
fn labels_and_the_scale_of_the_loss_change_neither_direction_nor_inconsistency() {
    let run = |labels: i64, scale: f64| {
        let (store, net) = model();
        let set = ParamSet::from_var_store(&store).unwrap();
        let (x, y) = batch(16, 0);
        let y = (y + labels).remainder(3);
        let delta = RefCell::new(Vec::new());
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::d(0.5, 1.0)).unwrap();
        let stats = iam
            .step(
                |pass| {
                    if pass.kind == PassKind::Perturbed(0) {
                        *delta.borrow_mut() = bits(set.tensors());
                    }
                    Ok(net.forward_with(&x, true, true))
                },
                |z| Ok(z.cross_entropy_for_logits(&y) * scale),
            )
            .unwrap();
        (delta.into_inner(), stats.inconsistency.map(f64::to_bits))
    };
    let reference = run(0, 1.0);
    assert_eq!(run(1, 1.0), reference);
    assert_eq!(run(0, 7.0), reference);
}

#[test]
fn unlabeled_inputs_count_in_the_penalty_and_not_in_the_loss() {
    let (x, y) = batch(16, 0);
    let labels = y.narrow(0, 0, 6);
    let run = |semi: bool| {
        let (store, net) = model();
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::d(0.5, 1.0)).unwrap();
        let logits = |_: &sam_opt::Pass<'_>| Ok(net.forward_with(&x, true, true));
        let stats = if semi {
            iam.step_semi(6, logits, |z| Ok(z.cross_entropy_for_logits(&labels)))
        } else {
            iam.step(logits, |z| Ok(z.narrow(0, 0, 6).cross_entropy_for_logits(&labels)))
        };
        (weights(&store), stats.unwrap())
    };
    let ((semi, stats), (plain, _)) = (run(true), run(false));
    assert_eq!(semi, plain);
    assert_eq!(stats.unlabeled, Some(10));
    // Without unlabeled inputs the penalty falls back to the labeled ones, and the statistics say so.
    let (store, net) = model();
    let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::d(0.5, 1.0)).unwrap();
    let few = x.narrow(0, 0, 6);
    let stats = iam
        .step_semi(6, |_| Ok(net.forward_with(&few, true, true)), |z| Ok(z.cross_entropy_for_logits(&labels)))
        .unwrap();
    assert!(stats.unlabeled == Some(0) && stats.inconsistency.unwrap() > 0.0);
    let error = iam
        .step_semi(7, |_| Ok(net.forward_with(&few, true, true)), |z| Ok(z.cross_entropy_for_logits(&labels)))
        .unwrap_err();
    assert!(error.to_string().contains("labeled"), "{error}");
}

#[test]
fn the_search_may_use_other_inputs() {
    let (x, y) = batch(16, 0);
    let run = |other: &Tensor| {
        let (store, net) = model();
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::d(0.5, 1.0)).unwrap();
        let stats = iam
            .step_with_delta_inputs(
                |_| Ok(net.forward_with(&x, true, true)),
                |z| Ok(z.cross_entropy_for_logits(&y)),
                |_| Ok(net.forward_with(other, true, true)),
            )
            .unwrap();
        (weights(&store), stats.forwards)
    };
    // Where only some inputs have a label: as narrowing in the loss.
    let semi = |told: bool| {
        let (store, net) = model();
        let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::d(0.5, 1.0)).unwrap();
        let (logits, few) = (|_: &sam_opt::Pass<'_>| Ok(net.forward_with(&x, true, true)), y.narrow(0, 0, 6));
        let wide = batch(40, 1).0;
        let other = |_: &sam_opt::Pass<'_>| Ok(net.forward_with(&wide, true, true));
        let narrowed = |z: &Tensor| Ok(z.narrow(0, 0, 6).cross_entropy_for_logits(&few));
        let stats = if told {
            iam.step_semi_with_delta_inputs(6, logits, |z| Ok(z.cross_entropy_for_logits(&few)), other)
        } else {
            iam.step_with_delta_inputs(logits, narrowed, other)
        };
        (weights(&store), stats.unwrap().unlabeled)
    };
    let (told, narrowed) = (semi(true), semi(false));
    assert_eq!((told.0, told.1, narrowed.1), (narrowed.0, Some(10), None));
    // The same inputs are the same step; others another one, and one forward pass more.
    let (same, forwards) = run(&x.copy());
    let (store, net) = model();
    let mut iam = Iam::for_store(&store, Sgd::new(0.1), IamConfig::d(0.5, 1.0)).unwrap();
    let stats = iam.step(|_| Ok(net.forward_with(&x, true, true)), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
    assert_eq!(same, weights(&store));
    assert_eq!((stats.forwards, forwards), (4, 5));
    assert_ne!(run(&batch(40, 1).0).0, same);
}

#[test]
fn between_refreshes_the_old_direction_is_used_again() {
    let (store, net) = model();
    let set = ParamSet::from_var_store(&store).unwrap();
    let (x, y) = batch(16, 0);
    for config in [IamConfig::d(0.5, 1.0), IamConfig::s(0.5)] {
        let deltas = RefCell::new(Vec::new());
        let config = IamConfig { refresh_every: 3, ..config };
        let mut iam = Iam::for_store(&store, Sgd::new(0.0), config).unwrap();
        let stats: Vec<IamStats> = (0..4)
            .map(|_| {
                iam.step(
                    |pass| {
                        if pass.kind == PassKind::Perturbed(0) {
                            deltas.borrow_mut().push(bits(set.tensors()));
                        }
                        Ok(net.forward_with(&x, true, true))
                    },
                    |z| Ok(z.cross_entropy_for_logits(&y)),
                )
                .unwrap()
            })
            .collect();
        let deltas = deltas.into_inner();
        assert_eq!(deltas[0], deltas[1]);
        assert_eq!(deltas[0], deltas[2]);
        assert_ne!(deltas[0], deltas[3]);
        assert_eq!(stats.iter().map(|s| s.refreshed).collect::<Vec<_>>(), [true, false, false, true]);
        assert_eq!(stats[0].backwards - stats[1].backwards, 1);
        close(&[stats[1].delta_norm], &[stats[0].delta_norm], 1e-6);
    }
}

#[test]
fn align_sign_makes_the_loss_rise() {
    let (x, y) = inputs(12, 3, Kind::Double);
    let net = Net::new(&[4, 5, 3], Kind::Double);
    let rises = |align_sign| -> Vec<bool> {
        (0..8)
            .map(|seed| {
                let config = IamConfig { align_sign, seed, ..IamConfig::s(1e-3) };
                let mut iam = Iam::for_store(&net.store, Sgd::new(0.0), config).unwrap();
                let stats = iam.step(|_| Ok(net.logits(None, &x)), |z| Ok(cross_entropy(z, &y))).unwrap();
                stats.perturbed_loss.unwrap() > stats.loss
            })
            .collect()
    };
    assert!(rises(true).iter().all(|&r| r));
    let free = rises(false);
    assert!(free.iter().any(|&r| r) && free.iter().any(|&r| !r), "{free:?}");
}

#[test]
fn a_random_direction_has_the_radius_and_costs_no_search() {
    let (_, stats) = train(IamConfig { direction: IamDirection::Random, ..IamConfig::d(0.5, 1.0) });
    assert_eq!((stats.forwards, stats.backwards, stats.inner_signal), (3, 2, None));
    close(&[stats.delta_norm], &[0.5], 1e-6);
    let (_, power) = train(IamConfig::d(0.5, 1.0));
    assert!(power.inconsistency.unwrap() > 5.0 * stats.inconsistency.unwrap());
}

#[test]
fn the_fast_loops_and_libtorch_agree() {
    // The same f32 network in two layouts: a transposed weight isn't dense memory, so the plain path is taken.
    let run = |dense: bool| {
        let start = Tensor::arange(12, (Kind::Float, Device::Cpu)).sin().reshape([3, 4]);
        let w = if dense { start.copy() } else { start.tr().contiguous().tr() };
        let w = w.set_requires_grad(true);
        let b = leaf(&[0.1, -0.2, 0.3], Kind::Float);
        let mut iam = Iam::new(vec![group(&[("w", &w), ("b", &b)])], Adam::new(0.01), IamConfig::d(0.5, 1.0)).unwrap();
        for step in 0..3 {
            let (x, y) = batch(16, step);
            iam.step(|_| Ok(x.linear(&w, Some(&b))), |z| Ok(z.cross_entropy_for_logits(&y))).unwrap();
        }
        values(&w.contiguous())
    };
    close(&run(true), &run(false), 2e-5);
}

#[test]
fn groups_keep_their_own_radius_and_share_one_norm() {
    let (store, net) = model();
    let (x, y) = batch(16, 0);
    let mut first = ParamGroup::matching(&store, |name| name.starts_with('0'));
    let last = ParamGroup::matching(&store, |name| name.starts_with('1'));
    first.rho = Some(0.0);
    let set = ParamSet::from_var_store(&store).unwrap();
    let before = set.snapshot();
    let moved = RefCell::new(Vec::new());
    let mut iam = Iam::new(vec![first, last], Sgd::new(0.0), IamConfig::s(0.5)).unwrap();
    let stats = iam
        .step(
            |pass| {
                if pass.kind == PassKind::Perturbed(0) {
                    let now = set.snapshot();
                    now.axpy(-1.0, &before).unwrap();
                    *moved.borrow_mut() = now.present().iter().map(|t| t.norm().double_value(&[])).collect();
                }
                Ok(net.forward_with(&x, true, true))
            },
            |z| Ok(z.cross_entropy_for_logits(&y)),
        )
        .unwrap();
    let moved = moved.into_inner();
    assert_eq!(moved[..2], [0.0, 0.0]);
    let length = moved.iter().map(|m| m * m).sum::<f64>().sqrt();
    close(&[stats.delta_norm], &[length], 1e-6);
    assert!(length > 0.0 && length < 0.5, "the still group counts in the norm");
}

#[test]
fn settings_of_other_variants_are_refused_by_name() {
    for (config, field) in [
        (IamConfig { align_sign: true, ..IamConfig::d(0.1, 1.0) }, "align_sign"),
        (IamConfig { form: PenaltyForm::Functional, ..IamConfig::s(0.1) }, "form"),
        (IamConfig { gradient: PenaltyGradient::Detached, ..IamConfig::s(0.1) }, "gradient"),
        (IamConfig { direction: IamDirection::Random, ..IamConfig::de(0.1, 1.0) }, "direction"),
        (IamConfig { refresh_every: 2, variant: IamVariant::De, ..IamConfig::default() }, "refresh_every"),
    ] {
        let message = config.validate().unwrap_err().to_string();
        assert!(message.starts_with(field), "{message}");
    }
}
