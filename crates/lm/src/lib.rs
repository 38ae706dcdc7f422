//! A decoder language model over libtorch that loads real checkpoints, with sockets for research.

pub mod attention;
pub mod cache;
pub mod config;
mod error;
pub mod hooks;
pub mod linear;
pub mod model;
pub mod moe;
pub mod packed;

pub use error::{Error, Result};
pub use tensor;
