use std::io;
use std::ops::Range;

/// Why a file's header can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// Reading failed.
    #[error("The header couldn't be read: {0}.")]
    Io(#[from] io::Error),

    /// The file doesn't begin as its format does.
    #[error("This is no {format} file: {problem}.")]
    NotThisFormat {
        /// The format that was expected.
        format: &'static str,
        /// What was expected and what came, without the full stop.
        problem: String,
    },

    /// A version that isn't read.
    #[error(
        "The file has GGUF version {version}, but only 2 and 3 (little-endian) are read: convert it with a current converter."
    )]
    Version {
        /// The version of the file.
        version: u32,
    },

    /// The file ends before what the header announces.
    #[error(
        "The file is cut off: at byte {at}, {what} needs {need} bytes, but only {left} are left. Download it again."
    )]
    Truncated {
        /// What was to be read.
        what: String,
        /// Where in the file.
        at: u64,
        /// How many bytes it takes at least.
        need: u64,
        /// How many are left.
        left: u64,
    },

    /// Something is larger than [`Limits`](super::Limits) allow.
    #[error(
        "The header announces {value} as {what}, but at most {limit} is read: if the file is to be trusted, raise the limit."
    )]
    Limit {
        /// What is too large.
        what: String,
        /// What the header says.
        value: u64,
        /// What is allowed.
        limit: u64,
    },

    /// The header breaks the rules of its format.
    #[error("The header is malformed: {problem}.")]
    Malformed {
        /// What was expected and what came, without the full stop.
        problem: String,
    },

    /// A tensor's type isn't known, so its length can't be checked.
    #[error("The tensor `{tensor}` has the type {dtype}, which isn't known: a newer Tessera may read it.")]
    UnknownType {
        /// Name of the tensor.
        tensor: String,
        /// The type's number (GGUF) or name (safetensors).
        dtype: String,
    },

    /// The number of elements or bytes leaves 64 bits.
    #[error("The tensor `{tensor}` has the shape {shape:?}, whose size doesn't fit in 64 bits.")]
    Overflow {
        /// Name of the tensor.
        tensor: String,
        /// Its shape, outermost first.
        shape: Vec<u64>,
    },

    /// The rows of a tensor aren't whole blocks.
    #[error("The tensor `{tensor}` has {columns} columns, but {dtype} is stored in blocks of {block}.")]
    PartialBlock {
        /// Name of the tensor.
        tensor: String,
        /// Its type.
        dtype: String,
        /// Its innermost dimension (for safetensors, its number of elements).
        columns: u64,
        /// Elements in a block of the type.
        block: u64,
    },

    /// A tensor's range isn't as long as its type and shape say.
    #[error("The tensor `{tensor}` takes {expected} bytes by its type and shape, but its range holds {actual}.")]
    WrongLength {
        /// Name of the tensor.
        tensor: String,
        /// Bytes by type and shape.
        expected: u64,
        /// Bytes by the range.
        actual: u64,
    },

    /// A tensor lies beyond the end of the file.
    #[error("The tensor `{tensor}` ends at byte {end}, but the file has {file}: it is cut off. Download it again.")]
    BeyondEnd {
        /// Name of the tensor.
        tensor: String,
        /// Where it would end.
        end: u64,
        /// Length of the file.
        file: u64,
    },

    /// A tensor doesn't begin on a multiple of the alignment.
    #[error("The tensor `{tensor}` begins at offset {offset}, which is no multiple of the alignment, {alignment}.")]
    Misaligned {
        /// Name of the tensor.
        tensor: String,
        /// Its offset in the data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },

    /// Two tensors share bytes.
    #[error("The tensors `{first}` ({first_range:?}) and `{second}` ({second_range:?}) overlap in the file.")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// Its range.
        first_range: Range<u64>,
        /// The tensor that begins inside it.
        second: String,
        /// Its range.
        second_range: Range<u64>,
    },

    /// Bytes of a safetensors file belong to no tensor, which its format forbids.
    #[error("The bytes {range:?} of the file belong to no tensor, which safetensors doesn't allow.")]
    Unused {
        /// Where they lie.
        range: Range<u64>,
    },

    /// Two tensors or keys have one name.
    #[error("The name `{name}` comes twice in the header.")]
    Duplicate {
        /// The name.
        name: String,
    },
}

impl IndexError {
    pub(super) fn malformed(problem: impl Into<String>) -> Self {
        Self::Malformed { problem: problem.into() }
    }
}
