//! The experiments, one module a crate.

pub mod aligned_decoding;
pub mod lm;
pub mod sam_opt;
mod sentiment;
pub mod steering_ot;
