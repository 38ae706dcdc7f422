//! What lies where in a checkpoint: a bounded parser of safetensors and GGUF headers.
//!
//! It reads names, types, shapes and byte ranges, never the tensors. The file may come from anywhere: every length is checked against what is
//! really there and against [`Limits`] before memory is taken for it, products are checked for overflow, each range lies in the file, no two
//! overlap, and no name comes twice. So a reader may map the file and slice it by the ranges. It is the only such parser in
//! Tessera, it needs no libtorch, and it is fuzzed (`crates/tensor/fuzz`).
//!
//! ```
//! use tensor::checkpoint::index::{Limits, parse_safetensors};
//!
//! let header = br#"{"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}"#;
//! let mut file = (header.len() as u64).to_le_bytes().to_vec();
//! file.extend(header);
//! let start = file.len();
//! file.extend([0; 8]);
//!
//! let index = parse_safetensors(&file, &Limits::default())?;
//! assert_eq!(index.entries[0].shape, [2, 1]);
//! assert_eq!(index.entries[0].range, start as u64..file.len() as u64);
//! # Ok::<(), tensor::checkpoint::index::IndexError>(())
//! ```
//!
//! Shapes are outermost first in both formats: GGUF's own order is turned round. Ranges count from the start of the file.

mod error;
mod ggml;
mod gguf;
mod reader;
mod safetensors;

use std::collections::HashSet;
use std::ops::Range;

pub use error::IndexError;
pub use ggml::GgmlType;
pub use gguf::{GgufArray, GgufIndex, GgufValue, parse_gguf, read_gguf};
pub use safetensors::{SafeDtype, SafetensorsIndex, parse_safetensors, read_safetensors};

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<D> {
    /// Its name, which no other entry has.
    pub name: String,
    /// How its elements are stored.
    pub dtype: D,
    /// Its dimensions, outermost first; none for a scalar. The product of those above 0 doesn't overflow.
    pub shape: Vec<u64>,
    /// Where its bytes lie, counted from the start of the file. The range is as long as type and shape say, and lies in the file.
    pub range: Range<u64>,
}

/// The most that a header may announce. The defaults hold every model that we know of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the header; 128 MiB. What is kept of it takes a few times as much memory.
    pub header_bytes: u64,
    /// Number of tensors; 1,048,576.
    pub tensors: u64,
    /// Number of metadata keys; 65,536.
    pub metadata: u64,
    /// Bytes of a name or key; 65,535, as GGUF has it.
    pub name_bytes: u64,
    /// Dimensions of a tensor; 8.
    pub dimensions: u64,
    /// Levels of arrays in arrays in GGUF's metadata; 4.
    pub nesting: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_bytes: 128 << 20,
            tensors: 1 << 20,
            metadata: 1 << 16,
            name_bytes: 65_535,
            dimensions: 8,
            nesting: 4,
        }
    }
}

fn within(what: impl Into<String>, value: u64, limit: u64) -> Result<(), IndexError> {
    if value <= limit { Ok(()) } else { Err(IndexError::Limit { what: what.into(), value, limit }) }
}

/// The first name that comes twice is an error.
fn no_duplicates<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), IndexError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(IndexError::Duplicate { name: name.to_owned() });
        }
    }
    Ok(())
}

/// The product of the dimensions. That of those above 0 must not overflow either, so that strides computed in any order don't.
fn elements(tensor: &str, shape: &[u64]) -> Result<u64, IndexError> {
    let product = shape
        .iter()
        .filter(|&&dim| dim > 0)
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .ok_or_else(|| overflow(tensor, shape))?;
    Ok(if shape.contains(&0) { 0 } else { product })
}

fn overflow(tensor: &str, shape: &[u64]) -> IndexError {
    IndexError::Overflow { tensor: tensor.to_owned(), shape: shape.to_vec() }
}

/// Checks that no two ranges share a byte; returns the entries' numbers in the order of their ranges.
fn no_overlaps<D>(entries: &[Entry<D>]) -> Result<Vec<usize>, IndexError> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&i| (entries[i].range.start, entries[i].range.end));
    let mut last: Option<&Entry<D>> = None;
    for entry in order.iter().map(|&i| &entries[i]) {
        if entry.range.is_empty() {
            continue;
        }
        if let Some(last) = last.filter(|l| l.range.end > entry.range.start) {
            return Err(IndexError::Overlap {
                first: last.name.clone(),
                first_range: last.range.clone(),
                second: entry.name.clone(),
                second_range: entry.range.clone(),
            });
        }
        last = Some(entry);
    }
    Ok(order)
}
