//! Runs both models of a pair over a batch, the reference behind the policy if need be; and their heads.

use crate::Result;
use crate::pair::ModelPair;
use lm::cache::Cache;
use lm::model::CausalLm;
use tensor::tch::{Device, Kind, Tensor};

/// What the reference has still to read: tokens `[batch, time]`, or what enters its own layers `[batch, time, width]`.
#[derive(Debug)]
struct Pending {
    input: Tensor,
    real: Option<Tensor>,
}

/// What the reference made of what it had to read.
#[derive(Debug)]
pub(crate) struct CaughtUp {
    /// Final activations `[batch, time, width]`.
    pub(crate) hidden: Tensor,
    /// Where each read of the policy ended in it: the positions before a decision.
    pub(crate) ends: Vec<i64>,
}

/// The caches of a pair.
#[derive(Debug)]
pub(crate) struct Engine<'p, P: CausalLm, R: CausalLm> {
    pair: &'p ModelPair<P, R>,
    trunk: Cache,
    policy: Cache,
    reference: Cache,
    pending: Vec<Pending>,
    /// Whether the reference will ever be asked.
    follows: bool,
}

impl<'p, P: CausalLm, R: CausalLm> Engine<'p, P, R> {
    pub(crate) fn new(pair: &'p ModelPair<P, R>, follows: bool) -> Self {
        let (policy, reference) = (pair.policy().new_cache(), pair.reference().new_cache());
        Self { pair, trunk: pair.policy().new_cache(), policy, reference, pending: Vec::new(), follows }
    }

    /// The policy reads tokens `[batch, time]`; its final activations `[batch, time, width]`. The reference will have to.
    pub(crate) fn read(&mut self, ids: &Tensor, real: Option<&Tensor>) -> Result<Tensor> {
        let (input, hidden) = match self.pair.trunk() {
            None => (ids.shallow_clone(), self.pair.policy().forward_hidden(ids, real, &mut self.policy)?),
            Some(trunk) => {
                let x = (trunk.enter)(self.pair.policy(), trunk.layer, ids, real, &mut self.trunk)?;
                let hidden = (trunk.policy)(self.pair.policy(), trunk.layer, &x, real, &mut self.policy)?;
                (x, hidden)
            }
        };
        if self.follows {
            self.pending.push(Pending { input, real: real.map(Tensor::shallow_clone) });
        }
        Ok(hidden)
    }

    /// Reads of the policy that the reference has not made.
    pub(crate) fn lag(&self) -> usize {
        self.pending.len()
    }

    /// The reference reads all that it has to, in one pass; none if there is nothing.
    pub(crate) fn catch_up(&mut self) -> Result<Option<CaughtUp>> {
        let Some(first) = self.pending.first() else { return Ok(None) };
        let mut ends = Vec::with_capacity(self.pending.len());
        let mut end = 0;
        for pending in &self.pending {
            end += pending.input.size()[1];
            ends.push(end - 1);
        }
        let real = match &first.real {
            // Only a prompt has padding, and it comes first.
            Some(real) if self.pending.len() > 1 => {
                let more = end - real.size()[1];
                let ones = Tensor::f_ones([real.size()[0], more], (Kind::Bool, real.device()))?;
                Some(Tensor::f_cat(&[real, &ones], 1)?)
            }
            real => real.as_ref().map(Tensor::shallow_clone),
        };
        let inputs: Vec<&Tensor> = self.pending.iter().map(|p| &p.input).collect();
        let input = if inputs.len() == 1 { inputs[0].shallow_clone() } else { Tensor::f_cat(&inputs, 1)? };
        let (reference, cache) = (self.pair.reference(), &mut self.reference);
        let hidden = match self.pair.trunk() {
            None => reference.forward_hidden(&input, real.as_ref(), cache)?,
            Some(trunk) => (trunk.reference)(reference, trunk.layer, &input, real.as_ref(), cache)?,
        };
        self.pending.clear();
        Ok(Some(CaughtUp { hidden, ends }))
    }

