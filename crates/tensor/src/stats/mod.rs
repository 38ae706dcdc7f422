//! Statistics for comparing methods: intervals, rank tests and the bootstrap, all in f64.
//!
//! ```
//! use tensor::stats::paired_t;
//!
//! // Accuracy of two methods on the same five seeds.
//! let difference = paired_t(&[0.71, 0.69, 0.74, 0.70, 0.72], &[0.69, 0.68, 0.70, 0.69, 0.70], 0.95)?;
//! assert!(difference.low > 0.0);          // the first is better, and the interval says by how much
//! assert_eq!(difference.n, 5);
//! # Ok::<(), tensor::stats::StatsError>(())
//! ```
//!
//! | question | function |
//! | --- | --- |
//! | mean and its spread | [`mean_std`], [`t_interval`] |
//! | is one method better on the same seeds, and by how much | [`paired_t`] |
//! | the same, without a normal distribution in mind | [`wilcoxon_signed_rank`] |
//! | an interval for any statistic | [`bootstrap_interval`] |
//! | how much faster, from timings A B A B | [`ratio_of_medians`] |
//! | does one number order things as another does | [`kendall_tau`] |
//! | order statistics | [`median`], [`quantile`] |
//!
//! All functions refuse NaN, infinities, unequal lengths and too few values with a [`StatsError`] that names what came; finite input never
//! gives NaN. The results agree with SciPy's under the options that each function
//! names, which the tests hold as numbers.

mod bootstrap;
mod describe;
mod error;
mod kendall;
mod t;
mod wilcoxon;

pub use bootstrap::{Bootstrap, BootstrapInterval, BootstrapMethod, bootstrap_interval, ratio_of_medians};
pub use describe::{mean_std, median, quantile};
pub use error::StatsError;
pub use kendall::{Kendall, kendall_tau};
pub use t::{Interval, paired_t, t_interval};
pub use wilcoxon::{Wilcoxon, wilcoxon_signed_rank};

/// How `values` are called in an error, at least how many are needed, and that all must be finite.
fn check(what: &'static str, values: &[f64], need: usize) -> Result<(), StatsError> {
    if values.len() < need {
        return Err(StatsError::TooFew { what, need, got: values.len() });
    }
    match values.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(StatsError::NonFinite { what, index, value: values[index] }),
        None => Ok(()),
    }
}

fn check_pair(a: &[f64], b: &[f64], need: usize) -> Result<(), StatsError> {
    if a.len() != b.len() {
        return Err(StatsError::UnequalLengths { a: a.len(), b: b.len() });
    }
    check("a", a, need)?;
    check("b", b, need)
}

fn check_level(level: f64) -> Result<(), StatsError> {
    if level > 0.0 && level < 1.0 { Ok(()) } else { Err(StatsError::BadLevel { level }) }
}

/// `value`, if the arithmetic on very large numbers hasn't left the range of f64.
fn finite(what: &'static str, value: f64) -> Result<f64, StatsError> {
    if value.is_finite() { Ok(value) } else { Err(StatsError::Overflow { what }) }
}
