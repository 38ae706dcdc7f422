//! Traces for people and programs: where preference training changed what the model would have said.

use crate::Result;
use crate::error::Error;
use crate::generate::{Generation, StepTrace};
use lm::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// A candidate with its text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NamedCandidate {
    /// The token.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// Log-probability under the policy, in nats.
    pub policy: f64,
    /// Under the reference.
    pub reference: f64,
    /// A = policy − reference.
    pub advantage: f64,
}

/// A step with its texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NamedStep {
    /// Number of the step, from 0.
    pub step: usize,
    /// The text of the chosen token.
    pub chosen: String,
    /// The text of what the policy alone would have taken.
    pub policy_top: String,
    /// Number of candidates, |V_α|.
    pub plausible: usize,
    /// A of the chosen token.
    pub advantage: f64,
    /// The most probable candidates.
    pub candidates: Vec<NamedCandidate>,
}

/// The steps of a text, with texts for tokens: what `aad generate --trace-json` writes.
///
/// # Errors
/// [`Error::InvalidArgument`] for a text without a trace; what the tokenizer reports.
pub fn named(generation: &Generation, tokenizer: &Tokenizer) -> Result<Vec<NamedStep>> {
    let text = |id: u32| tokenizer.decode(&[id], false);
    let step = |(step, s): (usize, &StepTrace)| -> Result<NamedStep> {
        let candidate = |c: &crate::generate::TraceCandidate| -> Result<NamedCandidate> {
            let (policy, reference, advantage) = (c.policy, c.reference, c.advantage());
            Ok(NamedCandidate { id: c.id, text: text(c.id)?, policy, reference, advantage })
        };
        Ok(NamedStep {
            step,
            chosen: text(s.chosen)?,
            policy_top: text(s.policy_top)?,
            plausible: s.plausible,
            advantage: s.advantage,
            candidates: s.candidates.iter().map(candidate).collect::<Result<_>>()?,
        })
    };
    steps(generation)?.iter().enumerate().map(step).collect()
}

fn steps(generation: &Generation) -> Result<&[StepTrace]> {
    generation.trace.as_deref().ok_or_else(|| Error::invalid("trace", "on", false))
}

/// Colours of a terminal: green what was chosen instead, red what the policy alone would have said, dim numbers.
const GREEN: &str = "\x1b[1;32m";
const RED: &str = "\x1b[31m";
const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// The text with its departures marked, and a line for each of them: what the policy alone would have taken, what was chosen, their
/// probabilities under both models and the advantage. Control characters of the text are shown escaped.
///
/// # Errors
/// As [`named`].
pub fn render(generation: &Generation, tokenizer: &Tokenizer, colour: bool) -> Result<String> {
    let steps = named(generation, tokenizer)?;
    let paint = |colour_of: &str, text: &str| {
        if colour { format!("{colour_of}{text}{RESET}") } else { text.to_owned() }
    };
    let mut out = String::new();
    for step in &steps {
        let chosen = printable(&step.chosen, true);
        if step.chosen == step.policy_top {
            out.push_str(&chosen);
        } else if colour {
            out.push_str(&paint(GREEN, &chosen));
        } else {
            let _ = write!(out, "[{chosen}]"); // writing to a String can't fail
        }
    }
    out.push_str("\n\n");
    for step in steps.iter().filter(|s| s.chosen != s.policy_top) {
        let numbers = |text: &str| {
            let found = step.candidates.iter().find(|c| c.text == text);
            found.map_or_else(String::new, |c| {
                format!("policy {:.3}, reference {:.3}, A {:+.2}", c.policy.exp(), c.reference.exp(), c.advantage)
            })
        };
        let (top, chosen) = (numbers(&step.policy_top), numbers(&step.chosen));
        let _ = writeln!(
            out,
            "{:>4}  {} {}  →  {} {}  {}",
            step.step,
            paint(RED, &format!("`{}`", printable(&step.policy_top, false))),
            paint(DIM, &format!("({top})")),
            paint(GREEN, &format!("`{}`", printable(&step.chosen, false))),
            paint(DIM, &format!("({chosen})")),
            paint(DIM, &format!("of {} candidates", step.plausible)),
        );
    }
    Ok(out)
}

/// Text without the characters that steer a terminal.
fn printable(text: &str, lines: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && !(lines && c == '\n') {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}
