//! Corners of the methods for several domains that a review found: each was wrong, or could have been, without a test.
#![allow(missing_docs)]

mod common;
use common::{Trace, close, group, leaf, values};
use sam_opt::baselines::{Dgsam, DgsamConfig, GroupDro};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use sam_opt::tensor::{ParamSet, Seed, StateDict};
use sam_opt::{
    Adam, AmdfConfig, DaSam, DaSamConfig, DaSamStats, DasRule, DomainId, DomainLosses, DomainSampler, Error, OuterMode,
    PassKind, PerturbDirection, RhoSchedule, Sam, SamConfig, Sgd, SharpnessOptions, SwadAverager, SwadConfig,
    SwadPhase, sharpness_report,
};
use serde_json::json;
use std::collections::BTreeMap;
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

// Losses.

/// Squares of `w` as per-sample losses, the first sample in a domain of its own.
fn squares(w: &Tensor) -> DomainLosses {
    let domains = (0..w.numel()).map(|i| DomainId(u32::from(i > 0))).collect();
    DomainLosses::PerSample { losses: w.square(), domains }
}

#[test]
fn a_rise_that_is_not_a_number_shows_in_the_report() {
    let w = leaf(&[0.3, -0.2], Kind::Float).reshape([1, 2]).detach().set_requires_grad(true);
    let params = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let report = |bad: &dyn Fn(usize) -> bool| {
        let mut calls = 0;
        let losses = || {
            calls += 1;
            Ok(one(w.square().sum(Kind::Float) * if bad(calls) { f64::NAN } else { 1.0 }))
        };
        sharpness_report(&params, losses, &SharpnessOptions::default()).unwrap().mean_worst_random()
    };
    assert!(report(&|_| false).is_finite());
    assert!(report(&|call| call == 5).is_nan() && report(&|call| call > 2).is_nan());
}

#[test]
fn radius_zero_is_the_base_optimizer_with_per_sample_losses_too() {
    let run = |step: &dyn Fn(&Tensor)| {
        let w = leaf(&[0.3, -0.2, 0.7, 1.3, -0.9, 0.1, 2.2], Kind::Float);
        step(&w);
        values(&w)
    };
    let erm = run(&|w| {
        let mut base = Sam::new(vec![group(&[("w", w)])], Adam::new(1e-2), SamConfig::sam(0.0)).unwrap();
        for _ in 0..20 {
            base.step(|pass| sam_opt::baselines::erm_loss(squares(&w.sin()), pass)).unwrap();
        }
    });
    for config in [DaSamConfig::da_sam(0.0), DaSamConfig::das_only(0.0)] {
        let da_sam = run(&|w| {
            let mut optimizer = DaSam::new(vec![group(&[("w", w)])], Adam::new(1e-2), config.clone()).unwrap();
            for _ in 0..20 {
                optimizer.step(|_| Ok(squares(&w.sin()))).unwrap();
            }
        });
        assert_eq!(da_sam, erm);
    }
}

#[test]
fn a_small_radius_without_probes_is_sam_with_per_sample_losses_too() {
    let run = |step: &dyn Fn(&Tensor)| {
        let w = leaf(&[0.3, -0.2, 0.7, 1.3, -0.9, 0.1, 2.2], Kind::Float);
        step(&w);
        values(&w)
    };
    let sam = run(&|w| {
        let mut sam = Sam::new(vec![group(&[("w", w)])], Adam::new(1e-2), SamConfig::sam(1e-3)).unwrap();
        for _ in 0..20 {
            sam.step(|pass| sam_opt::baselines::erm_loss(squares(&w.sin()), pass)).unwrap();
        }
    });
    let das = run(&|w| {
        let config = DaSamConfig { das: DasRule::Uniform, ..DaSamConfig::das_only(1e-3) };
        let mut optimizer = DaSam::new(vec![group(&[("w", w)])], Adam::new(1e-2), config).unwrap();
        for _ in 0..20 {
            let stats = optimizer.step(|_| Ok(squares(&w.sin()))).unwrap();
            assert!(stats.domain_losses.iter().all(|&l| f64::from(l as f32) == l), "the means are f32: {stats:?}");
        }
    });
    assert_eq!(das, sam);
}

