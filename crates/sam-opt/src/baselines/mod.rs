//! What the methods of this crate are compared with.

mod dgsam;
mod domain_losses;
mod entropy;
mod smoothing;
mod vat;

pub use dgsam::{Dgsam, DgsamConfig, DgsamStats};
pub use domain_losses::{GroupDro, erm_loss, vrex_loss};
pub use entropy::entropy;
pub use smoothing::smoothed_cross_entropy;
pub use vat::{VatConfig, vat_penalty};
