//! What a trainer asks of the model.

use super::batch::{Batch, Layout, PreferencePair};
use super::loss::{Counted, token_log_probs};
use crate::lora::Adapter;
use crate::model::{Model, Pass};
use crate::moe::LayerRouting;
use crate::{Error, Result};
use std::collections::HashMap;
use tensor::tch::{Kind, Tensor, no_grad_guard};

/// A model in training. A closure that gives logits is one.
pub trait Policy {
    /// Logits `[batch, time, vocab]` of a batch. What they give in front of tokens that don't count is never looked at.
    ///
    /// # Errors
    /// Whatever the model reports.
    fn logits(&mut self, batch: &Batch) -> Result<Tensor>;

    /// Log-probabilities `[batch, time − 1]` of the counted tokens, 0 elsewhere, as
    /// [`token_log_probs`](super::token_log_probs) gives them.
    ///
    /// # Errors
    /// Whatever the model reports.
    fn log_probs(&mut self, batch: &Batch) -> Result<Tensor> {
        token_log_probs(&self.logits(batch)?, &batch.ids, &batch.counted)
    }

    /// What else is to be minimized, for the batch just computed: a balance loss, for instance.
    ///
    /// # Errors
    /// Whatever the model reports.
    fn extra_loss(&mut self) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

impl<F: FnMut(&Batch) -> Result<Tensor>> Policy for F {
    fn logits(&mut self, batch: &Batch) -> Result<Tensor> {
        self(batch)
    }
}

/// Summed log-probabilities of the chosen and the rejected answer of each pair, without gradient, `part` pairs at a time:
/// what a reference is asked once, before training.
///
/// # Errors
/// As [`Layout::pairs`]; [`Error::InvalidArgument`] for no pairs at a time; what the model reports.
pub fn score_pairs(
    policy: &mut dyn Policy,
    pairs: &[PreferencePair],
    layout: &Layout,
    part: usize,
) -> Result<Vec<[f64; 2]>> {
    let _guard = no_grad_guard();
    if part == 0 {
        return Err(Error::invalid("part", "at least 1", 0));
    }
    let numbered: Vec<_> = pairs.iter().enumerate().collect();
    let mut scores = Vec::with_capacity(pairs.len());
    for part in numbered.chunks(part) {
        let sums = sums(&policy.log_probs(&layout.pairs(part)?)?, 2 * part.len() as i64)?;
        let sums = Vec::<f64>::try_from(sums.f_to_kind(Kind::Double)?)?;
        let (chosen, rejected) = sums.split_at(part.len());
        scores.extend(chosen.iter().zip(rejected).map(|(chosen, rejected)| [*chosen, *rejected]));
    }
    Ok(scores)
}

/// Sums over tokens, `[batch, time − 1] → [batch]`.
pub(super) fn sums(log_probs: &Tensor, batch: i64) -> Result<Tensor> {
    if log_probs.dim() != 2 || log_probs.size()[0] != batch {
        return Err(Error::shape("The policy's log-probabilities", format!("[{batch}, time − 1]"), log_probs));
    }
    Ok(log_probs.f_sum_dim_intlist([1i64].as_slice(), false, log_probs.kind())?)
}

/// A decoder in training, whole or through an adapter. Batches must be padded on the left.
///
/// Logits are computed only where a token counts. With [`frozen_below`](Self::frozen_below), what enters the given layer is
/// computed once for each text and kept: a step then runs the layers from there on.
#[derive(Debug)]
pub struct Decoder<'a> {
    model: &'a Model,
    adapter: Option<&'a Adapter>,
    trunk: Option<Trunk>,
    routings: Vec<LayerRouting>,
}

/// What enters a layer, by text.
#[derive(Debug)]
struct Trunk {
    layer: usize,
    texts: HashMap<usize, Kept>,
}

#[derive(Debug)]
struct Kept {
    tokens: Vec<i64>,
    /// `[tokens, width]`
    hidden: Tensor,
}

impl<'a> Decoder<'a> {
    /// All layers are run for every batch.
    pub fn new(model: &'a Model, adapter: Option<&'a Adapter>) -> Self {
        Self { model, adapter, trunk: None, routings: Vec::new() }
    }

