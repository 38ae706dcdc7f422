//! The same shift for every input.

use crate::chars::check_input;
use crate::data::{check_pair, mean};
use crate::steer::{Parts, Steer};
use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView2, Ix1};

/// `v` for each row of `x`.
pub(super) fn everywhere(v: &Array1<f64>, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
    check_input(x, v.len())?;
    let v = v.mapv(|v| v as f32);
    // A view of x's own shape can always be broadcast to from one row.
    v.broadcast(x.raw_dim()).map(|all| all.to_owned()).ok_or_else(|| Error::dim("Each row of x", v.len(), x.ncols()))
}

/// A vector that fits f32.
pub(super) fn representable(v: Array1<f64>, what: &str) -> Result<Array1<f64>> {
    match v.iter().find(|v| !(**v as f32).is_finite()) {
        Some(bad) => Err(Error::invalid(what, "within the range of f32", bad)),
        None if v.is_empty() => Err(Error::invalid(what, "at least one value", "empty")),
        None => Ok(v),
    }
}

fn difference(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>) -> Result<Array1<f64>> {
    check_pair(source, target)?;
    representable(mean(target) - mean(source), "the difference in means")
}

/// Difference in means: `T(x) = x + mean(B) − mean(A)` \[prior work: ActAdd, CAA\].
#[derive(Debug, Clone, PartialEq)]
pub struct DiM(Array1<f64>);

impl DiM {
    /// Fits to `source` (`[N_A, D]`) and `target` (`[N_B, D]`).
    ///
    /// # Errors
    /// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`].
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>) -> Result<Self> {
        difference(source, target).map(Self)
    }

    /// A control vector that came from elsewhere (`[D]`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty vector or one that isn't finite in f32.
    pub fn from_vector(v: Array1<f64>) -> Result<Self> {
        representable(v, "the control vector").map(Self)
    }

    /// The vector (`[D]`).
    pub fn vector(&self) -> &Array1<f64> {
        &self.0
    }

    pub(crate) fn of_parts(mut parts: Parts) -> Result<Self> {
        Self::from_vector(parts.take::<Ix1>("vector")?)
    }
}

impl Steer for DiM {
    fn name(&self) -> &'static str {
        "dim"
    }

    fn width(&self) -> usize {
        self.0.len()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        everywhere(&self.0, x)
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some(self.0.mapv(|v| v as f32))
    }

    fn parts(&self) -> Parts {
        Parts::new(self.name(), &()).with("vector", &self.0)
    }
}

/// Mean-AcT: each coordinate is translated by its difference in means \[prior work: ml-act\]. The same map as [`DiM`]; it has
/// a name of its own because tables list it beside the other by-coordinate maps.
#[derive(Debug, Clone, PartialEq)]
pub struct MeanAct(Array1<f64>);

impl MeanAct {
    /// Fits to `source` (`[N_A, D]`) and `target` (`[N_B, D]`).
    ///
    /// # Errors
    /// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`].
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>) -> Result<Self> {
        difference(source, target).map(Self)
    }

    pub(crate) fn of_parts(mut parts: Parts) -> Result<Self> {
        representable(parts.take::<Ix1>("vector")?, "the vector").map(Self)
    }
}

impl Steer for MeanAct {
    fn name(&self) -> &'static str {
        "mean_act"
    }

    fn width(&self) -> usize {
        self.0.len()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        everywhere(&self.0, x)
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some(self.0.mapv(|v| v as f32))
    }

    fn parts(&self) -> Parts {
        Parts::new(self.name(), &()).with("vector", &self.0)
    }
}
