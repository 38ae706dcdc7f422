use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF as _, Normal};

use super::{StatsError, check_pair};

/// Kendall's rank correlation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Kendall {
    /// τ-b: pairs in the same order minus pairs in opposite order, over the geometric mean of the pairs that aren't tied in each.
    pub tau: f64,
    /// Number of observations.
    pub n: usize,
    /// Variance of (pairs in the same order − pairs in opposite order) if there is no relation, ties considered.
    pub variance: f64,
    /// Two-sided probability of such a τ if there is no relation.
    pub p: f64,
    /// Whether `p` is exact; otherwise it is the normal approximation from `variance`.
    pub exact: bool,
}

/// Up to here, without ties, the distribution over all orders is computed.
const EXACT_UP_TO: usize = 33;

/// Kendall's τ-b of two lists of paired values, in O(n log n) (Knight 1966).
///
/// # Errors
/// [`StatsError::UnequalLengths`], [`StatsError::TooFew`] below two pairs, [`StatsError::NonFinite`], [`StatsError::Constant`] if all values of
/// one list are equal.
pub fn kendall_tau(a: &[f64], b: &[f64]) -> Result<Kendall, StatsError> {
    check_pair(a, b, 2)?;
    for (what, values) in [("a", a), ("b", b)] {
        if values.iter().all(|v| *v == values[0]) {
            return Err(StatsError::Constant { what, value: values[0] });
        }
    }
    let n = a.len();
    // −0 and 0 are the same value, and `total_cmp` must see them so.
    let mut points: Vec<(f64, f64)> = a.iter().zip(b).map(|(a, b)| (a + 0.0, b + 0.0)).collect();
    points.sort_by(|p, q| p.0.total_cmp(&q.0).then(p.1.total_cmp(&q.1)));
    let ties_a = Ties::of(points.chunk_by(|p, q| p.0 == q.0).map(<[_]>::len));
    let ties_both = Ties::of(points.chunk_by(|p, q| p == q).map(<[_]>::len));
    let mut in_a_order: Vec<f64> = points.iter().map(|p| p.1).collect();
    let opposite = sort_counting_exchanges(&mut in_a_order, &mut vec![0.0; n]) as f64;
    let ties_b = Ties::of(in_a_order.chunk_by(|p, q| p == q).map(<[_]>::len));

    let all = n as f64 * (n as f64 - 1.0) / 2.0;
    let same = all - opposite - ties_a.pairs - ties_b.pairs + ties_both.pairs;
    let score = same - opposite;
    let tau = score / (all - ties_a.pairs).sqrt() / (all - ties_b.pairs).sqrt();
    let variance = variance(n as f64, &ties_a, &ties_b);
    let exact = n <= EXACT_UP_TO && ties_a.pairs == 0.0 && ties_b.pairs == 0.0;
    let p = if exact {
        exact_p(n, opposite.min(same) as usize)
    } else {
        2.0 * Normal::standard().cdf(-score.abs() / variance.sqrt())
    };
    Ok(Kendall { tau: tau.clamp(-1.0, 1.0), n, variance, p, exact })
}

/// Sums over the groups of t equal values.
struct Ties {
    /// Σ t(t−1)/2.
    pairs: f64,
    /// Σ t(t−1)(t−2).
    triples: f64,
    /// Σ t(t−1)(2t+5).
    weighted: f64,
}

impl Ties {
    fn of(groups: impl Iterator<Item = usize>) -> Self {
        let mut ties = Self { pairs: 0.0, triples: 0.0, weighted: 0.0 };
        for t in groups.map(|t| t as f64) {
            ties.pairs += t * (t - 1.0) / 2.0;
            ties.triples += t * (t - 1.0) * (t - 2.0);
            ties.weighted += t * (t - 1.0) * (2.0 * t + 5.0);
        }
        ties
    }
}

/// The variance of the score under independence, with ties (Kendall, "Rank Correlation Methods", chapter 4).
fn variance(n: f64, a: &Ties, b: &Ties) -> f64 {
    let m = n * (n - 1.0);
    let triples = if n > 2.0 { a.triples * b.triples / (9.0 * m * (n - 2.0)) } else { 0.0 };
    (m * (2.0 * n + 5.0) - a.weighted - b.weighted) / 18.0 + 2.0 * a.pairs * b.pairs / m + triples
}

