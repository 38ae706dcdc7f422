//! sam-opt: domain shift on real digits, cost of a step, the Python peer.

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
    all.extend([
        iam_few::mnist(),
        iam_few::digits(),
        iam_fixmatch::experiment(),
        iam_ranking::experiment(),
        iam_parity::experiment(),
        iam_cost::experiment(),
        iam_peers::experiment(),
    ]);
    all.extend(iam_few::sweeps());
    all
}
