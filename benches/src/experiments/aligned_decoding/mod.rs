//! aligned-decoding: rules on exact trees, a real pair trained on human ratings, what decoding costs.

mod cost;
mod frontier;
mod oracle;
mod pair;
mod peers;
mod robust;
mod sentiment;
mod trees;
mod yardstick;

use crate::experiment::Experiment;

/// The experiments of the crate.
pub fn experiments() -> Vec<Experiment> {
    vec![
        trees::experiment(),
        sentiment::experiment(),
        cost::experiment(),
        frontier::experiment(),
        robust::experiment(),
        peers::experiment(),
        yardstick::experiment(),
    ]
}
