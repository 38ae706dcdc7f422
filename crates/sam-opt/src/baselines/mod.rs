//! What the methods of this crate are compared with.

mod dgsam;
mod domain_losses;

pub use dgsam::{Dgsam, DgsamConfig, DgsamStats};
pub use domain_losses::{GroupDro, erm_loss, vrex_loss};
