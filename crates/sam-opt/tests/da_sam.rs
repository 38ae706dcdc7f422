//! DA-SAM and its baselines: the specification's numbers, reductions, restoration, limits.
#![allow(missing_docs)]

mod common;
use common::{Trace, batch, bits, close, group, leaf, values};
use sam_opt::baselines::{Dgsam, DgsamConfig, GroupDro, erm_loss, vrex_loss};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{self, Device, Kind, Reduction, Tensor, nn::VarStore};
use sam_opt::tensor::{ParamSet, Seed};
use sam_opt::{
    Adam, AmdfConfig, DaSam, DaSamConfig, DaSamStats, DasRule, DomainId, DomainLosses, Error, OuterMode, OuterWeights,
    ParamGroup, Pass, PassKind, PerturbDirection, Result, Sam, SamConfig, Sgd, buffers,
};

/// `L₁ = ½(w₁−1)² + ½w₂²`, `L₂ = 2(w₁+1)² + ½(w₂−2)²`.
fn two_domains(w: &Tensor) -> [Tensor; 2] {
    let (a, b) = (w.get(0), w.get(1));
    [(&a - 1.0).square() * 0.5 + b.square() * 0.5, (&a + 1.0).square() * 2.0 + (&b - 2.0).square() * 0.5]
}

fn toy(w: &Tensor) -> DomainLosses {
    let [first, second] = two_domains(w);
    DomainLosses::PerDomain(vec![(DomainId(1), first), (DomainId(2), second)])
}

/// One step at the origin with rate 1: where each pass was, the update, the statistics.
fn one_step(config: DaSamConfig) -> (Trace, Vec<f64>, DaSamStats) {
    let w = leaf(&[0.0, 0.0], Kind::Double);
    let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
    let mut trace = Trace::new();
    let stats = optimizer
        .step(|pass| {
            trace.record(pass, &w);
            Ok(toy(&w))
        })
        .unwrap();
    let update = values(&w).iter().map(|v| -v).collect();
    (trace, update, stats)
}

#[test]
fn das_weighs_the_harder_domain_more() {
    let (trace, update, stats) = one_step(DaSamConfig::das_only(0.1));
    close(&stats.domain_losses, &[0.5, 4.0], 1e-12);
    close(&stats.factors, &[0.348570642, 1.651429358], 1e-9);
    close(&[stats.grad_norm], &[3.128573394f64.hypot(1.651429358)], 1e-8);
    close(&trace.points[1], &[0.088435700, -0.046681120], 1e-9);
    close(&update, &[1.721089250, -1.046681120], 1e-8);
    assert_eq!((stats.forwards, stats.backwards, stats.directions_used), (2, 2, 1));
    close(&[stats.loss, stats.epsilon_norm, stats.rho_t], &[2.25, 0.1, 0.1], 1e-12);
}

#[test]
fn disam_has_the_opposite_sign() {
    let (trace, _, stats) = one_step(DaSamConfig::disam(0.1, 0.1));
    close(&stats.factors, &[1.35, 0.65], 1e-12);
    let g = [0.625, -0.65f64];
    let norm = g[0].hypot(g[1]);
    close(&[stats.grad_norm], &[norm], 1e-12);
    close(&trace.points[1], &[0.1 * g[0] / norm, 0.1 * g[1] / norm], 1e-12);
}

#[test]
fn the_uniform_rule_is_sams_direction_and_the_comparison_says_so() {
    let with = |das| {
        let config = DaSamConfig { das, compare_with_sam: true, ..DaSamConfig::das_only(0.1) };
        let (trace, _, stats) = one_step(config);
        (trace.points[1].clone(), stats.cos_to_sam.unwrap(), stats.backwards)
    };
    let (uniform, cosine, backwards) = with(DasRule::Uniform);
    close(&uniform, &[0.0832050294, -0.0554700196], 1e-9);
    close(&[cosine], &[1.0], 1e-12);
    assert_eq!(backwards, 3);
    let (_, cosine, _) = with(DasRule::Softmax);
    let expected = 0.884356998 * 0.832050294 + 0.466811203 * 0.554700196;
    close(&[cosine], &[expected], 1e-8);
}

