//! One error type for the crate; every variant names what was given, what was expected and the way out.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// One of the two models of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The model that was trained on preferences.
    Policy,
    /// The model that it was trained from.
    Reference,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Policy => "policy",
            Self::Reference => "reference",
        })
    }
}

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The plausibility threshold isn't a share.
    #[error("alpha must be from 0 to 1, but it is {0}: 0.1 is the usual value, 1 is greedy decoding of the policy.")]
    BadAlpha(f64),
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
    /// The vocabularies of policy and reference have different sizes.
    #[error(
        "The policy has {policy} tokens and the reference {reference}: take the reference that this policy was trained from, \
         or, if one table is only padded, allow it (`allow_padded_vocab`)."
    )]
    VocabMismatch {
        /// Tokens of the policy.
        policy: i64,
        /// Tokens of the reference.
        reference: i64,
    },
    /// The tokenizers of policy and reference differ.
    #[error(
        "The tokenizers differ first at the id {id}: {what} (policy: {}, reference: {}). A pair must have one tokenizer.",
        shown(policy.as_deref()), shown(reference.as_deref())
    )]
    TokenizerMismatch {
        /// The first id that they treat differently.
        id: u32,
        /// The token of the policy's tokenizer, if it has one.
        policy: Option<String>,
        /// The token of the reference's.
        reference: Option<String>,
        /// What differs, in words.
        what: String,
    },
    /// A prompt without tokens.
    #[error("The prompt of row {row} is empty: give at least one token (a begin-of-text token will do).")]
    EmptyPrompt {
        /// Row of the batch.
        row: usize,
    },
    /// More tokens than a model has positions for.
    #[error("{len} tokens don't fit in the context of {max}: shorten the prompt.")]
    ContextOverflow {
        /// Tokens that were to be read.
        len: i64,
        /// The smaller context of the two models.
        max: i64,
    },
    /// A token that the pair doesn't share.
    #[error("The token {id} of row {row} is outside the {vocab} tokens that policy and reference share.")]
    TokenOutOfRange {
        /// The token.
        id: u32,
        /// Row of the batch.
        row: usize,
        /// Tokens that both have.
        vocab: i64,
    },
    /// Logits that can't be compared.
    #[error(
        "The logit of token {id} of the {model} is {value} (row {row}, step {step}): the model or a plug has overflowed, or \
         its weights are damaged."
    )]
    NonFiniteLogits {
        /// Step of the generation.
        step: usize,
        /// Row of the batch.
        row: usize,
        /// Whose logits.
        model: Side,
        /// The first such token.
        id: u32,
        /// Its logit.
        value: f64,
    },
    /// Every token is forbidden.
    #[error("No token is allowed at step {step} of row {row}: shorten the list of banned tokens or the n-gram rule.")]
    NothingAllowed {
        /// Step of the generation.
        step: usize,
        /// Row of the batch.
        row: usize,
    },
    /// A line of a file isn't what it should be.
    #[error("Line {line} of {} isn't what it should be: {source}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A file operation failed.
    #[error("The file {} can't be read or written: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A closure of the caller's (a reward, a measurement) reported an error.
    #[error("{what} reports: {source}")]
    Closure {
        /// Which.
        what: &'static str,
        /// What it said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// From statistics.
    #[error(transparent)]
    Stats(#[from] tensor::stats::StatsError),
    /// From the model.
    #[cfg(feature = "lm")]
    #[error(transparent)]
    Lm(#[from] lm::Error),
    /// libtorch reported an error.
    #[cfg(feature = "torch")]
    #[error("libtorch reports: {0}")]
    Torch(#[from] tensor::tch::TchError),
}

fn shown(token: Option<&str>) -> String {
    token.map_or_else(|| "none".to_owned(), |token| format!("`{token}`"))
}

impl Error {
    /// An argument outside its domain: `name` must be `expected`, but it is `got`.
    #[allow(clippy::needless_pass_by_value)] // a literal at every call
    pub fn invalid(name: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::InvalidArgument { name: name.into(), expected: expected.into(), got: got.to_string() }
    }

    /// An error of a caller's closure.
    pub fn closure(what: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Closure { what, source: source.into() }
    }

    /// Logits that can't be compared; where they came from is told by [`at`](Self::at).
    pub(crate) fn non_finite(model: Side, id: u32, value: f32) -> Self {
        Self::NonFiniteLogits { step: 0, row: 0, model, id, value: value.into() }
    }

    /// With the place in a generation, for errors of a single step.
    #[must_use]
    #[cfg_attr(not(feature = "lm"), allow(dead_code))]
    pub(crate) fn at(mut self, at_step: usize, at_row: usize) -> Self {
        if let Self::NonFiniteLogits { step, row, .. } | Self::NothingAllowed { step, row } = &mut self {
            (*step, *row) = (at_step, at_row);
        }
        self
    }

    /// With the token that a place of a shortened vocabulary stands for.
    #[must_use]
    #[cfg_attr(not(feature = "lm"), allow(dead_code))]
    pub(crate) fn with_ids(mut self, ids: impl Fn(u32) -> u32) -> Self {
        if let Self::NonFiniteLogits { id, .. } = &mut self {
            *id = ids(*id);
        }
        self
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
