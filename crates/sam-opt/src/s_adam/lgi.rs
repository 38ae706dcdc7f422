//! Local geometric instability: the statistics, and their law on a smooth loss.
//!
//! Symbols: `D_i = (f(θ + σu_i) − f(θ))/σ` is the slope that the probe `i` of `k` saw, `g` the gradient, `u_i` random
//! directions.

use statrs::distribution::{ContinuousCDF as _, Normal};
use statrs::function::{beta::beta_reg, gamma::ln_gamma};

/// The published statistic \[official code\]: `Var(D)/(mean(D²) + ζ)` with the variance's divisor `k − 1`; 0 for fewer
/// than two slopes.
///
/// With ζ = 0 it is exactly `(k/(k−1))·(1 − mean(D)²/mean(D²))` (derived), so it lies in `[0, k/(k−1)]`, doesn't
/// depend on the scale of the loss, and is small only where all slopes have the same sign and size. On a smooth loss in
/// many dimensions its mean is 1 for every `k`.
///
/// ```
/// use sam_opt::s_adam::lgi_from_probes;
/// assert!((lgi_from_probes(&[3.0, 1.0], 1e-6) - 0.39999992).abs() < 1e-8);
/// assert_eq!(lgi_from_probes(&[2.0, 2.0], 1e-6), 0.0);
/// ```
pub fn lgi_from_probes(d: &[f64], zeta: f64) -> f64 {
    if d.len() < 2 {
        return 0.0;
    }
    let n = d.len() as f64;
    let mean = d.iter().sum::<f64>() / n;
    let square = mean_square(d);
    let variance = d.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    // All slopes 0 (a flat loss) and ζ = 0: nothing varies.
    if variance == 0.0 { 0.0 } else { variance / (square + zeta) }
}

/// The calibrated statistic (reconstruction): `mean(r²)/(mean(r²) + s)`, of residuals `r_i = D_i − ⟨g, u_i⟩` (the
/// residual form) or of `K_i` (the kink form), against the typical squared slope `s`; 0 without residuals.
///
/// In `[0, 1]`; 0 where the gradient predicts every slope.
pub fn lgi_from_residuals(residuals: &[f64], slope_square: f64) -> f64 {
    let unexplained = mean_square(residuals);
    if unexplained == 0.0 { 0.0 } else { unexplained / (unexplained + slope_square) }
}

/// Richardson's combination of second differences (derived): with `c(σ) = (f(θ+σu) + f(θ−σu) − 2f(θ))/σ`,
/// `K = 2c(σ/2) − c(σ)`. A quadratic term cancels, a kink's constant `c` stays.
///
/// The losses are `f(θ+σu)`, `f(θ−σu)`, `f(θ+½σu)`, `f(θ−½σu)`.
pub fn kink_from_losses(center: f64, losses: [f64; 4], sigma: f64) -> f64 {
    let [plus, minus, half_plus, half_minus] = losses.map(|loss| loss - center);
    2.0 * (half_plus + half_minus) / (0.5 * sigma) - (plus + minus) / sigma
}

fn mean_square(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64 }
}

/// Mean of the damping `exp(−λ·LGI)` of `k` probes on a smooth loss in many dimensions (derived):
/// `exp(−x)·₁F₁(½; k/2; x)` with `x = λk/(k−1)`; 1 for `k < 2`, where the LGI is 0.
///
/// This is the factor by which the published optimizer shrinks the steps where there is nothing to see: 0.3085 for the
/// defaults (k = 2, λ = 2). It holds while mean(D²) ≫ ζ; where slopes are smaller the LGI goes to 0 and the damping to 1.
/// NaN for a negative λ.
pub fn null_lgi_mean_damping(k: usize, lambda: f64) -> f64 {
    if lambda.is_nan() || lambda < 0.0 {
        return f64::NAN;
    }
    if k < 2 || lambda == 0.0 {
        return 1.0;
    }
    let k = k as f64;
    let x = lambda * k / (k - 1.0);
    if x > 1e4 {
        // Γ(k/2)/Γ(½) x^((1−k)/2), the leading term for large x; the next is smaller by a factor of about k/x.
        return (ln_gamma(0.5 * k) - ln_gamma(0.5) + 0.5 * (1.0 - k) * x.ln()).exp();
    }
    // The series Σ (½)_n/(k/2)_n xⁿ/n! has positive terms; e^(−x) is split off in logarithms because the sum overflows
    // where the product is still a number.
    let (mut term, mut sum, mut scale) = (1.0f64, 1.0f64, 0.0f64);
    let mut n = 0.0f64;
    while term > sum * 1e-17 || n < x {
        term *= (0.5 + n) / (0.5 * k + n) * x / (n + 1.0);
        sum += term;
        n += 1.0;
        if sum > 1e200 {
            (term, sum, scale) = (term * 1e-200, sum * 1e-200, scale + 200.0 * std::f64::consts::LN_10);
        }
    }
    (sum.ln() + scale - x).exp()
}

/// Standard deviation of the published LGI on a smooth loss in many dimensions (derived): `√(2/((k−1)(k+2)))`; its mean
/// is 1. 0 for `k < 2`.
pub fn null_lgi_sd(k: usize) -> f64 {
    if k < 2 {
        return 0.0;
    }
    let k = k as f64;
    (2.0 / ((k - 1.0) * (k + 2.0))).sqrt()
}

/// Two-sided p-value of the published LGI of `k` probes under the law that it has on a smooth loss in many dimensions
/// (derived): `mean(D)²/mean(D²)` is Beta(½, (k−1)/2). `None` for `k < 2`.
///
/// A small value with an LGI below 1 says that the probes rise (or fall) together: a kink, or curvature that the radius
/// makes visible.
pub fn null_lgi_p_value(lgi: f64, k: usize) -> Option<f64> {
    if k < 2 || !lgi.is_finite() {
        return None;
    }
    let k = k as f64;
    let b = (1.0 - lgi * (k - 1.0) / k).clamp(0.0, 1.0);
    let below = beta_reg(0.5, 0.5 * (k - 1.0), b);
    Some((2.0 * below.min(1.0 - below)).min(1.0))
}

/// Interval of the LGI that infinitely many directions would give, `1/(1 + m²)` with `m = E D/sd D`, which is at most 1
/// (a sample can exceed it). The delta method for `m` with the sample's skewness and kurtosis; `None` below eight slopes,
/// where those mean nothing, and for slopes that are all 0.
pub(super) fn lgi_interval(d: &[f64], level: f64) -> Option<(f64, f64)> {
    if d.len() < 8 {
        return None;
    }
    let n = d.len() as f64;
    let mean = d.iter().sum::<f64>() / n;
    let moment = |power| d.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / n;
    let variance = moment(2);
    if variance == 0.0 {
        return (mean != 0.0).then_some((0.0, 0.0));
    }
    let (skewness, kurtosis) = (moment(3) / variance.powf(1.5), moment(4) / variance.powi(2));
    let m = mean / variance.sqrt();
    let error = ((1.0 - skewness * m + 0.25 * (kurtosis - 1.0) * m * m).max(0.0) / n).sqrt();
    let reach = Normal::standard().inverse_cdf(0.5 + 0.5 * level) * error;
    let (near, far) = ((m.abs() - reach).max(0.0), m.abs() + reach);
    Some((1.0 / (1.0 + far * far), 1.0 / (1.0 + near * near)))
}
