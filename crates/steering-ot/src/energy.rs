//! Energy distance between two sets of activations: how far a transported set is from the target, without a probe that could
//! be fooled.

use crate::data::{check_pair, standard};
use crate::kernel::row_distance;
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

/// Rows that are compared with all others at a time, so that these come from memory once for all of them.
const TILE: usize = 16;

/// Mean distance between rows of `x` and rows of `y`.
fn mean_distance(x: ArrayView2<'_, f32>, y: ArrayView2<'_, f32>) -> f64 {
    let (x, y) = (standard(x), standard(y));
    let (n, m, d) = (x.nrows(), y.nrows(), x.ncols());
    let (x, y) = (x.as_slice().unwrap_or_default(), y.as_slice().unwrap_or_default());
    let tile = |tile: &[f32]| -> f64 {
        y.chunks_exact(d).flat_map(|b| tile.chunks_exact(d).map(move |a| row_distance(a, b).sqrt())).sum()
    };
    // One sum a tile, added in order: the same result on any number of threads.
    let sums: Vec<f64> = x.par_chunks(TILE * d).map(tile).collect();
    sums.iter().sum::<f64>() / (n as f64 * m as f64)
}

/// Mean distance between different rows of `x`.
fn mean_distance_within(x: ArrayView2<'_, f32>) -> f64 {
    // A row's distance to itself adds nothing, and the other pairs are all counted twice.
    let n = x.nrows() as f64;
    mean_distance(x, x) * n / (n - 1.0)
}