#[test]
fn probes_are_the_slopes_of_the_weighted_losses() {
    let amdf = Some(AmdfConfig { directions: 5, ..AmdfConfig::default() });
    let (trace, _, stats) = one_step(DaSamConfig { amdf, ..DaSamConfig::da_sam(0.1) });
    let kinds: Vec<PassKind> = trace.kinds.clone();
    let mut expected = vec![PassKind::Main];
    expected.extend((0..5).map(PassKind::Probe));
    expected.push(PassKind::Perturbed(0));
    assert_eq!(kinds, expected);
    assert_eq!((stats.forwards, stats.backwards, stats.directions_used), (7, 2, 5));
    // h = ⟨g_s, u⟩ + (ρ/2) uᵀH_s u with g_s and H_s of the weighted mean, exactly on a quadratic.
    let s = &stats.factors;
    let g = [0.5 * (-s[0] + 4.0 * s[1]), 0.5 * (-2.0 * s[1])];
    let h = [0.5 * (s[0] + 4.0 * s[1]), 0.5 * (s[0] + s[1])];
    let slopes: Vec<f64> = trace.points[1..6]
        .iter()
        .map(|point| {
            let u = [point[0] / 0.1, point[1] / 0.1];
            close(&[u[0].hypot(u[1])], &[1.0], 1e-9);
            g[0] * u[0] + g[1] * u[1] + 0.05 * (h[0] * u[0] * u[0] + h[1] * u[1] * u[1])
        })
        .collect();
    close(&slopes[..1], &[3.684548646], 1e-8);
    let mean = slopes.iter().sum::<f64>() / 5.0;
    let std = (slopes.iter().map(|h| (h - mean).powi(2)).sum::<f64>() / 5.0).sqrt();
    close(&[stats.sharpness, stats.anisotropy], &[mean + std, std], 1e-9);
    // The first step's level is its own sharpness.
    close(&[stats.rho_t, stats.epsilon_norm], &[0.1, 0.1], 1e-9);
}

// Reductions, bit exact.

struct Model {
    store: VarStore,
    net: Mlp,
}

impl Model {
    fn new(config: &MlpConfig) -> Self {
        tch::set_num_threads(1);
        let store = VarStore::new(Device::Cpu);
        let net = Mlp::new(&store.root(), config, Seed::new(5)).unwrap();
        Self { store, net }
    }

    fn relu() -> Self {
        Self::new(&MlpConfig::relu(&[4, 16, 3]))
    }

    fn groups(&self) -> Vec<ParamGroup> {
        vec![ParamGroup::from_var_store(&self.store)]
    }

    fn bits(&self) -> Vec<Vec<u64>> {
        bits(ParamSet::from_var_store(&self.store).unwrap().tensors())
    }

    /// The mean loss of each of `count` domains, 8 samples each.
    fn losses(&self, step: u64, count: u32) -> Vec<(DomainId, Tensor)> {
        let (x, y) = batch(8 * i64::from(count), step);
        let logits = self.net.forward_with(&x, true, true);
        let one =
            |k: u32| logits.narrow(0, 8 * i64::from(k), 8).cross_entropy_for_logits(&y.narrow(0, 8 * i64::from(k), 8));
        (0..count).map(|k| (DomainId(k), one(k))).collect()
    }
}

fn da_sam_bits(config: DaSamConfig, domains: u32) -> Vec<Vec<u64>> {
    let model = Model::relu();
    let mut optimizer = DaSam::new(model.groups(), Adam::new(1e-2), config).unwrap();
    for _ in 0..5 {
        optimizer.step(|pass| Ok(DomainLosses::PerDomain(model.losses(pass.step, domains)))).unwrap();
    }
    model.bits()
}

fn sam_bits(config: SamConfig, loss: impl Fn(&Model, &Pass<'_>) -> Result<Tensor>) -> Vec<Vec<u64>> {
    let model = Model::relu();
    let mut optimizer = Sam::new(model.groups(), Adam::new(1e-2), config).unwrap();
    for _ in 0..5 {
        optimizer.step(|pass| loss(&model, pass)).unwrap();
    }
    model.bits()
}

fn amdf(directions: usize, exponent: f64, zeta: f64) -> AmdfConfig {
    AmdfConfig { directions, exponent, zeta, ..AmdfConfig::default() }
}

#[test]
fn one_domain_and_one_direction_is_sam() {
    let expected = sam_bits(SamConfig::sam(0.3), |model, pass| Ok(model.losses(pass.step, 1).remove(0).1));
    for modules in [Some(amdf(1, 0.0, 1.0)), None] {
        assert_eq!(da_sam_bits(DaSamConfig { amdf: modules, ..DaSamConfig::da_sam(0.3) }, 1), expected);
    }
}

#[test]
fn the_uniform_rule_with_one_direction_is_sam_on_the_domain_balanced_mean() {
    let mean = |model: &Model, pass: &Pass<'_>| {
        let losses = model.losses(pass.step, 3);
        let third = Tensor::from_slice(&[1.0f32 / 3.0]);
        let stacked: Vec<Tensor> = losses.into_iter().map(|(_, loss)| loss.reshape([1])).collect();
        Ok(Tensor::cat(&stacked, 0).dot(&third.repeat([3])))
    };
    let expected = sam_bits(SamConfig::sam(0.3), mean);
    let config = DaSamConfig { das: DasRule::Uniform, amdf: Some(amdf(1, 0.0, 1.0)), ..DaSamConfig::da_sam(0.3) };
    assert_eq!(da_sam_bits(config, 3), expected);
    let erm = |model: &Model, pass: &Pass<'_>| erm_loss(DomainLosses::PerDomain(model.losses(pass.step, 3)), pass);
    assert_eq!(sam_bits(SamConfig::sam(0.3), erm), expected);
}

