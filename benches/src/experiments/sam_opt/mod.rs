//! sam-opt: domain shift on real digits, cost of a step, the Python peer; S-Adam's experiments.

mod arms;
mod cost;
mod domains;
mod nets;
mod peer;
mod peers;
mod s_adam_ablations;
mod s_adam_cost;
mod s_adam_curves;
mod s_adam_data;
mod s_adam_nets;
mod s_adam_non_smooth;
mod s_adam_peers;
mod s_adam_train;
mod search;
pub mod tune;

use crate::experiment::Experiment;

/// The experiments of the crate.
pub fn experiments() -> Vec<Experiment> {
    vec![
        domains::handwriting3(),
        domains::rotated_mnist(),
        domains::ablations(),
        cost::experiment(),
        peers::experiment(),
        s_adam_curves::noisy_batches(),
        s_adam_curves::qat_2bit(),
        s_adam_curves::qat_4bit(),
        s_adam_non_smooth::experiment(),
        s_adam_cost::experiment(),
        s_adam_peers::experiment(),
        s_adam_ablations::experiment(),
        s_adam_ablations::cnn(),
    ]
}
