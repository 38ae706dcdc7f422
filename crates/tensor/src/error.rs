//! One error type for the crate; every variant names what was given, what was expected and the way out.

use std::path::PathBuf;

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside its domain.
    #[error("{name} must be {expected}, but it is {got}.")]
    InvalidArgument {
        /// The argument or field.
        name: String,
        /// What would be accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// A device string was not understood, or the device isn't there.
    #[error("The device \"{given}\" can't be used: {reason}")]
    Device {
        /// The string as given.
        given: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// A parameter set without parameters.
    #[error("The parameter set is empty: it needs at least one tensor that requires a gradient.")]
    EmptyParamSet,
    /// Two names for one tensor, or one name for two tensors.
    #[error(
        "The parameter \"{name}\" appears twice (the other entry is \"{other}\"): list every tensor once, under one name."
    )]
    DuplicateParam {
        /// The second entry.
        name: String,
        /// The entry that it repeats.
        other: String,
    },
    /// Two parameters share memory without being the same tensor.
    #[error(
        "The parameters \"{name}\" and \"{other}\" share memory: one is a view into the other. List only the base tensor."
    )]
    OverlappingParams {
        /// The first of the two.
        name: String,
        /// The second of the two.
        other: String,
    },
    /// Parameters that are perturbed already are to be perturbed again.
    #[error("The parameter \"{name}\" is perturbed already: finish or drop the open guard before perturbing again.")]
    NestedPerturbation {
        /// The first parameter found to be perturbed.
        name: String,
    },
    /// Shapes that must agree don't.
    #[error("{what} has the shape {got:?}, but {expected:?} was expected.")]
    Shape {
        /// Which tensor or array.
        what: String,
        /// The shape wanted.
        expected: Vec<i64>,
        /// The shape that came.
        got: Vec<i64>,
    },
    /// An element type that isn't handled.
    #[error("{what} has the element type {got}, but {expected} was expected.")]
    Kind {
        /// Which tensor.
        what: String,
        /// What is handled.
        expected: String,
        /// What came.
        got: String,
    },
    /// A value that must be finite isn't.
    #[error("{what} is {value}, which isn't finite.")]
    NonFinite {
        /// Which quantity.
        what: String,
        /// Its value.
        value: f64,
    },
    /// A tensor without a graph where a gradient is asked for.
    #[error(
        "{what} doesn't depend on any parameter through the autograd graph: compute it without `no_grad` and without `detach`."
    )]
    Detached {
        /// Which tensor.
        what: String,
    },
    /// A checkpoint that doesn't fit.
    #[error("The checkpoint {} can't be used: {reason}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// A file operation failed.
    #[error("The file {} can't be read or written: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The header of a checkpoint file is malformed.
    #[error(transparent)]
    Index(#[from] crate::checkpoint::index::IndexError),
    /// A statistic can't be computed from what was given.
    #[error(transparent)]
    Stats(#[from] crate::stats::StatsError),
    /// libtorch reported an error.
    #[cfg(feature = "torch")]
    #[error("libtorch reports: {0}")]
    Torch(#[from] tch::TchError),
}

impl Error {
    /// An argument outside its domain: `name` must be `expected`, but it is `got`.
    #[allow(clippy::needless_pass_by_value)] // a literal at every call
    pub fn invalid(name: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::InvalidArgument { name: name.into(), expected: expected.into(), got: got.to_string() }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
