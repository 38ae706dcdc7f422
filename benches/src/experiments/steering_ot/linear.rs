//! Softmax regression with an L2 penalty, for probes of sentiment and domain. It is a judge here, not a method.

use ndarray::{Array1, Array2, Axis};

/// Weight of the penalty, per row: probes of 576 coordinates on a thousand rows need one.
const PENALTY: f64 = 0.05;
/// Steps of gradient descent with momentum on standardized coordinates; the penalized loss has settled by then.
const STEPS: usize = 200;
const RATE: f64 = 0.2;
const MOMENTUM: f64 = 0.9;

/// A fitted softmax regression.
#[derive(Debug)]
pub(super) struct Softmax {
    mean: Array1<f64>,
    spread: Array1<f64>,
    /// `[width + 1, classes]`, the last row is the intercept.
    weights: Array2<f64>,
}

impl Softmax {
    /// Fits classes 0 to `classes` − 1 of rows `x`.
    pub(super) fn fit(x: &Array2<f32>, y: &[usize], classes: usize) -> Self {
        let x = x.mapv(f64::from);
        let mean = x.mean_axis(Axis(0)).unwrap_or_else(|| Array1::zeros(x.ncols()));
        let spread = x.std_axis(Axis(0), 0.0).mapv(|s| s.max(1e-6));
        let mut model = Self { mean, spread, weights: Array2::zeros((x.ncols() + 1, classes)) };
        let x = model.standardized(&x);
        let mut velocity = Array2::zeros(model.weights.dim());
        // Divided by the width, so that one rate serves every width.
        let rate = RATE / (x.ncols() as f64).sqrt();
        for _ in 0..STEPS {
            let mut error = softmax(x.dot(&model.weights));
            for (mut row, &class) in error.rows_mut().into_iter().zip(y) {
                row[class] -= 1.0;
            }
            let mut gradient = x.t().dot(&error) / x.nrows() as f64;
            gradient.scaled_add(PENALTY, &model.weights);
            velocity = velocity * MOMENTUM - gradient * rate;
            model.weights += &velocity;
        }
        model
    }

    fn standardized(&self, x: &Array2<f64>) -> Array2<f64> {
        let mut out = Array2::ones((x.nrows(), x.ncols() + 1));
        let scaled = (x - &self.mean) / &self.spread;
        out.slice_mut(ndarray::s![.., ..-1]).assign(&scaled);
        out
    }

    /// Probabilities `[rows, classes]`.
    pub(super) fn probabilities(&self, x: &Array2<f32>) -> Array2<f64> {
        softmax(self.standardized(&x.mapv(f64::from)).dot(&self.weights))
    }

    /// The most probable class of each row.
    pub(super) fn classes(&self, x: &Array2<f32>) -> Vec<usize> {
        let best = |row: ndarray::ArrayView1<'_, f64>| {
            row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(class, _)| class)
        };
        self.probabilities(x).rows().into_iter().map(best).collect()
    }
}

fn softmax(mut scores: Array2<f64>) -> Array2<f64> {
    for mut row in scores.rows_mut() {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.mapv_inplace(|s| (s - top).exp());
        let sum = row.sum();
        row /= sum;
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separated_classes_are_told_apart() {
        let y: Vec<usize> = (0..60).map(|i| i % 3).collect();
        let x = Array2::from_shape_fn((60, 4), |(i, j)| if i % 3 == j { 2.0 } else { 0.0 } + (i * j % 5) as f32 * 0.05);
        let model = Softmax::fit(&x, &y, 3);
        assert_eq!(model.classes(&x), y);
        let p = model.probabilities(&x);
        assert!(p.rows().into_iter().all(|row| (row.sum() - 1.0).abs() < 1e-12));
        assert!(p[[0, 0]] > 0.8, "{p}");
    }
}