#[test]
fn differences_over_a_small_radius_are_taken_in_f64() {
    // The losses 1 + w, 0, 0 are exact at w = 0 and at 2⁻¹⁶; their f32 means aren't: numbers near 1/3 are 2⁻²⁵ apart, and
    // half of that is 3e-3 of the rise.
    let small = 2f64.powi(-16);
    let amdf = Some(AmdfConfig { directions: 1, ..AmdfConfig::default() });
    for (rho, own) in [(small, None), (0.5, Some(small))] {
        let w = leaf(&[0.0], Kind::Float);
        let mut groups = vec![group(&[("w", &w)])];
        groups[0].rho = own;
        let mut optimizer =
            DaSam::new(groups, Sgd::new(0.1), DaSamConfig { amdf, ..DaSamConfig::da_sam(rho) }).unwrap();
        let step = optimizer.step(|_| {
            let losses = Tensor::cat(&[&w + 1.0, &w * 0.0, &w * 0.0], 0);
            Ok(DomainLosses::PerSample { losses, domains: vec![DomainId(0); 3] })
        });
        // The slope is a unit of the optimizer's own ρ.
        close(&[step.unwrap().sharpness * rho / small], &[1.0 / 3.0], 1e-6);
    }
}

#[test]
fn a_loss_that_is_handed_out_again_is_stale_in_every_later_pass() {
    let copy = |losses: &DomainLosses| match losses {
        DomainLosses::PerDomain(list) => {
            DomainLosses::PerDomain(list.iter().map(|(id, loss)| (*id, loss.shallow_clone())).collect())
        }
        DomainLosses::PerSample { losses, domains } => {
            DomainLosses::PerSample { losses: losses.shallow_clone(), domains: domains.clone() }
        }
    };
    for (late, per_sample) in
        [PassKind::Probe(0), PassKind::Perturbed(0)].into_iter().flat_map(|k| [(k, false), (k, true)])
    {
        let w = leaf(&[0.3, -0.2, 0.5], Kind::Float);
        let fresh = || if per_sample { squares(&w) } else { bowls(&w) };
        let mut kept = None;
        let error = da_sam(&w, DaSamConfig::da_sam(0.1))
            .step(|pass| {
                let first = kept.get_or_insert_with(fresh);
                Ok(if [PassKind::Main, late].contains(&pass.kind) { copy(first) } else { fresh() })
            })
            .unwrap_err();
        assert!(matches!(error, Error::StaleLoss { pass } if pass == late), "{error}");
        close(&values(&w), &[0.3, -0.2, 0.5], 1e-7);
    }
}

#[test]
fn dgsam_refuses_a_stale_loss_and_asams_scaling() {
    let w = leaf(&[0.3, -0.2], Kind::Float);
    let mut dgsam = Dgsam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), DgsamConfig::default()).unwrap();
    let mut kept: BTreeMap<DomainId, Tensor> = BTreeMap::new();
    let step = dgsam.step(&[0, 1].map(DomainId), |_, id| {
        Ok(kept.entry(id).or_insert_with(|| (&w - f64::from(id.0)).square().sum(Kind::Float)).shallow_clone())
    });
    assert!(matches!(step, Err(Error::StaleLoss { pass: PassKind::Perturbed(1) })));
    let mut asam = group(&[("w", &w)]);
    asam.adaptive = Some(true);
    let error = Dgsam::new(vec![asam], Sgd::new(0.1), DgsamConfig::default()).unwrap_err().to_string();
    assert!(error.contains("adaptive"), "{error}");
}

// Buffers.

/// A buffer that counts passes and enters the loss; what it was at the start of each pass.
struct Counter {
    buffer: Tensor,
    seen: Vec<f64>,
}

impl Counter {
    fn new() -> Self {
        Self { buffer: Tensor::from_slice(&[0.0f32]), seen: Vec::new() }
    }

    fn loss(&mut self, w: &Tensor) -> Tensor {
        self.seen.push(self.buffer.double_value(&[0]));
        let _ = self.buffer.shallow_clone().g_add_scalar_(1.0);
        // The buffer itself is in the graph: writing to it before the backward pass would be an error.
        ((w - 1.0).square() * &self.buffer).sum(Kind::Float)
    }
}

