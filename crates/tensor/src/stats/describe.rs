use super::{StatsError, check, finite};

/// Mean and sample standard deviation (divided by n − 1) of at least two values.
///
/// # Errors
/// [`StatsError::TooFew`] below two values, [`StatsError::NonFinite`], [`StatsError::Overflow`].
pub fn mean_std(values: &[f64]) -> Result<(f64, f64), StatsError> {
    mean_std_of("values", values)
}

/// Two passes, so that a large mean doesn't swallow a small spread.
pub(super) fn mean_std_of(what: &'static str, values: &[f64]) -> Result<(f64, f64), StatsError> {
    check(what, values, 2)?;
    let n = values.len() as f64;
    let mut mean = finite(what, values.iter().sum::<f64>() / n)?;
    // The mean of equal values is that value, whatever the sum was rounded to.
    mean += values.iter().map(|v| v - mean).sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    Ok((finite(what, mean)?, finite(what, (squares / (n - 1.0)).sqrt())?))
}

/// The value in the middle; with an even number of values the mean of the two in the middle.
///
/// # Errors
/// [`StatsError::TooFew`] without values, [`StatsError::NonFinite`].
pub fn median(values: &[f64]) -> Result<f64, StatsError> {
    quantile(values, 0.5)
}

/// The quantile of order `q`, interpolated linearly between the neighbours (type 7, NumPy's default): 0 is the least, 1 the largest.
///
/// # Errors
/// [`StatsError::BadQuantile`], [`StatsError::TooFew`] without values, [`StatsError::NonFinite`].
pub fn quantile(values: &[f64], q: f64) -> Result<f64, StatsError> {
    check("values", values, 1)?;
    if !(0.0..=1.0).contains(&q) {
        return Err(StatsError::BadQuantile { q });
    }
    let mut sorted = values.to_vec();
    Ok(quantile_in_place(&mut sorted, q))
}

/// The same without checks: `values` has an entry, all are finite, and `q` is from 0 to 1. Reorders `values`.
pub(super) fn quantile_in_place(values: &mut [f64], q: f64) -> f64 {
    let place = q * (values.len() - 1) as f64;
    let below = (place.floor() as usize).min(values.len() - 1);
    let (_, low, rest) = values.select_nth_unstable_by(below, f64::total_cmp);
    let low = *low;
    let part = place - below as f64;
    let high = rest.iter().copied().fold(f64::INFINITY, f64::min);
    if part == 0.0 || high == low {
        low
    } else {
        // Not low + part · (high − low): the difference may leave the range.
        low * (1.0 - part) + high * part
    }
}

pub(super) fn median_in_place(values: &mut [f64]) -> f64 {
    quantile_in_place(values, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_are_numpys() {
        let values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
        for (q, expected) in [(0.0, 1.0), (0.1, 1.0), (0.25, 1.75), (0.5, 3.5), (0.9, 6.9), (1.0, 9.0)] {
            assert!((quantile(&values, q).unwrap() - expected).abs() < 1e-14, "{q}");
        }
        assert_eq!(median(&[2.0]), Ok(2.0));
        assert_eq!(median(&[f64::MAX, -f64::MAX]), Ok(0.0));
    }

    #[test]
    fn a_small_spread_about_a_large_mean_is_kept() {
        let (mean, std) = mean_std(&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 3.0]).unwrap();
        assert_eq!((mean, std), (1e9 + 2.0, 1.0));
        assert_eq!(mean_std(&[0.1; 10]), Ok((0.1, 0.0)));
    }

    #[test]
    fn bad_input_is_named() {
        assert_eq!(
            mean_std(&[1.0, f64::NAN]).unwrap_err().to_string(),
            "The value number 1 of `values` is NaN, but finite numbers are needed: leave failed runs out and report how many there were."
        );
        assert!(matches!(mean_std(&[1.0]), Err(StatsError::TooFew { need: 2, got: 1, .. })));
        assert!(matches!(median(&[]), Err(StatsError::TooFew { need: 1, got: 0, .. })));
        assert!(matches!(quantile(&[1.0], 1.1), Err(StatsError::BadQuantile { .. })));
        assert!(matches!(quantile(&[1.0], f64::NAN), Err(StatsError::BadQuantile { .. })));
        assert!(matches!(mean_std(&[f64::MAX, f64::MAX]), Err(StatsError::Overflow { .. })));
        assert!(matches!(mean_std(&[f64::MAX, -f64::MAX]), Err(StatsError::Overflow { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_quantile_agrees_with_the_sorted_list(values in prop::collection::vec(-1e3..1e3f64, 1..50), q in 0.0..=1.0f64) {
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            let place = q * (sorted.len() - 1) as f64;
            let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            let plain = low + (high - low) * place.fract();
            prop_assert!((quantile(&values, q).unwrap() - plain).abs() < 1e-9);
        }

        #[test]
        fn shifting_and_scaling_move_mean_and_spread(values in prop::collection::vec(-1e3..1e3f64, 2..50), shift in -1e3..1e3f64, scale in 0.1..10.0f64) {
            let (mean, std) = mean_std(&values).unwrap();
            let moved: Vec<f64> = values.iter().map(|v| v * scale + shift).collect();
            let (other_mean, other_std) = mean_std(&moved).unwrap();
            prop_assert!((other_mean - (mean * scale + shift)).abs() < 1e-8);
            prop_assert!((other_std - std * scale).abs() < 1e-8);
        }
    }
}
