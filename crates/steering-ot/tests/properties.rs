//! The specification's correctness checks 1 to 8 and 10, on the map.

#![allow(clippy::needless_pass_by_value)] // array views

mod common;

use common::{largest_difference, mean, noise, norm, sets};
use nalgebra::DMatrix;
use ndarray::{Array1, Array2, Axis, array};
use proptest::prelude::*;
use steering_ot::transport::{self, SinkhornConfig};
use steering_ot::{CharsConfig, CharsMap, Coupling, Epsilon, Extra, Kernel, Warning, ndarray};

const KERNELS: [Kernel; 4] =
    [Kernel::AdaptiveGaussian, Kernel::Gaussian, Kernel::FixedSigma(3.0), Kernel::GlobalMedian];

fn config(k: usize) -> CharsConfig {
    let sinkhorn = SinkhornConfig { tolerance: 1e-13, max_iterations: 100_000 };
    CharsConfig { sinkhorn, ..CharsConfig::default().with_clusters(k) }
}

/// A map over random centroids and a random plan.
fn random_map(k_a: usize, k_b: usize, d: usize, seed: u64, config: CharsConfig) -> CharsMap {
    let a = noise(k_a, d, seed).mapv(f64::from) * 2.0;
    let b = noise(k_b, d, seed ^ 0x77).mapv(f64::from) * 2.0;
    let weights = noise(k_a, k_b, seed ^ 0x78).mapv(|v| f64::from(v).exp());
    CharsMap::from_parts(config, a, b, &weights / weights.sum(), Extra::default()).unwrap()
}

fn again(map: &CharsMap, config: CharsConfig) -> CharsMap {
    let (a, b) = (map.source_centroids().clone(), map.target_centroids().clone());
    CharsMap::from_parts(config, a, b, map.plan().clone(), Extra::default()).unwrap()
}

#[test]
fn one_cluster_is_the_difference_in_means_with_every_kernel() {
    let (source, target) = sets(50, 19, 1);
    let difference = mean(target.view()) - mean(source.view());
    for kernel in KERNELS {
        let map = CharsMap::fit(source.view(), target.view(), &CharsConfig { kernel, ..config(1) }).unwrap();
        assert_eq!(map.plan(), &array![[1.0]]);
        let shift = map.shift_exact(source.mapv(f64::from).view()).unwrap();
        for row in shift.rows() {
            assert!(largest_difference(row, &difference) < 1e-12);
        }
        let fast = map.shift(source.view()).unwrap();
        for row in fast.rows() {
            assert!(largest_difference(&row.mapv(f64::from), &difference) < 1e-6);
        }
    }
}

#[test]
fn the_mean_shift_over_clusters_is_the_difference_in_means_for_any_number_of_clusters() {
    let (source, target) = sets(60, 11, 2);
    let difference = mean(target.view()) - mean(source.view());
    for k in [2, 3, 5, 8] {
        for (coupling, epsilon) in [
            (Coupling::Ot, Epsilon::Exact),
            (Coupling::Ot, Epsilon::ScaledMedian(0.05)),
            (Coupling::Ot, Epsilon::ScaledMedian(1.0)),
            (Coupling::Uniform, Epsilon::Exact),
        ] {
            let config = CharsConfig { coupling, epsilon, ..config(k) };
            let map = CharsMap::fit(source.view(), target.view(), &config).unwrap();
            let sum = map.p().dot(map.shifts());
            assert!(largest_difference(&sum, &difference) < 1e-10, "K = {k}, {coupling:?}, {epsilon:?}");
            assert!(largest_difference(map.mean_shift_exact(), &difference) < 1e-10);
        }
    }
}

#[test]
fn wide_gates_and_no_components_give_the_difference_in_means() {
    let (source, target) = sets(60, 11, 3);
    let difference = mean(target.view()) - mean(source.view());
    let x = source.mapv(f64::from);
    for kernel in KERNELS {
        let wide = CharsConfig { kernel, bandwidth: 1e14, epsilon: Epsilon::Exact, ..config(5) };
        let none = CharsConfig { kernel, pct: Some(0), epsilon: Epsilon::Exact, ..config(5) };
        for config in [wide, none] {
            let map = CharsMap::fit(source.view(), target.view(), &config).unwrap();
            for row in map.shift_exact(x.view()).unwrap().rows() {
                assert!(largest_difference(row, &difference) < 1e-9);
            }
        }
    }
}