#[test]
fn radius_zero_is_the_base_optimizer_with_one_pass() {
    let erm = |model: &Model, pass: &Pass<'_>| erm_loss(DomainLosses::PerDomain(model.losses(pass.step, 3)), pass);
    let expected = sam_bits(SamConfig::sam(0.0), erm);
    assert_eq!(da_sam_bits(DaSamConfig::da_sam(0.0), 3), expected);
    let (trace, _, stats) = one_step(DaSamConfig::da_sam(0.0));
    assert_eq!((trace.kinds.len(), stats.forwards, stats.epsilon_norm), (1, 1, 0.0));
}

#[test]
fn without_noise_every_direction_is_the_guided_one() {
    let one = da_sam_bits(DaSamConfig { amdf: Some(amdf(1, 1.0, 1.0)), ..DaSamConfig::da_sam(0.3) }, 3);
    for outer in [OuterMode::Soft, OuterMode::Worst, OuterMode::Average] {
        let config = DaSamConfig { amdf: Some(amdf(4, 1.0, 0.0)), outer, ..DaSamConfig::da_sam(0.3) };
        assert_eq!(da_sam_bits(config, 3), one, "{outer:?}");
    }
}

#[test]
fn outer_weights_and_modes_change_the_update() {
    let all: Vec<_> = [OuterMode::Soft, OuterMode::Worst, OuterMode::Average]
        .into_iter()
        .map(|outer| da_sam_bits(DaSamConfig { outer, ..DaSamConfig::da_sam(0.3) }, 3))
        .chain([da_sam_bits(DaSamConfig { outer_weights: OuterWeights::Das, ..DaSamConfig::da_sam(0.3) }, 3)])
        .collect();
    for i in 0..all.len() {
        assert!(all[i + 1..].iter().all(|other| *other != all[i]));
    }
}

#[test]
fn the_average_mode_takes_a_gradient_at_every_direction() {
    let config = DaSamConfig { outer: OuterMode::Average, ..DaSamConfig::da_sam(0.1) };
    let (trace, update, stats) = one_step(config);
    let points: Vec<&Vec<f64>> = trace.points.iter().rev().take(4).collect();
    assert_eq!((stats.backwards, stats.directions_used, stats.forwards), (5, 4, 9));
    // The gradient of the mean is affine: (½(−1 + 4) + ½·5 a, ½(−2) + ½·2 b).
    let mean = |i: usize| points.iter().map(|p| p[i]).sum::<f64>() / 4.0;
    close(&update, &[1.5 + 2.5 * mean(0), -1.0 + mean(1)], 1e-9);
    close(&trace.points[1], &trace.points[5], 1e-12);
}

#[test]
fn the_worst_mode_goes_to_the_steepest_probe() {
    let config = DaSamConfig { outer: OuterMode::Worst, ..DaSamConfig::da_sam(0.1) };
    let (trace, _, stats) = one_step(config);
    let s = &stats.factors;
    let rise = |p: &Vec<f64>| {
        let at = |p: [f64; 2]| {
            let first = 0.5 * (p[0] - 1.0).powi(2) + 0.5 * p[1] * p[1];
            let second = 2.0 * (p[0] + 1.0).powi(2) + 0.5 * (p[1] - 2.0).powi(2);
            0.5 * (s[0] * first + s[1] * second)
        };
        at([p[0], p[1]]) - at([0.0, 0.0])
    };
    let steepest = trace.points[1..5].iter().max_by(|a, b| rise(a).total_cmp(&rise(b))).unwrap();
    close(&trace.points[5], steepest, 1e-12);
    assert_eq!(stats.directions_used, 1);
}