/// Merge sort; returns how many pairs stood in descending order.
fn sort_counting_exchanges(values: &mut [f64], scratch: &mut [f64]) -> u64 {
    let n = values.len();
    if n < 2 {
        return 0;
    }
    let (low, high) = values.split_at_mut(n / 2);
    let mut count = sort_counting_exchanges(low, scratch) + sort_counting_exchanges(high, scratch);
    let (mut i, mut j) = (0, 0);
    for slot in &mut scratch[..n] {
        if j == high.len() || (i < low.len() && low[i] <= high[j]) {
            *slot = low[i];
            i += 1;
        } else {
            count += (low.len() - i) as u64;
            *slot = high[j];
            j += 1;
        }
    }
    values.copy_from_slice(&scratch[..n]);
    count
}

/// Twice the probability that a random order of n has at most `exchanges` inversions, which must not be more than half of all.
fn exact_p(n: usize, exchanges: usize) -> f64 {
    // parts[k]: probability of k inversions. One more element adds 0..=its place, each equally likely.
    let mut parts = vec![0.0; exchanges + 1];
    parts[0] = 1.0;
    for place in 1..n {
        let mut window = 0.0;
        let old = parts.clone();
        for k in 0..=exchanges {
            window += old[k];
            if k > place {
                window -= old[k - place - 1];
            }
            parts[k] = window / (place + 1) as f64;
        }
    }
    (2.0 * parts.iter().sum::<f64>()).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pair by pair.
    fn plain_tau(a: &[f64], b: &[f64]) -> f64 {
        let (mut score, mut in_a, mut in_b) = (0.0, 0.0, 0.0);
        for i in 0..a.len() {
            for j in 0..i {
                let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
                let (x, y) = (sign(a[i] - a[j]), sign(b[i] - b[j]));
                score += x * y;
                in_a += x * x;
                in_b += y * y;
            }
        }
        score / f64::sqrt(in_a * in_b)
    }

    #[test]
    fn the_same_order_gives_one_and_the_opposite_minus_one() {
        let a = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(kendall_tau(&a, &[10.0, 20.0, 21.0, 22.0]).unwrap().tau, 1.0);
        let opposite = kendall_tau(&a, &[4.0, 3.0, 2.0, 1.0]).unwrap();
        assert_eq!(opposite.tau, -1.0);
        assert!((opposite.p - 2.0 / 24.0).abs() < 1e-15); // one order of 4! on either side
    }

    #[test]
    fn bad_input_is_named() {
        assert_eq!(
            kendall_tau(&[1.0, 2.0], &[3.0, 3.0]).unwrap_err().to_string(),
            "All values of `b` are 3: a rank correlation needs values that differ."
        );
        assert!(matches!(kendall_tau(&[1.0], &[3.0]), Err(StatsError::TooFew { .. })));
        assert!(matches!(kendall_tau(&[1.0], &[]), Err(StatsError::UnequalLengths { .. })));
        assert!(matches!(kendall_tau(&[1.0, f64::NAN], &[3.0, 4.0]), Err(StatsError::NonFinite { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_fast_way_agrees_with_the_plain_one(pairs in prop::collection::vec((-4i8..5, -4i8..5), 2..60)) {
            let (a, b): (Vec<f64>, Vec<f64>) = pairs.into_iter().map(|(a, b)| (f64::from(a), f64::from(b))).unzip();
            match kendall_tau(&a, &b) {
                Ok(kendall) => {
                    prop_assert!((kendall.tau - plain_tau(&a, &b)).abs() < 1e-12);
                    prop_assert!(kendall.p > 0.0 && kendall.p <= 1.0 && kendall.variance > 0.0);
                }
                Err(error) => prop_assert!(matches!(error, StatsError::Constant { .. }), "{}", error),
            }
        }

        #[test]
        fn the_exact_p_falls_to_two_in_all_orders(n in 2usize..12) {
            let factorial: f64 = (1..=n).map(|i| i as f64).product();
            prop_assert!((exact_p(n, 0) - 2.0 / factorial).abs() < 1e-15);
        }
    }
}
