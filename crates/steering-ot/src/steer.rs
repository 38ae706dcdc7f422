//! One interface for every map, so that a baseline is drop-in.

use crate::{CharsMap, Error, Result};
use ndarray::{Array1, Array2, ArrayD, ArrayView2};
use std::collections::BTreeMap;
use std::fmt::Debug;

/// What a map is made of: enough to build it again, bit for bit.
#[derive(Debug, Clone, PartialEq)]
pub struct Parts {
    /// Which map: [`Steer::name`] of the one that gave the parts.
    pub kind: String,
    /// Its settings.
    pub settings: serde_json::Value,
    /// Its arrays.
    pub arrays: BTreeMap<String, ArrayD<f64>>,
}

/// A map of activations: `T(x)`, applied as `x + α (T(x) − x)`.
pub trait Steer: Send + Sync + Debug {
    /// What the map is called in files and tables.
    fn name(&self) -> &'static str;

    /// Width D of the activations.
    fn width(&self) -> usize;

    /// `T(x) − x` for each row (`[M, D]`).
    ///
    /// # Errors
    /// [`Error::DimMismatch`] for rows of another width, [`Error::NonFinite`] for NaN or infinity.
    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>>;

    /// Mean of the shift over the source set of the fit (`[D]`): what a plain control vector would be; `None` if there is none.
    fn mean_shift(&self) -> Option<Array1<f32>>;

    /// What the map is made of.
    fn parts(&self) -> Parts;

    /// `x + alpha·(T(x) − x)`.
    ///
    /// # Errors
    /// As [`shift`](Self::shift); [`Error::InvalidArgument`] for an `alpha` that isn't finite.
    fn transport(&self, x: ArrayView2<'_, f32>, alpha: f32) -> Result<Array2<f32>> {
        if !alpha.is_finite() {
            return Err(Error::invalid("alpha", "finite", alpha));
        }
        let mut moved = self.shift(x)?;
        moved.zip_mut_with(&x, |v, x| *v = x + alpha * *v);
        Ok(moved)
    }

    /// [`shift`](Self::shift) on memory: `x` and `out` are `[M, D]`, row after row.
    ///
    /// # Errors
    /// As [`shift`](Self::shift); `out` then holds nothing of use.
    fn shift_into(&self, x: &[f32], out: &mut [f32]) -> Result<()> {
        let d = self.width();
        if out.len() != x.len() {
            return Err(Error::dim("out", x.len(), out.len()));
        }
        let rows = ArrayView2::from_shape((x.len() / d.max(1), d), x)
            .map_err(|_| Error::invalid("x", format!("rows of {d} values"), format!("{} values", x.len())))?;
        let shift = self.shift(rows)?;
        out.iter_mut().zip(&shift).for_each(|(out, v)| *out = *v);
        Ok(())
    }
}

impl Steer for CharsMap {
    fn name(&self) -> &'static str {
        "chars"
    }

    fn width(&self) -> usize {
        self.width()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        self.shift(x)
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some(self.mean_shift())
    }

    fn parts(&self) -> Parts {
        Parts { kind: "chars".to_owned(), settings: serde_json::Value::Null, arrays: BTreeMap::new() }
    }

    fn transport(&self, x: ArrayView2<'_, f32>, alpha: f32) -> Result<Array2<f32>> {
        self.transport(x, alpha)
    }

    fn shift_into(&self, x: &[f32], out: &mut [f32]) -> Result<()> {
        self.shift_into(x, out)
    }
}

/// Builds the map again that gave these parts.
///
/// # Errors
/// [`Error::InvalidArgument`] for an unknown kind, missing arrays or settings; the errors of the map itself.
pub fn from_parts(parts: Parts) -> Result<Box<dyn Steer>> {
    Err(Error::invalid("kind", "a known map", parts.kind))
}
