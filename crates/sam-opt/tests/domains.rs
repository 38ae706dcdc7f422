//! Samplers, splits and averages: what must hold for any data.
#![allow(missing_docs)]

mod common;
use common::{close, group, leaf};
use proptest::prelude::*;
use sam_opt::tensor::ParamSet;
use sam_opt::tensor::tch::{Kind, Tensor};
use sam_opt::{
    AmdfConfig, DaSam, DaSamConfig, DaSamStats, DasRule, DomainId, DomainLosses, DomainSampler, Error,
    LeaveOneDomainOut, Sgd, SwadAverager, SwadConfig, SwadPhase, das_factors,
};
use std::collections::{BTreeMap, HashSet};

fn cases(n: u32) -> ProptestConfig {
    ProptestConfig { cases: n, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn factors_sum_to_the_number_of_domains_and_are_ordered_like_the_losses(
        losses in prop::collection::vec(1e-4f64..20.0, 1..16),
        rule in 0..3,
        tau in 0.1f64..4.0,
    ) {
        let das = [DasRule::Softmax, DasRule::Power(1.5), DasRule::Uniform][rule as usize];
        let config = DaSamConfig { das, tau, ..DaSamConfig::default() };
        let s = das_factors(&config, &losses);
        let d = losses.len() as f64;
        prop_assert!((s.iter().sum::<f64>() - d).abs() < 1e-9, "{s:?}");
        prop_assert!(s.iter().all(|&s| (0.1 - 1e-12..=d + 1e-9).contains(&s)), "{s:?}");
        for i in 0..losses.len() {
            for j in 0..losses.len() {
                prop_assert!(losses[i] < losses[j] || s[i] >= s[j] - 1e-12, "{losses:?} {s:?}");
            }
        }
        // The factors don't depend on the losses' unit.
        let scaled: Vec<f64> = losses.iter().map(|l| 37.0 * l).collect();
        close(&das_factors(&config, &scaled), &s, 1e-8);
    }

    #[test]
    fn batches_are_balanced_and_every_row_comes_before_any_comes_twice(
        domains in prop::collection::vec(0u32..4, 1..60),
        per_domain in 1usize..5,
        seed: u64,
    ) {
        let ids: Vec<DomainId> = domains.iter().map(|&d| DomainId(d)).collect();
        let sampler = DomainSampler::new(&ids, per_domain, seed).unwrap();
        let mut seen: BTreeMap<DomainId, Vec<usize>> = BTreeMap::new();
        for step in 0..sampler.steps_per_epoch() {
            let batch = sampler.batch(step);
            prop_assert_eq!(&batch, &sampler.batch(step));
            for (row, id) in batch.iter().zip(sampler.domains(&batch)) {
                prop_assert_eq!(id, ids[*row]);
                seen.entry(id).or_default().push(*row);
            }
        }
        for (id, rows) in seen {
            let all = ids.iter().filter(|&&i| i == id).count();
            for round in rows.chunks(all) {
                prop_assert_eq!(round.iter().collect::<HashSet<_>>().len(), round.len());
            }
            prop_assert!(rows.iter().collect::<HashSet<_>>().len() == all, "a row never came");
        }
    }

    #[test]
    fn folds_part_the_rows(domains in prop::collection::vec(0u32..4, 8..60), seed: u64) {
        let ids: Vec<DomainId> = domains.iter().map(|&d| DomainId(d)).collect();
        let Ok(splits) = LeaveOneDomainOut::new(&ids, 0.2, seed) else { return Ok(()) };
        for fold in splits.folds() {
            let mut rows: Vec<usize> = [&fold.train[..], &fold.validation, &fold.test].concat();
            rows.sort_unstable();
            prop_assert_eq!(rows, (0..ids.len()).collect::<Vec<_>>());
            prop_assert!(fold.test.iter().all(|&r| ids[r] == fold.held_out));
            prop_assert!(fold.train.iter().chain(&fold.validation).all(|&r| ids[r] != fold.held_out));
        }
    }
}

proptest! {
    #![proptest_config(cases(20))]

    #[test]
    fn multiplying_all_losses_changes_neither_factors_nor_directions_nor_the_radius(c in 0.01f64..100.0, seed in 0u64..1000) {
        let run = |factor: f64| -> (Vec<DaSamStats>, Vec<Vec<f64>>) {
            let w = leaf(&[0.3, -0.8, 1.2, 0.1], Kind::Float);
            let config = DaSamConfig { seed, ..DaSamConfig::da_sam(0.2) };
            let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.0), config).unwrap();
            let mut points = Vec::new();
            let stats = (0..3).map(|_| {
                optimizer.step(|_| {
                    points.push(common::values(&w));
                    let domain = |k: u32, center: f64| (DomainId(k), (&w - center).square().sum(Kind::Float) * factor);
                    Ok(DomainLosses::PerDomain(vec![domain(0, 0.5), domain(1, -2.0), domain(2, 1.0)]))
                }).unwrap()
            });
            (stats.collect(), points)
        };
        let ((plain, points), (scaled, scaled_points)) = (run(1.0), run(c));
        for (p, s) in plain.iter().zip(&scaled) {
            close(&s.factors, &p.factors, 1e-5);
            prop_assert!((s.rho_t - p.rho_t).abs() < 1e-5 * p.rho_t);
            prop_assert!((s.sharpness / c - p.sharpness).abs() < 1e-3 * p.sharpness.abs());
        }
        for (p, s) in points.iter().zip(&scaled_points) {
            close(s, p, 1e-5);
        }
    }

    #[test]
    fn the_radius_stays_in_its_bounds_and_is_the_length(seed in 0u64..1000, exponent in 0.0f64..3.0, clip in 1.0f64..4.0) {
        let w = leaf(&[0.3, -0.8, 1.2], Kind::Float);
        let amdf = Some(AmdfConfig { exponent, clip, ..AmdfConfig::default() });
        let config = DaSamConfig { seed, amdf, ..DaSamConfig::da_sam(0.2) };
        let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.05), config).unwrap();
        for _ in 0..6 {
            let stats = optimizer.step(|_| {
                let domain = |k: u32, center: f64| (DomainId(k), ((&w * 2.0 - center).sin() + 1.5).sum(Kind::Float));
                Ok(DomainLosses::PerDomain(vec![domain(0, 0.5), domain(1, -2.0)]))
            }).unwrap();
            prop_assert!(stats.rho_t >= 0.2 / clip - 1e-9 && stats.rho_t <= 0.2 * clip + 1e-9);
            prop_assert!((stats.epsilon_norm - stats.rho_t).abs() < 1e-6 * stats.rho_t.max(1.0), "{stats:?}");
        }
    }
}

