#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! - [`Lm`]: model, tokenizer, template and stop tokens of a checkpoint; [`LoadOptions`], [`Weights`]
//! - [`model`]: the decoder and its passes; [`config`]: what it is made of
//! - [`generate`]: batches, processors, sampling, streaming
//! - [`tokenizer`], [`template`]: text to tokens and back, conversations
//! - [`hooks`], [`attention`], [`cache`], [`linear`], [`moe`]: the sockets with their defaults
//! - [`packed`]: linear maps on quantized blocks
//! - [`activations`]: activations of many texts
//! - [`lora`], [`train`]: adapters, supervised fine-tuning, preference optimization

pub mod activations;
pub mod attention;
pub mod cache;
pub mod config;
mod error;
pub mod generate;
pub mod hooks;
mod language_model;
pub mod linear;
mod load;
pub mod lora;
pub mod model;
pub mod moe;
pub mod packed;
pub mod template;
pub mod tokenizer;
pub mod train;

pub use error::{Error, Result};
pub use language_model::{Lm, LoadOptions};
pub use load::gguf::{self, Weights};
pub use tensor;

/// Bytes in hexadecimal.
fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut out, byte| {
        // Writing to a String can't fail.
        let _ = write!(out, "{byte:02x}");
        out
    })
}
