//! Lloyd's iteration with distances from one matrix product a round.
//!
//! `argmin_j ‖x − c_j‖² = argmin_j (‖c_j‖² − 2 x·c_j)`, in f32 after the mean of the set has been taken off both. A row whose two
//! nearest centroids are closer to each other than rounding allows is decided by direct differences in f64, so the
//! assignment is that of the plain version.

use super::KMeans;
use super::plain::{iterate, nearest};
use crate::config::KMeansConfig;
use crate::data::mean;
use ndarray::{Array2, ArrayView2};

pub(super) fn run(x: ArrayView2<'_, f32>, start: &Array2<f64>, requested: usize, config: &KMeansConfig) -> KMeans {
    let center = mean(x);
    let mut centred = x.to_owned();
    for mut row in centred.rows_mut() {
        row.zip_mut_with(&center, |v, m| *v = (f64::from(*v) - m) as f32);
    }
    let norms: Vec<f32> = centred.rows().into_iter().map(|row| row.dot(&row)).collect();
    // A dot product of D terms in f32 is off by about √D roundings of the size of its terms.
    let rounding = f32::EPSILON * (16.0 + 4.0 * (x.ncols() as f32).sqrt());
    let assign = |centroids: &Array2<f64>| {
        let c = Array2::from_shape_fn(centroids.raw_dim(), |(i, j)| (centroids[(i, j)] - center[j]) as f32);
        let squares: Vec<f32> = c.rows().into_iter().map(|row| row.dot(&row)).collect();
        let largest = squares.iter().copied().fold(0.0, f32::max);
        let products = centred.dot(&c.t());
        products
            .rows()
            .into_iter()
            .enumerate()
            .map(|(i, row)| {
                let (mut best, mut least, mut second) = (0, f32::INFINITY, f32::INFINITY);
                for (j, (product, square)) in row.iter().zip(&squares).enumerate() {
                    let score = square - 2.0 * product;
                    if score < least {
                        (best, second, least) = (j, least, score);
                    } else {
                        second = second.min(score);
                    }
                }
                // Also false for NaN, which is what values beyond f32's squares give.
                let clear = second - least > rounding * (norms[i] + largest);
                if clear { best } else { nearest(x.row(i).as_slice().unwrap_or_default(), centroids) }
            })
            .collect()
    };
    iterate(x, start, requested, config, assign)
}
