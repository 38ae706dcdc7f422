use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF as _, StudentsT};

use super::describe::mean_std_of;
use super::{StatsError, check_level, check_pair, finite};

/// A mean with its interval of Student's t distribution, and the test that it is 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The mean (of the differences, if paired).
    pub mean: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Number of values or pairs.
    pub n: usize,
    /// The mean over its standard error; `f64::MAX` with the sign of the mean if all values are equal and not 0, so that it can be
    /// written as JSON.
    pub t: f64,
    /// Two-sided probability of such a `t` if the true mean is 0.
    pub p: f64,
}

/// The interval of the mean of at least two values at the given level, for instance 0.95.
///
/// # Errors
/// [`StatsError::TooFew`], [`StatsError::NonFinite`], [`StatsError::BadLevel`], [`StatsError::Overflow`].
pub fn t_interval(values: &[f64], level: f64) -> Result<Interval, StatsError> {
    interval("values", values, level)
}

/// The interval of the mean of a − b, pair by pair, at the given level. Pairs are runs on the same seed, data and batches.
///
/// # Errors
/// [`StatsError::UnequalLengths`], and as [`t_interval`].
pub fn paired_t(a: &[f64], b: &[f64], level: f64) -> Result<Interval, StatsError> {
    check_pair(a, b, 2)?;
    let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    if differences.iter().any(|d| !d.is_finite()) {
        return Err(StatsError::Overflow { what: "a − b" });
    }
    interval("a − b", &differences, level)
}

fn interval(what: &'static str, values: &[f64], level: f64) -> Result<Interval, StatsError> {
    check_level(level)?;
    let (mean, std) = mean_std_of(what, values)?;
    let n = values.len();
    let error = std / (n as f64).sqrt();
    let t = match (error == 0.0, mean == 0.0) {
        (_, true) => 0.0,
        (true, false) => f64::MAX.copysign(mean),
        (false, false) => (mean / error).clamp(-f64::MAX, f64::MAX),
    };
    // Invariant: location 0, scale 1 and n − 1 ≥ 1 degrees of freedom are what the distribution accepts.
    let student = StudentsT::new(0.0, 1.0, (n - 1) as f64).expect("n is at least 2");
    let reach = student.inverse_cdf(0.5 + level / 2.0) * error;
    Ok(Interval {
        mean,
        low: finite(what, mean - reach)?,
        high: finite(what, mean + reach)?,
        n,
        t,
        p: (2.0 * student.cdf(-t.abs())).min(1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_values_give_a_point_and_a_certain_answer() {
        let one = t_interval(&[2.0, 2.0, 2.0], 0.95).unwrap();
        assert_eq!((one.low, one.mean, one.high, one.t, one.p), (2.0, 2.0, 2.0, f64::MAX, 0.0));
        let zero = paired_t(&[2.0, 3.0], &[2.0, 3.0], 0.95).unwrap();
        assert_eq!((zero.low, zero.mean, zero.high, zero.t, zero.p), (0.0, 0.0, 0.0, 0.0, 1.0));
    }

    #[test]
    fn bad_input_is_named() {
        assert_eq!(
            paired_t(&[1.0, 2.0], &[1.0], 0.95).unwrap_err().to_string(),
            "Paired values are needed, but `a` has 2 and `b` has 1: give the same seeds to both."
        );
        assert!(matches!(
            paired_t(&[1.0, 2.0], &[1.0, f64::INFINITY], 0.95),
            Err(StatsError::NonFinite { what: "b", index: 1, .. })
        ));
        assert!(matches!(paired_t(&[1.0], &[1.0], 0.95), Err(StatsError::TooFew { .. })));
        for level in [0.0, 1.0, -0.5, 95.0, f64::NAN] {
            assert!(matches!(t_interval(&[1.0, 2.0], level), Err(StatsError::BadLevel { .. })));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_interval_leaves_out_zero_just_when_p_is_small(values in prop::collection::vec(-1.0..1.5f64, 2..30), level in 0.5..0.999f64) {
            let interval = t_interval(&values, level).unwrap();
            prop_assert!(interval.low <= interval.mean && interval.mean <= interval.high);
            let outside = interval.low > 0.0 || interval.high < 0.0;
            if (interval.p - (1.0 - level)).abs() > 1e-6 {
                prop_assert_eq!(outside, interval.p < 1.0 - level);
            }
        }

        #[test]
        fn exchanging_the_two_turns_the_sign(pairs in prop::collection::vec((-1e3..1e3f64, -1e3..1e3f64), 2..30)) {
            let (a, b): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
            let (one, other) = (paired_t(&a, &b, 0.9).unwrap(), paired_t(&b, &a, 0.9).unwrap());
            prop_assert_eq!((one.mean, one.low, one.t, one.p), (-other.mean, -other.high, -other.t, other.p));
        }
    }
}
