//! Choices that the data can make: how many clusters, how sharp a plan \[reconstruction: ours\].

use crate::chars::{Clusters, fit_clustered};
use crate::config::{CharsConfig, Coupling, Epsilon};
use crate::data::{check, check_pair, squared_distance};
use crate::energy::energy_distance;
use crate::kmeans;
use crate::{CharsMap, Error, KMeansConfig, Result};
use ndarray::{Array2, ArrayView2, Axis};
use rand::Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use tensor::Seed;

/// What [`choose_epsilon`] tries.
pub const CANDIDATES: [Epsilon; 5] = [
    Epsilon::Exact,
    Epsilon::ScaledMedian(0.05),
    Epsilon::ScaledMedian(0.1),
    Epsilon::ScaledMedian(0.3),
    Epsilon::ScaledMedian(1.0),
];
/// Random splits over which a choice is averaged.
const SPLITS: u64 = 3;
/// Share of the rows that a split holds out.
const HELD_OUT: f64 = 0.25;
/// Most rows of which silhouettes are computed: the number of distances grows with its square.
const SILHOUETTE_ROWS: usize = 1500;

/// How [`auto_k`] judges a number of clusters.
#[derive(Debug, Clone)]
pub enum Criterion<'a> {
    /// The bend of the inertia over K: farthest below the chord from the first to the last K.
    Elbow,
    /// Mean silhouette; 0 for K = 1.
    Silhouette,
    /// Energy distance from held-out transported rows of `x` to held-out rows of this target (`[N_B, D]`), with as many clusters
    /// on both sides and everything else as configured.
    HeldOutEd {
        /// The target set.
        target: ArrayView2<'a, f32>,
        /// Everything but the numbers of clusters.
        config: &'a CharsConfig,
    },
}

/// A number of clusters and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AutoK {
    /// The chosen number.
    pub k: usize,
    /// Each number that was tried and its score: inertia, silhouette or energy distance.
    pub scores: Vec<(usize, f64)>,
}

/// Chooses the number of clusters of `x` (`[N, D]`) from a range.
///
/// # Errors
/// [`Error::EmptySet`], [`Error::NonFinite`]; [`Error::InvalidArgument`] for an empty range or one that starts at 0;
/// [`Error::TooFewSamples`] for a range that ends above the rows there are.
pub fn auto_k(
    x: ArrayView2<'_, f32>,
    range: RangeInclusive<usize>,
    criterion: &Criterion<'_>,
    seed: u64,
) -> Result<AutoK> {
    check(x, "x")?;
    if range.is_empty() || *range.start() == 0 {
        return Err(Error::invalid("range", "not empty and from at least 1", format!("{range:?}")));
    }
    if *range.end() > x.nrows() {
        return Err(Error::TooFewSamples { side: "x", n: x.nrows(), k: *range.end() });
    }
    let config = KMeansConfig::default();
    let mut scores = Vec::new();
    for k in range {
        let score = match criterion {
            Criterion::Elbow => kmeans::fit(x, k, &config, seed)?.inertia,
            Criterion::Silhouette => silhouette(x, &kmeans::fit(x, k, &config, seed)?.labels, seed),
            Criterion::HeldOutEd { target, config } => {
                let config = CharsConfig { seed, ..(*config).clone() }.with_clusters(k);
                held_out(x, *target, &config, std::slice::from_ref(&config.epsilon))?[0]
            }
        };
        scores.push((k, score));
    }
    let best = match criterion {
        Criterion::Elbow => elbow(&scores),
        Criterion::Silhouette => least(scores.iter().map(|(_, s)| -s)),
        Criterion::HeldOutEd { .. } => least(scores.iter().map(|(_, s)| *s)),
    };
    Ok(AutoK { k: scores[best].0, scores })
}

/// The regularisation with the least energy distance on held-out rows, and the score of each candidate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpsilonChoice {
    /// The chosen one.
    pub epsilon: Epsilon,
    /// Each candidate and its mean energy distance.
    pub scores: Vec<(Epsilon, f64)>,
}

/// Chooses the regularisation: fits on three quarters of both sides, moves the other quarter of the source with α = 1 and
/// measures its energy distance to the other quarter of the target; the mean over three splits decides.
///
/// # Errors
/// As [`CharsMap::fit`]; [`Error::TooFewSamples`] when three quarters of a side are fewer than its clusters, or a quarter
/// fewer than 2 rows.
pub fn choose_epsilon(
    source: ArrayView2<'_, f32>,
    target: ArrayView2<'_, f32>,
    config: &CharsConfig,
) -> Result<EpsilonChoice> {
    config.validate()?;
    check_pair(source, target)?;
    let scores = held_out(source, target, config, &CANDIDATES)?;
    let best = least(scores.iter().copied());
    Ok(EpsilonChoice { epsilon: CANDIDATES[best], scores: CANDIDATES.into_iter().zip(scores).collect() })
}

