//! The searches that there are.

use super::arms::{Method, SEARCHED};
use super::domains::{HANDWRITING3, Protocol, ROTATED_MNIST, STEPS, source_validation};
use super::search::run_search;
use super::{iam, s_adam};
use crate::experiment::Context;
use anyhow::{Context as _, Result, bail};

/// Searches one experiment's hyper-parameters and returns the committed file's text.
///
/// # Errors
/// For an experiment that has no search; when a data set is missing.
pub fn tune(context: &Context, experiment: &str) -> Result<String> {
    match experiment {
        "handwriting3" => over_domains(context, &HANDWRITING3),
        "rotated-mnist" => over_domains(context, &ROTATED_MNIST),
        other => match iam::search(context, other).or_else(|| s_adam::search(context, other)) {
            Some(found) => found,
            None => bail!("\"{other}\" has no search."),
        },
    }
}

/// Validation on the source domains of each fold.
fn over_domains(context: &Context, protocol: &'static Protocol) -> Result<String> {
    let grid = |arm: &'static str| Ok((arm, Method::grid(arm).context("every arm has a grid")?));
    let arms = SEARCHED.into_iter().map(grid).collect::<Result<Vec<_>>>()?;
    run_search(protocol.name, &arms, protocol.held_out, |candidate, held_out, seed| {
        source_validation(protocol, context, candidate, STEPS, held_out, seed)
    })
}
