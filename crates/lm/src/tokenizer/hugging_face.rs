//! Tokenizers from `tokenizer.json`.

use super::{Tokenizer, guarded};
use crate::load::read_json;
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

impl Tokenizer {
    /// Reads `tokenizer.json` from a folder, and the marks of begin and end from `tokenizer_config.json` where it is there.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], [`Error::Tokenizer`] for files that aren't what they should be.
    pub fn from_hugging_face(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let json = std::fs::read(&path).map_err(|source| Error::Io { path, source })?;
        let config = folder.join("tokenizer_config.json");
        let config = if config.exists() { read_json(&config)? } else { Value::Null };
        Self::from_json(&json, &config)
    }

    /// From the content of a `tokenizer.json` and the value of a `tokenizer_config.json` (null for none).
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if it isn't a tokenizer, or the configuration names a token that it doesn't have.
    pub fn from_json(tokenizer: &[u8], config: &Value) -> Result<Self> {
        let mut tokenizer = Self::new(guarded(|| tokenizers::Tokenizer::from_bytes(tokenizer))?)?;
        tokenizer.bos = tokenizer.named(config, "bos_token")?;
        tokenizer.eos = tokenizer.named(config, "eos_token")?;
        Ok(tokenizer)
    }

    /// The id of the token that a field of the configuration names.
    fn named(&self, config: &Value, field: &str) -> Result<Option<u32>> {
        let Some(token) = token_text(config, field) else { return Ok(None) };
        let missing = || Error::Tokenizer {
            reason: format!("`{field}` of tokenizer_config.json is `{token}`, which isn't in the vocabulary"),
        };
        self.id(token).map(Some).ok_or_else(missing)
    }
}

/// A token of `tokenizer_config.json`: a string, or an object with its `content`.
pub(crate) fn token_text<'a>(config: &'a Value, field: &str) -> Option<&'a str> {
    let value = config.get(field)?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}
