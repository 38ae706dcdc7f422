//! Dynamic adaptive scaling: from losses to factors.

use super::config::{DaSamConfig, DasRule};

/// Factors `s_k` of the domains with these mean losses: `Σ s_k = D`, within `[s_min, s_max]` where the rule is
/// clipped [reconstruction; `Disam` is prior work].
///
/// Losses must be at least 0 (means of a cross-entropy are): shares of a sum that may be negative or 0 mean nothing. One
/// domain, or losses that are all 0, give 1. Nothing is checked here: a configuration that
/// [`validate`](DaSamConfig::validate) refuses gives factors without meaning.
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

/// Clips to `[low, high]` such that the sum stays. Bounds that don't enclose 1, which no valid configuration has, clip
/// nothing.
fn clipped(factors: Vec<f64>, low: f64, high: f64) -> Vec<f64> {
    let valid = low <= 1.0 && high >= 1.0;
    if !valid || factors.iter().all(|s| (low..=high).contains(s)) {
        return factors;
    }
    clip_and_rescale(&factors, low, high).unwrap_or_else(|| clip_rescaled(&factors, low, high))
}

/// The specification's loop: clip, keep what was clipped, rescale the others so that the sum is their number; again
/// until nothing is clipped, at most as many times as there are entries. `None` where that misses the sum (entries that
/// are cut at both ends may leave nothing, or not enough, to rescale).
fn clip_and_rescale(factors: &[f64], low: f64, high: f64) -> Option<Vec<f64>> {
    let total = factors.len() as f64;
    let mut entries: Vec<(f64, bool)> = factors.iter().map(|&s| (s, false)).collect();
    for _ in 0..factors.len() {
        for (s, fixed) in &mut entries {
            *fixed |= !(low..=high).contains(s);
            *s = s.max(low).min(high);
        }
        let sum = |of: bool| entries.iter().filter(|(_, fixed)| *fixed == of).map(|(s, _)| s).sum::<f64>();
        let (held, free) = (sum(true), sum(false));
        let rescale = (total - held) / free;
        if !(free > 0.0 && rescale > 0.0 && rescale.is_finite()) {
            break;
        }
        entries.iter_mut().filter(|(_, fixed)| !fixed).for_each(|(s, _)| *s *= rescale);
        if entries.iter().all(|(s, _)| (low..=high).contains(s)) {
            break;
        }
    }
    let result: Vec<f64> = entries.into_iter().map(|(s, _)| s).collect();
    let kept = (result.iter().sum::<f64>() - total).abs() <= 1e-9 * total;
    (kept && result.iter().all(|s| (low..=high).contains(s))).then_some(result)
}

/// Rescales all entries by one common number and clips them, with the number at which the sum is right: the sum grows
/// with it, so it is found by bisection.
fn clip_rescaled(factors: &[f64], low: f64, high: f64) -> Vec<f64> {
    let total = factors.len() as f64;
    let logarithms: Vec<f64> = factors.iter().map(|s| s.max(1e-300).ln()).collect();
    let at = |log: f64| logarithms.iter().map(move |s| (s + log).exp().max(low).min(high));
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

    fn close(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{got:?} is not {expected:?}");
        }
    }

    #[test]
    fn clipping_is_the_specifications_loop() {
        // 1.7 is cut to 1.5 and 0.05 raised to 0.1; 2.25 in all is left to 2.4.
        close(&clipped(vec![1.7, 1.3, 0.95, 0.05], 0.1, 1.5), &[1.5, 1.3 * 2.4 / 2.25, 0.95 * 2.4 / 2.25, 0.1]);
        // The first round lifts the second entry over the bound, so that there is a second round.
        close(&clipped(vec![2.0, 1.4, 0.4, 0.2], 0.1, 1.5), &[1.5, 1.5, 2.0 / 3.0, 1.0 / 3.0]);
        // What was raised stays: 3.8 is left for the others.
        let looped = clipped(vec![1.98, 1.96, 0.05, 0.01], 0.1, 2.0);
        close(&looped, &[1.98 * 3.8 / 3.94, 1.96 * 3.8 / 3.94, 0.1, 0.1]);
    }

    #[test]
    fn where_the_loop_leaves_nothing_to_rescale_the_sum_is_kept_all_the_same() {
        let factors = [3.9, 0.05, 0.03, 0.02];
        assert_eq!(clip_and_rescale(&factors, 0.1, 1.5), None);
        close(&clipped(factors.to_vec(), 0.1, 1.5), &clip_rescaled(&factors, 0.1, 1.5));
        let sum: f64 = clipped(factors.to_vec(), 0.1, 1.5).iter().sum();
        assert!((sum - 4.0).abs() < 1e-12, "{sum}");
    }

    #[test]
    fn a_configuration_that_nobody_checked_does_not_panic() {
        let nan = f64::NAN;
        for (s_min, s_max, tau) in [(5.0, Some(2.0), 0.5), (nan, None, 0.1), (0.1, Some(nan), 0.1), (0.1, None, 0.0)] {
            let config = DaSamConfig { tau, s_min, s_max, ..DaSamConfig::default() };
            for losses in [&[][..], &[1.0, 9.0], &[nan, 1.0, 2.0], &[-1.0, 1.0, 3.0]] {
                assert_eq!(das_factors(&config, losses).len(), losses.len());
            }
        }
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
