use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF as _, Normal};

use super::{StatsError, check};

/// Wilcoxon's signed rank test of paired differences.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Wilcoxon {
    /// The smaller of the two sums of ranks.
    pub statistic: f64,
    /// Sum of the ranks of the positive differences.
    pub positive: f64,
    /// Number of differences that aren't 0.
    pub n: usize,
    /// Two-sided probability if the differences are symmetric about 0.
    pub p: f64,
    /// Whether `p` is exact; otherwise it is the normal approximation with corrections for ties and continuity.
    pub exact: bool,
}

/// Up to here, without ties, all sign patterns are counted.
const EXACT_UP_TO: usize = 25;

/// Wilcoxon's signed rank test that `differences` (of paired runs) are symmetric about 0.
///
/// Differences of 0 are dropped, as Wilcoxon did (SciPy's `zero_method="wilcox"`). If nothing is left, `p` is 1.
///
/// # Errors
/// [`StatsError::TooFew`] without differences, [`StatsError::NonFinite`].
pub fn wilcoxon_signed_rank(differences: &[f64]) -> Result<Wilcoxon, StatsError> {
    check("differences", differences, 1)?;
    let mut sorted: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    sorted.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    let n = sorted.len();

    let (mut positive, mut ties) = (0.0, 0.0);
    let mut before = 0;
    for group in sorted.chunk_by(|a, b| a.abs() == b.abs()) {
        let size = group.len() as f64;
        let rank = before as f64 + f64::midpoint(1.0, size); // the mean of the ranks before + 1 ..= before + size
        positive += rank * group.iter().filter(|d| **d > 0.0).count() as f64;
        ties += size * (size * size - 1.0);
        before += group.len();
    }
    let total = n as f64 * (n as f64 + 1.0) / 2.0;
    let statistic = positive.min(total - positive);
    let exact = n <= EXACT_UP_TO && ties == 0.0;
    let p = if n == 0 {
        1.0
    } else if exact {
        exact_p(n, statistic as usize)
    } else {
        // Variance n(n+1)(2n+1)/24 − Σ(t³ − t)/48; it is above 0, as n of one rank still have n(n+1)²/16.
        let (n, mean) = (n as f64, total / 2.0);
        let variance = n * (n + 1.0) * (2.0 * n + 1.0) / 24.0 - ties / 48.0;
        let z = ((statistic - mean + 0.5) / variance.sqrt()).min(0.0);
        2.0 * Normal::standard().cdf(z)
    };
    Ok(Wilcoxon { statistic, positive, n, p, exact })
}

/// Twice the part of the 2^n subsets of the ranks 1..=n whose sum is at most `statistic`.
fn exact_p(n: usize, statistic: usize) -> f64 {
    // counts[s]: subsets with sum s, among the ranks so far.
    let mut counts = vec![0u64; statistic + 1];
    counts[0] = 1;
    for rank in 1..=n {
        for sum in (rank..=statistic).rev() {
            counts[sum] += counts[sum - rank];
        }
    }
    let at_most: u64 = counts.iter().sum();
    (2.0 * at_most as f64 / 2f64.powi(n as i32)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All 2^n patterns of signs, one by one.
    fn plain_p(n: usize, statistic: f64) -> f64 {
        let total = (n * (n + 1) / 2) as f64;
        let extreme = (0..1u32 << n)
            .filter(|signs| {
                let sum: f64 = (0..n).filter(|i| signs >> i & 1 == 1).map(|i| (i + 1) as f64).sum();
                sum.min(total - sum) <= statistic
            })
            .count();
        extreme as f64 / 2f64.powi(n as i32)
    }

    #[test]
    fn nothing_but_zeros_shows_nothing() {
        let test = wilcoxon_signed_rank(&[0.0, -0.0]).unwrap();
        assert_eq!((test.n, test.p, test.statistic), (0, 1.0, 0.0));
    }

    #[test]
    fn five_of_one_sign_reach_one_in_sixteen() {
        let test = wilcoxon_signed_rank(&[0.1, 0.2, 0.3, 0.4, 0.5]).unwrap();
        assert_eq!((test.statistic, test.positive, test.p, test.exact), (0.0, 15.0, 0.0625, true));
    }

    #[test]
    fn bad_input_is_named() {
        assert!(matches!(wilcoxon_signed_rank(&[]), Err(StatsError::TooFew { .. })));
        assert!(matches!(wilcoxon_signed_rank(&[1.0, f64::NAN]), Err(StatsError::NonFinite { index: 1, .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_exact_p_counts_all_patterns(signs in prop::collection::vec(any::<bool>(), 1..12)) {
            let differences: Vec<f64> = signs.iter().enumerate().map(|(i, &s)| if s { 1.0 + i as f64 } else { -1.0 - i as f64 }).collect();
            let test = wilcoxon_signed_rank(&differences).unwrap();
            prop_assert!(test.exact);
            prop_assert!((test.p - plain_p(signs.len(), test.statistic)).abs() < 1e-12);
        }

        #[test]
        fn only_signs_and_ranks_count(values in prop::collection::vec(-5i32..6, 1..60)) {
            let differences: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
            let cubes: Vec<f64> = differences.iter().map(|v| v.powi(3)).collect();
            let turned: Vec<f64> = differences.iter().rev().map(|v| -v).collect();
            let test = wilcoxon_signed_rank(&differences).unwrap();
            prop_assert_eq!(test, wilcoxon_signed_rank(&cubes).unwrap());
            prop_assert_eq!(test.p, wilcoxon_signed_rank(&turned).unwrap().p);
            prop_assert!(test.p > 0.0 && test.p <= 1.0);
        }
    }
}
