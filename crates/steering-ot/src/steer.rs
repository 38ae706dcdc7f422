//! One interface for every map, so that a baseline is drop-in, and the parts that a file has to hold.

use crate::baselines::{DiM, DiagonalChars, GaussianAct, GaussianOt, LinearAct, MeanAct, PcaDirection};
use crate::compose::Composition;
use crate::{CharsMap, Error, Result};
use ndarray::{Array1, Array2, ArrayD, ArrayView2};
use serde::Serialize;
use serde::de::DeserializeOwned;
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

impl Parts {
    /// Parts without arrays.
    pub(crate) fn new(kind: &str, settings: &impl Serialize) -> Self {
        // Settings are structs of numbers, strings and lists: they always have a JSON form.
        let settings = serde_json::to_value(settings).unwrap_or_default();
        Self { kind: kind.to_owned(), settings, arrays: BTreeMap::new() }
    }

    pub(crate) fn with<D: ndarray::Dimension>(mut self, name: &str, array: &ndarray::Array<f64, D>) -> Self {
        self.arrays.insert(name.to_owned(), array.clone().into_dyn());
        self
    }

    pub(crate) fn settings<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_value(self.settings.clone())
            .map_err(|e| Error::invalid("settings", format!("those of a map of the kind `{}`", self.kind), e))
    }

    /// The array called `name`, which must have the axes of `D` and finite values.
    pub(crate) fn take<D: ndarray::Dimension>(&mut self, name: &str) -> Result<ndarray::Array<f64, D>> {
        let Some(array) = self.arrays.remove(name) else {
            return Err(Error::invalid("arrays", format!("with `{name}` for the kind `{}`", self.kind), "without it"));
        };
        if !array.iter().all(|v| v.is_finite()) {
            return Err(Error::invalid(format!("arrays.{name}"), "finite", "NaN or infinite somewhere"));
        }
        let shape = array.shape().to_vec();
        // In the order of rows, as sums were taken at the fit.
        array.as_standard_layout().into_owned().into_dimensionality().map_err(|_| {
            Error::invalid(
                format!("arrays.{name}"),
                format!("of {} axes", D::NDIM.unwrap_or_default()),
                format!("of shape {shape:?}"),
            )
        })
    }
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

    /// At most `l` orthonormal directions (`[≤ l, D]`) in which the shift differs between inputs, the strongest first. None for
    /// a map whose shift is the same everywhere.
    fn directions(&self, l: usize) -> Array2<f64> {
        let _ = l;
        Array2::zeros((0, self.width()))
    }

    /// `x + alpha·(T(x) − x)`.
    ///
    /// # Errors
    /// As [`shift`](Self::shift); [`Error::InvalidArgument`] for an `alpha` that isn't finite.
    fn transport(&self, x: ArrayView2<'_, f32>, alpha: f32) -> Result<Array2<f32>> {
        check_alpha(alpha)?;
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
        // A shape that takes only part of a slice would be accepted, hence the check.
        let rows = ArrayView2::from_shape((x.len() / d.max(1), d), x).ok().filter(|_| x.len().is_multiple_of(d));
        let Some(rows) = rows else {
            return Err(Error::invalid("x", format!("rows of {d} values"), format!("{} values", x.len())));
        };
        let shift = self.shift(rows)?;
        out.iter_mut().zip(&shift).for_each(|(out, v)| *out = *v);
        Ok(())
    }
}

pub(crate) fn check_alpha(alpha: f32) -> Result<()> {
    if alpha.is_finite() { Ok(()) } else { Err(Error::invalid("alpha", "finite", alpha)) }
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
        self.to_parts(self.name())
    }

    fn directions(&self, l: usize) -> Array2<f64> {
        let l = self.config().pct.map_or(l, |kept| kept.min(l));
        let principal = self.principal();
        let l = l.min(principal.rank());
        principal.vectors.slice_move(ndarray::s![..l, ..])
    }

    fn transport(&self, x: ArrayView2<'_, f32>, alpha: f32) -> Result<Array2<f32>> {
        self.transport(x, alpha)
    }

    fn shift_into(&self, x: &[f32], out: &mut [f32]) -> Result<()> {
        self.shift_into(x, out)
    }
}

/// Builds the map again that gave these parts; its shifts are the same bit for bit.
///
/// # Errors
/// [`Error::InvalidArgument`] for an unknown kind, missing arrays or settings; the errors of the map itself.
pub fn from_parts(parts: Parts) -> Result<Box<dyn Steer>> {
    Ok(match parts.kind.as_str() {
        "chars" => Box::new(CharsMap::of_parts(parts)?),
        "dim" => Box::new(DiM::of_parts(parts)?),
        "mean_act" => Box::new(MeanAct::of_parts(parts)?),
        "pca_direction" => Box::new(PcaDirection::of_parts(parts)?),
        "gaussian_act" => Box::new(GaussianAct::of_parts(parts)?),
        "linear_act" => Box::new(LinearAct::of_parts(parts)?),
        "gaussian_ot" => Box::new(GaussianOt::of_parts(parts)?),
        "diagonal_chars" => Box::new(DiagonalChars::of_parts(parts)?),
        "composition" => Box::new(Composition::of_parts(parts)?),
        _ => {
            let known = "one of chars, dim, mean_act, pca_direction, gaussian_act, linear_act, gaussian_ot, diagonal_chars, composition";
            return Err(Error::invalid("kind", known, parts.kind));
        }
    })
}
