//! The list of experiments, and how they are found by name.

use crate::experiments;
use crate::spec::{Kind, Mode, Spec};
use anyhow::{Result, bail};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use tensor::tch::Device;

/// What a run may use.
#[derive(Debug)]
pub struct Context {
    /// How much is run.
    pub mode: Mode,
    /// Where tensors live.
    pub device: Device,
    /// Threads for libtorch and rayon.
    pub threads: usize,
    /// Python of the peers' virtual environment.
    pub peer_python: Option<PathBuf>,
    /// Set by Ctrl-C: long loops look at it and give up.
    pub interrupted: &'static AtomicBool,
}

/// Marker of a run that was given up because of Ctrl-C.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Context {
    /// # Errors
    /// [`Interrupted`] after Ctrl-C.
    pub fn check(&self) -> Result<()> {
        if self.interrupted.load(Ordering::Relaxed) { Err(Interrupted.into()) } else { Ok(()) }
    }
}

/// What one arm reports for one seed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// One number a metric.
    pub metrics: BTreeMap<String, f64>,
    /// Repeated measurements a metric, for ratios of medians.
    pub samples: BTreeMap<String, Vec<f64>>,
    /// Points (x, y) of each curve, in the order of x.
    pub curves: BTreeMap<String, Vec<(f64, f64)>>,
}

impl Outcome {
    /// Adds a metric.
    pub fn set(&mut self, name: &str, value: f64) {
        self.metrics.insert(name.into(), value);
    }

    /// Adds a point to a curve. Points of several seeds with the same x become one with an interval.
    pub fn point(&mut self, curve: &str, x: f64, y: f64) {
        self.curves.entry(curve.into()).or_default().push((x, y));
    }
}

/// Outcomes by arm.
pub type Outcomes = Vec<(String, Outcome)>;

/// How an experiment runs.
#[derive(Debug, Clone, Copy)]
pub enum Body {
    /// Each arm by itself.
    PerArm(fn(&Context, arm: &str, seed: u64) -> Result<Outcome>),
    /// All arms together, interleaved: timings. Returns every arm of the spec once, in any order; what can't run
    /// fails for all of them.
    Together(fn(&Context, seed: u64) -> Result<Outcomes>),
}

/// An experiment: its description and how it runs.
#[derive(Debug, Clone)]
pub struct Experiment {
    /// The description.
    pub spec: Spec,
    /// How it runs.
    pub body: Body,
}

/// Every experiment there is, by crate.
pub fn all() -> Vec<Experiment> {
    let mut all = experiments::sam_opt::experiments();
    all.extend(experiments::lm::experiments());
    all.extend(experiments::steering_ot::experiments());
    all.extend(experiments::aligned_decoding::experiments());
    all
}

/// Those that the names select: crates, experiments, or everything that the mode runs.
///
/// # Errors
/// For a name that is neither, with the nearest one that is.
pub fn select(names: &[String], mode: Mode, peers: bool) -> Result<Vec<Experiment>> {
    let all = all();
    let runs = |spec: &Spec| match spec.kind {
        Kind::Core => true,
        Kind::FullOnly => mode == Mode::Full,
        Kind::Peers => peers,
        Kind::ByName => false,
    };
    if names.is_empty() {
        return Ok(all.into_iter().filter(|e| runs(&e.spec)).collect());
    }
    for name in names {
        if !all.iter().any(|e| e.spec.name == *name || e.spec.krate == *name) {
            let known = all.iter().flat_map(|e| [e.spec.name.as_str(), e.spec.krate.as_str()]);
            let nearest = known.max_by(|a, b| strsim::jaro(name, a).total_cmp(&strsim::jaro(name, b)));
            bail!(
                "There is no crate or experiment called \"{name}\". Did you mean \"{}\"? `cargo xtask bench --list` shows all.",
                nearest.unwrap_or_default()
            );
        }
    }
    let chosen = |e: &Experiment| names.contains(&e.spec.name) || (names.contains(&e.spec.krate) && runs(&e.spec));
    Ok(all.into_iter().filter(chosen).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_answered_with_the_nearest() {
        let message = select(&["handwritting".into()], Mode::Quick, false).unwrap_err().to_string();
        assert!(message.contains("\"handwritting\"") && message.contains("\"handwriting3\""), "{message}");
    }

    #[test]
    fn every_description_is_consistent() {
        let all = all();
        for (i, e) in all.iter().enumerate() {
            let spec = &e.spec;
            assert!(all[..i].iter().all(|other| other.spec.name != spec.name), "{} twice", spec.name);
            for claim in &spec.claims {
                assert!(spec.metric(&claim.metric).is_some(), "{}: no metric {}", spec.name, claim.metric);
                assert!(spec.arm(&claim.arm).is_some(), "{}: no arm {}", spec.name, claim.arm);
                assert!(spec.arm(&claim.reference).is_some(), "{}: no arm {}", spec.name, claim.reference);
            }
            for set in &spec.data {
                assert!(datasets::catalog::catalog().set(set).is_ok(), "{}: no data set {set}", spec.name);
            }
            assert!(spec.seeds.0 >= 1 && spec.seeds.1 >= spec.seeds.0, "{}", spec.name);
        }
    }

    #[test]
    fn a_crates_name_selects_its_core_and_an_experiments_name_selects_it_in_any_mode() {
        let names = |names: &[&str], mode, peers| -> Vec<String> {
            let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            select(&names, mode, peers).unwrap().into_iter().map(|e| e.spec.name).collect()
        };
        let core = names(&["sam-opt"], Mode::Quick, false);
        assert!(core.contains(&"handwriting3".to_owned()) && !core.contains(&"sam-peers".to_owned()));
        assert!(names(&["sam-opt"], Mode::Quick, true).contains(&"sam-peers".to_owned()));
        assert_eq!(names(&["sam-peers"], Mode::Quick, false), ["sam-peers"]);
    }
}
