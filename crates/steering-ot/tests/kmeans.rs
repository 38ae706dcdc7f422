//! Clustering: the fast iteration against the plain one, and what can go wrong.

#![allow(clippy::needless_pass_by_value)] // array views

mod common;

use common::{around, largest_difference, mean, noise, sets};
use ndarray::{Array1, Array2, Axis};
use proptest::prelude::*;
use steering_ot::kmeans::{fit, from_start, from_start_plain};
use steering_ot::{Error, KMeansConfig, ndarray};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn the_fast_iteration_is_the_plain_one(n in 8usize..60, d in 1usize..40, k in 1usize..8, seed in 0u64..1_000_000, far in 0u32..5) {
        // Far from the origin the expansion into products would cancel.
        let x = noise(n, d, seed) + 10f32.powi(far as i32);
        let start = x.slice(ndarray::s![..k, ..]).mapv(f64::from);
        let config = KMeansConfig::default();
        let fast = from_start(x.view(), start.view(), &config).unwrap();
        let plain = from_start_plain(x.view(), start.view(), &config).unwrap();
        prop_assert_eq!(&fast.labels, &plain.labels);
        prop_assert_eq!(fast, plain);
    }

    #[test]
    fn centroids_are_the_means_of_their_rows(n in 8usize..60, k in 1usize..8, seed in 0u64..1_000_000, trials in 0usize..3) {
        let x = noise(n, 5, seed);
        let c = fit(x.view(), k, &KMeansConfig { trials, ..KMeansConfig::default() }, seed).unwrap();
        prop_assert_eq!(c.k(), k);
        prop_assert_eq!(c.counts.iter().sum::<usize>(), n);
        let grand = Array1::from(c.masses()).dot(&c.centroids);
        prop_assert!(largest_difference(&grand, &mean(x.view())) < 1e-12);
        for cluster in 0..k {
            let rows: Vec<usize> = (0..n).filter(|&i| c.labels[i] == cluster).collect();
            prop_assert_eq!(rows.len(), c.counts[cluster]);
            prop_assert!(largest_difference(&mean(x.select(Axis(0), &rows).view()), c.centroids.row(cluster)) < 1e-12);
        }
    }
}

#[test]
fn separated_clusters_are_found_and_the_seed_decides_the_rest() {
    let centres = Array2::from_shape_fn((5, 8), |(i, d)| if i == d { 30.0 } else { 0.0 });
    let x = around(&centres, 100, 0.5, 3);
    let config = KMeansConfig { trials: 0, ..KMeansConfig::default() };
    let c = fit(x.view(), 5, &config, 1).unwrap();
    assert_eq!(c.counts, [20; 5]);
    assert!((0..100).all(|i| c.labels[i] == c.labels[i % 5]));
    assert!(c.converged);
    assert_eq!(fit(x.view(), 5, &config, 1).unwrap(), c);
    let (noise, _) = sets(80, 6, 4);
    assert_ne!(fit(noise.view(), 7, &config, 1).unwrap().labels, fit(noise.view(), 7, &config, 2).unwrap().labels);
}

#[test]
fn an_empty_cluster_is_started_anew_at_the_farthest_row() {
    let x = ndarray::array![[0.0f32, 0.0], [0.1, 0.0], [0.2, 0.0], [9.0, 0.0]];
    // The second start is nobody's nearest.
    let start = ndarray::array![[0.1, 0.0], [-500.0, 0.0]];
    for c in [
        from_start(x.view(), start.view(), &KMeansConfig::default()),
        from_start_plain(x.view(), start.view(), &KMeansConfig::default()),
    ] {
        let c = c.unwrap();
        assert_eq!(c.counts, [3, 1]);
        assert_eq!(c.labels, [0, 0, 0, 1]);
    }
}

#[test]
fn fewer_distinct_rows_than_clusters_give_fewer_clusters() {
    let same = Array2::from_elem((10, 3), 2.5f32);
    let c = fit(same.view(), 4, &KMeansConfig::default(), 0).unwrap();
    assert_eq!((c.k(), c.requested, c.inertia), (1, 4, 0.0));
    let mut two = same;
    two.row_mut(7).fill(1.0);
    let c = fit(two.view(), 4, &KMeansConfig::default(), 0).unwrap();
    assert_eq!(c.k(), 2);
    let start = ndarray::array![[2.5, 2.5, 2.5], [2.5, 2.5, 2.5], [1.0, 1.0, 1.0]];
    assert_eq!(from_start(two.view(), start.view(), &KMeansConfig::default()).unwrap().k(), 2);
}

#[test]
fn values_whose_squares_overflow_f32_are_clustered() {
    let x = noise(30, 4, 8) * 1e30;
    let c = fit(x.view(), 3, &KMeansConfig::default(), 0).unwrap();
    let small = fit((&x * 1e-30).view(), 3, &KMeansConfig::default(), 0).unwrap();
    assert_eq!(c.labels, small.labels);
    assert!(c.inertia.is_finite());
}

#[test]
fn bad_input_is_named() {
    let config = KMeansConfig::default();
    let x = noise(5, 3, 1);
    assert!(matches!(fit(x.view(), 6, &config, 0), Err(Error::TooFewSamples { n: 5, k: 6, .. })));
    assert!(matches!(fit(x.view(), 0, &config, 0), Err(Error::InvalidArgument { .. })));
    assert!(matches!(fit(Array2::zeros((0, 3)).view(), 1, &config, 0), Err(Error::EmptySet { .. })));
    assert!(matches!(fit(Array2::zeros((3, 0)).view(), 1, &config, 0), Err(Error::EmptySet { .. })));
    let mut bad = x.clone();
    bad[(2, 1)] = f32::NAN;
    assert!(matches!(fit(bad.view(), 2, &config, 0), Err(Error::NonFinite { row: 2, .. })));
    let start = |n, d, v| Array2::from_elem((n, d), v);
    assert!(matches!(from_start(x.view(), start(2, 4, 0.0).view(), &config), Err(Error::DimMismatch { .. })));
    assert!(matches!(from_start(x.view(), start(6, 3, 0.0).view(), &config), Err(Error::TooFewSamples { .. })));
    assert!(matches!(from_start(x.view(), start(2, 3, f64::NAN).view(), &config), Err(Error::NonFinite { .. })));
    assert!(matches!(from_start(x.view(), start(0, 3, 0.0).view(), &config), Err(Error::EmptySet { .. })));
    assert!(KMeansConfig { max_iterations: 0, ..config }.validate().is_err());
    assert!(KMeansConfig { tolerance: -1.0, ..config }.validate().is_err());
}
