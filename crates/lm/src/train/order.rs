//! In which order texts come, and whether a saved training was on the same ones.

use crate::{Error, Result};
use rand::seq::SliceRandom as _;
use sha2::{Digest as _, Sha256};
use std::path::Path;
use tensor::{Seed, StateDict};

/// Every text once an epoch, shuffled anew in each. A step's texts depend on its number only, so training can be continued
/// from the number.
#[derive(Debug)]
pub(super) struct Order {
    texts: usize,
    batch: usize,
    seed: Seed,
    digest: String,
}

impl Order {
    /// For `texts` texts, `batch` at a time; `data` are all their tokens, list after list.
    pub(super) fn new<'a>(
        texts: usize,
        batch: usize,
        seed: u64,
        data: impl IntoIterator<Item = &'a [u32]>,
    ) -> Result<Self> {
        if texts == 0 {
            return Err(Error::invalid("texts", "at least one", "none"));
        }
        if batch == 0 {
            return Err(Error::invalid("batch", "at least 1", 0));
        }
        let mut hash = Sha256::new();
        for number in [seed, batch as u64, texts as u64] {
            hash.update(number.to_le_bytes());
        }
        for list in data {
            hash.update((list.len() as u64).to_le_bytes());
            for id in list {
                hash.update(id.to_le_bytes());
            }
        }
        let digest = hash.finalize().iter().take(16).fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
        Ok(Self { texts, batch, seed: Seed::new(seed).child("order"), digest })
    }

    /// The texts of a step.
    pub(super) fn of(&self, step: u64) -> Vec<usize> {
        let first = step * self.batch as u64;
        let mut epoch = (u64::MAX, Vec::new());
        (first..first + self.batch as u64)
            .map(|place| {
                let number = place / self.texts as u64;
                if epoch.0 != number {
                    let mut order: Vec<usize> = (0..self.texts).collect();
                    order.shuffle(&mut self.seed.index(number).rng());
                    epoch = (number, order);
                }
                epoch.1[(place % self.texts as u64) as usize]
            })
            .collect()
    }

    pub(super) fn save(&self, state: &mut StateDict) {
        state.meta.insert("data".into(), self.digest.clone().into());
    }

    /// # Errors
    /// [`Error::Checkpoint`] for a state of other texts, or another order of them.
    pub(super) fn check(&self, state: &StateDict, path: &Path) -> Result<()> {
        if state.meta.get("data").and_then(|d| d.as_str()) == Some(&self.digest) {
            return Ok(());
        }
        let reason =
            "it was saved from a training on other texts, another batch or another seed: it can't be continued \
                      with these"
                .into();
        Err(Error::Checkpoint { path: path.to_owned(), reason })
    }
}
