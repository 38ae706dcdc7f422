//! The search for hyper-parameters: validation on the source domains of each fold, seeds that are never evaluated,
//! the same number of candidates for every method. Its result is committed under `benches/tuned/`.

use super::arms::{Method, SEARCHED, Search, Trial, Tuned};
use super::domains::{HANDWRITING3, ROTATED_MNIST, STEPS, source_validation};
use crate::experiment::Context;
use anyhow::{Context as _, Result, bail};

/// First seed of the search, far from those that are evaluated.
const FIRST: u64 = 1000;
/// Seeds of the search.
const SEEDS: u64 = 3;

/// Searches one protocol and returns the committed file's text.
///
/// # Errors
/// For an experiment that has no search; when a data set is missing.
pub fn tune(context: &Context, experiment: &str) -> Result<String> {
    let protocol = match experiment {
        "handwriting3" => &HANDWRITING3,
        "rotated-mnist" => &ROTATED_MNIST,
        other => bail!("\"{other}\" has no search: handwriting3 and rotated-mnist have."),
    };
    let mut searches = Vec::new();
    for arm in SEARCHED {
        for held_out in protocol.held_out {
            let mut trials = Vec::new();
            for candidate in Method::grid(arm).context("every arm has a grid")? {
                let (mut accuracy, mut loss) = (0.0, 0.0);
                for seed in FIRST..FIRST + SEEDS {
                    let score = source_validation(protocol, context, &candidate, STEPS, held_out, seed)?;
                    accuracy += score.accuracy / SEEDS as f64;
                    loss += score.loss / SEEDS as f64;
                }
                println!(
                    "{experiment} {arm}, {held_out} held out, {}: {accuracy:.2} % {loss:.4}",
                    candidate.settings()
                );
                trials.push(Trial { candidate, validation_accuracy: accuracy, validation_loss: loss });
            }
            let chosen = Trial::best(&trials).context("a grid has candidates")?.candidate.clone();
            searches.push(Search { arm: arm.into(), held_out: (*held_out).into(), chosen, trials });
        }
    }
    let tuned = Tuned { seeds: (FIRST..FIRST + SEEDS).collect(), searches };
    Ok(serde_json::to_string_pretty(&tuned)? + "\n")
}
