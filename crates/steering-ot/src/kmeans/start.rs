//! Where Lloyd's iteration starts: k-means++ \[prior work: Arthur & Vassilvitskii 2007\].

use crate::data::squared_distance;
use ndarray::{Array2, ArrayView2};
use rand::Rng;

/// Centroids drawn from the rows, each with a probability that grows as the squared distance to those drawn before. Of
/// `trials` draws the one is kept that leaves the least sum of squared distances (0 stands for `2 + ⌊ln k⌋`). Fewer than `k`
/// come out when there are fewer distinct rows.
pub(super) fn plus_plus(x: ArrayView2<'_, f32>, k: usize, trials: usize, rng: &mut impl Rng) -> Array2<f64> {
    let trials = if trials == 0 { 2 + (k as f64).ln() as usize } else { trials };
    let (n, d) = x.dim();
    let values = x.as_slice().unwrap_or_default();
    let row = |i: usize| &values[i * d..(i + 1) * d];
    let distances = |to: usize| -> Vec<f64> { (0..n).map(|i| squared_distance(row(i), row(to))).collect() };
    let mut chosen = vec![rng.random_range(0..n)];
    let mut closest = distances(chosen[0]);
    while chosen.len() < k {
        let total: f64 = closest.iter().sum();
        if !(total > 0.0 && total.is_finite()) {
            break;
        }
        let mut best: Option<(f64, usize, Vec<f64>)> = None;
        for _ in 0..trials {
            let candidate = draw(&closest, rng.random::<f64>() * total);
            let mut left = distances(candidate);
            left.iter_mut().zip(&closest).for_each(|(new, old)| *new = new.min(*old));
            let sum = left.iter().sum();
            if best.as_ref().is_none_or(|(least, ..)| sum < *least) {
                best = Some((sum, candidate, left));
            }
        }
        let Some((_, candidate, left)) = best else { break };
        chosen.push(candidate);
        closest = left;
    }
    Array2::from_shape_fn((chosen.len(), d), |(c, j)| f64::from(x[(chosen[c], j)]))
}

/// The row whose share of the running sum holds `at`; never one with weight 0.
fn draw(weights: &[f64], at: f64) -> usize {
    let mut sum = 0.0;
    let mut last = 0;
    for (i, w) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
        sum += w;
        last = i;
        if sum > at {
            break;
        }
    }
    last
}
