//! Energy distance between two sets of activations: how far a transported set is from the target, without a probe that could
//! be fooled.

use crate::data::{check_pair, squared_distance, standard};
use crate::{Error, Result};
use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;

/// `2E‖X − Y‖ − E‖X − X′‖ − E‖Y − Y′‖` between rows, unbiased (pairs of different rows only), so it may be slightly negative
/// for equal distributions. In units of the activations.
///
/// # Errors
/// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`]; [`Error::TooFewSamples`] below 2 rows a side.
pub fn energy_distance(x: ArrayView2<'_, f32>, y: ArrayView2<'_, f32>) -> Result<f64> {
    check_pair(x, y)?;
    for (side, n) in [("source", x.nrows()), ("target", y.nrows())] {
        if n < 2 {
            return Err(Error::TooFewSamples { side, n, k: 2 });
        }
    }
    Ok(2.0 * mean_distance(x, y) - mean_distance_within(x) - mean_distance_within(y))
}

/// Mean of the energy distance over the groups that both sides have, each group against its own.
///
/// # Errors
/// As [`energy_distance`]; [`Error::DimMismatch`] for labels of another number, [`Error::InvalidArgument`] when no group is on
/// both sides.
pub fn conditional_energy_distance(
    x: ArrayView2<'_, f32>,
    x_groups: &[usize],
    y: ArrayView2<'_, f32>,
    y_groups: &[usize],
) -> Result<f64> {
    for (what, x, groups) in [("x_groups", x, x_groups), ("y_groups", y, y_groups)] {
        if groups.len() != x.nrows() {
            return Err(Error::dim(what, x.nrows(), groups.len()));
        }
    }
    let mut groups: Vec<usize> = x_groups.iter().copied().filter(|g| y_groups.contains(g)).collect();
    groups.sort_unstable();
    groups.dedup();
    if groups.is_empty() {
        return Err(Error::invalid("groups", "labels of which at least one is on both sides", "none in common"));
    }
    let rows = |x: ArrayView2<'_, f32>, of: &[usize], group: usize| -> Array2<f32> {
        let at: Vec<usize> = (0..of.len()).filter(|&i| of[i] == group).collect();
        x.select(Axis(0), &at)
    };
    let mut sum = 0.0;
    for &group in &groups {
        sum += energy_distance(rows(x, x_groups, group).view(), rows(y, y_groups, group).view())?;
    }
    Ok(sum / groups.len() as f64)
}

/// Mean distance between rows of `x` and rows of `y`.
fn mean_distance(x: ArrayView2<'_, f32>, y: ArrayView2<'_, f32>) -> f64 {
    let (x, y) = (standard(x), standard(y));
    let (n, m, d) = (x.nrows(), y.nrows(), x.ncols());
    let (x, y) = (x.as_slice().unwrap_or_default(), y.as_slice().unwrap_or_default());
    // One sum a row, added in order: the same result on any number of threads.
    let sums: Vec<f64> =
        x.par_chunks(d).map(|row| y.chunks_exact(d).map(|other| squared_distance(row, other).sqrt()).sum()).collect();
    sums.iter().sum::<f64>() / (n as f64 * m as f64)
}

/// Mean distance between different rows of `x`.
fn mean_distance_within(x: ArrayView2<'_, f32>) -> f64 {
    let x = standard(x);
    let (n, d) = x.dim();
    let x = x.as_slice().unwrap_or_default();
    let sums: Vec<f64> = (0..n)
        .into_par_iter()
        .map(|i| {
            x[(i + 1) * d..].chunks_exact(d).map(|other| squared_distance(&x[i * d..(i + 1) * d], other).sqrt()).sum()
        })
        .collect();
    2.0 * sums.iter().sum::<f64>() / (n as f64 * (n as f64 - 1.0))
}
