//! sam-opt: DA-SAM over domains, IAM with few labels, S-Adam over learning rates; the cost of a step; the Python peers.

mod arms;
mod cost;
mod domains;
mod iam;
mod nets;
mod peers;
mod s_adam;
mod search;
pub mod tune;

use crate::experiment::Experiment;

/// The experiments of the crate.
pub fn experiments() -> Vec<Experiment> {
    let mut all = vec![
        domains::handwriting3(),
        domains::rotated_mnist(),
        domains::ablations(),
        cost::experiment(),
        peers::experiment(),
    ];
    all.extend(iam::experiments());
    all.extend(s_adam::experiments());
    all
}