    /// Layers below `layer` aren't trained: what they make of a text is kept for the next time that it comes, by its number
    /// in [`Batch::texts`].
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`]; [`Error::InvalidArgument`] if the adapter changes a lower layer.
    pub fn frozen_below(mut self, layer: usize) -> Result<Self> {
        let layers = self.model.config().layers;
        if layer >= layers {
            return Err(Error::LayerOutOfRange { layer, layers });
        }
        if let Some(adapter) = self.adapter.filter(|a| a.first_layer() < layer) {
            let expected = format!("at most {}, the lowest layer of the adapter", adapter.first_layer());
            return Err(Error::invalid("layer", expected, layer));
        }
        self.trunk = (layer > 0).then(|| Trunk { layer, texts: HashMap::new() });
        Ok(self)
    }

    /// Goes on with another adapter and keeps what is known of the texts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it changes a layer below the frozen one.
    pub fn with_adapter(self, adapter: Option<&'a Adapter>) -> Result<Self> {
        if let (Some(trunk), Some(adapter)) = (&self.trunk, adapter)
            && adapter.first_layer() < trunk.layer
        {
            let expected = format!("one of layers from {} on", trunk.layer);
            return Err(Error::invalid("adapter", expected, format!("one of layer {}", adapter.first_layer())));
        }
        Ok(Self { adapter, ..self })
    }

    /// Where the experts of a mixture were sent the tokens of the last batch, by layer.
    pub fn routings(&self) -> &[LayerRouting] {
        &self.routings
    }

    /// Final activations `[batch, time, width]`.
    fn hidden(&mut self, batch: &Batch) -> Result<Tensor> {
        self.routings.clear();
        let entering = match self.trunk.take() {
            None => None,
            Some(mut trunk) => {
                let x = self.entering(&mut trunk, batch);
                let layer = trunk.layer;
                self.trunk = Some(trunk);
                Some((layer, x?))
            }
        };
        let device = self.model.device();
        let (ids, real) = (batch.ids.f_to_device(device)?, batch.real.f_to_device(device)?);
        let mut pass = Pass {
            real: Some(&real),
            adapter: self.adapter.map(Adapter::view),
            routings: Some(&mut self.routings),
            training: true,
            ..Pass::default()
        };
        match entering {
            None => self.model.hidden(&ids, &mut pass),
            Some((layer, x)) => self.model.hidden_from(layer, &x, &mut pass),
        }
    }

    /// What enters the first trained layer, `[batch, time, width]`, zero for padding.
    fn entering(&self, trunk: &mut Trunk, batch: &Batch) -> Result<Tensor> {
        let _guard = no_grad_guard();
        let device = self.model.device();
        let mut rows = Vec::with_capacity(batch.texts.len());
        for (row, text) in batch.texts.iter().enumerate() {
            let ids = batch.ids.f_select(0, row as i64)?;
            let tokens = Vec::<i64>::try_from(ids.f_masked_select(&batch.real.f_select(0, row as i64)?)?)?;
            let known = trunk.texts.remove(text).filter(|kept| kept.tokens == tokens);
            let kept = if let Some(kept) = known {
                kept
            } else {
                let ids = Tensor::f_from_slice(&tokens)?.f_view([1, -1])?.f_to_device(device)?;
                Kept { tokens, hidden: self.enters(trunk.layer, &ids)? }
            };
            let pad = ids.size()[0] - kept.tokens.len() as i64;
            rows.push(kept.hidden.f_constant_pad_nd([0, 0, pad, 0])?);
            trunk.texts.insert(*text, kept);
        }
        Ok(Tensor::f_stack(&rows, 0)?)
    }

    /// The residual stream `[time, width]` that enters a layer.
    fn enters(&self, layer: usize, ids: &Tensor) -> Result<Tensor> {
        let site = crate::hooks::Site::ResidPre(layer);
        let mut hooks = crate::hooks::Hooks::new().stop_after(site);
        let hidden = self.model.hidden(ids, &mut Pass { hooks: Some(&mut hooks), ..Pass::default() })?;
        Ok(hidden.f_squeeze_dim(0)?)
    }
}

impl Policy for Decoder<'_> {
    fn logits(&mut self, batch: &Batch) -> Result<Tensor> {
        let hidden = self.hidden(batch)?;
        self.model.head(&hidden)
    }

    fn log_probs(&mut self, batch: &Batch) -> Result<Tensor> {
        let hidden = self.hidden(batch)?;
        let device = self.model.device();
        let counted = Counted::new(&batch.ids.f_to_device(device)?, &batch.counted.f_to_device(device)?)?;
        let rows = hidden.f_reshape([-1, self.model.config().width])?.f_index_select(0, &counted.before)?;
        counted.spread(&counted.log_probs(&self.model.head(&rows)?)?)
    }

    /// The routers' losses, where there are some.
    fn extra_loss(&mut self) -> Result<Option<Tensor>> {
        let mut sum = None::<Tensor>;
        for (_, loss) in self.routings.iter().flat_map(|layer| &layer.routing.losses) {
            sum = Some(match sum {
                None => loss.shallow_clone(),
                Some(sum) => sum.f_add(loss)?,
            });
        }
        Ok(sum)
    }
}
