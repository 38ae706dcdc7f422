use rand_chacha::rand_core::RngCore;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF as _, Normal};

use super::describe::{median_in_place, quantile_in_place};
use super::{StatsError, check, check_level, check_pair, finite};
use crate::Seed;

/// How a bootstrap is made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bootstrap {
    /// Number of resamples.
    pub resamples: usize,
    /// Level of confidence.
    pub level: f64,
    /// How the ends are found.
    pub method: BootstrapMethod,
    /// Seed of the resamples.
    pub seed: u64,
}

impl Default for Bootstrap {
    /// 10,000 resamples, 95 %, bias-corrected and accelerated, seed 0.
    fn default() -> Self {
        Self { resamples: 10_000, level: 0.95, method: BootstrapMethod::Bca, seed: 0 }
    }
}

/// How the ends of a bootstrap interval are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootstrapMethod {
    /// Quantiles of the resampled statistics.
    Percentile,
    /// Quantiles corrected for bias and for a spread that changes with the statistic (B. Efron, 1987).
    Bca,
}

/// A statistic with its bootstrap interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BootstrapInterval {
    /// The statistic of the values as they came.
    pub estimate: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The bootstrap interval of any statistic of `values`. The statistic may reorder the values that it is given.
///
/// Resample `i` has a stream of its own, so the result doesn't depend on the number of threads.
///
/// ```
/// use tensor::stats::{Bootstrap, bootstrap_interval};
///
/// let gains = [0.4, 1.1, 0.8, 0.1, 0.9, 1.4, 0.7, 0.6];
/// let mean = |values: &mut [f64]| values.iter().sum::<f64>() / values.len() as f64;
/// let interval = bootstrap_interval(&gains, mean, &Bootstrap::default())?;
/// assert!(interval.low > 0.3 && interval.high < 1.1);
/// # Ok::<(), tensor::stats::StatsError>(())
/// ```
///
/// # Errors
/// [`StatsError::TooFew`] below two values, [`StatsError::NonFinite`], [`StatsError::BadLevel`], [`StatsError::NoResamples`], [`StatsError::BadStatistic`]
/// if the statistic isn't finite on a resample.
pub fn bootstrap_interval(
    values: &[f64],
    statistic: impl Fn(&mut [f64]) -> f64 + Sync,
    config: &Bootstrap,
) -> Result<BootstrapInterval, StatsError> {
    check("values", values, 2)?;
    over_rows("values", values.len(), config, |rows| {
        let mut chosen: Vec<f64> = rows.iter().map(|&row| values[row]).collect();
        statistic(&mut chosen)
    })
}

/// median(a) / median(b) of paired timings, with its bootstrap interval.
///
/// `a[i]` and `b[i]` are neighbours of an interleaved run A B A B, and pairs are resampled as pairs: what slows both down doesn't widen
/// the interval.
///
/// # Errors
/// [`StatsError::UnequalLengths`], [`StatsError::NotPositive`], and as [`bootstrap_interval`].
pub fn ratio_of_medians(a: &[f64], b: &[f64], config: &Bootstrap) -> Result<BootstrapInterval, StatsError> {
    check_pair(a, b, 2)?;
    for (what, values) in [("a", a), ("b", b)] {
        if let Some(index) = values.iter().position(|v| *v <= 0.0) {
            return Err(StatsError::NotPositive { what, index, value: values[index] });
        }
    }
    over_rows("a / b", a.len(), config, |rows| {
        let median = |values: &[f64]| {
            let mut chosen: Vec<f64> = rows.iter().map(|&row| values[row]).collect();
            median_in_place(&mut chosen)
        };
        median(a) / median(b)
    })
}

/// The interval of a statistic of `n` rows, given by their numbers.
fn over_rows(
    what: &'static str,
    n: usize,
    config: &Bootstrap,
    statistic: impl Fn(&[usize]) -> f64 + Sync,
) -> Result<BootstrapInterval, StatsError> {
    check_level(config.level)?;
    if config.resamples == 0 {
        return Err(StatsError::NoResamples);
    }
    let checked = |rows: &[usize]| {
        let value = statistic(rows);
        if value.is_finite() { Ok(value) } else { Err(StatsError::BadStatistic { what, value }) }
    };
    let all: Vec<usize> = (0..n).collect();
    let estimate = checked(&all)?;
    let rng = Seed::new(config.seed).child("bootstrap").rng();
    let mut resampled = (0..config.resamples as u64)
        .into_par_iter()
        .map(|i| {
            let mut rng = rng.clone();
            rng.set_stream(i);
            // The high half of a 64-bit product is uniform to n / 2^64.
            let mut row = || ((u128::from(rng.next_u64()) * n as u128) >> 64) as usize;
            let rows: Vec<usize> = (0..n).map(|_| row()).collect();
            checked(&rows)
        })
        .collect::<Result<Vec<f64>, _>>()?;

    let tails = [(1.0 - config.level) / 2.0, f64::midpoint(1.0, config.level)];
    let [low, high] = match config.method {
        BootstrapMethod::Percentile => tails,
        BootstrapMethod::Bca => {
            let left_out = (0..n)
                .map(|skip| {
                    let rows: Vec<usize> = all.iter().copied().filter(|r| *r != skip).collect();
                    checked(&rows)
                })
                .collect::<Result<Vec<f64>, _>>()?;
            corrected(tails, estimate, &resampled, &left_out)
        }
    };
    Ok(BootstrapInterval {
        estimate,
        low: finite(what, quantile_in_place(&mut resampled, low))?,
        high: finite(what, quantile_in_place(&mut resampled, high))?,
    })
}