#[test]
fn a_domain_without_rows_is_refused_where_it_is_expected() {
    let ids = [0, 0, 2].map(DomainId);
    let error = DomainSampler::expecting(&[0, 1, 2].map(DomainId), &ids, 4, 0).unwrap_err();
    assert!(matches!(error, Error::EmptyDomain { id: DomainId(1) }));
    assert!(error.to_string().contains("domain 1 has no samples"), "{error}");
    assert!(DomainSampler::expecting(&[0, 2].map(DomainId), &ids, 4, 0).is_ok());
    assert!(DomainSampler::new(&[], 4, 0).is_err() && DomainSampler::new(&ids, 0, 0).is_err());
    assert!(matches!(
        LeaveOneDomainOut::new(&ids, 0.2, 0).unwrap().fold(DomainId(7)),
        Err(Error::UnknownDomain { id: DomainId(7) })
    ));
    assert!(LeaveOneDomainOut::new(&[DomainId(3); 9], 0.2, 0).is_err());
    // Half of one row is a row: nothing would be left to train on.
    assert!(matches!(LeaveOneDomainOut::new(&ids, 0.5, 0), Err(Error::EmptyDomain { id: DomainId(2) })));
}

/// Feeds iterates 0, 1, 2, … with these validation losses; phases and the averages.
fn swad(losses: &[f64]) -> (SwadAverager, Vec<SwadPhase>) {
    let w = Tensor::from_slice(&[0.0f32]);
    let params = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let mut swad = SwadAverager::new(SwadConfig::default()).unwrap();
    let mut phases = Vec::new();
    for (i, &loss) in losses.iter().enumerate() {
        let _ = w.shallow_clone().fill_(i as f64);
        swad.update(&params).unwrap();
        phases.push(swad.evaluate(loss).unwrap());
    }
    (swad, phases)
}

fn average(swad: &SwadAverager) -> f64 {
    swad.average().unwrap().unwrap().parts()[0].as_ref().unwrap().double_value(&[0])
}

#[test]
fn swad_averages_from_the_minimum_to_the_rise() {
    // Minimum at 2, seen when 3 and 4 are no lower; threshold 1.3 · mean(1, 1.1, 1.2) = 1.43, passed from 7 on.
    let losses = [3.0, 2.0, 1.0, 1.1, 1.2, 1.3, 1.4, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0];
    let (swad, phases) = swad(&losses);
    assert_eq!(phases[..4], [SwadPhase::Waiting; 4]);
    assert_eq!(phases[4..12], [SwadPhase::Averaging; 8]);
    assert_eq!(phases[12..], [SwadPhase::Stopped; 2]);
    // Iterates 2 to 6.
    assert_eq!(average(&swad), 4.0);
}

#[test]
fn swad_without_a_rise_averages_to_the_end_and_without_a_minimum_gives_the_last() {
    assert_eq!(average(&swad(&[3.0, 1.0, 1.1, 1.2, 1.0]).0), 2.5);
    let (falling, phases) = swad(&[5.0, 4.0, 3.0, 2.0]);
    assert_eq!((average(&falling), phases.last()), (3.0, Some(&SwadPhase::Waiting)));
}

#[test]
fn swad_refuses_what_it_cannot_use() {
    let mut fresh = SwadAverager::new(SwadConfig::default()).unwrap();
    assert!(fresh.evaluate(1.0).is_err() && fresh.average().unwrap().is_none());
    assert!(swad(&[1.0]).0.evaluate(f64::NAN).is_err());
    for bad in [
        SwadConfig { patience_start: 0, ..SwadConfig::default() },
        SwadConfig { patience_end: 0, ..SwadConfig::default() },
        SwadConfig { tolerance: 0.5, ..SwadConfig::default() },
    ] {
        assert!(SwadAverager::new(bad).is_err());
    }
}
