//! Protocols A (Handwriting-3) and B (Rotated MNIST) of the specification `sam-opt-da-sam`.

mod ablations;
mod describe;
#[cfg(test)]
mod tests;
mod training;

pub(crate) use ablations::ablations;
pub(crate) use describe::{handwriting3, rotated_mnist};

use super::arms::Method;
use super::search::{Score, Tuned};
use crate::experiment::{Context, Outcome};
use crate::spec::Mode;
use anyhow::{Result, bail};
use datasets::domains::{self, Domain};
use std::sync::OnceLock;
use training::Trained;

/// Samples of each domain in a batch.
const BATCH: usize = 32;
/// Optimizer steps.
pub(super) const STEPS: u64 = 400;
/// Optimizer steps of a quick run.
const QUICK_STEPS: u64 = 150;
/// Steps between two looks of SWAD at the validation loss.
const SWAD_EVERY: i64 = 20;
/// Most samples of a source domain, and the share kept for validation.
const CAP: usize = 1200;
const VALIDATION: f64 = 0.2;

/// A leave-one-out protocol over digit domains.
pub(super) struct Protocol {
    pub(super) name: &'static str,
    /// The domains. They are the same for every seed: a digit that is tested on in one seed must not be trained or
    /// validated on in another, nor in the search.
    load: fn() -> Result<&'static [Domain]>,
    /// Data sets that must be in the cache.
    data: &'static [&'static str],
    /// Names of the held-out domains.
    pub(super) held_out: &'static [&'static str],
    widths: &'static [i64],
    /// The committed search.
    tuned: &'static str,
}

pub(super) static HANDWRITING3: Protocol = Protocol {
    name: "handwriting3",
    load: || {
        static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
        once(&DOMAINS, domains::handwriting3)
    },
    data: &["mnist-10k", "optdigits", "mfeat"],
    held_out: &["mnist", "optdigits", "mfeat"],
    widths: &[64, 128, 128, 10],
    tuned: include_str!("../../../../tuned/handwriting3.json"),
};

pub(super) static ROTATED_MNIST: Protocol = Protocol {
    name: "rotated-mnist",
    load: || {
        static DOMAINS: OnceLock<Vec<Domain>> = OnceLock::new();
        once(&DOMAINS, || domains::rotated_mnist(PARTITION))
    },
    data: &["mnist-10k"],
    held_out: &["0°", "75°"],
    widths: &[196, 128, 128, 10],
    tuned: include_str!("../../../../tuned/rotated-mnist.json"),
};

/// Seed of the one partition of MNIST into the domains of Rotated MNIST.
const PARTITION: u64 = 0;

/// Loads domains on the first call.
fn once(
    cell: &'static OnceLock<Vec<Domain>>,
    load: impl FnOnce() -> datasets::Result<Vec<Domain>>,
) -> Result<&'static [Domain]> {
    if let Some(domains) = cell.get() {
        return Ok(domains);
    }
    let domains = load()?;
    Ok(cell.get_or_init(|| domains))
}

/// The oracle's radius: the specification chose it for SAM by looking at Handwriting-3's held-out domains.
const ORACLE_RHO: f64 = 0.5;
/// SAM with it.
const ORACLE: Method = Method::Sam { rho: ORACLE_RHO };
fn run_arm(protocol: &Protocol, context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    let tuned = Tuned::<Method>::parse(protocol.tuned)?;
    tuned.check_seed(seed)?;
    let domains = (protocol.load)()?;
    let (held_out, steps) = schedule(protocol, context.mode);
    let folds = held_out.iter().map(|name| {
        let plan = plan(&tuned, arm, name, steps)?;
        Ok((*name, Trained::new(protocol, context, &plan, domains, name, seed)?.test()?))
    });
    Ok(mean_over_folds(&folds.collect::<Result<Vec<_>>>()?))
}

/// Folds and steps of a mode.
fn schedule(protocol: &Protocol, mode: Mode) -> (&'static [&'static str], u64) {
    match mode {
        Mode::Quick => (&protocol.held_out[..1], QUICK_STEPS),
        Mode::Full => (protocol.held_out, STEPS),
    }
}

/// What an arm trains with in a fold.
struct Plan {
    method: Method,
    steps: u64,
    /// Average the weights by SWAD.
    swad: bool,
}

impl Plan {
    fn new(method: Method, steps: u64) -> Self {
        Self { method, steps, swad: false }
    }
}

fn plan(tuned: &Tuned<Method>, arm: &str, held_out: &str, steps: u64) -> Result<Plan> {
    let chosen = |arm| tuned.chosen(arm, held_out).cloned();
    Ok(match arm {
        "sam-oracle" => Plan::new(ORACLE, steps),
        "random-oracle" => Plan::new(Method::Random { rho: ORACLE_RHO }, steps),
        "da-sam-oracle" => Plan::new(Method::DaSam { rho: ORACLE_RHO }, steps),
        "da-sam-same" => match chosen("sam")? {
            Method::Sam { rho } => Plan::new(Method::DaSam { rho }, steps),
            other => bail!("the search chose {other:?} for SAM"),
        },
        "erm-2x" => Plan::new(chosen("erm")?, 2 * steps),
        "sam-1.67x" => Plan::new(chosen("sam")?, steps * 5 / 3),
        "swad" => Plan { swad: true, ..Plan::new(chosen("sam")?, steps) },
        arm => Plan::new(chosen(arm)?, steps),
    })
}

/// The mean of every metric over the folds, and each fold's own accuracy.
fn mean_over_folds(folds: &[(&str, Outcome)]) -> Outcome {
    let mut outcome = Outcome::default();
    for (name, fold) in folds {
        outcome.set(&format!("accuracy {name}"), fold.metrics["accuracy"]);
        for (metric, value) in &fold.metrics {
            *outcome.metrics.entry(metric.clone()).or_insert(0.0) += value / folds.len() as f64;
        }
    }
    outcome
}

/// Trains with `held_out` held out and looks at the source domains only: what a search may know.
pub(super) fn source_validation(
    protocol: &Protocol,
    context: &Context,
    method: &Method,
    steps: u64,
    held_out: &str,
    seed: u64,
) -> Result<Score> {
    let domains = (protocol.load)()?;
    let plan = Plan::new(method.clone(), steps);
    Ok(Trained::new(protocol, context, &plan, domains, held_out, seed)?.validation())
}
