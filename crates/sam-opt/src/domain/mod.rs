//! Training on several domains: losses by domain, balanced batches, leave-one-out splits.

mod losses;
mod sampler;

pub(crate) use losses::{ByDomain, f64_reduction};
pub use losses::{DomainId, DomainLosses};
pub use sampler::{DomainFold, DomainSampler, LeaveOneDomainOut};
