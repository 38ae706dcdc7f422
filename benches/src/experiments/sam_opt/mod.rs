//! sam-opt: DA-SAM over domains, IAM with few labels, S-Adam over learning rates; the cost of a step; the Python peers.

mod arms;
mod cost;
mod domains;
mod iam_arms;
mod iam_cost;
mod iam_few;
mod iam_fixmatch;
mod iam_parity;
mod iam_peers;
mod iam_ranking;
mod iam_train;
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
    let mut all = vec![
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
        iam_few::mnist(),
        iam_few::digits(),
        iam_fixmatch::experiment(),
        iam_ranking::experiment(),
        iam_parity::experiment(),
        iam_cost::experiment(),
        iam_peers::experiment(),
    ];
    all.extend(iam_few::sweeps());
    all
}
