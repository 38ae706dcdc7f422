//! Checks and sums that every fit needs.

use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView2};

/// That a set has rows and only finite values.
pub(crate) fn check(x: ArrayView2<'_, f32>, side: &'static str) -> Result<()> {
    if x.is_empty() {
        return Err(Error::EmptySet { side });
    }
    match x.rows().into_iter().position(|row| !row.iter().all(|v| v.is_finite())) {
        Some(row) => Err(Error::NonFinite { side, row }),
        None => Ok(()),
    }
}

/// That both sets can be used together; gives their width.
pub(crate) fn check_pair(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>) -> Result<usize> {
    check(source, "source")?;
    check(target, "target")?;
    if source.ncols() != target.ncols() {
        return Err(Error::dim("Each row of the target set", source.ncols(), target.ncols()));
    }
    Ok(source.ncols())
}

/// Mean of the rows, in f64.
pub(crate) fn mean(x: ArrayView2<'_, f32>) -> Array1<f64> {
    let mut sum = Array1::<f64>::zeros(x.ncols());
    for row in x.rows() {
        sum.zip_mut_with(&row, |s, &v| *s += f64::from(v));
    }
    sum / x.nrows() as f64
}

/// Variance of each coordinate about `mean` (divided by N), in f64.
pub(crate) fn variance(x: ArrayView2<'_, f32>, mean: &Array1<f64>) -> Array1<f64> {
    let mut sum = Array1::<f64>::zeros(x.ncols());
    for row in x.rows() {
        ndarray::Zip::from(&mut sum).and(row).and(mean).for_each(|s, &v, &m| *s += (f64::from(v) - m).powi(2));
    }
    sum / x.nrows() as f64
}

/// The rows as they lie in memory, copied only if they don't lie one after the other.
pub(crate) fn standard(x: ArrayView2<'_, f32>) -> ndarray::CowArray<'_, f32, ndarray::Ix2> {
    if x.is_standard_layout() {
        ndarray::CowArray::from(x)
    } else {
        ndarray::CowArray::from(x.as_standard_layout().into_owned())
    }
}

/// An f64 array in f32, or an error that names what overflows.
pub(crate) fn narrow(x: &Array2<f64>, what: &str) -> Result<Array2<f32>> {
    let narrowed = x.mapv(|v| v as f32);
    if narrowed.iter().all(|v| v.is_finite()) {
        Ok(narrowed)
    } else {
        let largest = x.iter().fold(0.0f64, |m, v| if v.abs() > m || v.is_nan() { v.abs() } else { m });
        Err(Error::invalid(what, "within the range of f32", largest))
    }
}

/// Squared distance of two rows by direct differences, summed in f64.
pub(crate) fn squared_distance(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f64 =
        a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
    for (x, y) in a8.zip(b8) {
        for l in 0..8 {
            let d = f64::from(x[l]) - f64::from(y[l]);
            lanes[l] += d * d;
        }
    }
    lanes.iter().sum::<f64>() + tail
}

/// Squared distance of a row from a point in f64.
pub(crate) fn squared_distance_to(a: &[f32], b: &[f64]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum();
    for (x, y) in a8.zip(b8) {
        for l in 0..8 {
            let d = f64::from(x[l]) - y[l];
            lanes[l] += d * d;
        }
    }
    lanes.iter().sum::<f64>() + tail
}
