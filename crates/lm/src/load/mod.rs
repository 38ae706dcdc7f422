//! Checkpoints on disk.

mod hugging_face;
