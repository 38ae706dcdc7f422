//! How strong to steer: the effect and the price of each strength, and the strength for a price.
//!
//! A strength chosen by eye means nothing for another map, site or model. What can be compared is the effect at the same loss
//! of fluency, measured on the same prompts.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::stats::{Bootstrap, BootstrapInterval, bootstrap_interval};

/// What one strength did to each prompt.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Measured {
    /// The concept's score of each continuation, larger is more of it.
    pub effect: Vec<f64>,
    /// Mean negative log-likelihood of each continuation under the model that isn't steered, nats a token.
    pub nll: Vec<f64>,
}

/// A strength with what it changed, paired by prompt with no steering.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The strength.
    pub alpha: f64,
    /// Mean change of the effect, with its 95 % interval over prompts.
    pub effect: BootstrapInterval,
    /// Mean rise of the negative log-likelihood, nats a token, with its 95 % interval over prompts.
    pub nll: BootstrapInterval,
}

/// The strengths that were tried, and the one for the budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// The largest strength whose mean rise of the negative log-likelihood stays within the budget, on straight lines between
    /// the strengths that were tried. 0 if the smallest step is too dear.
    pub alpha: f64,
    /// Whether the largest strength that was tried is still within the budget: a larger one might be too.
    pub at_end: bool,
    /// The strengths in rising order.
    pub points: Vec<Point>,
}

/// Finds the strength for a budget of fluency: the largest α of which the continuations' negative log-likelihood (under the
/// model that isn't steered) rises by at most `budget` nats a token on average.
///
/// `measure(alpha)` generates for the same prompts with the same random numbers; it is called with 0 first and then with
/// each of `alphas`.
///
/// # Errors
/// [`Error::InvalidArgument`] for no or unordered strengths, a budget below 0, or measurements of unequal length or that aren't
/// finite; what `measure` reports.
pub fn calibrate(
    alphas: &[f64],
    budget: f64,
    seed: u64,
    mut measure: impl FnMut(f64) -> Result<Measured>,
) -> Result<Calibration> {
    let rising = alphas.first().is_some_and(|&first| first > 0.0) && alphas.windows(2).all(|w| w[0] < w[1]);
    if !rising || alphas.iter().any(|alpha| !alpha.is_finite()) {
        return Err(Error::invalid("alphas", "strengths above 0 in rising order", format!("{alphas:?}")));
    }
    if !(budget.is_finite() && budget >= 0.0) {
        return Err(Error::invalid("budget", "at least 0 nats a token", budget));
    }
    let base = measure(0.0)?;
    let mut points = Vec::with_capacity(alphas.len());
    for &alpha in alphas {
        let steered = measure(alpha)?;
        let change = |what: &str, after: &[f64], before: &[f64]| -> Result<BootstrapInterval> {
            let sides = (after.len(), before.len());
            if sides.0 != sides.1 || before.len() < 2 {
                let expected = "of the same two or more prompts for every strength";
                return Err(Error::invalid(what, expected, format!("{} and {} numbers", sides.0, sides.1)));
            }
            let differences: Vec<f64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
            let mean = |values: &mut [f64]| values.iter().sum::<f64>() / values.len() as f64;
            bootstrap_interval(&differences, mean, &Bootstrap { seed, ..Bootstrap::default() })
                .map_err(|error| Error::invalid(what, "finite numbers", error))
        };
        points.push(Point {
            alpha,
            effect: change("effect", &steered.effect, &base.effect)?,
            nll: change("nll", &steered.nll, &base.nll)?,
        });
    }
    let mut alpha = 0.0;
    let mut at_end = true;
    let (mut last_alpha, mut last_nll) = (0.0, 0.0);
    for point in &points {
        if point.nll.estimate > budget {
            let share = (budget - last_nll) / (point.nll.estimate - last_nll);
            alpha = last_alpha + share.clamp(0.0, 1.0) * (point.alpha - last_alpha);
            at_end = false;
            break;
        }
        (alpha, last_alpha, last_nll) = (point.alpha, point.alpha, point.nll.estimate);
    }
    Ok(Calibration { alpha, at_end, points })
}

/// The effect at a given price: `points` are (price, effect) in the order of the strengths, beginning with no steering; the value
/// is read off the straight line between the first two neighbours that have the price between them. None where the price
/// isn't reached.
pub fn effect_at(points: &[(f64, f64)], price: f64) -> Option<f64> {
    points.windows(2).find_map(|w| {
        let ((low, before), (high, after)) = (w[0], w[1]);
        if !(low.min(high)..=low.max(high)).contains(&price) {
            return None;
        }
        let share = if high == low { 0.0 } else { (price - low) / (high - low) };
        Some(before + share * (after - before))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::unnecessary_wraps)] // what `calibrate` calls may fail
    fn measured(alpha: f64) -> Result<Measured> {
        let prompts = 0..20;
        let spread = |i: i32| 0.01 * f64::from(i % 5);
        Ok(Measured {
            effect: prompts.clone().map(|i| 0.1 * alpha + spread(i)).collect(),
            nll: prompts.map(|i| 2.0 + 0.05 * alpha * alpha + spread(i)).collect(),
        })
    }

    #[test]
    fn the_strength_is_read_off_the_line_between_two_neighbours() {
        let found = calibrate(&[1.0, 2.0, 4.0], 0.5, 0, measured).unwrap();
        // 0.2 at α = 2, 0.8 at α = 4: 0.5 lies half way.
        assert!((found.alpha - 3.0).abs() < 1e-9 && !found.at_end, "{found:?}");
        assert!((found.points[1].effect.estimate - 0.2).abs() < 1e-9);
        assert!((found.points[2].nll.estimate - 0.8).abs() < 1e-9);
    }

    #[test]
    fn a_budget_beyond_the_grid_gives_its_end_and_says_so() {
        let found = calibrate(&[1.0, 2.0], 9.0, 0, measured).unwrap();
        assert!(found.alpha == 2.0 && found.at_end);
        let none = calibrate(&[1.0, 2.0], 0.0, 0, measured).unwrap();
        assert!(none.alpha == 0.0 && !none.at_end);
    }

    #[test]
    fn bad_grids_budgets_and_measurements_are_named() {
        for alphas in [&[][..], &[0.0, 1.0], &[2.0, 1.0], &[1.0, f64::NAN]] {
            let message = calibrate(alphas, 0.1, 0, measured).unwrap_err().to_string();
            assert!(message.contains("alphas"), "{message}");
        }
        assert!(calibrate(&[1.0], -0.1, 0, measured).unwrap_err().to_string().contains("budget"));
        let mut calls = 0;
        let ragged = |alpha| {
            calls += 1;
            let mut m = measured(alpha)?;
            m.nll.truncate(20 - calls);
            Ok(m)
        };
        assert!(calibrate(&[1.0], 0.1, 0, ragged).unwrap_err().to_string().contains("nll"));
    }

    #[test]
    fn the_effect_at_a_price_needs_neighbours_around_it() {
        let points = [(2.0, 0.0), (2.2, 0.1), (2.6, 0.3)];
        assert!((effect_at(&points, 2.4).unwrap() - 0.2).abs() < 1e-12);
        assert_eq!(effect_at(&points, 2.7), None);
        assert_eq!(effect_at(&points, 2.0), Some(0.0));
    }
}
