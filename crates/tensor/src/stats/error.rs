/// Why a statistic can't be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StatsError {
    /// A value is NaN or infinite.
    #[error(
        "The value number {index} of `{what}` is {value}, but finite numbers are needed: leave failed runs out and report how many there were."
    )]
    NonFinite {
        /// Name of the argument.
        what: &'static str,
        /// Its first value that isn't finite, counted from 0.
        index: usize,
        /// That value.
        value: f64,
    },

    /// Two lists that belong together differ in length.
    #[error("Paired values are needed, but `a` has {a} and `b` has {b}: give the same seeds to both.")]
    UnequalLengths {
        /// Length of the first.
        a: usize,
        /// Length of the second.
        b: usize,
    },

    /// There are fewer values than the statistic needs.
    #[error("`{what}` needs at least {need} values, but {got} came: run more seeds.")]
    TooFew {
        /// Name of the argument.
        what: &'static str,
        /// The fewest that would do.
        need: usize,
        /// How many came.
        got: usize,
    },

    /// A level of confidence outside (0, 1).
    #[error("The level of confidence must lie between 0 and 1, as 0.95 does, but it is {level}.")]
    BadLevel {
        /// What came.
        level: f64,
    },

    /// The order of a quantile is outside [0, 1].
    #[error("The order of a quantile must lie from 0 to 1, as 0.5 does, but it is {q}.")]
    BadQuantile {
        /// What came.
        q: f64,
    },

    /// All values are the same, so there is nothing to order by.
    #[error("All values of `{what}` are {value}: a rank correlation needs values that differ.")]
    Constant {
        /// Name of the argument.
        what: &'static str,
        /// The value that all have.
        value: f64,
    },

    /// A value that must be above 0 isn't.
    #[error("The value number {index} of `{what}` is {value}, but a ratio needs values above 0.")]
    NotPositive {
        /// Name of the argument.
        what: &'static str,
        /// Its first such value, counted from 0.
        index: usize,
        /// That value.
        value: f64,
    },

    /// No resamples were asked for.
    #[error("A bootstrap needs at least 1 resample, but 0 were asked for; 10,000 is usual.")]
    NoResamples,

    /// The statistic that was given isn't finite on some of the values.
    #[error(
        "The statistic is {value} on a resample of `{what}`: it must be finite on any values that were drawn from them."
    )]
    BadStatistic {
        /// Name of the argument.
        what: &'static str,
        /// What the statistic gave.
        value: f64,
    },

    /// The values are too large for the sums of their squares.
    #[error("The values of `{what}` are too large for f64: divide them by a common factor.")]
    Overflow {
        /// Name of the argument.
        what: &'static str,
    },
}
