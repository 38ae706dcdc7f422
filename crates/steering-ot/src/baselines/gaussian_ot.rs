//! The optimal map between two Gaussians: the reference for few coordinates.

use crate::chars::check_input;
use crate::data::{check_pair, mean, narrow};
use crate::steer::{Parts, Steer};
use crate::{Error, Result};
use nalgebra::{DMatrix, SymmetricEigen};
use ndarray::{Array1, Array2, ArrayView2, Ix1, Ix2};
use serde::{Deserialize, Serialize};

/// Settings of [`GaussianOt`].
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GaussianOtConfig {
    /// Share of `(tr S / D)·I` in the covariance, from 0 to 1; `None` for the share that Ledoit and Wolf (2004) estimate.
    pub shrinkage: Option<f64>,
}

/// `T(x) = μ_B + Â(x − μ_A)` with `Â = Σ_A^{-1/2}(Σ_A^{1/2} Σ_B Σ_A^{1/2})^{1/2} Σ_A^{-1/2}` and shrunk covariances: the
/// W2-optimal map between the Gaussians \[paper, theory\].
#[derive(Debug, Clone, PartialEq)]
pub struct GaussianOt {
    config: GaussianOtConfig,
    source_mean: Array1<f64>,
    target_mean: Array1<f64>,
    /// `Â`.
    matrix: Array2<f64>,
}

impl GaussianOt {
    /// Widths above this are refused: the eigendecompositions of D×D matrices would take minutes.
    pub const MAX_WIDTH: usize = 1024;

    /// Fits to `source` (`[N_A, D]`) and `target` (`[N_B, D]`). A source whose rows are all the same is translated.
    ///
    /// # Errors
    /// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`]; [`Error::InvalidArgument`] for D above
    /// [`MAX_WIDTH`](Self::MAX_WIDTH) or a shrinkage outside 0..=1.
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>, config: &GaussianOtConfig) -> Result<Self> {
        let d = check_pair(source, target)?;
        if d > Self::MAX_WIDTH {
            let expected = format!("at most {} coordinates wide (use DiM or GaussianAct)", Self::MAX_WIDTH);
            return Err(Error::invalid("the sets", expected, d));
        }
        if let Some(share) = config.shrinkage
            && !(0.0..=1.0).contains(&share)
        {
            return Err(Error::invalid("shrinkage", "from 0 to 1", share));
        }
        let (source_mean, target_mean) = (mean(source), mean(target));
        let a = covariance(source, &source_mean, config.shrinkage);
        let b = covariance(target, &target_mean, config.shrinkage);
        let matrix = if a.trace() > 0.0 { optimal(a, &b) } else { DMatrix::identity(d, d) };
        let matrix = Array2::from_shape_fn((d, d), |at| matrix[at]);
        if !matrix.iter().all(|v| v.is_finite()) {
            return Err(Error::invalid("the covariances", "finite", "an overflow: scale the activations down"));
        }
        Ok(Self { config: *config, source_mean, target_mean, matrix })
    }

    /// `Â` (`[D, D]`).
    pub fn matrix(&self) -> &Array2<f64> {
        &self.matrix
    }

    pub(crate) fn of_parts(mut parts: Parts) -> Result<Self> {
        let config = parts.settings()?;
        let source_mean: Array1<f64> = parts.take::<Ix1>("source_mean")?;
        let target_mean: Array1<f64> = parts.take::<Ix1>("target_mean")?;
        let matrix: Array2<f64> = parts.take::<Ix2>("matrix")?;
        let d = source_mean.len();
        if d == 0 {
            return Err(Error::EmptySet { side: "source_mean" });
        }
        for (what, got) in [("target_mean", target_mean.len()), ("matrix", matrix.nrows()), ("matrix", matrix.ncols())]
        {
            if got != d {
                return Err(Error::dim(what, d, got));
            }
        }
        Ok(Self { config, source_mean, target_mean, matrix })
    }
}

impl Steer for GaussianOt {
    fn name(&self) -> &'static str {
        "gaussian_ot"
    }

    fn width(&self) -> usize {
        self.source_mean.len()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        check_input(x, self.width())?;
        let x = x.mapv(f64::from);
        let moved = (&x - &self.source_mean).dot(&self.matrix) + &self.target_mean; // Â is symmetric
        narrow(&(moved - x), "the shift")
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some((&self.target_mean - &self.source_mean).mapv(|v| v as f32))
    }

    fn parts(&self) -> Parts {
        Parts::new(self.name(), &self.config)
            .with("source_mean", &self.source_mean)
            .with("target_mean", &self.target_mean)
            .with("matrix", &self.matrix)
    }
}

/// `(1 − ρ) S + ρ (tr S / D) I`, with `S` divided by N. Without a given `ρ`, Ledoit and Wolf's: the mean squared error of `S`
/// over its distance from the multiple of the identity.
fn covariance(x: ArrayView2<'_, f32>, mean: &Array1<f64>, shrinkage: Option<f64>) -> DMatrix<f64> {
    let (n, d) = (x.nrows() as f64, x.ncols());
    let centred = x.mapv(f64::from) - mean;
    let s = centred.t().dot(&centred) / n;
    let scale = s.diag().sum() / d as f64;
    let rho = shrinkage.unwrap_or_else(|| {
        let norm: f64 = s.iter().map(|v| v * v).sum();
        let distance = norm - d as f64 * scale * scale;
        let fourth: f64 = centred.rows().into_iter().map(|row| row.dot(&row).powi(2)).sum();
        let error = (fourth / n - norm) / n;
        if distance > 0.0 { (error / distance).clamp(0.0, 1.0) } else { 1.0 }
    });
    DMatrix::from_fn(d, d, |i, j| (1.0 - rho) * s[(i, j)] + if i == j { rho * scale } else { 0.0 })
}

/// `Â` for covariances of which the first isn't 0.
fn optimal(a: DMatrix<f64>, b: &DMatrix<f64>) -> DMatrix<f64> {
    let eigen = SymmetricEigen::new(a);
    // Directions in which the source has no variance can't be stretched; a floor keeps the inverse finite.
    let floor = eigen.eigenvalues.max() * 1e-10;
    let on = |f: &dyn Fn(f64) -> f64| {
        &eigen.eigenvectors
            * DMatrix::from_diagonal(&eigen.eigenvalues.map(|v| f(v.max(floor))))
            * eigen.eigenvectors.transpose()
    };
    let (root, inverse) = (on(&f64::sqrt), on(&|v| v.sqrt().recip()));
    let inner = &root * b * &root;
    let inner = SymmetricEigen::new((&inner + inner.transpose()) * 0.5);
    let inner = &inner.eigenvectors
        * DMatrix::from_diagonal(&inner.eigenvalues.map(|v| v.max(0.0).sqrt()))
        * inner.eigenvectors.transpose();
    let map = &inverse * inner * &inverse;
    (&map + map.transpose()) * 0.5
}