    /// Makes row `i` what row `rows[i]` was, of all caches and of what is pending.
    pub(crate) fn select_rows(&mut self, rows: &[i64]) -> Result<()> {
        for cache in [&mut self.trunk, &mut self.policy, &mut self.reference] {
            if !cache.is_empty() {
                cache.select_rows(rows)?;
            }
        }
        let index = Tensor::f_from_slice(rows)?;
        let select = |t: &Tensor| t.f_index_select(0, &index.f_to_device(t.device())?);
        for pending in &mut self.pending {
            pending.input = select(&pending.input)?;
            pending.real = pending.real.as_ref().map(select).transpose()?;
        }
        Ok(())
    }
}

/// The tokens that exist, and the heads restricted to them. A place is a column of the logits.
#[derive(Debug)]
pub(crate) struct Heads {
    /// By place, rising; none if every place is its own token.
    allowed: Option<Vec<u32>>,
    /// The same as a tensor.
    ids: Option<Tensor>,
    tokens: i64,
}

impl Heads {
    /// # Errors
    /// [`crate::Error::TokenOutOfRange`] for an allowed token beyond the vocabulary.
    pub(crate) fn new(allowed: Option<&[u32]>, tokens: i64) -> Result<Self> {
        let Some(allowed) = allowed else { return Ok(Self { allowed: None, ids: None, tokens }) };
        let mut allowed = allowed.to_vec();
        allowed.sort_unstable();
        allowed.dedup();
        if let Some(&id) = allowed.last().filter(|id| i64::from(**id) >= tokens) {
            return Err(crate::Error::TokenOutOfRange { id, row: 0, vocab: tokens });
        }
        let ids: Vec<i64> = allowed.iter().map(|&id| id.into()).collect();
        Ok(Self { ids: Some(Tensor::f_from_slice(&ids)?), allowed: Some(allowed), tokens })
    }

    /// Number of places.
    pub(crate) fn places(&self) -> usize {
        self.allowed.as_ref().map_or(self.tokens as usize, Vec::len)
    }

    /// The token of a place.
    pub(crate) fn id(&self, place: u32) -> u32 {
        self.allowed.as_ref().map_or(place, |allowed| allowed[place as usize])
    }

    /// An error of a step with its place and the token that it means.
    pub(crate) fn located(&self, error: crate::Error, step: usize, row: usize) -> crate::Error {
        error.at(step, row).with_ids(|place| self.id(place))
    }

    /// The place of a token, if it exists.
    pub(crate) fn place(&self, id: u32) -> Option<u32> {
        match &self.allowed {
            None => (i64::from(id) < self.tokens).then_some(id),
            Some(allowed) => allowed.binary_search(&id).ok().map(|place| place as u32),
        }
    }

    /// Logits `[…, places]` of final activations `[…, width]`, f32 (f64 of an f64 model).
    pub(crate) fn all(&self, model: &impl CausalLm, hidden: &Tensor) -> Result<Tensor> {
        let logits = match &self.ids {
            Some(ids) => model.head_rows(hidden, &ids.f_to_device(hidden.device())?)?,
            None => model.head(hidden)?.f_narrow(-1, 0, self.tokens)?,
        };
        wide(&logits)
    }

    /// Logits `[…, n]` of some places, f32 (f64 of an f64 model).
    pub(crate) fn some(&self, model: &impl CausalLm, hidden: &Tensor, places: &[u32]) -> Result<Tensor> {
        let ids: Vec<i64> = places.iter().map(|&place| self.id(place).into()).collect();
        wide(&model.head_rows(hidden, &Tensor::f_from_slice(&ids)?.f_to_device(hidden.device())?)?)
    }
}

/// bf16 and f16 logits as f32: differences of large close numbers decide.
fn wide(logits: &Tensor) -> Result<Tensor> {
    let kind = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    Ok(logits.f_to_kind(kind)?)
}

/// Copies a tensor to a slice of f32.
pub(crate) fn values(t: &Tensor) -> Result<Vec<f32>> {
    let t = t.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?.f_contiguous()?;
    let mut out = vec![0f32; t.numel()];
    let n = out.len();
    t.f_copy_data(&mut out, n)?;
    Ok(out)
}

/// ln Σ exp of each row of logits `[rows, places]`.
pub(crate) fn normalizers(logits: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::<f64>::try_from(&logits.f_logsumexp([1i64].as_slice(), false)?.f_to_kind(Kind::Double)?)?)
}