#[test]
fn every_later_pass_starts_from_the_buffers_of_the_main_pass() {
    for outer in [OuterMode::Soft, OuterMode::Average] {
        let w = leaf(&[0.3, -0.2], Kind::Float);
        let mut counter = Counter::new();
        let config = DaSamConfig { outer, ..DaSamConfig::da_sam(0.1) };
        let mut optimizer = da_sam(&w, config).with_buffers(vec![counter.buffer.shallow_clone()]);
        for step in 0..2 {
            counter.seen.clear();
            optimizer.step(|_| Ok(one(counter.loss(&w)))).unwrap();
            let later = counter.seen.split_off(1);
            assert_eq!(counter.seen, [f64::from(step)]);
            assert!(later.iter().all(|&seen| seen == f64::from(step + 1)), "{outer:?}: {later:?}");
        }
    }
    let w = leaf(&[0.3, -0.2], Kind::Float);
    let mut counter = Counter::new();
    let dgsam = Dgsam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), DgsamConfig::default()).unwrap();
    let mut dgsam = dgsam.with_buffers(vec![counter.buffer.shallow_clone()]);
    dgsam.step(&[0, 1, 2].map(DomainId), |_, _| Ok(counter.loss(&w))).unwrap();
    assert_eq!(counter.seen, [0.0, 1.0, 1.0, 1.0]);
    assert_eq!(values(&counter.buffer), [1.0], "the step leaves those of one plain pass");
}

#[test]
fn dgsams_running_statistics_are_those_of_the_first_visit() {
    let make = || {
        let store = VarStore::new(Device::Cpu);
        let shape = MlpConfig { batch_norm: true, ..MlpConfig::relu(&[4, 8, 3]) };
        let net = Mlp::new(&store.root(), &shape, Seed::new(5)).unwrap();
        (store, net)
    };
    let loss = |net: &Mlp, id: DomainId| {
        let (x, y) = common::batch(16, u64::from(id.0));
        net.forward_with(&x, true, true).cross_entropy_for_logits(&y)
    };
    let (store, net) = make();
    let config = DgsamConfig { rho: 0.3, ..DgsamConfig::default() };
    let mut dgsam = Dgsam::for_store(&store, Sgd::new(0.1), config).unwrap();
    let stats = dgsam.step(&[0, 1, 2].map(DomainId), |_, id| Ok(loss(&net, id))).unwrap();
    let (plain, net) = make();
    let _ = loss(&net, stats.order[0]);
    assert_eq!(common::bits(&sam_opt::buffers(&store)), common::bits(&sam_opt::buffers(&plain)));
}

// Weight averages.

#[test]
fn swad_averages_half_precision_parameters_in_f32() {
    for kind in [Kind::Half, Kind::BFloat16, Kind::Double] {
        let w = Tensor::from_slice(&[1.0f32, 1.0]).to_kind(kind);
        let params = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
        let mut swad = SwadAverager::new(SwadConfig { patience_start: 1, ..SwadConfig::default() }).unwrap();
        // In f16 a sum of ones stops at 2,048, in bf16 at 256.
        for _ in 0..3000 {
            swad.update(&params).unwrap();
        }
        swad.evaluate(1.0).unwrap();
        assert_eq!(swad.phase(), SwadPhase::Averaging);
        let average = swad.average().unwrap().unwrap();
        let part = average.parts()[0].as_ref().unwrap();
        assert_eq!((values(part), part.kind() == Kind::Double), (vec![1.0, 1.0], kind == Kind::Double));
    }
}

// Baselines and SAM's control.

#[test]
fn group_dro_survives_saving_and_refuses_what_is_malformed() {
    let w = leaf(&[0.3, -0.2], Kind::Float);
    let base = || Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), SamConfig::sam(0.1)).unwrap();
    let (mut dro, mut sam) = (GroupDro::new(0.1).unwrap(), base());
    for _ in 0..2 {
        sam.step(|pass| dro.loss(bowls(&w), pass)).unwrap();
    }
    let saved = serde_json::to_value(&dro).unwrap();
    let mut loaded: GroupDro = serde_json::from_str(&saved.to_string()).unwrap();
    assert_eq!(loaded, dro);
    let mut again = base();
    again.load_state_dict(&sam.state_dict().unwrap()).unwrap();
    sam.step(|pass| dro.loss(bowls(&w), pass)).unwrap();
    again.step(|pass| loaded.loss(bowls(&w), pass)).unwrap();
    assert_eq!(loaded, dro);
    for (path, value) in [("/eta", json!(-1.0)), ("/now", json!({})), ("/now/0", json!(null)), ("/step", json!(-1))] {
        let mut bad = saved.clone();
        *bad.pointer_mut(path).unwrap() = value;
        assert!(serde_json::from_value::<GroupDro>(bad).is_err(), "{path}");
    }
}

