//! S-Adam: curves over learning rates on noisy and quantized training, non-smooth functions, ablations, cost.

mod ablations;
mod cost;
mod curves;
mod data;
mod nets;
mod non_smooth;
mod peers;
mod train;

use crate::experiment::{Context, Experiment};
use anyhow::Result;

pub(super) fn experiments() -> Vec<Experiment> {
    vec![
        curves::noisy_batches(),
        curves::qat_2bit(),
        curves::qat_4bit(),
        non_smooth::experiment(),
        cost::experiment(),
        peers::experiment(),
        ablations::experiment(),
        ablations::cnn(),
    ]
}

/// The search of this name, if there is one.
pub(super) fn search(context: &Context, name: &str) -> Option<Result<String>> {
    let curve = match name {
        "noisy-batches" => &curves::NOISY,
        "qat-2bit" => &curves::QAT2,
        "qat-4bit" => &curves::QAT4,
        _ => return None,
    };
    Some(curves::search(context, curve))
}
