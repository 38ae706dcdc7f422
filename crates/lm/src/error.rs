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
    /// A field of a model's configuration or metadata is missing, malformed or not supported.
    #[error("The model's configuration can't be used: `{field}` must be {expected}, but it is {got}.")]
    Config {
        /// The field, with its path.
        field: String,
        /// What would be accepted.
        expected: String,
        /// What came, or "missing".
        got: String,
    },
    /// A RoPE scaling that isn't built: ignoring it would give fluent nonsense.
    #[error("The RoPE scaling `{kind}` isn't known; known are: {known}. The model would run, but wrongly.")]
    RopeScaling {
        /// As the checkpoint names it.
        kind: String,
        /// Those that are built.
        known: String,
    },
    /// The tensors of a checkpoint aren't those of the model.
    #[error("The checkpoint {} doesn't fit the model. Missing: {}. Unexpected: {}.", path.display(), list(missing), list(unexpected))]
    Tensors {
        /// The file or folder.
        path: PathBuf,
        /// Names that the model needs and the checkpoint lacks.
        missing: Vec<String>,
        /// Names that the model doesn't know.
        unexpected: Vec<String>,
    },
    /// A tensor of a checkpoint has another shape than the configuration says.
    #[error("The tensor `{name}` has the shape {got:?}, but the configuration wants {expected:?}.")]
    TensorShape {
        /// Its name in the checkpoint.
        name: String,
        /// The shape by the configuration.
        expected: Vec<i64>,
        /// The shape in the file.
        got: Vec<i64>,
    },
    /// A tensor is stored in a way that isn't read.
    #[error("The tensor `{name}` is stored as {dtype}, which isn't read here; read are: {known}.")]
    TensorType {
        /// Its name in the checkpoint.
        name: String,
        /// Its type.
        dtype: String,
        /// The types that are read.
        known: String,
    },
    /// A checkpoint file that can't be used for another reason.
    #[error("The checkpoint {} can't be used: {reason}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// A pre-tokenizer that isn't built: ignoring it would give wrong tokens.
    #[error("The pre-tokenizer `{name}` isn't known; known are: {known}. Use a checkpoint with a tokenizer.json.")]
    PreTokenizer {
        /// As the checkpoint names it.
        name: String,
        /// Those that are built.
        known: String,
    },
    /// A tokenizer that can't be built, or text that it can't handle.
    #[error("The tokenizer reports: {reason}")]
    Tokenizer {
        /// Why.
        reason: String,
    },
    /// Bytes that should be text aren't.
    #[error("{what} isn't UTF-8: byte {at} is wrong.")]
    Utf8 {
        /// Which bytes.
        what: String,
        /// Number of the first wrong byte.
        at: usize,
    },
    /// A chat template that can't be parsed or refuses the messages.
    #[error("The chat template reports: {reason}")]
    Template {
        /// Why.
        reason: String,
    },
    /// A prompt without tokens.
    #[error("The prompt of row {row} is empty: give at least one token (a begin-of-text token will do).")]
    EmptyPrompt {
        /// Row of the batch.
        row: usize,
    },
    /// More tokens than the model has positions for.
    #[error("{len} tokens don't fit in the context of {max}: shorten the prompt or generate fewer tokens.")]
    ContextOverflow {
        /// Tokens that were to be read, with those in the cache.
        len: i64,
        /// The model's context.
        max: i64,
    },
    /// A token id that the vocabulary doesn't have.
    #[error("The token {id} of row {row} is outside the vocabulary of {vocab}.")]
    TokenOutOfRange {
        /// The id.
        id: i64,
        /// Row of the batch.
        row: usize,
        /// Size of the vocabulary.
        vocab: i64,
    },
    /// Tokenizer and model, or two models, have different vocabularies.
    #[error("{what} has {got} tokens, but {expected} were expected: {hint}")]
    VocabMismatch {
        /// Whose vocabulary.
        what: String,
        /// Size wanted.
        expected: usize,
        /// Size that came.
        got: usize,
        /// The way out.
        hint: String,
    },
    /// A layer that the model doesn't have.
    #[error("There is no layer {layer}: the model has {layers}, counted from 0.")]
    LayerOutOfRange {
        /// The layer asked for.
        layer: usize,
        /// Number of layers.
        layers: usize,
    },
    /// Shapes that must agree don't.
    #[error("{what} has the shape {got:?}, but {expected} was expected.")]
    Shape {
        /// Which tensor.
        what: String,
        /// The shape wanted, in words or numbers.
        expected: String,
        /// The shape that came.
        got: Vec<i64>,
    },
    /// Logits from which nothing can be chosen.
    #[error("The logits of row {row} at step {step} aren't finite ({value}): the model or a plug has overflowed.")]
    NonFiniteLogits {
        /// Step of the generation.
        step: usize,
        /// Row of the batch.
        row: usize,
        /// The first such value.
        value: f64,
    },
    /// A loss that isn't finite.
    #[error(
        "The loss of step {step} is {value}: lower the learning rate or clip gradients. The weights are those before the step."
    )]
    NonFiniteLoss {
        /// Step of the training.
        step: u64,
        /// The loss.
        value: f64,
    },
    /// A gradient that isn't finite, although the loss is.
    #[error(
        "The gradient of step {step} has the norm {norm}: lower the learning rate. The weights are those before the step."
    )]
    NonFiniteGradient {
        /// Step of the training.
        step: u64,
        /// Norm over all parameters.
        norm: f64,
    },
    /// A plug in a socket reported an error.
    #[error("{socket} of layer {layer} reports: {source}")]
    Plug {
        /// Which socket.
        socket: &'static str,
        /// Where.
        layer: usize,
        /// What it said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file operation failed.
    #[error("The file {} can't be read or written: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A JSON file is malformed.
    #[error("The file {} isn't what it should be: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// From the tensor layer.
    #[error(transparent)]
    Tensor(#[from] tensor::Error),
    /// The header of a checkpoint file is malformed.
    #[error(transparent)]
    Index(#[from] tensor::checkpoint::index::IndexError),
    /// libtorch reported an error.
    #[error("libtorch reports: {0}")]
    Torch(#[from] tensor::tch::TchError),
}

/// The first names of a list, and how many more there are.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names.len() {
        0 => "none".to_owned(),
        n if n <= SHOWN => names.join(", "),
        n => format!("{} and {} more", names[..SHOWN].join(", "), n - SHOWN),
    }
}

impl Error {
    /// An argument outside its domain: `name` must be `expected`, but it is `got`.
    #[allow(clippy::needless_pass_by_value)] // a literal at every call
    pub fn invalid(name: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::InvalidArgument { name: name.into(), expected: expected.into(), got: got.to_string() }
    }

    /// A configuration field that can't be used.
    #[allow(clippy::needless_pass_by_value)] // a literal at every call
    pub(crate) fn config(field: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::Config { field: field.into(), expected: expected.into(), got: got.to_string() }
    }

    /// A tensor of the wrong shape.
    pub fn shape(what: impl Into<String>, expected: impl Into<String>, got: &tensor::tch::Tensor) -> Self {
        Self::Shape { what: what.into(), expected: expected.into(), got: got.size() }
    }

    /// An error of a plug, with the place where it sits.
    pub fn plug(
        socket: &'static str,
        layer: usize,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Plug { socket, layer, source: source.into() }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