#[test]
fn group_dro_gives_an_absent_domain_a_falling_share_and_the_batch_a_whole() {
    let w = leaf(&[0.0], Kind::Double);
    let mut dro = GroupDro::new(0.5).unwrap();
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), SamConfig::sam(0.0)).unwrap();
    sam.step(|pass| dro.loss(bowls(&w), pass)).unwrap();
    let before = dro.weights();
    let stats = sam.step(|pass| dro.loss(one((&w - 1.0).square().sum(Kind::Double)), pass)).unwrap();
    close(&[stats.loss], &[1.0], 1e-12);
    let odds = |weights: &BTreeMap<DomainId, f64>| weights[&DomainId(1)] / weights[&DomainId(0)];
    close(&[odds(&dro.weights())], &[odds(&before) * (-0.5f64).exp()], 1e-12);
}

#[test]
fn group_dro_refuses_micro_batches() {
    let w = leaf(&[0.3], Kind::Float);
    let mut dro = GroupDro::new(0.1).unwrap();
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(0.1)).unwrap();
    let error = sam.step_accumulate(2, |pass| dro.loss(bowls(&w), pass)).unwrap_err().to_string();
    assert!(error.contains("step_accumulate"), "{error}");
    sam.step_accumulate(1, |pass| dro.loss(bowls(&w), pass)).unwrap();
}

#[test]
fn the_random_control_refuses_what_needs_the_gradients_direction() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let random = || SamConfig { direction: PerturbDirection::Random, ..SamConfig::sam(0.1) };
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), random()).unwrap();
    let gradient = sam.params().gradient(&w.square().sum(Kind::Float)).unwrap();
    let error = sam.perturb(&gradient).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("direction"), "{error}");
    let rho_schedule = RhoSchedule::LossBudget { fraction: 0.1, rho_max: 1.0 };
    let error = SamConfig { rho_schedule, ..random() }.validate().unwrap_err().to_string();
    assert!(error.contains("direction"), "{error}");
    // A gradient that isn't finite may not hide behind the noise: √ has an infinite slope at 0.
    let v = leaf(&[0.0, 1.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("v", &v)])], Sgd::new(0.1), random()).unwrap();
    let error = sam.step(|_| Ok(v.sqrt().sum(Kind::Float))).unwrap_err();
    assert!(matches!(error, Error::NonFinite { what: "gradient norm", pass: PassKind::Main, .. }), "{error}");
    assert_eq!(values(&v), [0.0, 1.0]);
}

#[test]
fn batches_do_not_depend_on_which_came_before() {
    let ids: Vec<DomainId> = (0..23).map(|i| DomainId(u32::from(i % 3 == 0))).collect();
    let make = || DomainSampler::new(&ids, 4, 7).unwrap();
    let walked = make();
    for step in [0, 1, 2, 3, 9, 2, 0, 100, 4] {
        assert_eq!(walked.batch(step), make().batch(step), "step {step}");
        assert_eq!(walked.clone().batch(step), walked.batch(step));
    }
}

// Points and what is reported of them.

/// Two steps of rate 0 on losses whose size is `factors`, with the point of every pass.
fn two_steps(config: DaSamConfig, factors: [f64; 2]) -> Vec<(DaSamStats, Trace)> {
    let w = leaf(&[0.3, -0.8, 1.2, 0.1], Kind::Double);
    let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), config).unwrap();
    let mut step = |factor: f64| {
        let mut trace = Trace::new();
        let stats = optimizer.step(|pass| {
            trace.record(pass, &w);
            Ok(one((&w - 1.0).square().sum(w.kind()) * factor))
        });
        (stats.unwrap(), trace)
    };
    factors.into_iter().map(&mut step).collect()
}

fn outer_points(trace: &Trace) -> Vec<Vec<f64>> {
    let outer = trace.kinds.iter().zip(&trace.points).filter(|(kind, _)| matches!(kind, PassKind::Perturbed(_)));
    outer.map(|(_, point)| point.clone()).collect()
}

