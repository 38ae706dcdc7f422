//! Checkpoints: safetensors files of named tensors, and the index of headers.
//!
//! `StateDict` (feature `torch`) is what every optimizer and model of Tessera saves: tensors plus a JSON object of scalars.
//! Files are written beside the target and renamed, so an interrupted save leaves the old file whole. Reading
//! goes through the bounded parser of [`index`], which checks every length before anything is allocated.

pub mod index;

#[cfg(feature = "torch")]
mod state;
#[cfg(feature = "torch")]
pub use state::{LoadReport, NameMap, StateDict};
