//! lm: speed and memory of the reference model, alone and beside transformers and llama.cpp; a small mixture of experts trained
//! on real text.

mod cost;
mod moe;
mod peers;

use crate::experiment::Experiment;
use anyhow::Result;
use lm::{Lm, LoadOptions, Weights};
use tensor::tch::Device;

/// The experiments of the crate.
pub fn experiments() -> Vec<Experiment> {
    vec![moe::experiment(), cost::experiment(), peers::experiment()]
}

/// The reference model, f32.
fn smollm2(weights: Weights, device: Device) -> Result<Lm> {
    Ok(Lm::load(&datasets::smollm2::path()?, &LoadOptions { weights, device, ..LoadOptions::default() })?)
}

/// The tokens that all sides read: no text, but tokens of which none repeats.
fn prompt(tokens: i64) -> Vec<i64> {
    (0..tokens).map(|i| i * 7919 % 49_000 + 100).collect()
}
