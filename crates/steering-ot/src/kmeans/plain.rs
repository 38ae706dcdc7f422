//! Lloyd's iteration by direct differences in f64: the reference of the fast one.

use super::{KMeans, check_start, finish, means, reseed};
use crate::Result;
use crate::config::KMeansConfig;
use crate::data::{mean, squared_distance_to, standard, variance};
use ndarray::{Array2, ArrayView2};

/// As [`from_start`](super::from_start), with every distance a direct difference in f64. Slower; the tests compare with it.
///
/// # Errors
/// As [`from_start`](super::from_start).
pub fn from_start_plain(x: ArrayView2<'_, f32>, start: ArrayView2<'_, f64>, config: &KMeansConfig) -> Result<KMeans> {
    config.validate()?;
    check_start(x, start)?;
    let x = standard(x);
    let assign = |centroids: &Array2<f64>| {
        x.rows().into_iter().map(|row| nearest(row.as_slice().unwrap_or_default(), centroids)).collect()
    };
    Ok(iterate(x.view(), &start.to_owned(), start.nrows(), config, assign))
}

/// The nearest centroid; of several nearest the first.
pub(super) fn nearest(row: &[f32], centroids: &Array2<f64>) -> usize {
    let distance = |c: usize| squared_distance_to(row, centroids.row(c).as_slice().unwrap_or_default());
    let mut best = (0, distance(0));
    for c in 1..centroids.nrows() {
        let d = distance(c);
        if d < best.1 {
            best = (c, d);
        }
    }
    best.0
}

/// Lloyd's iteration around any way to assign rows to centroids.
pub(super) fn iterate(
    x: ArrayView2<'_, f32>,
    start: &Array2<f64>,
    requested: usize,
    config: &KMeansConfig,
    mut assign: impl FnMut(&Array2<f64>) -> Vec<usize>,
) -> KMeans {
    let k = start.nrows();
    let tolerance = config.tolerance * variance(x, &mean(x)).sum() / x.ncols() as f64;
    let mut centroids = start.as_standard_layout().into_owned();
    let mut labels: Vec<usize> = Vec::new();
    let (mut iterations, mut converged) = (0, false);
    while iterations < config.max_iterations && !converged {
        iterations += 1;
        let mut next = assign(&centroids);
        let (mut moved, mut counts) = means(x, &next, k);
        let own = |row: usize| {
            squared_distance_to(
                x.row(row).as_slice().unwrap_or_default(),
                centroids.row(next[row]).as_slice().unwrap_or_default(),
            )
        };
        let distances: Vec<f64> = if counts.contains(&0) { (0..next.len()).map(own).collect() } else { Vec::new() };
        if reseed(&mut next, &mut counts, |row| distances[row]) {
            (moved, counts) = means(x, &next, k);
        }
        for c in (0..k).filter(|&c| counts[c] == 0) {
            moved.row_mut(c).assign(&centroids.row(c));
        }
        let shift: f64 = (&moved - &centroids).mapv(|v| v * v).sum();
        converged = next == labels || shift <= tolerance;
        labels = next;
        centroids = moved;
    }
    finish(x, labels, k, requested, iterations, converged)
}
