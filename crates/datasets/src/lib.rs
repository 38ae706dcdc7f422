#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! - [`optdigits`], [`mnist10k`], [`mfeat`], [`fashion`], [`diabetes`]: the sets
//! - [`moby_dick`]: a text to model
//! - [`vader_sentiment`], [`brown`]: texts with ratings of sentiment, and of 15 genres
//! - [`smollm2`]: a small language model's file
//! - [`Images`], [`Labeled`]: what they return
//! - [`split`]: seeded, stratified parts
//! - [`image`]: crop, resample, pool, rotate, shift, cut out
//! - [`domains`]: Handwriting-3, Rotated MNIST, leave one domain out
//! - [`catalog`], [`cache`]: where the sets come from and where they lie
//! - [`idx`]: the file format of the MNIST family
//! - [`stream`]: named random streams

pub mod brown;
pub mod cache;
pub mod catalog;
pub mod diabetes;
pub mod domains;
mod error;
pub mod fashion;
pub mod idx;
pub mod image;
mod labeled;
pub mod mfeat;
pub mod mnist10k;
pub mod moby_dick;
pub mod optdigits;
mod packed;
pub mod smollm2;
pub mod split;
pub mod stream;
pub mod vader_sentiment;

pub use error::{Error, Result};
pub use labeled::{Images, Labeled};
