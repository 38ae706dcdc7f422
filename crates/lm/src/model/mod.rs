//! The decoder.

pub(crate) mod source;
