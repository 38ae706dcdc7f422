//! What a fit saw, so that a collapse is seen and not guessed.

use crate::config::Epsilon;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The clustering of one side.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SideReport {
    /// Rows.
    pub rows: usize,
    /// Clusters used.
    pub clusters: usize,
    /// Sum of squared distances to the own centroid.
    pub inertia: f64,
    /// Lloyd iterations.
    pub iterations: usize,
}

/// What a fit saw.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FitReport {
    /// The source's clusters.
    pub source: SideReport,
    /// The target's clusters.
    pub target: SideReport,
    /// The regularisation used, in squared units of the activations; `None` for a plan without any.
    pub epsilon: Option<f64>,
    /// Mutual information of the plan in nats: near 0 every source cluster goes to the target's grand mean.
    pub plan_mutual_information: f64,
    /// `⟨P, C⟩`.
    pub transport_cost: f64,
    /// `exp` of the mean entropy of the gates over the source set: 1 = each input follows one cluster, K = no input does.
    pub effective_clusters: f64,
    /// Whether Sinkhorn's iteration converged (true where none was needed).
    pub converged: bool,
    /// Sinkhorn's iterations.
    pub iterations: usize,
    /// L1 error of the plan's row marginal before the last rescaling.
    pub marginal_error: f64,
    /// The coordinate with the largest share of the variance within the sides, and that share.
    pub dominant_coordinate: (usize, f64),
    /// With [`Epsilon::Auto`], each candidate and its energy distance on held-out rows.
    pub epsilon_scores: Vec<(Epsilon, f64)>,
    /// What a user should look at.
    pub warnings: Vec<Warning>,
}

/// Something that a user should look at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Warning {
    /// There were fewer distinct rows than clusters.
    ReducedClusters {
        /// "source" or "target".
        side: String,
        /// Clusters asked for.
        requested: usize,
        /// Clusters used.
        used: usize,
    },
    /// All rows of a side are the same.
    IdenticalRows {
        /// "source" or "target".
        side: String,
    },
    /// One coordinate holds most of the variance, as it does when activations of position 0 are among the rows.
    DominantCoordinate {
        /// Its number.
        coordinate: usize,
        /// Its share of the variance.
        share: f64,
    },
    /// The plan hardly tells the clusters apart.
    NearIndependentPlan {
        /// In nats.
        mutual_information: f64,
        /// Entropy of the smaller side: what a deterministic plan would have.
        largest: f64,
    },
    /// Sinkhorn's iteration stopped at its cap.
    NotConverged {
        /// L1 error of the row marginal.
        error: f64,
        /// Iterations done.
        iterations: usize,
    },
    /// The median cost is 0, so the exact plan was used.
    ZeroMedianCost,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReducedClusters { side, requested, used } => write!(
                f,
                "The {side} set has fewer distinct rows than the {requested} clusters asked for: {used} are used."
            ),
            Self::IdenticalRows { side } => write!(f, "All rows of the {side} set are the same."),
            Self::DominantCoordinate { coordinate, share } => write!(
                f,
                "Coordinate {coordinate} holds {:.0} % of the variance: are activations of position 0 among the rows? Clusters then follow the length of the text.",
                100.0 * share
            ),
            Self::NearIndependentPlan { mutual_information, largest } => write!(
                f,
                "The plan is nearly independent ({mutual_information:.3} of at most {largest:.3} nat), so every input is drawn toward the target's grand mean: lower epsilon."
            ),
            Self::NotConverged { error, iterations } => write!(
                f,
                "Sinkhorn's iteration stopped after {iterations} iterations with a marginal error of {error:.1e}."
            ),
            Self::ZeroMedianCost => write!(f, "The median cost is 0, so the exact plan was used."),
        }
    }
}
