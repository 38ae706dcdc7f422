//! sam-opt: domain shift on real digits, cost of a step, the Python peer.

mod arms;
mod cost;
mod domains;
mod nets;
mod peers;
mod search;
mod sharpness;
pub mod tune;

use crate::experiment::Experiment;

/// The experiments of the crate.
pub fn experiments() -> Vec<Experiment> {
    vec![domains::handwriting3(), domains::rotated_mnist(), cost::experiment(), peers::experiment()]
}
