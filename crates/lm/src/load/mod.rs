//! Checkpoints on disk.

pub mod gguf;
mod hugging_face;

pub(crate) use hugging_face::read_json;
