//! Which projections an adapter changes, and how it starts.

use crate::config::{Architecture, ModelConfig};
use crate::linear::Projection;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Which layers an adapter changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    /// All.
    #[default]
    All,
    /// The last so many. What lies below can be run once for the model with and without the adapter.
    Top(usize),
    /// Those of a range, counted from 0.
    Range(Range<usize>),
    /// These, counted from 0.
    List(Vec<usize>),
}

/// How the matrix A starts. B always starts at 0, so that the adapted model starts as the bare one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// N(0, 1/in).
    #[default]
    Normal,
    /// Uniform in ±1/√in, which is what Kaiming's rule with a = √5 comes to.
    Kaiming,
}

/// Settings of an [`Adapter`](super::Adapter).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank r of what is added to a weight.
    pub rank: i64,
    /// α: what is added is (α/r) B A.
    pub alpha: f64,
    /// The projections. GPT-2 has no gate; the experts of a mixture can't be adapted.
    pub targets: Vec<Projection>,
    /// The layers.
    pub layers: Layers,
    /// How A starts.
    pub init: Init,
    /// Seed of A.
    pub seed: u64,
}

impl Default for LoraConfig {
    /// Rank 16, scale 2, all projections of all layers.
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            targets: Projection::ALL.to_vec(),
            layers: Layers::All,
            init: Init::Normal,
            seed: 0,
        }
    }
}

/// Far above every use; keeps sizes in 64 bits.
const MAX_RANK: i64 = 1 << 16;

impl LoraConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first field that can't be.
    pub fn validate(&self) -> Result<()> {
        if !(1..=MAX_RANK).contains(&self.rank) {
            return Err(Error::invalid("rank", format!("from 1 to {MAX_RANK}"), self.rank));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(Error::invalid("alpha", "positive and finite", self.alpha));
        }
        if self.targets.is_empty() {
            return Err(Error::invalid("targets", "at least one projection", "empty"));
        }
        if let Some(twice) = repeated(&self.targets) {
            return Err(Error::invalid("targets", "a list without repetition", format!("one with {twice:?} twice")));
        }
        let empty = match &self.layers {
            Layers::All => false,
            Layers::Top(n) => *n == 0,
            Layers::Range(range) => range.is_empty(),
            Layers::List(list) => {
                if let Some(twice) = repeated(list) {
                    return Err(Error::invalid(
                        "layers",
                        "a list without repetition",
                        format!("one with {twice} twice"),
                    ));
                }
                list.is_empty()
            }
        };
        if empty {
            return Err(Error::invalid("layers", "at least one layer", format!("{:?}", self.layers)));
        }
        Ok(())
    }

    /// The layers of a model with `layers` of them.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub(super) fn layers_of(&self, layers: usize) -> Result<Vec<usize>> {
        let chosen: Vec<usize> = match &self.layers {
            Layers::All => (0..layers).collect(),
            Layers::Top(n) if *n > layers => return Err(Error::LayerOutOfRange { layer: n - 1, layers }),
            Layers::Top(n) => (layers - n..layers).collect(),
            // Its end first, so that a huge range isn't listed.
            Layers::Range(range) if range.end > layers => {
                return Err(Error::LayerOutOfRange { layer: range.end - 1, layers });
            }
            Layers::Range(range) => range.clone().collect(),
            Layers::List(list) => list.clone(),
        };
        match chosen.iter().find(|l| **l >= layers) {
            Some(&layer) => Err(Error::LayerOutOfRange { layer, layers }),
            None => Ok(chosen),
        }
    }
}

fn repeated<T: PartialEq>(list: &[T]) -> Option<&T> {
    list.iter().enumerate().find(|(i, item)| list[..*i].contains(item)).map(|(_, item)| item)
}

/// `[out, in]` of a projection.
///
/// # Errors
/// [`Error::InvalidArgument`] for one that the model doesn't have, or that is a mixture of experts.
pub(super) fn size(model: &ModelConfig, which: Projection) -> Result<[i64; 2]> {
    let (width, ffn) = (model.width, model.ffn);
    let (query, key) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let feed_forward = matches!(which, Projection::Gate | Projection::Up | Projection::Down);
    if feed_forward && model.moe.is_some() {
        let expected =
            "q, k, v and o only: the feed-forward of this model is a mixture of experts, which isn't adapted";
        return Err(Error::invalid("targets", expected, format!("{which:?}")));
    }
    if which == Projection::Gate && model.architecture == Architecture::Gpt2 {
        return Err(Error::invalid("targets", "without Gate: GPT-2's feed-forward has none", format!("{which:?}")));
    }
    Ok(match which {
        Projection::Q => [query, width],
        Projection::K | Projection::V => [key, width],
        Projection::O => [width, query],
        Projection::Gate | Projection::Up => [ffn, width],
        Projection::Down => [width, ffn],
    })
}
