//! One error type for the crate; every variant names what was given, what was expected and the way out.

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument or a field of a configuration is outside its domain.
    #[error("{name} must be {expected}, but it is {got}.")]
    InvalidArgument {
        /// The argument or field.
        name: String,
        /// What would be accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// An array has another size than what it goes with.
    #[error(
        "{what} has {got}, but {expected} was expected: activations must come from the site that the map was fitted at."
    )]
    DimMismatch {
        /// The size that fits.
        expected: usize,
        /// The size that came.
        got: usize,
        /// Which array, and along which axis.
        what: String,
    },
    /// Fewer rows than clusters.
    #[error(
        "The {side} set has {n} rows, but {k} clusters were asked for: collect more activations or ask for fewer clusters."
    )]
    TooFewSamples {
        /// "source", "target" or the name of the argument.
        side: &'static str,
        /// Rows that there are.
        n: usize,
        /// Clusters asked for, or rows needed.
        k: usize,
    },
    /// A row with NaN or an infinite value.
    #[error(
        "Row {row} of the {side} set holds NaN or an infinite value: leave it out, or look for an overflow in the model."
    )]
    NonFinite {
        /// "source", "target" or the name of the argument.
        side: &'static str,
        /// The first such row.
        row: usize,
    },
    /// A set without rows, or rows without coordinates.
    #[error("The {side} set is empty: give at least one row with at least one coordinate.")]
    EmptySet {
        /// "source", "target" or the name of the argument.
        side: &'static str,
    },
    /// An entropic regularisation that can't be used.
    #[error("epsilon is {value}, but it must be finite and above 0 (for no regularisation use `Epsilon::Exact`).")]
    BadEpsilon {
        /// The value.
        value: f64,
    },
    /// Sinkhorn's iteration stopped at its cap; an error only when `strict` is set.
    #[error(
        "Sinkhorn's iteration didn't converge: the row marginal is off by {error:e} (L1) after {iterations} iterations. Raise epsilon or `sinkhorn.max_iterations`, use `Epsilon::Exact`, or accept the plan with `strict: false`."
    )]
    NotConverged {
        /// L1 error of the row marginal.
        error: f64,
        /// Iterations done.
        iterations: usize,
    },
    /// A plan was fitted on another model.
    #[error(
        "The plan was fitted on the model with the fingerprint {fitted}, but this one has {given}: fit it again on this model, or clear `model` to take the risk."
    )]
    ModelMismatch {
        /// Fingerprint of the model of the fit.
        fitted: String,
        /// Fingerprint of the model that came.
        given: String,
    },
    /// A site at a layer that the model lacks.
    #[error("There is no layer {layer}: the model has {layers}, counted from 0.")]
    LayerOutOfRange {
        /// The layer of the site.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A file that can't be read, written or used.
    #[error("The file {} can't be used: {reason}.", path.display())]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// Why not.
        reason: String,
    },
    /// From the tensor layer.
    #[error(transparent)]
    Tensor(#[from] tensor::Error),
    /// libtorch reported an error.
    #[cfg(feature = "torch")]
    #[error("libtorch reports: {0}")]
    Torch(#[from] tensor::tch::TchError),
    /// From the language model.
    #[cfg(feature = "lm")]
    #[error(transparent)]
    Lm(#[from] lm::Error),
}

impl Error {
    /// An argument outside its domain: `name` must be `expected`, but it is `got`.
    #[allow(clippy::needless_pass_by_value)] // a literal at every call
    pub fn invalid(name: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::InvalidArgument { name: name.into(), expected: expected.into(), got: got.to_string() }
    }

    /// An array of the wrong size.
    pub fn dim(what: impl Into<String>, expected: usize, got: usize) -> Self {
        Self::DimMismatch { expected, got, what: what.into() }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
