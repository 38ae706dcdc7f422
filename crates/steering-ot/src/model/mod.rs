//! Steering a language model: activations of texts, plans as hooks, files, the price in fluency.

mod control_vector;
mod file;
mod fit;
mod fluency;
mod mask;
mod plan;

pub use fit::{activations_at, collect_activations, collect_steered, fit_plan, fit_sequential};
pub use fluency::continuation_nll;
pub use lm::activations::{ActivationStore, CollectConfig, Pooling};
pub use lm::hooks::Site;
pub use mask::TokenMask;
pub use plan::{Mode, SiteMap, SteeringPlan};
