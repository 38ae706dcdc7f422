//! The published formulas as they stand, in f64: what the fast path is compared with.

use super::CharsMap;
use crate::kernel::{Width, soft_f64};
use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2};

impl CharsMap {
    /// `v̂(x)` by the double sum over pairs of clusters (O(K²D) a row) as published, in f64 (`[M, D]`). With principal
    /// component thresholding `ṽ(x) = v̄ + Σ_k α̂_k(x) u_k` by its coefficients. Plain reference of [`shift`](Self::shift).
    ///
    /// # Errors
    /// [`Error::DimMismatch`].
    pub fn double_sum(&self, x: ArrayView2<'_, f64>) -> Result<Array2<f64>> {
        self.check_width(x.ncols())?;
        let mut out = Array2::zeros(x.raw_dim());
        for (x, mut out) in x.rows().into_iter().zip(out.rows_mut()) {
            let distances = self.distances(x);
            let width = self.width_at(&distances);
            let nearest = distances.iter().copied().fold(f64::INFINITY, f64::min);
            // Taking the nearest distance off multiplies numerator and denominator alike; clusters without mass get 0.
            let mut kernel = vec![0.0; self.p.len()];
            self.active.iter().zip(&distances).for_each(|(&i, d)| kernel[i] = (-(d - nearest) / width).exp());
            let weights = Array2::from_shape_fn(self.plan.raw_dim(), |(i, j)| self.plan[(i, j)] * kernel[i]);
            let total = weights.sum();
            let mut sum = Array1::<f64>::zeros(x.len());
            for ((i, j), w) in weights.indexed_iter() {
                let v = &self.target_centroids.row(j) - &self.source_centroids.row(i);
                match &self.kept {
                    None => sum.scaled_add(w / total, &v),
                    Some(basis) => {
                        let coefficients = basis.dot(&(v - &self.mean_shift));
                        sum.scaled_add(w / total, &basis.t().dot(&coefficients));
                    }
                }
            }
            if self.kept.is_some() {
                sum += &self.mean_shift;
            }
            self.gate_coordinates(x, &mut sum);
            out.assign(&sum);
        }
        Ok(out)
    }

    /// `v̂(x)` by the factored form in f64 (`[M, D]`): [`shift`](Self::shift) without f32's rounding.
    ///
    /// # Errors
    /// [`Error::DimMismatch`]; [`Error::NonFinite`].
    pub fn shift_exact(&self, x: ArrayView2<'_, f64>) -> Result<Array2<f64>> {
        self.check_width(x.ncols())?;
        let mut out = Array2::zeros(x.raw_dim());
        for (row, (x, mut out)) in x.rows().into_iter().zip(out.rows_mut()).enumerate() {
            let mut gates = self.distances(x);
            if !gates.iter().all(|v| v.is_finite()) {
                return Err(Error::NonFinite { side: "x", row });
            }
            soft_f64(&mut gates, &self.mixture.log_mass, self.mixture.width);
            let mut sum = Array1::zeros(x.len());
            for (&i, g) in self.active.iter().zip(&gates) {
                sum.scaled_add(*g, &self.shifts.row(i));
            }
            self.gate_coordinates(x, &mut sum);
            out.assign(&sum);
        }
        Ok(out)
    }

    /// `d_i²` of the clusters with mass.
    fn distances(&self, x: ArrayView1<'_, f64>) -> Vec<f64> {
        let distance =
            |i: &usize| x.iter().zip(self.source_centroids.row(*i)).map(|(x, a)| (x - a) * (x - a)).sum::<f64>();
        self.active.iter().map(distance).collect()
    }

    fn width_at(&self, distances: &[f64]) -> f64 {
        match self.mixture.width {
            Width::Fixed(width) => width,
            Width::Median(h) => {
                let mut sorted = distances.to_vec();
                sorted.sort_by(f64::total_cmp);
                h * sorted[(sorted.len() - 1) / 2]
            }
        }
    }

    fn gate_coordinates(&self, x: ArrayView1<'_, f64>, shift: &mut Array1<f64>) {
        if let Some((low, high)) = &self.extra.bounds {
            for (d, v) in shift.iter_mut().enumerate() {
                if !(low[d]..=high[d]).contains(&x[d]) {
                    *v = 0.0;
                }
            }
        }
    }
}
