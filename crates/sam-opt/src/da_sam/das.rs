//! Dynamic adaptive scaling: from losses to factors.

use super::config::{DaSamConfig, DasRule};

/// Factors `s_k` of the domains with these mean losses: `Σ s_k = D`, within `[s_min, s_max]` where the rule is
/// clipped [reconstruction; `Disam` is prior work].
///
/// One domain, or losses that are all 0, give 1.
///
/// ```
/// use sam_opt::{DaSamConfig, das_factors};
/// let s = das_factors(&DaSamConfig::default(), &[0.5, 4.0]);
/// assert!((s[1] - 1.651429358).abs() < 1e-9 && (s[0] + s[1] - 2.0).abs() < 1e-12);
/// ```
pub fn das_factors(config: &DaSamConfig, losses: &[f64]) -> Vec<f64> {
    let d = losses.len() as f64;
    let mean = losses.iter().sum::<f64>() / d;
    let ones = vec![1.0; losses.len()];
    if losses.len() < 2 || losses.iter().all(|&l| l == 0.0) {
        return ones;
    }
    // r_k, the relative difficulty: free of the losses' scale.
    let relative: Vec<f64> = losses.iter().map(|l| l / (mean + 1e-12)).collect();
    let raw: Vec<f64> = match config.das {
        DasRule::Uniform => return ones,
        DasRule::Disam(lambda) => return losses.iter().map(|l| 1.0 - 2.0 * lambda * (l - mean)).collect(),
        DasRule::Softmax => {
            let largest = relative.iter().map(|r| r / config.tau).fold(f64::MIN, f64::max);
            relative.iter().map(|r| (r / config.tau - largest).exp()).collect()
        }
        // A loss of 0 with a negative exponent would be infinite: the smallest positive share stands in for it.
        DasRule::Power(gamma) => relative.iter().map(|r| r.max(1e-12).powf(gamma)).collect(),
    };
    let sum: f64 = raw.iter().sum();
    if !(sum.is_finite() && sum > 0.0) {
        return ones;
    }
    let factors = raw.iter().map(|r| d * r / sum).collect();
    clipped(factors, config.s_min, config.s_max.unwrap_or(d))
}

/// Clips to `[low, high]` and rescales what isn't clipped, by one common number, so that the sum stays.
///
/// The specification clips and rescales in turn, which misses the sum where entries are cut at both ends; this finds
/// the same point where that works, and keeps the sum where it doesn't: the sum grows with the common number.
fn clipped(factors: Vec<f64>, low: f64, high: f64) -> Vec<f64> {
    if factors.iter().all(|s| (low..=high).contains(s)) {
        return factors;
    }
    let total = factors.len() as f64;
    let factors: Vec<f64> = factors.iter().map(|s| s.max(1e-300)).collect();
    let at = |log: f64| factors.iter().map(move |s| (s.ln() + log).exp().clamp(low, high));
    let (mut below, mut above) = (-800.0, 800.0);
    // 800 · 2⁻⁶⁴ is below the spacing of f64 at the logarithms that matter.
    for _ in 0..64 {
        let middle = f64::midpoint(below, above);
        if at(middle).sum::<f64>() < total {
            below = middle;
        } else {
            above = middle;
        }
    }
    at(above).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_keeps_the_sum_and_the_order() {
        let config = DaSamConfig { tau: 0.05, ..DaSamConfig::default() };
        let s = das_factors(&config, &[0.1, 0.2, 3.0, 0.3]);
        assert!((s.iter().sum::<f64>() - 4.0).abs() < 1e-12, "{s:?}");
        assert!(s.iter().all(|&s| (0.1..=4.0).contains(&s)), "{s:?}");
        assert!(s[2] > s[3] && s[3] >= s[1] && s[1] >= s[0], "{s:?}");
        let bounded = das_factors(&DaSamConfig { s_max: Some(1.5), ..config }, &[0.1, 0.2, 3.0, 0.3]);
        assert!((bounded.iter().sum::<f64>() - 4.0).abs() < 1e-12, "{bounded:?}");
        assert!(bounded.iter().all(|&s| s <= 1.5 + 1e-12), "{bounded:?}");
    }

    #[test]
    fn signs_of_the_rules() {
        let with = |das, tau| das_factors(&DaSamConfig { das, tau, ..DaSamConfig::default() }, &[0.5, 1.5]);
        assert!(with(DasRule::Softmax, 1.0)[1] > 1.0 && with(DasRule::Softmax, -1.0)[1] < 1.0);
        assert!(with(DasRule::Power(2.0), 1.0)[1] > 1.0 && with(DasRule::Power(-1.0), 1.0)[1] < 1.0);
        assert_eq!(with(DasRule::Disam(0.1), 1.0), [1.1, 0.9]);
        assert_eq!(with(DasRule::Uniform, 1.0), [1.0, 1.0]);
    }

    #[test]
    fn limits() {
        let config = DaSamConfig::default();
        assert_eq!(das_factors(&config, &[3.0]), [1.0]);
        assert_eq!(das_factors(&config, &[0.0, 0.0]), [1.0, 1.0]);
        let power = DaSamConfig { das: DasRule::Power(-3.0), ..config };
        assert!(das_factors(&power, &[0.0, 1.0]).iter().all(|s| s.is_finite()));
        let extreme = DaSamConfig { tau: 1e-6, ..DaSamConfig::default() };
        assert!(das_factors(&extreme, &[1e-3, 1e3]).iter().all(|s| s.is_finite()));
    }
}
