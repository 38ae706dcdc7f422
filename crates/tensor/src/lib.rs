#![doc = include_str!("../README.md")]

pub mod checkpoint;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod error;
pub mod seed;
pub mod stats;
pub mod threads;

#[cfg(feature = "torch")]
pub mod autograd;
#[cfg(feature = "torch")]
pub mod device;
mod ffi;
#[cfg(feature = "torch")]
pub mod fused;
#[cfg(feature = "torch")]
pub mod interop;
#[cfg(feature = "torch")]
mod kernel;
#[cfg(feature = "torch")]
pub mod nn;
#[cfg(feature = "torch")]
pub mod params;
#[cfg(feature = "torch")]
pub mod spectrum;

pub use error::{Error, Result};
pub use ndarray;
pub use seed::Seed;

#[cfg(feature = "torch")]
pub use checkpoint::StateDict;
#[cfg(feature = "torch")]
pub use params::{ParamSet, ParamVec, RestoreGuard};
#[cfg(feature = "torch")]
pub use tch;
