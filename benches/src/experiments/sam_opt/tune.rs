//! The search for hyper-parameters: source-domain validation, seeds that are never evaluated, the same number
//! of candidates for every method. Its result is committed under `benches/tuned/`.

use super::arms::{Method, Trial, Tuned, TunedMethod};
use super::domains::{HANDWRITING3, ROTATED_MNIST, evaluate};
use crate::experiment::Context;
use anyhow::{Context as _, Result, bail};

/// First seed of the search, far from those that are evaluated.
const FIRST: u64 = 1000;
/// Seeds of the search.
const SEEDS: u64 = 3;
/// Steps of the protocols.
const STEPS: u64 = 400;

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
    let mut methods = Vec::new();
    for arm in ["erm", "sam", "asam", "gsam", "sagm"] {
        let grid = Method::grid(arm).context("every arm has a grid")?;
        let mut trials = Vec::new();
        for candidate in grid {
            let (mut accuracy, mut loss) = (0.0, 0.0);
            for seed in FIRST..FIRST + SEEDS {
                let outcome = evaluate(protocol, context, &candidate, STEPS, seed)?;
                accuracy += outcome.metrics["validation"] / SEEDS as f64;
                loss += outcome.metrics["validation loss"] / SEEDS as f64;
            }
            println!("{experiment} {arm} {}: {accuracy:.2} % {loss:.4}", candidate.settings());
            trials.push(Trial { candidate, validation_accuracy: accuracy, validation_loss: loss });
        }
        let best = trials
            .iter()
            .max_by(|a, b| {
                let loss = b.validation_loss.total_cmp(&a.validation_loss);
                a.validation_accuracy.total_cmp(&b.validation_accuracy).then(loss)
            })
            .context("a grid has candidates")?;
        methods.push(TunedMethod { arm: arm.into(), chosen: best.candidate.clone(), trials });
    }
    let tuned = Tuned { seeds: (FIRST..FIRST + SEEDS).collect(), methods };
    Ok(serde_json::to_string_pretty(&tuned)? + "\n")
}
