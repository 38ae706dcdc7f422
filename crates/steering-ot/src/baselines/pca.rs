//! A control vector along the first principal component \[prior work: repeng\].

use super::translation::{everywhere, representable};
use crate::data::{check_pair, mean};
use crate::steer::{Parts, Steer};
use crate::{Error, Result};
use nalgebra::{DMatrix, SymmetricEigen};
use ndarray::{Array1, Array2, ArrayView2, Ix1};
use serde::{Deserialize, Serialize};
use tensor::Seed;

/// Of which rows the principal component is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PcaRows {
    /// Every row of both sides less the midpoint of the two means, both sides with the same weight: needs no pairs
    /// \[reconstruction\].
    #[default]
    Pooled,
    /// `±(b_i − a_i)/2` of rows that belong together, as many on both sides \[prior work: repeng, centred pairs\].
    Paired,
}

/// Settings of [`PcaDirection`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PcaConfig {
    /// Of which rows.
    pub rows: PcaRows,
    /// Seed of the start of the iteration for the eigenvector.
    pub seed: u64,
}

/// `T(x) = x + s·v` with the first principal component `v` (unit length, `mean(B)·v > mean(A)·v`) and
/// `s = (mean(B) − mean(A))·v`, so that α = 1 moves the source's mean to the target's along `v`. (repeng leaves the length to
/// the user; this one makes strengths of different maps comparable.)
#[derive(Debug, Clone, PartialEq)]
pub struct PcaDirection {
    config: PcaConfig,
    direction: Array1<f64>,
    scale: f64,
    vector: Array1<f64>,
}

impl PcaDirection {
    /// Fits to `source` (`[N_A, D]`) and `target` (`[N_B, D]`).
    ///
    /// # Errors
    /// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`] (also for pairs of different numbers);
    /// [`Error::InvalidArgument`] when all rows are the same.
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>, config: &PcaConfig) -> Result<Self> {
        check_pair(source, target)?;
        let (a, b) = (mean(source), mean(target));
        let difference = &b - &a;
        let rows = match config.rows {
            PcaRows::Paired => {
                if source.nrows() != target.nrows() {
                    return Err(Error::dim("The target set, in rows,", source.nrows(), target.nrows()));
                }
                (&target.mapv(f64::from) - &source.mapv(f64::from)) * 0.5
            }
            PcaRows::Pooled => {
                let middle = (&a + &b) * 0.5;
                let centred = |x: ArrayView2<'_, f32>| (x.mapv(f64::from) - &middle) / (x.nrows() as f64).sqrt();
                let (source, target) = (centred(source), centred(target));
                ndarray::concatenate(ndarray::Axis(0), &[source.view(), target.view()])
                    .map_err(|_| Error::dim("Each row of the target set", source.ncols(), target.ncols()))?
            }
        };
        let Some(mut direction) = first_component(&rows, &difference, config.seed) else {
            return Err(Error::invalid("the sets", "rows that differ", "all rows the same"));
        };
        let mut scale = difference.dot(&direction);
        if scale < 0.0 {
            direction.mapv_inplace(|v| -v);
            scale = -scale;
        }
        Self::new(*config, direction, scale)
    }

    fn new(config: PcaConfig, direction: Array1<f64>, scale: f64) -> Result<Self> {
        let vector = representable(&direction * scale, "the control vector")?;
        Ok(Self { config, direction, scale, vector })
    }

    /// `v` (`[D]`, unit length).
    pub fn direction(&self) -> &Array1<f64> {
        &self.direction
    }

    /// `s`.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    pub(crate) fn of_parts(mut parts: Parts) -> Result<Self> {
        let config = parts.settings()?;
        let scale: Array1<f64> = parts.take::<Ix1>("scale")?;
        if scale.len() != 1 {
            return Err(Error::dim("arrays.scale", 1, scale.len()));
        }
        Self::new(config, parts.take::<Ix1>("direction")?, scale[0])
    }
}

impl Steer for PcaDirection {
    fn name(&self) -> &'static str {
        "pca_direction"
    }

    fn width(&self) -> usize {
        self.vector.len()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        everywhere(&self.vector, x)
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some(self.vector.mapv(|v| v as f32))
    }

    fn parts(&self) -> Parts {
        Parts::new(self.name(), &self.config)
            .with("direction", &self.direction)
            .with("scale", &Array1::from_elem(1, self.scale))
    }
}

/// Steps of the Lanczos iteration before it starts anew from what it found.
const STEPS: usize = 40;
/// Restarts at most.
const RESTARTS: usize = 20;
/// Residual, relative to the eigenvalue, at which it ends.
const RESIDUAL: f64 = 1e-10;

/// The leading right singular vector of `rows` (`[N, D]`), by a restarted Lanczos iteration that orthogonalises fully: only
/// products with `rows` are needed, never a `D×D` matrix.
fn first_component(rows: &Array2<f64>, hint: &Array1<f64>, seed: u64) -> Option<Array1<f64>> {
    let d = rows.ncols();
    let multiply = |v: &Array1<f64>| rows.t().dot(&rows.dot(v));
    let noise = Array1::from_iter(Seed::new(seed).child("pca").normal(d).into_iter().map(f64::from));
    let length = |v: &Array1<f64>| v.dot(v).sqrt();
    // The difference in means usually lies near the component; the noise is there for when it is orthogonal to it.
    let mut v = noise / (d as f64).sqrt() + hint / length(hint).max(f64::MIN_POSITIVE);
    for _ in 0..RESTARTS {
        let mut basis: Vec<Array1<f64>> = vec![&v / length(&v)];
        let mut products = vec![multiply(&basis[0])];
        while basis.len() < STEPS.min(d) {
            let mut next = products[basis.len() - 1].clone();
            let before = length(&next);
            for _ in 0..2 {
                for b in &basis {
                    let along = b.dot(&next);
                    next.scaled_add(-along, b);
                }
            }
            let norm = length(&next);
            if !(norm > 1e-14 * before && norm > 0.0) {
                break;
            }
            next /= norm;
            products.push(multiply(&next));
            basis.push(next);
        }
        let n = basis.len();
        let small = DMatrix::from_fn(n, n, |i, j| 0.5 * (basis[i].dot(&products[j]) + basis[j].dot(&products[i])));
        let eigen = SymmetricEigen::new(small);
        let (at, value) = eigen.eigenvalues.argmax();
        if !(value > 0.0 && value.is_finite()) {
            return None;
        }
        let mix = |of: &[Array1<f64>]| {
            let mut sum = Array1::zeros(d);
            for (i, b) in of.iter().enumerate() {
                sum.scaled_add(eigen.eigenvectors[(i, at)], b);
            }
            sum
        };
        v = mix(&basis);
        let residual = mix(&products) - &v * value;
        if length(&residual) <= RESIDUAL * value {
            break;
        }
    }
    Some(&v / length(&v))
}