#[test]
fn a_random_direction_of_the_same_length_is_a_control_not_the_gradient() {
    let w = leaf(&[1.0; 200], Kind::Float);
    let config = SamConfig { direction: PerturbDirection::Random, ..SamConfig::sam(0.3) };
    let mut control = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config.clone()).unwrap();
    let mut trace = Trace::new();
    for _ in 0..2 {
        let stats = control
            .step(|pass| {
                trace.record(pass, &w);
                Ok(w.square().sum(Kind::Float))
            })
            .unwrap();
        close(&[stats.epsilon_norm], &[0.3], 1e-6);
    }
    let moved =
        |i: usize| -> Vec<f64> { trace.points[i + 1].iter().zip(&trace.points[i]).map(|(a, b)| a - b).collect() };
    let cosine = |a: &[f64], b: &[f64]| {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    // Chance gives 1/√200 = 0.07; four of that.
    assert!(cosine(&moved(0), &[1.0; 200]).abs() < 0.28);
    assert!(cosine(&moved(0), &moved(2)).abs() < 0.28, "every step draws anew");
    let gsam = sam_opt::GsamConfig { alpha: 0.1, sam: config };
    let error = sam_opt::Gsam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), gsam).unwrap_err().to_string();
    assert!(error.contains("direction"), "{error}");
}

// Reuse, running losses, half measures.

#[test]
fn probes_are_reused_with_their_noise_and_radius() {
    let w = leaf(&[0.3, -0.2], Kind::Double);
    let config = AmdfConfig { probe_every: 3, ..AmdfConfig::default() };
    let config = DaSamConfig { amdf: Some(config), ..DaSamConfig::da_sam(0.1) };
    let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.01), config).unwrap();
    let stats: Vec<DaSamStats> = (0..6).map(|_| optimizer.step(|_| Ok(toy(&w))).unwrap()).collect();
    let forwards: Vec<usize> = stats.iter().map(|s| s.forwards).collect();
    assert_eq!(forwards, [6, 2, 2, 6, 2, 2]);
    assert_eq!((stats[1].rho_t, stats[1].sharpness), (stats[0].rho_t, stats[0].sharpness));
    assert_ne!(stats[3].sharpness, stats[0].sharpness);
    assert!(stats.iter().all(|s| (s.epsilon_norm - s.rho_t).abs() < 1e-9));
}

#[test]
fn running_losses_follow_the_batches_slowly() {
    let w = leaf(&[0.0, 0.0], Kind::Double);
    let config = DaSamConfig { loss_ema: 0.75, ..DaSamConfig::das_only(0.1) };
    let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), config.clone()).unwrap();
    let swapped = |w: &Tensor| {
        let [first, second] = two_domains(w);
        DomainLosses::PerDomain(vec![(DomainId(1), second), (DomainId(2), first)])
    };
    optimizer.step(|_| Ok(toy(&w))).unwrap();
    let second = optimizer.step(|_| Ok(swapped(&w))).unwrap();
    let running = [0.75 * 0.5 + 0.25 * 4.0, 0.75 * 4.0 + 0.25 * 0.5];
    assert_eq!(second.factors, sam_opt::das_factors(&config, &running));
}

// Domains.

#[test]
fn the_order_of_the_domains_does_not_matter() {
    let run = |reversed: bool| {
        let model = Model::relu();
        let mut optimizer = DaSam::new(model.groups(), Adam::new(1e-2), DaSamConfig::da_sam(0.3)).unwrap();
        for _ in 0..3 {
            optimizer
                .step(|pass| {
                    let mut losses = model.losses(pass.step, 3);
                    if reversed {
                        losses.reverse();
                    }
                    Ok(DomainLosses::PerDomain(losses))
                })
                .unwrap();
        }
        model.bits()
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn a_domain_that_is_missing_from_a_batch_or_from_all_is_reported() {
    let w = leaf(&[0.2, 0.1], Kind::Double);
    let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), DaSamConfig::da_sam(0.1))
        .unwrap()
        .with_domains([1, 2, 3].map(DomainId));
    let only = |w: &Tensor| DomainLosses::PerDomain(vec![(DomainId(2), two_domains(w)[1].shallow_clone())]);
    let stats = optimizer.step(|_| Ok(only(&w))).unwrap();
    assert_eq!(
        (stats.domains, stats.factors, stats.missing),
        (vec![DomainId(2)], vec![1.0], [1, 3].map(DomainId).into())
    );
    optimizer.step(|_| Ok(toy(&w))).unwrap();
    assert_eq!(optimizer.never_seen(), [DomainId(3)]);
    let before = values(&w);
    let unknown = DomainLosses::PerDomain;
    let error = optimizer.step(|_| Ok(unknown(vec![(DomainId(9), w.square().sum(Kind::Double))]))).unwrap_err();
    assert!(matches!(error, Error::UnknownDomain { id: DomainId(9) }));
    assert_eq!(values(&w), before);
}

