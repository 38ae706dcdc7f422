//! k-means: k-means++ start, Lloyd's iteration, and what it can't do said openly (fewer clusters than asked for when rows
//! repeat).
//!
//! Each centroid that comes out is the f64 mean of its rows, so `Σ (n_i/N) a_i` is the mean of the set to rounding: the
//! mass identity of the steering map rests on it.

mod lloyd;
mod plain;
mod start;

pub use plain::from_start_plain;

use crate::config::KMeansConfig;
use crate::data::{check, squared_distance_to, standard};
use crate::{Error, Result};
use ndarray::{Array2, ArrayView2};
use tensor::Seed;

/// A clustering of the rows of a set.
#[derive(Debug, Clone, PartialEq)]
pub struct KMeans {
    /// Means of the clusters (`[K, D]`); K is smaller than asked for when there are fewer distinct rows.
    pub centroids: Array2<f64>,
    /// The cluster of each row (`[N]`).
    pub labels: Vec<usize>,
    /// Rows of each cluster (`[K]`), none 0.
    pub counts: Vec<usize>,
    /// Sum of squared distances to the own centroid.
    pub inertia: f64,
    /// Lloyd iterations done.
    pub iterations: usize,
    /// Whether the centroids stood still (within the tolerance) before the cap on iterations.
    pub converged: bool,
    /// Clusters that were asked for.
    pub requested: usize,
}

impl KMeans {
    /// Number of clusters.
    pub fn k(&self) -> usize {
        self.counts.len()
    }

    /// Share of the rows in each cluster.
    pub fn masses(&self) -> Vec<f64> {
        let n = self.labels.len() as f64;
        self.counts.iter().map(|&c| c as f64 / n).collect()
    }
}

/// Clusters the rows of `x` (`[N, D]`): k-means++ start from the seed's stream, then Lloyd.
///
/// # Errors
/// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::TooFewSamples`] for N < `k`, [`Error::InvalidArgument`] for `k` = 0.
pub fn fit(x: ArrayView2<'_, f32>, k: usize, config: &KMeansConfig, seed: u64) -> Result<KMeans> {
    fit_side(x, k, config, seed, "x")
}

/// As [`fit`], with the side's name in errors.
pub(crate) fn fit_side(
    x: ArrayView2<'_, f32>,
    k: usize,
    config: &KMeansConfig,
    seed: u64,
    side: &'static str,
) -> Result<KMeans> {
    config.validate()?;
    check(x, side)?;
    if k == 0 {
        return Err(Error::invalid("k", "at least 1", k));
    }
    if x.nrows() < k {
        return Err(Error::TooFewSamples { side, n: x.nrows(), k });
    }
    let x = standard(x);
    let mut rng = Seed::new(seed).child("kmeans").rng();
    let start = start::plus_plus(x.view(), k, config.trials, &mut rng);
    Ok(lloyd::run(x.view(), &start, k, config))
}

/// Lloyd's iteration from these centroids (`[K, D]`), so that another implementation can be compared from the same start.
///
/// # Errors
/// As [`fit`]; [`Error::DimMismatch`] for another width, [`Error::NonFinite`] for the start.
pub fn from_start(x: ArrayView2<'_, f32>, start: ArrayView2<'_, f64>, config: &KMeansConfig) -> Result<KMeans> {
    config.validate()?;
    check_start(x, start)?;
    let x = standard(x);
    Ok(lloyd::run(x.view(), &start.to_owned(), start.nrows(), config))
}

fn check_start(x: ArrayView2<'_, f32>, start: ArrayView2<'_, f64>) -> Result<()> {
    check(x, "x")?;
    if start.is_empty() {
        return Err(Error::EmptySet { side: "start" });
    }
    if start.ncols() != x.ncols() {
        return Err(Error::dim("Each start centroid", x.ncols(), start.ncols()));
    }
    if x.nrows() < start.nrows() {
        return Err(Error::TooFewSamples { side: "x", n: x.nrows(), k: start.nrows() });
    }
    match start.rows().into_iter().position(|row| !row.iter().all(|v| v.is_finite())) {
        Some(row) => Err(Error::NonFinite { side: "start", row }),
        None => Ok(()),
    }
}

/// Means of the rows under `labels`, and how many there are.
fn means(x: ArrayView2<'_, f32>, labels: &[usize], k: usize) -> (Array2<f64>, Vec<usize>) {
    let mut sums = Array2::<f64>::zeros((k, x.ncols()));
    let mut counts = vec![0usize; k];
    for (row, &label) in x.rows().into_iter().zip(labels) {
        counts[label] += 1;
        sums.row_mut(label).zip_mut_with(&row, |s, &v| *s += f64::from(v));
    }
    for (mut sum, &count) in sums.rows_mut().into_iter().zip(&counts) {
        sum /= count.max(1) as f64;
    }
    (sums, counts)
}

/// Gives each empty cluster the row that is farthest from its own centroid. Clusters stay empty only when every row lies on
/// its centroid.
fn reseed(labels: &mut [usize], counts: &mut [usize], own_distance: impl Fn(usize) -> f64) -> bool {
    if counts.iter().all(|&c| c > 0) {
        return false;
    }
    let mut distances: Vec<f64> = (0..labels.len()).map(own_distance).collect();
    let mut moved = false;
    for empty in 0..counts.len() {
        if counts[empty] > 0 {
            continue;
        }
        let farthest = (0..labels.len())
            .filter(|&row| counts[labels[row]] > 1 && distances[row] > 0.0)
            .reduce(|best, row| if distances[row] > distances[best] { row } else { best });
        if let Some(row) = farthest {
            counts[labels[row]] -= 1;
            labels[row] = empty;
            counts[empty] = 1;
            distances[row] = 0.0;
            moved = true;
        }
    }
    moved
}

/// Puts the result together; clusters that stayed empty go.
fn finish(
    x: ArrayView2<'_, f32>,
    mut labels: Vec<usize>,
    k: usize,
    requested: usize,
    iterations: usize,
    converged: bool,
) -> KMeans {
    let mut kept = vec![usize::MAX; k];
    let mut next = 0;
    let mut used = vec![false; k];
    for &label in &labels {
        used[label] = true;
    }
    for (cluster, _) in used.iter().enumerate().filter(|(_, used)| **used) {
        kept[cluster] = next;
        next += 1;
    }
    for label in &mut labels {
        *label = kept[*label];
    }
    let (centroids, counts) = means(x, &labels, next);
    let inertia = x
        .rows()
        .into_iter()
        .zip(&labels)
        .map(|(row, &label)| {
            // Rows of both lie one after the other: x is in standard layout, and so are means.
            squared_distance_to(row.as_slice().unwrap_or_default(), centroids.row(label).as_slice().unwrap_or_default())
        })
        .sum();
    KMeans { centroids, labels, counts, inertia, iterations, converged, requested }
}