/// The orders of the quantiles that stand for `tails`: Φ(z₀ + (z₀ + z) / (1 − a(z₀ + z))), with the bias z₀ from the part of the resampled
/// statistics below the estimate (half of the equal ones counted) and the acceleration a from the statistics with one row left out.
fn corrected(tails: [f64; 2], estimate: f64, resampled: &[f64], left_out: &[f64]) -> [f64; 2] {
    let normal = Normal::standard();
    let count = resampled.len() as f64;
    let below: f64 = resampled
        .iter()
        .map(|v| match v.total_cmp(&estimate) {
            std::cmp::Ordering::Less => 1.0,
            std::cmp::Ordering::Equal => 0.5,
            std::cmp::Ordering::Greater => 0.0,
        })
        .sum();
    // All on one side would be an infinite bias: count half a resample on the other.
    let bias = normal.inverse_cdf((below / count).clamp(0.5 / count, 1.0 - 0.5 / count));
    let mean = left_out.iter().sum::<f64>() / left_out.len() as f64;
    let (mut squares, mut cubes) = (0.0, 0.0);
    for value in left_out {
        let lack = mean - value;
        squares += lack * lack;
        cubes += lack * lack * lack;
    }
    let acceleration = cubes / (6.0 * f64::powf(squares, 1.5));
    let acceleration = if acceleration.is_finite() { acceleration } else { 0.0 };
    tails.map(|tail| {
        let z = bias + normal.inverse_cdf(tail);
        let scale = 1.0 - acceleration * z;
        // Beyond the pole the correction has no meaning: the end of the range is the answer.
        if scale <= 0.0 { f64::from(z > 0.0) } else { normal.cdf(bias + z / scale) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mean(values: &mut [f64]) -> f64 {
        values.iter().sum::<f64>() / values.len() as f64
    }

    #[test]
    fn bca_orders_are_scipys() {
        // Six resampled statistics, four with one row left out; orders by the formulas of scipy.stats.bootstrap 1.17.
        let orders = corrected([0.025, 0.975], 2.5, &[1.0, 2.0, 2.5, 2.6, 3.0, 4.0], &[2.0, 2.2, 2.9, 3.9]);
        let expected = [0.004266824488221543, 0.919976867744773];
        for (order, expected) in orders.iter().zip(expected) {
            assert!((order - expected).abs() < 1e-10, "{orders:?}");
        }
    }

    #[test]
    fn equal_values_give_a_point() {
        let interval = bootstrap_interval(&[3.0; 5], mean, &Bootstrap::default()).unwrap();
        assert_eq!((interval.low, interval.estimate, interval.high), (3.0, 3.0, 3.0));
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let values: Vec<f64> = Seed::new(1).normal(30).into_iter().map(f64::from).collect();
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| bootstrap_interval(&values, mean, &Bootstrap::default()).unwrap())
        };
        assert_eq!(with(1), with(3));
    }

    #[test]
    fn a_common_drift_leaves_the_ratio_alone() {
        // Both slow down eightfold during the run; a takes twice the time of b throughout.
        let b: Vec<f64> = (0..21).map(|i| f64::exp2(f64::from(i) / 7.0)).collect();
        let a: Vec<f64> = b.iter().map(|t| 2.0 * t).collect();
        let ratio = ratio_of_medians(&a, &b, &Bootstrap::default()).unwrap();
        assert_eq!((ratio.low, ratio.estimate, ratio.high), (2.0, 2.0, 2.0));
    }

    #[test]
    fn the_interval_covers_the_truth_about_as_often_as_it_says() {
        // 400 samples of 20 from a skewed distribution (squares of normals, mean 1).
        let config = Bootstrap { resamples: 500, level: 0.9, ..Bootstrap::default() };
        let covered = (0..400u64)
            .filter(|&i| {
                let sample: Vec<f64> = Seed::new(11).index(i).normal(20).iter().map(|v| f64::from(v * v)).collect();
                let interval = bootstrap_interval(&sample, mean, &config).unwrap();
                interval.low <= 1.0 && 1.0 <= interval.high
            })
            .count();
        // Small samples of a skewed distribution: BCa covers 0.84 (of 20,000 such samples). Five standard deviations of 400 are 37.
        assert!((299..=372).contains(&covered), "{covered} of 400");
    }

    #[test]
    fn bad_input_is_named() {
        let config = Bootstrap::default();
        let nothing = Bootstrap { resamples: 0, ..config };
        let values = [1.0, 2.0];
        assert_eq!(bootstrap_interval(&values, mean, &nothing), Err(StatsError::NoResamples));
        assert!(matches!(bootstrap_interval(&[1.0], mean, &config), Err(StatsError::TooFew { .. })));
        assert!(matches!(bootstrap_interval(&values, |_| f64::NAN, &config), Err(StatsError::BadStatistic { .. })));
        assert_eq!(
            ratio_of_medians(&values, &[1.0, 0.0], &config).unwrap_err().to_string(),
            "The value number 1 of `b` is 0, but a ratio needs values above 0."
        );
        let level = Bootstrap { level: 95.0, ..config };
        assert!(matches!(ratio_of_medians(&values, &values, &level), Err(StatsError::BadLevel { .. })));
        assert!(serde_json::from_str::<Bootstrap>(r#"{"resample": 3}"#).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_ends_lie_within_the_values(values in prop::collection::vec(-10.0..10.0f64, 2..20), seed: u64, level in 0.5..0.99f64) {
            for method in [BootstrapMethod::Percentile, BootstrapMethod::Bca] {
                let config = Bootstrap { resamples: 200, level, method, seed };
                let interval = bootstrap_interval(&values, median_in_place, &config).unwrap();
                let least = values.iter().copied().fold(f64::INFINITY, f64::min);
                let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                prop_assert!(least <= interval.low && interval.low <= interval.high && interval.high <= most);
            }
        }
    }
}
