//! Texts for training, and batches of them.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::tch::{Kind, Tensor};

/// A text to be learned: the completion is, the prompt isn't.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Example {
    /// Tokens that are given; at least one.
    pub prompt: Vec<u32>,
    /// Tokens that are learned, with the end token if the model shall learn to end; at least one.
    pub completion: Vec<u32>,
}

/// Two answers to a prompt, one of them preferred.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreferencePair {
    /// Tokens that are given; at least one.
    pub prompt: Vec<u32>,
    /// The preferred answer, with its end token.
    pub chosen: Vec<u32>,
    /// The other, with its end token.
    pub rejected: Vec<u32>,
}

/// Where short texts are filled up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    /// In front, as the decoder wants it.
    #[default]
    Left,
    /// Behind.
    Right,
}

/// Some texts as tensors.
#[derive(Debug)]
pub struct Batch {
    /// Tokens, `[batch, time]` of i64.
    pub ids: Tensor,
    /// Which aren't padding, `[batch, time]` of bool.
    pub real: Tensor,
    /// Which count: those of the completions, `[batch, time]` of bool.
    pub counted: Tensor,
    /// Counted tokens of each row.
    pub tokens: Vec<i64>,
    /// Which text of the trainer each row is: `i` for an example, `2i` for the chosen text of pair `i` and `2i + 1` for the
    /// rejected one. A policy can keep by it what doesn't change (the activations of frozen layers).
    pub texts: Vec<usize>,
}

/// How texts become batches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Layout {
    /// Where short texts are filled up.
    pub padding: Padding,
    /// The token they are filled up with. It is never looked at.
    pub pad: u32,
    /// Tokens of a text, prompt and completion together; completions are cut there. None: as long as they are.
    pub max_tokens: Option<usize>,
}

impl Default for Layout {
    fn default() -> Self {
        Self { padding: Padding::Left, pad: 0, max_tokens: None }
    }
}

impl Layout {
    /// A batch of texts, each with its number and its prompt and completion.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`]; [`Error::InvalidArgument`] without texts, for an empty completion, or for a prompt that leaves
    /// nothing of `max_tokens`.
    pub fn batch(&self, texts: &[(usize, &[u32], &[u32])]) -> Result<Batch> {
        if texts.is_empty() {
            return Err(Error::invalid("texts", "at least one", "none"));
        }
        let mut rows = Vec::with_capacity(texts.len());
        for (row, (number, prompt, completion)) in texts.iter().enumerate() {
            rows.push((*prompt, self.cut(row, *number, prompt, completion)?));
        }
        let time = rows.iter().map(|(p, c)| p.len() + c.len()).max().unwrap_or(0);
        let n = rows.len() * time;
        let (mut ids, mut real, mut counted) = (vec![i64::from(self.pad); n], vec![false; n], vec![false; n]);
        for (row, (prompt, completion)) in rows.iter().enumerate() {
            let length = prompt.len() + completion.len();
            let start = row * time + if self.padding == Padding::Left { time - length } else { 0 };
            for (place, id) in ids[start..].iter_mut().zip(prompt.iter().chain(*completion)) {
                *place = i64::from(*id);
            }
            real[start..start + length].fill(true);
            counted[start + prompt.len()..start + length].fill(true);
        }
        let shape = [rows.len() as i64, time as i64];
        let mask = |values: &[bool]| -> Result<Tensor> { Ok(Tensor::f_from_slice(values)?.f_view(shape)?) };
        Ok(Batch {
            ids: Tensor::f_from_slice(&ids)?.f_view(shape)?.f_to_kind(Kind::Int64)?,
            real: mask(&real)?,
            counted: mask(&counted)?,
            tokens: rows.iter().map(|(_, c)| c.len() as i64).collect(),
            texts: texts.iter().map(|(number, _, _)| *number).collect(),
        })
    }

    /// What is kept of a completion.
    pub(super) fn cut<'a>(
        &self,
        row: usize,
        number: usize,
        prompt: &[u32],
        completion: &'a [u32],
    ) -> Result<&'a [u32]> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt { row });
        }
        let room = self.max_tokens.map_or(completion.len(), |max| max.saturating_sub(prompt.len()));
        let kept = &completion[..completion.len().min(room)];
        if kept.is_empty() {
            let expected = match self.max_tokens {
                Some(max) => format!("at least one token that fits into {max} with the prompt of {}", prompt.len()),
                None => "at least one token".into(),
            };
            return Err(Error::invalid(format!("the completion of text {number}"), expected, "empty"));
        }
        Ok(kept)
    }

    /// A batch of pairs with their numbers: first all chosen texts, then all rejected ones.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    pub fn pairs(&self, pairs: &[(usize, &PreferencePair)]) -> Result<Batch> {
        let chosen = pairs.iter().map(|(i, p)| (2 * i, &p.prompt[..], &p.chosen[..]));
        let rejected = pairs.iter().map(|(i, p)| (2 * i + 1, &p.prompt[..], &p.rejected[..]));
        self.batch(&chosen.chain(rejected).collect::<Vec<_>>())
    }
}

/// Lengths of the answers of pairs. Where one side is longer, length is what training learns first.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lengths {
    /// Mean tokens of the chosen answers.
    pub chosen: f64,
    /// Mean tokens of the rejected answers.
    pub rejected: f64,
    /// Share of pairs whose chosen answer is the longer one, ties counting half: 0.5 is balanced.
    pub chosen_longer: f64,
}

/// The lengths of the answers of pairs; none without pairs.
pub fn lengths(pairs: &[PreferencePair]) -> Option<Lengths> {
    let n = pairs.len() as f64;
    let mean = |of: &dyn Fn(&PreferencePair) -> f64| pairs.iter().map(of).sum::<f64>() / n;
    (!pairs.is_empty()).then(|| Lengths {
        chosen: mean(&|p| p.chosen.len() as f64),
        rejected: mean(&|p| p.rejected.len() as f64),
        chosen_longer: mean(&|p| match p.chosen.len().cmp(&p.rejected.len()) {
            std::cmp::Ordering::Greater => 1.0,
            std::cmp::Ordering::Equal => 0.5,
            std::cmp::Ordering::Less => 0.0,
        }),
    })
}
