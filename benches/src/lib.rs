//! The evidence for Tessera's methods.
//!
//! An [`Experiment`](experiment::Experiment) states the claims it tests, its arms (the method, its baselines,
//! its ablations), its data, its metrics and their direction. [`run`] crosses seeds with arms on the same
//! streams and writes one JSON line per run at once, so that nothing is lost when a benchmark is killed.
//! [`analysis`] computes paired differences with 95 % intervals and a verdict for each claim; [`report`] shows
//! them. Verdicts are computed, never written by hand; an effect that doesn't show is reported as not shown.
//!
//! The binary `tessera-bench` is what `cargo xtask bench` calls; `probe` tells `cargo xtask doctor` what
//! libtorch can do here.

pub mod analysis;
pub mod cli;
pub mod experiment;
pub mod experiments;
mod peer;
pub mod record;

pub mod report;
pub mod run;
pub mod snapshot;
pub mod spec;
pub mod timing;

/// The examples of the workspace's README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
