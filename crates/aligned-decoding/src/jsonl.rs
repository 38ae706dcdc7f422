//! Files with one JSON value a line, as preference data usually comes: `{"prompt": …, "chosen": …, "rejected": …}`.

use crate::{Error, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::Write as _;
use std::path::Path;

/// Two answers to a prompt as text, one of them preferred.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextPair {
    /// What is given.
    pub prompt: String,
    /// The preferred answer.
    pub chosen: String,
    /// The other.
    pub rejected: String,
}

/// Writes a value a line.
///
/// # Errors
/// [`Error::Io`]; [`Error::Line`] for a value that JSON can't hold.
pub fn write<T: Serialize>(path: &Path, values: &[T]) -> Result<()> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut out = std::io::BufWriter::new(std::fs::File::create(path).map_err(io)?);
    for (i, value) in values.iter().enumerate() {
        let line = serde_json::to_string(value);
        let line = line.map_err(|source| Error::Line { path: path.to_owned(), line: i + 1, source })?;
        writeln!(out, "{line}").map_err(io)?;
    }
    out.flush().map_err(io)
}

/// Reads what [`write()`] has written; empty lines are passed over.
///
/// # Errors
/// [`Error::Io`]; [`Error::Line`] with the number of the first line that isn't such a value.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(i, line)| {
        serde_json::from_str(line).map_err(|source| Error::Line { path: path.to_owned(), line: i + 1, source })
    });
    parsed.collect()
}