#[test]
fn any_number_of_domains_and_directions_works() {
    for (domains, directions) in [(1, 16), (16, 1), (16, 16), (2, 2)] {
        let model = Model::relu();
        let config = DaSamConfig { amdf: Some(amdf(directions, 1.0, 1.0)), ..DaSamConfig::da_sam(0.2) };
        let mut optimizer = DaSam::new(model.groups(), Sgd::new(0.1), config).unwrap();
        for _ in 0..2 {
            let stats = optimizer.step(|pass| Ok(DomainLosses::PerDomain(model.losses(pass.step, domains)))).unwrap();
            close(&[stats.factors.iter().sum::<f64>()], &[f64::from(domains)], 1e-9);
            close(&[stats.epsilon_norm], &[stats.rho_t], 1e-6);
            assert!(stats.rho_t >= 0.1 && stats.rho_t <= 0.4);
        }
    }
}

// Errors and restoration.

#[test]
fn malformed_losses_are_named() {
    let w = leaf(&[0.2, 0.1], Kind::Float);
    let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), DaSamConfig::da_sam(0.1)).unwrap();
    let mut fails = |losses: &dyn Fn() -> DomainLosses| optimizer.step(|_| Ok(losses())).unwrap_err();
    let per_domain = |list: Vec<(u32, Tensor)>| {
        DomainLosses::PerDomain(list.into_iter().map(|(id, loss)| (DomainId(id), loss)).collect())
    };
    let sum = || w.square().sum(Kind::Float);
    assert!(matches!(fails(&|| per_domain(vec![])), Error::NoDomain { .. }));
    let empty = || DomainLosses::PerSample { losses: w.square().narrow(0, 0, 0), domains: vec![] };
    assert!(matches!(fails(&empty), Error::NoDomain { .. }));
    assert!(matches!(fails(&|| per_domain(vec![(4, w.narrow(0, 0, 0))])), Error::EmptyDomain { id: DomainId(4) }));
    assert!(matches!(fails(&|| per_domain(vec![(4, w.square())])), Error::DomainLossShape { id: DomainId(4), .. }));
    assert!(matches!(fails(&|| per_domain(vec![(4, sum()), (4, sum())])), Error::DuplicateDomain { .. }));
    for losses in [w.square(), sum()] {
        let wrong =
            || DomainLosses::PerSample { losses: losses.shallow_clone(), domains: [1, 1, 2].map(DomainId).into() };
        assert!(matches!(fails(&wrong), Error::PerSampleShape { domains: 3, .. }));
    }
    assert!(matches!(fails(&|| per_domain(vec![(4, sum().detach())])), Error::Detached { .. }));
    assert!(matches!(fails(&|| per_domain(vec![(4, sum() * f64::NAN)])), Error::NonFinite { .. }));
    let other = leaf(&[1.0], Kind::Float);
    assert!(matches!(fails(&|| per_domain(vec![(4, other.sum(Kind::Float))])), Error::NoGradient { .. }));
    assert_eq!(values(&w), values(&leaf(&[0.2, 0.1], Kind::Float)));
}

#[test]
fn another_batch_in_a_later_pass_is_refused() {
    for late in [PassKind::Probe(1), PassKind::Perturbed(0)] {
        let w = leaf(&[0.2, 0.1], Kind::Double);
        let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), DaSamConfig::da_sam(0.1)).unwrap();
        let error = optimizer
            .step(|pass| {
                let DomainLosses::PerDomain(mut list) = toy(&w) else { unreachable!() };
                if pass.kind == late {
                    list.truncate(1);
                }
                Ok(DomainLosses::PerDomain(list))
            })
            .unwrap_err();
        assert!(matches!(&error, Error::DomainsChanged { pass, .. } if *pass == late), "{error}");
        assert_eq!(values(&w), [0.2, 0.1]);
    }
}

