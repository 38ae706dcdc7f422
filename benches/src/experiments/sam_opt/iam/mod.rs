//! IAM: few labels and many unlabeled inputs, FixMatch, ranking of models, parity with all labels, cost.

mod arms;
mod cost;
mod few;
mod fixmatch;
mod parity;
mod peers;
mod ranking;
mod train;

use crate::experiment::{Context, Experiment};
use anyhow::Result;

pub(super) fn experiments() -> Vec<Experiment> {
    let mut all = vec![
        few::mnist(),
        few::digits(),
        fixmatch::experiment(),
        ranking::experiment(),
        parity::experiment(),
        cost::experiment(),
        peers::experiment(),
    ];
    all.extend(few::sweeps());
    all
}

/// The search of this name, if there is one.
pub(super) fn search(context: &Context, name: &str) -> Option<Result<String>> {
    match name {
        "few-labels" => Some(few::search(context)),
        "fixmatch-digits" => Some(fixmatch::search(context)),
        "supervised-parity" => Some(parity::search(context)),
        _ => None,
    }
}
