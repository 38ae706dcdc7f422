//! Seeded parts of a set in which the classes keep their proportions.
//!
//! All functions return indices of rows, take a seed, and give the same answer on every machine and in every version.

use crate::stream::{shuffle, stream};
use crate::{Error, Result};

/// Indices of the rows of three parts that share no row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// Rows to train on.
    pub train: Vec<usize>,
    /// Rows to choose hyper-parameters on.
    pub validation: Vec<usize>,
    /// Rows to report on.
    pub test: Vec<usize>,
}

/// A random order of the rows in which every beginning has the classes in nearly the proportions of `y`: with k
/// classes each is off by at most (k + 1)/2 rows, and by less than one in balanced sets.
///
/// Cut it anywhere: that is how the other functions here take their parts. Within a class the order is uniformly random.
pub fn stratified_order(y: &[u8], seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..y.len()).collect();
    shuffle(&mut order, &mut stream(seed, "stratified_order"));
    let mut sizes = [0usize; 256];
    for &class in y {
        sizes[usize::from(class)] += 1;
    }
    // The j-th row of a class of n stands at (j + ½)/n of the whole. The sort is stable: ties stay in random order.
    let mut seen = [0usize; 256];
    let mut placed: Vec<(f64, usize)> = order
        .into_iter()
        .map(|row| {
            let class = usize::from(y[row]);
            let place = (seen[class] as f64 + 0.5) / sizes[class] as f64;
            seen[class] += 1;
            (place, row)
        })
        .collect();
    placed.sort_by(|a, b| a.0.total_cmp(&b.0));
    placed.into_iter().map(|(_, row)| row).collect()
}

/// Cuts all rows into train, validation and test. Every row is in one part; a part's size is its fraction of the rows, rounded.
///
/// # Errors
/// [`Error::BadArgument`] if a fraction is negative or not finite, or if they don't add up to 1.
pub fn stratified(y: &[u8], fractions: [f64; 3], seed: u64) -> Result<Split> {
    let sum: f64 = fractions.iter().sum();
    let bad = fractions.iter().any(|f| !f.is_finite() || *f < 0.0);
    if bad || (sum - 1.0).abs() > 1e-9 {
        return Err(Error::argument(
            "fractions",
            format!("three fractions from 0 to 1 that add up to 1 were expected, but {fractions:?} came"),
        ));
    }
    let n = y.len();
    let first = (fractions[0] * n as f64).round() as usize;
    let second = ((fractions[0] + fractions[1]) * n as f64).round() as usize;
    let mut train = stratified_order(y, seed);
    let test = train.split_off(second.min(n));
    let validation = train.split_off(first.min(second));
    Ok(Split { train, validation, test })
}

/// `n` rows with the classes in the proportions of `y`; all rows, in random order, if there are no more than `n`.
pub fn subsample(y: &[u8], n: usize, seed: u64) -> Vec<usize> {
    let mut order = stratified_order(y, seed);
    order.truncate(n);
    order
}

/// `per_class` rows of every class that occurs in `y`, the classes mixed.
///
/// # Errors
/// [`Error::BadArgument`] if a class has fewer rows.
pub fn balanced(y: &[u8], per_class: usize, seed: u64) -> Result<Vec<usize>> {
    let mut order: Vec<usize> = (0..y.len()).collect();
    let mut rng = stream(seed, "balanced");
    shuffle(&mut order, &mut rng);
    let mut taken = [0usize; 256];
    let mut chosen = Vec::new();
    for &row in &order {
        let count = &mut taken[usize::from(y[row])];
        *count += 1;
        if *count <= per_class {
            chosen.push(row);
        }
    }
    match taken.iter().position(|&n| n > 0 && n < per_class) {
        Some(class) => Err(Error::argument(
            "per_class",
            format!("{per_class} rows of every class were asked for, but class {class} has only {}", taken[class]),
        )),
        None => Ok(chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(y: &[u8], rows: &[usize]) -> [usize; 10] {
        let mut counts = [0; 10];
        for &row in rows {
            counts[usize::from(y[row])] += 1;
        }
        counts
    }

    #[test]
    fn the_splits_never_change() {
        let y: Vec<u8> = (0..12).map(|i| i % 3).collect();
        assert_eq!(stratified_order(&y, 1), [10, 5, 3, 8, 4, 9, 2, 6, 1, 11, 7, 0]);
        assert_eq!(balanced(&y, 2, 1).unwrap(), [9, 2, 1, 11, 6, 10]);
    }

    #[test]
    fn fractions_that_make_no_whole_are_refused() {
        for fractions in [[0.5, 0.5, 0.5], [1.5, -0.5, 0.0], [f64::NAN, 0.5, 0.5]] {
            assert!(stratified(&[0, 1], fractions, 0).is_err());
        }
        let message = stratified(&[0], [0.5, 0.2, 0.2], 0).unwrap_err().to_string();
        assert_eq!(
            message,
            "`fractions`: three fractions from 0 to 1 that add up to 1 were expected, but [0.5, 0.2, 0.2] came."
        );
    }

    #[test]
    fn a_class_that_is_too_small_is_named() {
        let message = balanced(&[0, 0, 3], 2, 0).unwrap_err().to_string();
        assert!(message.contains("class 3 has only 1"), "{message}");
    }

    #[test]
    fn nothing_comes_of_nothing() {
        let split = stratified(&[], [0.8, 0.1, 0.1], 0).unwrap();
        assert!(split.train.is_empty() && split.validation.is_empty() && split.test.is_empty());
        assert!(balanced(&[], 3, 0).unwrap().is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_beginning_keeps_the_proportions(y in prop::collection::vec(0u8..10, 1..200), seed: u64) {
            let order = stratified_order(&y, seed);
            let all = counts(&y, &order);
            prop_assert_eq!(all.iter().sum::<usize>(), y.len());
            for k in 0..=y.len() {
                let part = counts(&y, &order[..k]);
                for class in 0..10 {
                    // Each class is at most half a row off its place, the others together as much: three classes can add up to 1.5 + 0.5.
                    let fair = all[class] as f64 * k as f64 / y.len() as f64;
                    prop_assert!((part[class] as f64 - fair).abs() <= 5.5, "{} of {}", part[class], fair);
                }
            }
        }

        #[test]
        fn the_parts_hold_every_row_once(y in prop::collection::vec(0u8..4, 0..200), a in 0.0..1.0f64, b in 0.0..1.0f64, seed: u64) {
            let (a, b) = (a.min(b), a.max(b));
            let split = stratified(&y, [a, b - a, 1.0 - b], seed).unwrap();
            let mut rows = [split.train, split.validation, split.test].concat();
            rows.sort_unstable();
            prop_assert_eq!(rows, (0..y.len()).collect::<Vec<_>>());
        }

        #[test]
        fn balanced_parts_are_balanced(seed: u64, per_class in 0usize..5) {
            let y: Vec<u8> = (0..23).map(|i| i % 4).collect();
            let rows = balanced(&y, per_class, seed).unwrap();
            let expected: Vec<usize> = (0..10).map(|class| if class < 4 { per_class } else { 0 }).collect();
            prop_assert_eq!(counts(&y, &rows).to_vec(), expected);
        }

        #[test]
        fn the_same_seed_gives_the_same_part(seed: u64) {
            let y: Vec<u8> = (0..50).map(|i| i % 4).collect();
            prop_assert_eq!(subsample(&y, 20, seed), subsample(&y, 20, seed));
            prop_assert_eq!(subsample(&y, 80, seed).len(), 50);
        }
    }
}
