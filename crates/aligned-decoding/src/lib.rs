#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! Without libtorch (no feature):
//! - [`select`]: the kernel on raw logits; [`rules`]: all rules; [`config`]: settings, [`Rule`], [`AadConfig`]
//! - [`tree`]: texts so short that the optimal policy is known exactly
//! - [`guard`]: guards against over-optimization, α for a budget
//! - [`jsonl`]: files with a value a line

pub mod config;
mod error;
pub mod guard;
pub mod jsonl;
pub mod rules;
pub mod select;
pub mod tree;

pub use config::{AadConfig, ReferenceMode, Rule, StopReason, StopRule};
pub use error::{Error, Result, Side};
pub use select::{Choice, select};
pub use tensor;