#[test]
fn narrow_gates_give_the_shift_of_the_nearest_cluster() {
    let x = noise(40, 9, 5) * 3.0;
    for kernel in KERNELS {
        let map = random_map(6, 5, 9, 4, CharsConfig { kernel, bandwidth: 1e-9, ..config(6) });
        for (row, shift) in x.rows().into_iter().zip(map.shift(x.view()).unwrap().rows()) {
            let distance = |i: usize| norm(&(row.mapv(f64::from) - map.source_centroids().row(i)));
            let nearest = (0..6).min_by(|&i, &j| distance(i).total_cmp(&distance(j))).unwrap();
            assert!(largest_difference(&shift.mapv(f64::from), map.shifts().row(nearest)) < 1e-5);
        }
    }
}

#[test]
fn much_regularisation_gives_the_independent_plan_and_little_the_exact_one() {
    let (source, target) = sets(60, 11, 6);
    let fit = |epsilon| CharsMap::fit(source.view(), target.view(), &CharsConfig { epsilon, ..config(4) }).unwrap();
    let diffuse = fit(Epsilon::ScaledMedian(1e9));
    let independent = transport::independent(diffuse.p().view(), diffuse.q().view());
    assert!(largest_difference(diffuse.plan(), &independent) < 1e-8);
    let toward = mean(target.view());
    for (m, a) in diffuse.shifts().rows().into_iter().zip(diffuse.source_centroids().rows()) {
        assert!(largest_difference(m, &(&toward - &a)) < 1e-6);
    }
    assert!(diffuse.diagnostics().warnings.iter().any(|w| matches!(w, Warning::NearIndependentPlan { .. })));
    let (sharp, exact) = (fit(Epsilon::ScaledMedian(1e-3)), fit(Epsilon::Exact));
    assert!(sharp.diagnostics().converged);
    assert!(largest_difference(sharp.plan(), exact.plan()) < 1e-6);
    assert!(!exact.diagnostics().warnings.iter().any(|w| matches!(w, Warning::NearIndependentPlan { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_factored_form_is_the_published_double_sum(
        k_a in 1usize..9, k_b in 1usize..9, d in 1usize..70, seed in 0u64..1_000_000, kernel in 0usize..4,
        pct in proptest::option::of(0usize..5), h in 0.05f64..4.0,
    ) {
        let map = random_map(k_a, k_b, d, seed, CharsConfig { kernel: KERNELS[kernel], pct, bandwidth: h, ..config(1) });
        let x = noise(7, d, seed ^ 5) * 2.0;
        let exact = x.mapv(f64::from);
        let double = map.double_sum(exact.view()).unwrap();
        let scale = 1.0 + double.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        prop_assert!(largest_difference(&double, &map.shift_exact(exact.view()).unwrap()) < 1e-10 * scale);
        let fast = map.shift(x.view()).unwrap().mapv(f64::from);
        // Gates in f32: an error of 1e-6 in d²/(h·med) is one of the gate; narrow gates enlarge it.
        prop_assert!(largest_difference(&double, &fast) < 2e-6 * scale * (1.0 + 8.0 / h));
    }

    #[test]
    fn the_shift_lies_in_the_hull_of_the_shifts_between_clusters(
        k_a in 1usize..7, k_b in 1usize..7, d in 1usize..12, seed in 0u64..1_000_000,
    ) {
        let map = random_map(k_a, k_b, d, seed, config(1));
        let longest = (0..k_a).flat_map(|i| (0..k_b).map(move |j| (i, j)))
            .map(|(i, j)| norm(&(&map.target_centroids().row(j) - &map.source_centroids().row(i))))
            .fold(0.0, f64::max);
        let x = noise(9, d, seed ^ 6).mapv(f64::from) * 5.0;
        let gates = map.gates(x.mapv(|v| v as f32).view()).unwrap();
        for (shift, gates) in map.shift_exact(x.view()).unwrap().rows().into_iter().zip(gates.rows()) {
            prop_assert!(norm(shift) <= longest * (1.0 + 1e-12));
            prop_assert!((gates.sum() - 1.0).abs() < 1e-5 && gates.iter().all(|g| *g >= 0.0));
        }
    }

    #[test]
    fn thresholding_keeps_its_identities(
        k_a in 1usize..6, k_b in 1usize..6, d in 2usize..9, l in 0usize..12, seed in 0u64..1_000_000,
    ) {
        let map = random_map(k_a, k_b, d, seed, config(1));
        let principal = map.principal();
        prop_assert!(principal.rank() <= (k_a + k_b - 2).min(d));
        // Σ_tot formed as it is defined.
        let mut total = DMatrix::<f64>::zeros(d, d);
        let mut trace = 0.0;
        for i in 0..k_a {
            for j in 0..k_b {
                let v = &map.target_centroids().row(j) - &map.source_centroids().row(i) - map.mean_shift_exact();
                trace += map.plan()[(i, j)] * v.dot(&v);
                total += DMatrix::from_fn(d, d, |a, b| map.plan()[(i, j)] * v[a] * v[b]);
            }
        }
        let mut direct: Vec<f64> = nalgebra::SymmetricEigen::new(total).eigenvalues.iter().copied().collect();
        direct.sort_by(|a, b| b.total_cmp(a));
        prop_assert!((principal.values.iter().sum::<f64>() - trace).abs() < 1e-9 * (1.0 + trace));
        for (value, want) in principal.values.iter().zip(&direct) {
            prop_assert!((value - want).abs() < 1e-9 * (1.0 + trace));
        }
        let x = noise(6, d, seed ^ 8).mapv(f64::from) * 3.0;
        let full = map.shift_exact(x.view()).unwrap();
        let cut = again(&map, CharsConfig { pct: Some(l), ..map.config().clone() });
        let cut = cut.shift_exact(x.view()).unwrap();
        for (full, cut) in full.rows().into_iter().zip(cut.rows()) {
            let (full, cut) = (&full - map.mean_shift_exact(), &cut - map.mean_shift_exact());
            prop_assert!(norm(&cut) <= norm(&full) + 1e-9);
            if l >= principal.rank() {
                prop_assert!(largest_difference(&cut, &full) == 0.0);
            }
            // What is left is the projection: what was taken is orthogonal to it.
            prop_assert!((cut.dot(&(&full - &cut))).abs() < 1e-8 * (1.0 + norm(&full)).powi(2));
        }
    }

    #[test]
    fn translation_rotation_and_scale_go_through_the_map(seed in 0u64..1_000_000, scale in 0.01f64..100.0) {
        let d = 8;
        let map = random_map(5, 4, d, seed, config(1));
        let x = noise(6, d, seed ^ 9).mapv(f64::from) * 2.0;
        let shift = map.shift_exact(x.view()).unwrap();
        let with = |f: &dyn Fn(&Array2<f64>) -> Array2<f64>| {
            let (a, b) = (f(map.source_centroids()), f(map.target_centroids()));
            let map = CharsMap::from_parts(map.config().clone(), a, b, map.plan().clone(), Extra::default()).unwrap();
            map.shift_exact(f(&x).view()).unwrap()
        };
        let t = noise(1, d, seed ^ 0x10).row(0).mapv(f64::from) * 10.0;
        prop_assert!(largest_difference(&with(&|x| x + &t), &shift) < 1e-10);
        let q = DMatrix::from_fn(d, d, |i, j| f64::from(noise(d, d, seed ^ 0x11)[(i, j)])).qr().q();
        let q = Array2::from_shape_fn((d, d), |at| q[at]);
        prop_assert!(largest_difference(&with(&|x| x.dot(&q)), &shift.dot(&q)) < 1e-10);
        prop_assert!(largest_difference(&with(&|x| x * scale), &(&shift * scale)) < 1e-10 * scale.max(1.0));
    }

    #[test]
    fn names_of_clusters_and_splits_of_a_cluster_change_nothing(seed in 0u64..1_000_000, share in 0.1f64..0.9) {
        let map = random_map(4, 3, 6, seed, CharsConfig { kernel: Kernel::FixedSigma(2.0), ..config(1) });
        let x = noise(6, 6, seed ^ 0x12).mapv(f64::from) * 2.0;
        let shift = map.shift_exact(x.view()).unwrap();
        let (a, b, plan) = (map.source_centroids(), map.target_centroids(), map.plan());
        let built = |a, b, plan| {
            CharsMap::from_parts(map.config().clone(), a, b, plan, Extra::default()).unwrap().shift_exact(x.view()).unwrap()
        };
        let (rows, columns) = ([2, 0, 3, 1], [1, 2, 0]);
        let permuted = built(
            a.select(Axis(0), &rows),
            b.select(Axis(0), &columns),
            plan.select(Axis(0), &rows).select(Axis(1), &columns),
        );
        prop_assert!(largest_difference(&permuted, &shift) < 1e-12);
        let twice = [0, 1, 1, 2, 3];
        let mut split = plan.select(Axis(0), &twice);
        split.row_mut(1).mapv_inplace(|v| v * share);
        split.row_mut(2).mapv_inplace(|v| v * (1.0 - share));
        prop_assert!(largest_difference(&built(a.select(Axis(0), &twice), b.clone(), split), &shift) < 1e-12);
    }

    #[test]
    fn the_map_is_continuous_and_smooth_where_the_order_of_distances_stays(seed in 0u64..1_000_000) {
        let d = 5;
        let map = random_map(5, 5, d, seed, CharsConfig { bandwidth: 1.0, ..config(1) });
        let x = noise(1, d, seed ^ 0x13).mapv(f64::from);
        let direction = noise(1, d, seed ^ 0x14).mapv(f64::from);
        let at = |t: f64| map.shift_exact((&x + &(&direction * t)).view()).unwrap();
        // Continuity everywhere: also where the median changes its cluster.
        let steps: Vec<Array2<f64>> = (0..=400).map(|i| at(f64::from(i) * 0.005 - 1.0)).collect();
        for pair in steps.windows(2) {
            prop_assert!(largest_difference(&pair[0], &pair[1]) < 0.5);
        }
        let (near, far) = (at(1e-9), at(-1e-9));
        prop_assert!(largest_difference(&near, &far) < 1e-6);
        // Where the order stays, central differences of two step sizes agree to second order.
        let order = |t: f64| {
            let x = &x + &(&direction * t);
            let distance = |i: usize| norm(&(&x.row(0) - &map.source_centroids().row(i)));
            let mut order: Vec<usize> = (0..5).collect();
            order.sort_by(|&i, &j| distance(i).total_cmp(&distance(j)));
            order
        };
        if order(-1e-3) == order(1e-3) {
            let slope = |t: f64| (at(t) - at(-t)) / (2.0 * t);
            let scale = 1.0 + slope(1e-4).iter().fold(0.0f64, |m, v| m.max(v.abs()));
            prop_assert!(largest_difference(&slope(1e-4), &slope(1e-5)) < 1e-4 * scale);
        }
    }
}

#[test]
fn the_order_of_rows_of_a_fixed_clustering_changes_nothing() {
    let (source, target) = sets(40, 7, 15);
    let map = CharsMap::fit(source.view(), target.view(), &config(3)).unwrap();
    let start = map.source_centroids();
    let reversed: Vec<usize> = (0..source.nrows()).rev().collect();
    let k = steering_ot::KMeansConfig::default();
    let a = steering_ot::kmeans::from_start(source.view(), start.view(), &k).unwrap();
    let b = steering_ot::kmeans::from_start(source.select(Axis(0), &reversed).view(), start.view(), &k).unwrap();
    assert!(largest_difference(&a.centroids, &b.centroids) < 1e-12);
    assert_eq!(a.counts, b.counts);
}

#[test]
fn scaling_both_sets_scales_the_fitted_shift() {
    let (source, target) = sets(50, 9, 16);
    let config = config(4);
    let x = noise(5, 9, 17);
    let shift = CharsMap::fit(source.view(), target.view(), &config).unwrap().shift(x.view()).unwrap();
    for s in [0.125f32, 64.0] {
        let map = CharsMap::fit((&source * s).view(), (&target * s).view(), &config).unwrap();
        let scaled = map.shift((&x * s).view()).unwrap() / s;
        assert!(largest_difference(&scaled.mapv(f64::from), &shift.mapv(f64::from)) < 1e-4);
    }
}

#[test]
fn equal_sets_are_not_moved_by_the_exact_plan() {
    let (source, _) = sets(60, 11, 18);
    let config = CharsConfig { epsilon: Epsilon::Exact, ..config(5) };
    let map = CharsMap::fit(source.view(), source.view(), &config).unwrap();
    assert!(map.shift(source.view()).unwrap().iter().all(|v| *v == 0.0));
    // A regularised plan moves single clusters, but not their mean.
    let map = CharsMap::fit(source.view(), source.view(), &self::config(5)).unwrap();
    assert!(largest_difference(map.mean_shift_exact(), &Array1::zeros(11)) < 1e-9);
}

#[test]
fn a_plan_with_an_empty_row_ignores_that_cluster() {
    let a = array![[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]];
    let b = array![[1.0, 0.0], [5.0, 6.0]];
    let plan = array![[0.5, 0.0], [0.0, 0.0], [0.0, 0.5]];
    let map = CharsMap::from_parts(config(3), a, b, plan, Extra::default()).unwrap();
    let x = array![[1.0f32, 1.0], [5.0, 5.0]];
    let gates = map.gates(x.view()).unwrap();
    assert_eq!(gates[(0, 1)], 0.0);
    assert!(map.shift(x.view()).unwrap().iter().all(|v| v.is_finite()));
    assert!(
        largest_difference(
            &map.double_sum(x.mapv(f64::from).view()).unwrap(),
            &map.shift(x.view()).unwrap().mapv(f64::from)
        ) < 1e-5
    );
}
