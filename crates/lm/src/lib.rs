//! A decoder language model over libtorch that loads real checkpoints, with sockets for research.

pub mod activations;
pub mod attention;
pub mod cache;
pub mod config;
mod error;
pub mod generate;
pub mod hooks;
pub mod linear;
mod load;
pub mod lora;
pub mod model;
pub mod moe;
pub mod packed;
pub mod template;
pub mod tokenizer;

pub use error::{Error, Result};
pub use load::gguf;
pub use tensor;
