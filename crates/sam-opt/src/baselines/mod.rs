//! The methods that this crate's own are compared with, beyond the SAM family.

mod entropy;
mod smoothing;
mod vat;

pub use entropy::entropy;
pub use smoothing::smoothed_cross_entropy;
pub use vat::{VatConfig, vat_penalty};
