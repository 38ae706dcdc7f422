//! What decoding rules need of a model: activations, and logits of all tokens or of a few.

use super::{Model, Pass};
use crate::Result;
use crate::cache::Cache;
use crate::lora::AdapterView;
use std::fmt;
use tensor::tch::Tensor;

/// A causal language model, as decoding rules see it: a bare model, or one with an adapter.
pub trait CausalLm: fmt::Debug {
    /// Size of the vocabulary.
    fn vocab(&self) -> i64;

    /// Number of positions.
    fn context(&self) -> i64;

    /// An empty cache.
    fn new_cache(&self) -> Cache;

    /// The final activations `[batch, time, width]` of tokens `[batch, time]` (i64) that continue the cache. `real`
    /// `[batch, time]` marks the tokens that aren't padding. The cache holds values without gradients: call this under
    /// `no_grad` where weights or an adapter can be trained.
    ///
    /// # Errors
    /// As [`Model::hidden`].
    fn forward_hidden(&self, ids: &Tensor, real: Option<&Tensor>, cache: &mut Cache) -> Result<Tensor>;

    /// Logits `[…, vocab]` of final activations `[…, width]`.
    ///
    /// # Errors
    /// As [`Model::head`].
    fn head(&self, hidden: &Tensor) -> Result<Tensor>;

    /// Logits `[…, n]` of the tokens `ids` `[n]` only.
    ///
    /// # Errors
    /// As [`Model::head_rows`].
    fn head_rows(&self, hidden: &Tensor, ids: &Tensor) -> Result<Tensor>;
}

impl CausalLm for Model {
    fn vocab(&self) -> i64 {
        self.config().vocab
    }

    fn context(&self) -> i64 {
        self.config().positions()
    }

    fn new_cache(&self) -> Cache {
        Model::new_cache(self)
    }

    fn forward_hidden(&self, ids: &Tensor, real: Option<&Tensor>, cache: &mut Cache) -> Result<Tensor> {
        self.hidden(ids, &mut Pass { cache: Some(cache), real, ..Pass::default() })
    }

    fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        Model::head(self, hidden)
    }

    fn head_rows(&self, hidden: &Tensor, ids: &Tensor) -> Result<Tensor> {
        Model::head_rows(self, hidden, ids)
    }
}

/// A model seen through an adapter. The weights are shared: the bare model is the same object without the adapter.
#[derive(Debug)]
pub struct Adapted<'a> {
    /// The weights.
    pub model: &'a Model,
    /// What is added to them.
    pub adapter: AdapterView<'a>,
}

impl CausalLm for Adapted<'_> {
    fn vocab(&self) -> i64 {
        self.model.vocab()
    }

    fn context(&self) -> i64 {
        self.model.context()
    }

    fn new_cache(&self) -> Cache {
        Model::new_cache(self.model)
    }

    fn forward_hidden(&self, ids: &Tensor, real: Option<&Tensor>, cache: &mut Cache) -> Result<Tensor> {
        let adapter = Some(self.adapter);
        self.model.hidden(ids, &mut Pass { cache: Some(cache), real, adapter, ..Pass::default() })
    }

    fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        self.model.head(hidden)
    }

    fn head_rows(&self, hidden: &Tensor, ids: &Tensor) -> Result<Tensor> {
        self.model.head_rows(hidden, ids)
    }
}
