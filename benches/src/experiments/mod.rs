//! The experiments, one module a crate.

pub mod sam_opt;
