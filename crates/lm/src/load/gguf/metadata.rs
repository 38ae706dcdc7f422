//! Values of a GGUF file's metadata, or errors that name the key.

use crate::{Error, Result};
use tensor::checkpoint::index::{GgufArray, GgufIndex, GgufValue};

/// The keys and values of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Metadata<'a>(&'a GgufIndex);

impl<'a> Metadata<'a> {
    pub(crate) fn new(index: &'a GgufIndex) -> Self {
        Self(index)
    }

    /// Whether the key is there.
    pub(crate) fn has(self, key: &str) -> bool {
        self.0.metadata.contains_key(key)
    }

    /// The value, as `expected` describes it.
    fn get<T>(self, key: &str, expected: &str, read: impl FnOnce(&'a GgufValue) -> Option<T>) -> Result<T> {
        match self.0.metadata.get(key) {
            None => Err(Error::config(key, expected, "missing")),
            Some(value) => read(value).ok_or_else(|| Error::config(key, expected, describe(value))),
        }
    }

    pub(crate) fn text(self, key: &str) -> Result<&'a str> {
        self.get(key, "a string", GgufValue::as_str)
    }

    pub(crate) fn strings(self, key: &str) -> Result<&'a [String]> {
        self.get(key, "a list of strings", GgufValue::as_strings)
    }

    /// A whole number from 0 to 2^62, which leaves room for sums.
    pub(crate) fn int(self, key: &str) -> Result<i64> {
        self.get(key, "a whole number from 0", |v| v.as_u64().filter(|n| *n <= 1 << 62).map(|n| n as i64))
    }

    pub(crate) fn int_or(self, key: &str, default: i64) -> Result<i64> {
        if self.has(key) { self.int(key) } else { Ok(default) }
    }

    pub(crate) fn float(self, key: &str) -> Result<f64> {
        self.get(key, "a number", GgufValue::as_f64)
    }

    pub(crate) fn float_or(self, key: &str, default: f64) -> Result<f64> {
        if self.has(key) { self.float(key) } else { Ok(default) }
    }

    pub(crate) fn bool_or(self, key: &str, default: bool) -> Result<bool> {
        if self.has(key) { self.get(key, "true or false", GgufValue::as_bool) } else { Ok(default) }
    }

    /// A list of whole numbers from 0, of whatever width.
    pub(crate) fn integers(self, key: &str) -> Result<Vec<u64>> {
        fn all<T: Copy + TryInto<u64>>(values: &[T]) -> Option<Vec<u64>> {
            values.iter().map(|&v| v.try_into().ok()).collect()
        }
        self.get(key, "a list of whole numbers from 0", |value| match value {
            GgufValue::Array(GgufArray::U8(v)) => all(v),
            GgufValue::Array(GgufArray::I8(v)) => all(v),
            GgufValue::Array(GgufArray::U16(v)) => all(v),
            GgufValue::Array(GgufArray::I16(v)) => all(v),
            GgufValue::Array(GgufArray::U32(v)) => all(v),
            GgufValue::Array(GgufArray::I32(v)) => all(v),
            GgufValue::Array(GgufArray::U64(v)) => all(v),
            GgufValue::Array(GgufArray::I64(v)) => all(v),
            _ => None,
        })
    }

    /// A token of a vocabulary of `vocab`; none if the key isn't there.
    pub(crate) fn token(self, key: &str, vocab: usize) -> Result<Option<u32>> {
        if !self.has(key) {
            return Ok(None);
        }
        let id = self.int(key)?;
        match u32::try_from(id) {
            Ok(small) if (small as usize) < vocab => Ok(Some(small)),
            _ => Err(Error::config(key, format!("a token of the vocabulary of {vocab}"), id)),
        }
    }
}

/// A value in a message: long ones by their kind and length.
fn describe(value: &GgufValue) -> String {
    const SHOWN: usize = 60;
    match value {
        GgufValue::Array(list) => format!("a list of {}", list.len()),
        GgufValue::String(text) if text.chars().count() > SHOWN => {
            format!("\"{}…\"", text.chars().take(SHOWN).collect::<String>().escape_debug())
        }
        other => format!("{other:?}"),
    }
}