#[test]
fn an_error_in_any_pass_leaves_everything_as_it_was() {
    let (main, probes, perturbed) = ([PassKind::Main], [0, 1, 2, 3].map(PassKind::Probe), [PassKind::Perturbed(0)]);
    let every = |probe_every| Some(AmdfConfig { probe_every, ..AmdfConfig::default() });
    let average = DaSamConfig { outer: OuterMode::Average, ..DaSamConfig::da_sam(0.3) };
    let cases: [(DaSamConfig, Vec<PassKind>); 4] = [
        (DaSamConfig::da_sam(0.3), [&main[..], &probes, &perturbed].concat()),
        (average.clone(), [0, 1, 2, 3].map(PassKind::Perturbed).into()),
        // The failing step, the second, reuses the first one's probes.
        (DaSamConfig { amdf: every(3), ..DaSamConfig::da_sam(0.3) }, [main, perturbed].concat()),
        (DaSamConfig { amdf: every(3), ..average }, vec![PassKind::Perturbed(2)]),
    ];
    for (config, passes) in cases {
        for bad in passes {
            let model = Model::new(&MlpConfig { batch_norm: true, ..MlpConfig::relu(&[4, 16, 3]) });
            let mut optimizer = DaSam::for_store(&model.store, Adam::new(1e-2), config.clone()).unwrap();
            let step = |optimizer: &mut DaSam<Adam>, bad: Option<PassKind>| {
                optimizer.step(|pass| {
                    let losses = DomainLosses::PerDomain(model.losses(pass.step, 2));
                    if Some(pass.kind) == bad { Err(Error::closure("broken")) } else { Ok(losses) }
                })
            };
            step(&mut optimizer, None).unwrap();
            let before = (model.bits(), bits(&buffers(&model.store)));
            assert!(matches!(step(&mut optimizer, Some(bad)), Err(Error::Closure(_))), "{bad}");
            assert_eq!((model.bits(), bits(&buffers(&model.store))), before, "{bad}");
            assert!(!optimizer.is_perturbed());
            // What follows is what would have followed without the failure.
            let after = step(&mut optimizer, None).unwrap();
            let clean = Model::new(&MlpConfig { batch_norm: true, ..MlpConfig::relu(&[4, 16, 3]) });
            let mut again = DaSam::for_store(&clean.store, Adam::new(1e-2), config.clone()).unwrap();
            let mut last = None;
            for _ in 0..2 {
                last = again.step(|pass| Ok(DomainLosses::PerDomain(clean.losses(pass.step, 2)))).ok();
            }
            assert_eq!(model.bits(), clean.bits(), "{bad}");
            assert_eq!(after.forwards, last.unwrap().forwards);
        }
    }
}

#[test]
fn running_statistics_are_those_of_one_plain_forward() {
    let normed = MlpConfig { batch_norm: true, ..MlpConfig::relu(&[4, 16, 3]) };
    let (plain, model) = (Model::new(&normed), Model::new(&normed));
    let _ = plain.losses(0, 2);
    let mut optimizer = DaSam::for_store(&model.store, Adam::new(1e-2), DaSamConfig::da_sam(0.3)).unwrap();
    optimizer.step(|pass| Ok(DomainLosses::PerDomain(model.losses(pass.step, 2)))).unwrap();
    assert_eq!(bits(&buffers(&model.store)), bits(&buffers(&plain.store)));
}

#[test]
fn a_probe_that_is_not_finite_is_dropped_and_all_of_them_fall_back_to_the_guided_direction() {
    let run = |bad: &dyn Fn(usize) -> bool| {
        let w = leaf(&[0.0, 0.0], Kind::Double);
        let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), DaSamConfig::da_sam(0.1)).unwrap();
        let mut trace = Trace::new();
        let stats = optimizer
            .step(|pass| {
                trace.record(pass, &w);
                let nan = matches!(pass.kind, PassKind::Probe(m) if bad(m));
                let [first, second] = two_domains(&w);
                let first = if nan { first * f64::NAN } else { first };
                Ok(DomainLosses::PerDomain(vec![(DomainId(1), first), (DomainId(2), second)]))
            })
            .unwrap();
        (trace, stats)
    };
    let (_, one) = run(&|m| m == 2);
    assert_eq!((one.probe_failures, one.directions_used), (1, 3));
    let (trace, all) = run(&|_| true);
    assert_eq!((all.probe_failures, all.directions_used), (4, 1));
    close(trace.points.last().unwrap(), &[0.088435700, -0.046681120], 1e-9);
}

