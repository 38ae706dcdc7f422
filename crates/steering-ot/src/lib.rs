#![doc = include_str!("../README.md")]
// Array views are references that know their shape; they are passed as such.
#![allow(clippy::needless_pass_by_value)]

pub mod ablate;
pub mod auto;
pub mod baselines;
pub mod calibrate;
pub mod cards;
pub mod chars;
pub mod compose;
pub mod config;
mod data;
pub mod energy;
pub mod error;
mod kernel;
pub mod kmeans;
#[cfg(feature = "lm")]
pub mod model;
pub mod steer;
pub mod streaming;
#[cfg(feature = "torch")]
pub mod tensors;
pub mod transport;

pub use chars::{CharsMap, Extra, FitReport, Warning};
pub use config::{CharsConfig, Coupling, Epsilon, KMeansConfig, Kernel};
pub use error::{Error, Result};
pub use steer::{Parts, Steer};
pub use tensor::ndarray;