/// The configuration with [`Epsilon::Auto`] replaced by what it chooses.
pub(crate) fn resolve(
    source: ArrayView2<'_, f32>,
    target: ArrayView2<'_, f32>,
    config: &CharsConfig,
) -> Result<(CharsConfig, Vec<(Epsilon, f64)>)> {
    if config.epsilon != Epsilon::Auto || config.coupling != Coupling::Ot {
        return Ok((config.clone(), Vec::new()));
    }
    let choice = choose_epsilon(source, target, config)?;
    Ok((CharsConfig { epsilon: choice.epsilon, ..config.clone() }, choice.scores))
}

/// Mean energy distance of each candidate over the splits; clusters are shared between candidates.
fn held_out(
    source: ArrayView2<'_, f32>,
    target: ArrayView2<'_, f32>,
    config: &CharsConfig,
    candidates: &[Epsilon],
) -> Result<Vec<f64>> {
    let mut sums = vec![0.0; candidates.len()];
    for split in 0..SPLITS {
        let seed = Seed::new(config.seed).child("held-out").index(split);
        let [fit_a, held_a] = halves(source, "source", config.k_source, seed.child("source"))?;
        let [fit_b, held_b] = halves(target, "target", config.k_target, seed.child("target"))?;
        let clusters = Clusters::fit(fit_a.view(), fit_b.view(), config)?;
        for (sum, &epsilon) in sums.iter_mut().zip(candidates) {
            let config = CharsConfig { epsilon, strict: false, ..config.clone() };
            let map: CharsMap = match epsilon {
                Epsilon::Auto => CharsMap::fit(fit_a.view(), fit_b.view(), &config)?,
                _ => fit_clustered(fit_a.view(), fit_b.view(), &clusters, &config)?,
            };
            *sum += energy_distance(map.transport(held_a.view(), 1.0)?.view(), held_b.view())?;
        }
    }
    Ok(sums.into_iter().map(|s| s / SPLITS as f64).collect())
}

/// Rows to fit on and rows held out.
fn halves(x: ArrayView2<'_, f32>, side: &'static str, k: usize, seed: Seed) -> Result<[Array2<f32>; 2]> {
    let n = x.nrows();
    let held = ((n as f64 * HELD_OUT) as usize).max(2);
    if n < held + k {
        return Err(Error::TooFewSamples { side, n, k: k + held });
    }
    let order = shuffled(n, seed);
    Ok([x.select(Axis(0), &order[held..]), x.select(Axis(0), &order[..held])])
}

fn shuffled(n: usize, seed: Seed) -> Vec<usize> {
    let mut rng = seed.rng();
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, rng.random_range(0..=i));
    }
    order
}

fn least(scores: impl Iterator<Item = f64>) -> usize {
    scores.enumerate().fold((0, f64::INFINITY), |best, (i, s)| if s < best.1 { (i, s) } else { best }).0
}

/// The place farthest below the chord, both axes scaled to 0..1; the first where there is none.
fn elbow(scores: &[(usize, f64)]) -> usize {
    let (first, last) = (scores[0], scores[scores.len() - 1]);
    let (width, drop) = ((last.0 - first.0) as f64, first.1 - last.1);
    if !(width > 0.0 && drop > 0.0) {
        return 0;
    }
    least(scores.iter().map(|(k, s)| (s - last.1) / drop + (k - first.0) as f64 / width))
}

/// Mean over rows of `(b − a)/max(a, b)`: `a` the mean distance to the own cluster, `b` to the nearest other one.
fn silhouette(x: ArrayView2<'_, f32>, labels: &[usize], seed: u64) -> f64 {
    let k = labels.iter().max().map_or(0, |m| m + 1);
    if k < 2 {
        return 0.0;
    }
    let mut rows = shuffled(x.nrows(), Seed::new(seed).child("silhouette"));
    rows.truncate(SILHOUETTE_ROWS);
    let x = x.select(Axis(0), &rows);
    let labels: Vec<usize> = rows.iter().map(|&i| labels[i]).collect();
    let mut counts = vec![0usize; k];
    for &label in &labels {
        counts[label] += 1;
    }
    let d = x.ncols();
    let values = x.as_slice().unwrap_or_default();
    let of_row = |i: usize| {
        let mut sums = vec![0.0; k];
        for (other, &label) in values.chunks_exact(d).zip(&labels) {
            sums[label] += squared_distance(&values[i * d..(i + 1) * d], other).sqrt();
        }
        let own = labels[i];
        if counts[own] < 2 {
            return 0.0;
        }
        let a = sums[own] / (counts[own] - 1) as f64;
        let b = (0..k)
            .filter(|&c| c != own && counts[c] > 0)
            .map(|c| sums[c] / counts[c] as f64)
            .fold(f64::INFINITY, f64::min);
        if b.is_finite() && a.max(b) > 0.0 { (b - a) / a.max(b) } else { 0.0 }
    };
    let each: Vec<f64> = (0..labels.len()).into_par_iter().map(of_row).collect();
    each.iter().sum::<f64>() / each.len() as f64
}