#[test]
fn zero_gradients_single_elements_and_frozen_parameters() {
    let (a, b) = (leaf(&[0.5], Kind::Float), leaf(&[2.0], Kind::Float));
    let frozen = Tensor::from_slice(&[7.0f32]);
    let groups = vec![group(&[("a", &a), ("b", &b), ("frozen", &frozen)])];
    let mut optimizer = DaSam::new(groups, Sgd::new(0.1), DaSamConfig::da_sam(0.1)).unwrap();
    let one = |loss: Tensor| DomainLosses::PerDomain(vec![(DomainId(0), loss)]);
    let zero = optimizer.step(|_| Ok(one((&a + &b).sum(Kind::Float) * 0.0))).unwrap();
    assert_eq!((zero.epsilon_norm, values(&a), values(&b)), (0.0, vec![0.5], vec![2.0]));
    // `b` has no gradient in this batch: it stays, in the probes too.
    let mut seen = Vec::new();
    optimizer
        .step(|_| {
            seen.push(values(&b)[0]);
            Ok(one((&a * &frozen).square().sum(Kind::Float)))
        })
        .unwrap();
    assert!(seen.iter().all(|&v| v == 2.0) && values(&frozen) == [7.0] && values(&a) != [0.5]);
    let nothing = DaSam::new(vec![], Sgd::new(0.1), DaSamConfig::default());
    assert!(matches!(nothing, Err(Error::EmptyGroup { .. })));
    let mut asam = group(&[("a", &a)]);
    asam.adaptive = Some(true);
    assert!(DaSam::new(vec![asam], Sgd::new(0.1), DaSamConfig::default()).is_err());
}

#[test]
fn groups_keep_their_own_radius_and_may_be_left_out() {
    let (a, b, c) = (leaf(&[0.5, 1.0], Kind::Double), leaf(&[2.0, -1.0], Kind::Double), leaf(&[1.0], Kind::Double));
    let mut groups = vec![group(&[("a", &a)]), group(&[("b", &b)]), group(&[("c", &c)])];
    groups[1].rho = Some(0.4);
    groups[2].perturb = false;
    let config = DaSamConfig { amdf: Some(amdf(3, 0.0, 1.0)), das: DasRule::Uniform, ..DaSamConfig::da_sam(0.1) };
    let mut optimizer = DaSam::new(groups, Sgd::new(0.0), config).unwrap();
    let mut trace = (Trace::new(), Trace::new());
    let stats = optimizer
        .step(|pass| {
            trace.0.record(pass, &a);
            trace.1.record(pass, &b);
            assert_eq!(values(&c), [1.0]);
            Ok(DomainLosses::PerDomain(vec![(DomainId(0), (a.square() + b.square() + &c).sum(Kind::Double))]))
        })
        .unwrap();
    let moved = |t: &Trace, i: usize| (t.points[i][0] - t.points[0][0]).hypot(t.points[i][1] - t.points[0][1]);
    // The probe along the gradient: (1, 2)/√25 of a and (4, −2)/√25 of b.
    let norm = (1.0f64 + 4.0 + 16.0 + 4.0).sqrt();
    close(&[moved(&trace.0, 1), moved(&trace.1, 1)], &[0.1 * 5f64.sqrt() / norm, 0.4 * 20f64.sqrt() / norm], 1e-9);
    let last = trace.0.points.len() - 1;
    close(&[stats.epsilon_norm], &[moved(&trace.0, last).hypot(moved(&trace.1, last))], 1e-9);
}

// Baselines.

#[test]
fn dgsam_walks_from_domain_to_domain() {
    let w = leaf(&[0.0, 0.0], Kind::Double);
    let config = DgsamConfig { rho: 0.1, ..DgsamConfig::default() };
    let mut optimizer = Dgsam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
    let mut visits = Vec::new();
    let ids = [1, 2].map(DomainId);
    let stats = optimizer
        .step(&ids, |pass, id| {
            visits.push((pass.kind, id, values(&w)));
            let [first, second] = two_domains(&w);
            Ok(if id == DomainId(1) { first } else { second })
        })
        .unwrap();
    let gradient = |id: DomainId, p: &[f64]| match id.0 {
        1 => [p[0] - 1.0, p[1]],
        _ => [4.0 * (p[0] + 1.0), p[1] - 2.0],
    };
    let (mut point, mut sum) = (vec![0.0, 0.0], [0.0, 0.0]);
    for (j, (kind, id, at)) in visits.iter().enumerate() {
        assert_eq!(*kind, if j == 0 { PassKind::Main } else { PassKind::Perturbed(j - 1) });
        assert_eq!(*id, stats.order[j % 2]);
        close(at, &point, 1e-9);
        let g = gradient(*id, &point);
        if j > 0 {
            sum = [sum[0] + g[0] / 2.0, sum[1] + g[1] / 2.0];
        }
        let norm = g[0].hypot(g[1]);
        if j < 2 {
            point = vec![point[0] + 0.1 * g[0] / norm, point[1] + 0.1 * g[1] / norm];
        }
    }
    close(&[stats.distance], &[point[0].hypot(point[1])], 1e-9);
    close(&values(&w), &[-sum[0], -sum[1]], 1e-9);
    assert_eq!((visits.len(), stats.domain_passes), (3, 3));
    let orders: Vec<Vec<DomainId>> =
        (0..20).map(|_| optimizer.step(&ids, |_, _| Ok(w.square().sum(Kind::Double))).unwrap().order).collect();
    assert!(orders.iter().any(|o| *o != orders[0]), "the order is drawn anew each step");
    assert!(matches!(optimizer.step(&[], |_, _| unreachable!()), Err(Error::NoDomain { .. })));
    let twice = [DomainId(1), DomainId(1)];
    assert!(matches!(optimizer.step(&twice, |_, _| unreachable!()), Err(Error::DuplicateDomain { .. })));
}

