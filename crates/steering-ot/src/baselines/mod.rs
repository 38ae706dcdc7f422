//! What CHaRS is compared with, behind the same interface.
//!
//! | map | `T(x)` |
//! | --- | --- |
//! | [`DiM`] | `x + mean(B) − mean(A)` |
//! | [`MeanAct`] | the same, by coordinate |
//! | [`PcaDirection`] | `x + s·v` along the first principal component `v` |
//! | [`GaussianAct`] | `(σ_B/σ_A)(x − μ_A) + μ_B`, by coordinate |
//! | [`LinearAct`] | `w x + b` by least squares of sorted values, by coordinate |
//! | [`GaussianOt`] | `μ_B + Â(x − μ_A)`, the optimal map between Gaussians |
//! | [`DiagonalChars`] | CHaRS whose clusters have diagonal covariances |
//!
//! The other couplings of CHaRS are [`Coupling::NearestNeighbour`](crate::Coupling) and
//! [`Coupling::Uniform`](crate::Coupling).

mod by_coordinate;
mod diagonal;
mod gaussian_ot;
mod pca;
mod translation;

pub use by_coordinate::{GaussianAct, LinearAct};
pub use diagonal::DiagonalChars;
pub use gaussian_ot::{GaussianOt, GaussianOtConfig};
pub use pca::{PcaConfig, PcaDirection, PcaRows};
pub use translation::{DiM, MeanAct};
