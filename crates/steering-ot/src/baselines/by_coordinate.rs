//! An affine map for each coordinate \[prior work: ml-act\].

use super::translation::representable;
use crate::chars::check_input;
use crate::data::{check_pair, mean, variance};
use crate::steer::{Parts, Steer};
use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView2, Ix1};

/// `w ⊙ x + b`.
#[derive(Debug, Clone, PartialEq)]
struct Affine {
    weight: Array1<f64>,
    offset: Array1<f64>,
    /// Mean shift over the source set.
    mean: Array1<f64>,
}

impl Affine {
    fn new(weight: Array1<f64>, offset: Array1<f64>, mean: Array1<f64>) -> Result<Self> {
        if offset.len() != weight.len() {
            return Err(Error::dim("offset", weight.len(), offset.len()));
        }
        if mean.len() != weight.len() {
            return Err(Error::dim("mean", weight.len(), mean.len()));
        }
        Ok(Self {
            weight: representable(weight, "the weights")?,
            offset: representable(offset, "the offsets")?,
            mean: representable(mean, "the mean shift")?,
        })
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        check_input(x, self.weight.len())?;
        let mut out = x.to_owned();
        for mut row in out.rows_mut() {
            ndarray::Zip::from(&mut row)
                .and(&self.weight)
                .and(&self.offset)
                .for_each(|x, w, b| *x = ((w - 1.0) * f64::from(*x) + b) as f32);
        }
        match out.iter().find(|v| !v.is_finite()) {
            Some(bad) => Err(Error::invalid("the shift", "within the range of f32", bad)),
            None => Ok(out),
        }
    }

    fn parts(&self, kind: &str) -> Parts {
        Parts::new(kind, &()).with("weight", &self.weight).with("offset", &self.offset).with("mean", &self.mean)
    }

    fn of_parts(mut parts: Parts) -> Result<Self> {
        Self::new(parts.take::<Ix1>("weight")?, parts.take::<Ix1>("offset")?, parts.take::<Ix1>("mean")?)
    }
}

/// Gaussian-AcT: `T(x) = (σ_B/σ_A)(x − μ_A) + μ_B` for each coordinate; one that is constant in the source is translated.
#[derive(Debug, Clone, PartialEq)]
pub struct GaussianAct(Affine);

impl GaussianAct {
    /// Fits to `source` (`[N_A, D]`) and `target` (`[N_B, D]`).
    ///
    /// # Errors
    /// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`].
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>) -> Result<Self> {
        check_pair(source, target)?;
        let (a, b) = (mean(source), mean(target));
        let (var_a, var_b) = (variance(source, &a), variance(target, &b));
        let weight =
            Array1::from_shape_fn(a.len(), |d| if var_a[d] > 0.0 { (var_b[d] / var_a[d]).sqrt() } else { 1.0 });
        let offset = &b - &(&weight * &a);
        Affine::new(weight, offset, b - a).map(Self)
    }

    pub(crate) fn of_parts(parts: Parts) -> Result<Self> {
        Affine::of_parts(parts).map(Self)
    }
}

impl Steer for GaussianAct {
    fn name(&self) -> &'static str {
        "gaussian_act"
    }

    fn width(&self) -> usize {
        self.0.weight.len()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        self.0.shift(x)
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some(self.0.mean.mapv(|v| v as f32))
    }

    fn parts(&self) -> Parts {
        self.0.parts(self.name())
    }
}

/// Linear-AcT: `T(x) = w x + b` for each coordinate, by least squares of the sorted target values on the sorted source
/// values. The larger set is cut to the first rows, as many as the smaller has; a coordinate that is constant in the source
/// has `w = 1`.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearAct(Affine);

impl LinearAct {
    /// Fits to `source` (`[N_A, D]`) and `target` (`[N_B, D]`).
    ///
    /// # Errors
    /// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`].
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>) -> Result<Self> {
        check_pair(source, target)?;
        let n = source.nrows().min(target.nrows());
        let cut = |x: ArrayView2<'_, f32>| x.slice(ndarray::s![..n, ..]).mapv(f64::from);
        let (source, target) = (cut(source), cut(target));
        let d = source.ncols();
        let (mut weight, mut offset, mut shift) = (Array1::ones(d), Array1::zeros(d), Array1::zeros(d));
        for j in 0..d {
            let sorted = |x: &Array2<f64>| {
                let mut values = x.column(j).to_vec();
                values.sort_by(f64::total_cmp);
                values
            };
            let (x, y) = (sorted(&source), sorted(&target));
            let (mean_x, mean_y) = (x.iter().sum::<f64>() / n as f64, y.iter().sum::<f64>() / n as f64);
            let covariance: f64 = x.iter().zip(&y).map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
            let spread: f64 = x.iter().map(|x| (x - mean_x).powi(2)).sum();
            if x[0] < x[n - 1] && spread > 0.0 {
                weight[j] = covariance / spread;
            }
            offset[j] = mean_y - weight[j] * mean_x;
            shift[j] = mean_y - mean_x;
        }
        Affine::new(weight, offset, shift).map(Self)
    }

    /// `w` (`[D]`).
    pub fn weight(&self) -> &Array1<f64> {
        &self.0.weight
    }

    /// `b` (`[D]`).
    pub fn offset(&self) -> &Array1<f64> {
        &self.0.offset
    }

    pub(crate) fn of_parts(parts: Parts) -> Result<Self> {
        Affine::of_parts(parts).map(Self)
    }
}

impl Steer for LinearAct {
    fn name(&self) -> &'static str {
        "linear_act"
    }

    fn width(&self) -> usize {
        self.0.weight.len()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        self.0.shift(x)
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some(self.0.mean.mapv(|v| v as f32))
    }

    fn parts(&self) -> Parts {
        self.0.parts(self.name())
    }
}