#[test]
fn steps_that_reuse_probes_use_their_noise() {
    for outer in [OuterMode::Soft, OuterMode::Worst, OuterMode::Average] {
        let run = |config| two_steps(DaSamConfig { outer, ..config }, [1.0, 1.0]);
        let reused = run(every_third(4));
        assert_eq!(outer_points(&reused[0].1), outer_points(&reused[1].1), "{outer:?}");
        let fresh = run(DaSamConfig::da_sam(0.1));
        assert_ne!(outer_points(&fresh[0].1), outer_points(&fresh[1].1), "{outer:?}");
    }
}

#[test]
fn every_outer_mode_goes_as_far_as_rho_t() {
    for outer in [OuterMode::Soft, OuterMode::Worst, OuterMode::Average] {
        let steps = two_steps(DaSamConfig { outer, ..DaSamConfig::da_sam(0.1) }, [1.0, 1.5]);
        let (stats, trace) = &steps[1];
        assert!(stats.rho_t > 0.11 && stats.rho_t < 0.2, "{}", stats.rho_t);
        let points = outer_points(trace);
        assert_eq!(points.len(), if outer == OuterMode::Average { 4 } else { 1 });
        for point in points {
            let moved: f64 = point.iter().zip(&trace.points[0]).map(|(a, b)| (a - b).powi(2)).sum();
            close(&[moved.sqrt()], &[stats.rho_t], 1e-9);
        }
    }
}

#[test]
fn the_average_mode_numbers_its_passes() {
    let steps = two_steps(DaSamConfig { outer: OuterMode::Average, ..DaSamConfig::da_sam(0.1) }, [1.0, 1.0]);
    assert_eq!(steps[0].1.kinds[5..], [0, 1, 2, 3].map(PassKind::Perturbed));
}

#[test]
fn with_radii_of_their_own_groups_the_reported_cosine_is_that_of_epsilon() {
    let soft = AmdfConfig { directions: 3, ..AmdfConfig::default() };
    for amdf in [None, Some(soft), Some(AmdfConfig { directions: 1, ..soft })] {
        let (a, b) = (leaf(&[0.5, 1.0], Kind::Double), leaf(&[2.0, -1.0], Kind::Double));
        let mut groups = vec![group(&[("a", &a)]), group(&[("b", &b)])];
        groups[1].rho = Some(0.4);
        // A radius of −0 is a radius of 0.
        let config = DaSamConfig { amdf, ..DaSamConfig::da_sam(-0.0) };
        let mut optimizer = DaSam::new(groups, Sgd::new(0.0), config).unwrap();
        let mut points = Vec::new();
        let stats = optimizer
            .step(|_| {
                points.push([values(&a), values(&b)].concat());
                Ok(one((a.square() + b.square()).sum(Kind::Double)))
            })
            .unwrap();
        let moved: Vec<f64> = points.last().unwrap().iter().zip(&points[0]).map(|(now, before)| now - before).collect();
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        // The gradient is twice the point.
        let cosine = dot(&moved, &points[0]) / (dot(&moved, &moved) * dot(&points[0], &points[0])).sqrt();
        close(&[stats.cos_to_guided, stats.epsilon_norm], &[cosine, dot(&moved, &moved).sqrt()], 1e-9);
        assert!(cosine < 0.99);
        assert_eq!(stats.rho_t.to_bits(), 0, "groups without a radius of their own stay");
    }
}

#[test]
fn half_precision_is_checked_where_only_a_group_has_a_radius() {
    let (a, b) = (leaf(&[1.0], Kind::Float), leaf(&[1.0], Kind::Half));
    let step = |rho: f64| {
        let mut groups = vec![group(&[("b", &b)])];
        groups[0].rho = Some(rho);
        let amdf = Some(AmdfConfig { directions: 2, ..AmdfConfig::default() });
        let mut optimizer =
            DaSam::new(groups, Sgd::new(0.0), DaSamConfig { amdf, ..DaSamConfig::da_sam(0.0) }).unwrap();
        optimizer.step(|_| Ok(one((&b.to_kind(Kind::Float) * &a).sum(Kind::Float))))
    };
    assert!(matches!(step(1e-6), Err(Error::LowPrecisionParams { .. })));
    step(0.1).unwrap();
    assert_eq!(values(&b), [1.0]);
}
