//! A judge of sentiment that has seen human ratings and no language model: ridge regression on TF-IDF of words and pairs of words.

use anyhow::{Result, ensure};
use std::collections::{BTreeMap, HashMap};

/// Weight of the penalty.
const LAMBDA: f64 = 1.0;
/// Steps of conjugate gradients: the residual is then far below what ratings are worth.
const STEPS: usize = 60;

/// Ridge regression of ratings on TF-IDF of words and neighbouring words.
#[derive(Debug)]
pub(super) struct Oracle {
    places: HashMap<String, usize>,
    /// Inverse document frequencies.
    idf: Vec<f64>,
    weights: Vec<f64>,
    mean: f64,
}

/// A row of a sparse matrix.
type Sparse = Vec<(usize, f64)>;

/// Words of two characters or more in lower case, and pairs of neighbours.
fn terms(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let words: Vec<&str> =
        lower.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|w| w.chars().count() > 1).collect();
    let pairs = words.windows(2).map(|w| format!("{} {}", w[0], w[1]));
    words.iter().map(|w| (*w).to_owned()).chain(pairs).collect()
}

impl Oracle {
    /// Fits ratings of texts.
    pub(super) fn fit(texts: &[&str], ratings: &[f64]) -> Result<Self> {
        ensure!(texts.len() == ratings.len() && texts.len() > 1, "an oracle needs texts, each with a rating");
        let mut frequency: BTreeMap<String, usize> = BTreeMap::new();
        for text in texts {
            let mut seen = terms(text);
            seen.sort_unstable();
            seen.dedup();
            for term in seen {
                *frequency.entry(term).or_default() += 1;
            }
        }
        let n = texts.len() as f64;
        let idf: Vec<f64> = frequency.values().map(|&count| ((1.0 + n) / (1.0 + count as f64)).ln() + 1.0).collect();
        let places: HashMap<String, usize> = frequency.into_keys().enumerate().map(|(i, term)| (term, i)).collect();
        let mean = ratings.iter().sum::<f64>() / n;
        let mut oracle = Self { weights: vec![0.0; idf.len()], places, idf, mean };
        let rows: Vec<Sparse> = texts.iter().map(|text| oracle.row(text)).collect();
        let target: Vec<f64> = ratings.iter().map(|rating| rating - mean).collect();
        oracle.weights = ridge(&rows, &target, oracle.idf.len());
        Ok(oracle)
    }

    /// TF-IDF of a text, of length 1. Terms that the fit didn't see are left out.
    fn row(&self, text: &str) -> Sparse {
        let mut counts: BTreeMap<usize, f64> = BTreeMap::new();
        for term in terms(text) {
            if let Some(&place) = self.places.get(&term) {
                *counts.entry(place).or_default() += self.idf[place];
            }
        }
        let length = counts.values().map(|v| v * v).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
        counts.into_iter().map(|(place, value)| (place, value / length)).collect()
    }

    /// The rating that it expects, from −4 to 4 or a little beyond.
    pub(super) fn score(&self, text: &str) -> f64 {
        self.mean + self.row(text).iter().map(|&(place, value)| value * self.weights[place]).sum::<f64>()
    }
}

/// Minimizes ‖X w − y‖² + λ ‖w‖² by conjugate gradients on the normal equations.
fn ridge(rows: &[Sparse], y: &[f64], width: usize) -> Vec<f64> {
    let times = |w: &[f64]| -> Vec<f64> {
        rows.iter().map(|row| row.iter().map(|&(place, value)| value * w[place]).sum()).collect()
    };
    let transposed = |v: &[f64]| {
        let mut out = vec![0.0; width];
        for (row, v) in rows.iter().zip(v) {
            for &(place, value) in row {
                out[place] += value * v;
            }
        }
        out
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut w = vec![0.0; width];
    let mut residual = transposed(y);
    let mut direction = residual.clone();
    let mut square = dot(&residual, &residual);
    for _ in 0..STEPS {
        if square < 1e-20 {
            break;
        }
        let mut image = transposed(&times(&direction));
        for (image, direction) in image.iter_mut().zip(&direction) {
            *image += LAMBDA * direction;
        }
        let step = square / dot(&direction, &image);
        for i in 0..width {
            w[i] += step * direction[i];
            residual[i] -= step * image[i];
        }
        let next = dot(&residual, &residual);
        for (direction, residual) in direction.iter_mut().zip(&residual) {
            *direction = residual + next / square * *direction;
        }
        square = next;
    }
    w
}

/// Pearson's correlation.
pub(super) fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let n = a.len() as f64;
    let (mean_a, mean_b) = (a.iter().sum::<f64>() / n, b.iter().sum::<f64>() / n);
    let of = |x: &[f64], mx: f64, y: &[f64], my: f64| x.iter().zip(y).map(|(x, y)| (x - mx) * (y - my)).sum::<f64>();
    of(a, mean_a, b, mean_b) / (of(a, mean_a, a, mean_a) * of(b, mean_b, b, mean_b)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_words_of_two_letters_and_pairs_of_neighbours() {
        assert_eq!(terms("I'm NOT happy!"), ["not", "happy", "not happy"]);
    }

    #[test]
    fn ridge_solves_the_normal_equations() {
        // X = [[1, 0], [0, 2]], y = [1, 4]: w = (1/(1+1), 8/(4+1)).
        let w = ridge(&[vec![(0, 1.0)], vec![(1, 2.0)]], &[1.0, 4.0], 2);
        assert!((w[0] - 0.5).abs() < 1e-9 && (w[1] - 1.6).abs() < 1e-9, "{w:?}");
    }

    #[test]
    fn good_words_raise_the_score() {
        let texts = ["good film", "good food", "bad film", "bad food", "film", "food"];
        let oracle = Oracle::fit(&texts, &[2.0, 2.0, -2.0, -2.0, 0.0, 0.0]).unwrap();
        assert!(oracle.score("good day") > 0.5 && oracle.score("bad day") < -0.5);
        assert!((correlation(&[1.0, 2.0, 3.0], &[2.0, 4.0, 6.5]) - 0.9986).abs() < 1e-3);
    }
}