#[test]
fn dgsam_restores_after_an_error_in_any_visit() {
    for bad in [PassKind::Main, PassKind::Perturbed(0), PassKind::Perturbed(1)] {
        let w = leaf(&[0.3, 0.1], Kind::Float);
        let before = bits(&[w.shallow_clone()]);
        let config = DgsamConfig { rho: 0.1, ..DgsamConfig::default() };
        let mut optimizer = Dgsam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), config).unwrap();
        let result = optimizer.step(&[1, 2].map(DomainId), |pass, _| {
            if pass.kind == bad { Err(Error::closure("broken")) } else { Ok(w.square().sum(Kind::Float)) }
        });
        assert!(result.is_err());
        assert_eq!(bits(&[w.shallow_clone()]), before, "{bad}");
    }
}

#[test]
fn group_dro_moves_weight_to_the_harder_domain_once_a_step() {
    let w = leaf(&[0.0, 0.0], Kind::Double);
    let mut dro = GroupDro::new(0.01).unwrap();
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), SamConfig::sam(0.1)).unwrap();
    let mut calls = 0;
    let mut failing = true;
    let mut step = |dro: &mut GroupDro, fail: bool| {
        sam.step(|pass| {
            calls += 1;
            let loss = dro.loss(toy(&w), pass)?;
            if fail && pass.kind != PassKind::Main { Err(Error::closure("broken")) } else { Ok(loss) }
        })
    };
    while failing {
        failing = step(&mut dro, true).is_ok();
    }
    let stats = step(&mut dro, false).unwrap();
    assert_eq!(calls, 4);
    // Losses 0.5 and 4 at the origin, equal weights before: q₂ = 1/(1 + e^{−0.01·3.5}), whatever failed before.
    let q = 1.0 / (1.0 + (-0.035f64).exp());
    close(&[dro.weights()[&DomainId(1)], dro.weights()[&DomainId(2)]], &[1.0 - q, q], 1e-12);
    close(&[stats.loss], &[(1.0 - q) * 0.5 + q * 4.0], 1e-12);
    assert!(GroupDro::new(-1.0).is_err());
}

#[test]
fn vrex_adds_the_population_variance() {
    let w = leaf(&[0.0, 0.0], Kind::Double);
    let mut erm = Sam::new(vec![group(&[("w", &w)])], Sgd::new(1.0), SamConfig::sam(0.0)).unwrap();
    let stats = erm.step(|pass| vrex_loss(toy(&w), 2.0, pass)).unwrap();
    // Losses 0.5 and 4: mean 2.25, population variance 1.75².
    close(&[stats.loss], &[2.25 + 2.0 * 1.75 * 1.75], 1e-12);
    assert!(erm.step(|pass| vrex_loss(toy(&w), -1.0, pass)).is_err());
}

#[test]
fn per_sample_losses_are_averaged_by_domain_in_the_step_too() {
    let model = Model::relu();
    let (x, y) = batch(12, 0);
    let domains: Vec<DomainId> = (0..12).map(|i| DomainId(u32::from(i < 3))).collect();
    let config = DaSamConfig { das: DasRule::Uniform, ..DaSamConfig::das_only(0.2) };
    let mut optimizer = DaSam::new(model.groups(), Sgd::new(0.1), config).unwrap();
    let mut losses = Vec::new();
    let stats = optimizer
        .step(|_| {
            let log_p = model.net.forward_with(&x, true, true).log_softmax(-1, Kind::Float);
            let each = log_p.nll_loss_nd(&y, None::<Tensor>, Reduction::None, -100);
            losses.push(values(&each));
            Ok(DomainLosses::PerSample { losses: each, domains: domains.clone() })
        })
        .unwrap();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    close(&stats.domain_losses, &[mean(&losses[0][3..]), mean(&losses[0][..3])], 1e-6);
    close(&[stats.loss], &[0.5 * (stats.domain_losses[0] + stats.domain_losses[1])], 1e-9);
}
