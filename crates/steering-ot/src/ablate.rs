//! Directional ablation: takes out of an input its part along a direction.

use crate::{Error, Result};
use ndarray::{Array2, ArrayView2};

/// A shift shorter than this times `1 + ‖x‖` has no direction worth the name.
const NO_DIRECTION: f64 = 1e-8;

/// `x − r̂ r̂ᵀ x` with `r̂ = v/‖v‖`, row by row (`[M, D]`); `shift` is `[M, D]`, or `[1, D]` for the same direction everywhere.
/// Rows whose shift is shorter than `1e-8·(1 + ‖x‖)` stay as they are.
///
/// With one direction this is the usual directional ablation \[prior work: Arditi et al.\]; with the shift `v̂(x)` of a map it
/// is taken per input \[reconstruction\].
///
/// # Errors
/// [`Error::DimMismatch`] for other shapes, [`Error::NonFinite`].
pub fn ablate(shift: ArrayView2<'_, f32>, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
    if shift.ncols() != x.ncols() {
        return Err(Error::dim("Each row of the shift", x.ncols(), shift.ncols()));
    }
    let Some(shift) = shift.broadcast(x.raw_dim()) else {
        return Err(Error::dim("The shift, in rows,", x.nrows(), shift.nrows()));
    };
    let mut out = x.to_owned();
    for (row, (mut out, v)) in out.rows_mut().into_iter().zip(shift.rows()).enumerate() {
        let (mut squares, mut product, mut length) = (0.0f64, 0.0f64, 0.0f64);
        for (x, v) in out.iter().zip(v) {
            let (x, v) = (f64::from(*x), f64::from(*v));
            squares += v * v;
            product += v * x;
            length += x * x;
        }
        if !squares.is_finite() {
            return Err(Error::NonFinite { side: "shift", row });
        }
        if !length.is_finite() {
            return Err(Error::NonFinite { side: "x", row });
        }
        if squares.sqrt() < NO_DIRECTION * (1.0 + length.sqrt()) {
            continue;
        }
        let along = product / squares;
        out.zip_mut_with(&v, |x, v| *x = (f64::from(*x) - along * f64::from(*v)) as f32);
    }
    Ok(out)
}
