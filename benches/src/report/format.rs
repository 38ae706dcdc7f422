//! Numbers and times as text. Values that aren't finite become a dash: no "NaN" reaches a reader.

use crate::analysis::Estimate;
use std::time::{Duration, UNIX_EPOCH};

/// Stands where there is no number.
pub(super) const DASH: &str = "–";

/// `-1.5` with two decimals is `−1.50`; what rounds to zero has no sign.
pub(super) fn fixed(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return DASH.to_owned();
    }
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().all(|c| c == '0' || c == '.') => rest.to_owned(),
        Some(rest) => format!("−{rest}"),
        None => text,
    }
}

/// As [`fixed`], with a plus sign for positive values: for differences.
pub(super) fn signed(value: f64, decimals: usize) -> String {
    let text = fixed(value, decimals);
    let zero = text.chars().all(|c| c == '0' || c == '.');
    if value > 0.0 && value.is_finite() && !zero { format!("+{text}") } else { text }
}

/// A margin or bound exactly as the claim states it, not rounded.
pub(super) fn exact(value: f64) -> String {
    if value.is_finite() { value.to_string().replace('-', "−") } else { DASH.to_owned() }
}

/// `[low, high]`, if both ends are numbers.
pub(super) fn interval(estimate: &Estimate, decimals: usize) -> Option<String> {
    let (low, high) = finite(estimate)?;
    Some(format!("[{}, {}]", fixed(low, decimals), fixed(high, decimals)))
}

/// The interval of an estimate, if both ends are numbers.
pub(super) fn finite(estimate: &Estimate) -> Option<(f64, f64)> {
    estimate.interval.filter(|(low, high)| low.is_finite() && high.is_finite())
}

/// Mean ± half the width of its interval.
pub(super) fn mean(estimate: Option<&Estimate>, decimals: usize) -> String {
    let Some(estimate) = estimate.filter(|e| e.value.is_finite()) else { return DASH.to_owned() };
    let value = fixed(estimate.value, decimals);
    match finite(estimate) {
        Some((low, high)) => format!("{value} ± {}", fixed((high - low) / 2.0, decimals)),
        None => value,
    }
}

/// Seconds of a run: three digits or so.
pub(super) fn seconds(value: f64) -> String {
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    fixed(value, decimals)
}

/// Mebibytes; 0 means that the system doesn't tell.
pub(super) fn mebibytes(value: f64) -> String {
    if value > 0.0 { fixed(value, 0) } else { DASH.to_owned() }
}

/// `2026-03-01 12:30 UTC` from seconds since 1970.
pub(super) fn date(seconds: u64) -> String {
    if seconds == 0 {
        return "unknown".to_owned();
    }
    let time =
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds.min(MAX_SECONDS))).to_string();
    format!("{} UTC", time[..16].replace('T', " "))
}

/// The end of the year 9999, beyond which there is no RFC 3339.
const MAX_SECONDS: u64 = 253_402_300_799;

/// `1 seed`, `2 seeds`.
pub(super) fn count(n: u64, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_a_real_minus_and_no_negative_zero() {
        assert_eq!(fixed(-1.25, 2), "−1.25");
        assert_eq!(fixed(-0.001, 2), "0.00");
        assert_eq!(signed(0.5, 1), "+0.5");
        assert_eq!(signed(0.001, 1), "0.0");
        assert_eq!(signed(-0.5, 1), "−0.5");
        assert_eq!(exact(-0.025), "−0.025");
    }

    #[test]
    fn what_is_not_a_number_is_a_dash() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for text in [fixed(bad, 2), signed(bad, 2), exact(bad), seconds(bad), mebibytes(-bad)] {
                assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
            }
            let estimate = Estimate { value: bad, interval: Some((bad, 1.0)), n: 2 };
            assert_eq!(mean(Some(&estimate), 1), DASH);
            assert_eq!(interval(&estimate, 1), None);
        }
    }

    #[test]
    fn a_single_value_has_no_half_width() {
        assert_eq!(mean(Some(&Estimate { value: 1.5, interval: None, n: 1 }), 1), "1.5");
        assert_eq!(mean(Some(&Estimate { value: 1.5, interval: Some((1.0, 2.0)), n: 2 }), 1), "1.5 ± 0.5");
        assert_eq!(mean(None, 1), DASH);
    }

    #[test]
    fn dates_are_short_and_the_far_future_does_not_panic() {
        assert_eq!(date(1_772_368_200), "2026-03-01 12:30 UTC");
        assert_eq!(date(0), "unknown");
        assert!(date(u64::MAX).starts_with("9999-12-31"));
    }
}
