//! The experiments, one module a crate.

pub mod lm;
pub mod sam_opt;
