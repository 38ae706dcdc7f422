//! Sets of activations that tests share.
#![allow(dead_code)] // each test file uses some of them

use ndarray::{Array1, Array2, ArrayView2, Axis};
use steering_ot::ndarray;
use tensor::Seed;

/// Standard normal numbers.
pub(crate) fn noise(n: usize, d: usize, seed: u64) -> Array2<f32> {
    Array2::from_shape_vec((n, d), Seed::new(seed).normal(n * d)).unwrap()
}

/// Rows around these centres in turn, with this deviation.
pub(crate) fn around(centres: &Array2<f32>, n: usize, sigma: f32, seed: u64) -> Array2<f32> {
    let mut x = noise(n, centres.ncols(), seed) * sigma;
    for (i, mut row) in x.rows_mut().into_iter().enumerate() {
        row += &centres.row(i % centres.nrows());
    }
    x
}

/// Two sets of a few clusters each, moved in different directions.
pub(crate) fn sets(n: usize, d: usize, seed: u64) -> (Array2<f32>, Array2<f32>) {
    let centres = noise(4, d, seed ^ 1) * 4.0;
    let moved = &centres + &(noise(4, d, seed ^ 2) * 1.5);
    (around(&centres, n, 0.7, seed ^ 3), around(&moved, n + 7, 0.7, seed ^ 4))
}

pub(crate) fn mean(x: ArrayView2<'_, f32>) -> Array1<f64> {
    x.mapv(f64::from).mean_axis(Axis(0)).unwrap()
}

pub(crate) fn largest_difference<'a>(
    a: impl IntoIterator<Item = &'a f64>,
    b: impl IntoIterator<Item = &'a f64>,
) -> f64 {
    a.into_iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

pub(crate) fn norm<'a>(v: impl IntoIterator<Item = &'a f64>) -> f64 {
    v.into_iter().map(|v| v * v).sum::<f64>().sqrt()
}
