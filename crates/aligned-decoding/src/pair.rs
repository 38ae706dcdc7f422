//! A policy with its reference.

use crate::{Error, Result};
use lm::Lm;
use lm::cache::Cache;
use lm::hooks::{Hooks, Site};
use lm::lora::AdapterView;
use lm::model::{Adapted, CausalLm, Model, Pass};
use lm::tokenizer::Tokenizer;
use tensor::tch::{Device, Tensor};

/// A model of `lm`, borrowed: bare or through an adapter.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The weights.
    pub model: &'a Model,
    /// What is added to them, if anything.
    pub adapter: Option<AdapterView<'a>>,
}

impl<'a> View<'a> {
    /// The bare model.
    pub fn bare(model: &'a Model) -> Self {
        Self { model, adapter: None }
    }

    /// The model through an adapter.
    pub fn adapted(model: &'a Model, adapter: AdapterView<'a>) -> Self {
        Self { model, adapter: Some(adapter) }
    }

    /// The lowest layer that differs from the bare model's; none if it is the bare model.
    fn first_layer(&self) -> Option<usize> {
        self.adapter.map(|view| view.adapter().first_layer())
    }

    /// What enters a layer; the layers below are the bare model's.
    fn enter(&self, layer: usize, ids: &Tensor, real: Option<&Tensor>, cache: &mut Cache) -> lm::Result<Tensor> {
        let mut hooks = Hooks::new().stop_after(Site::ResidPre(layer));
        self.model.hidden(ids, &mut Pass { cache: Some(cache), real, hooks: Some(&mut hooks), ..Pass::default() })
    }

    /// The layers from there on.
    fn rest(&self, layer: usize, x: &Tensor, real: Option<&Tensor>, cache: &mut Cache) -> lm::Result<Tensor> {
        let adapter = self.adapter;
        self.model.hidden_from(layer, x, &mut Pass { cache: Some(cache), real, adapter, ..Pass::default() })
    }
}

impl CausalLm for View<'_> {
    fn vocab(&self) -> i64 {
        self.model.vocab()
    }

    fn context(&self) -> i64 {
        self.model.context()
    }

    fn new_cache(&self) -> Cache {
        self.model.new_cache()
    }

    fn forward_hidden(&self, ids: &Tensor, real: Option<&Tensor>, cache: &mut Cache) -> lm::Result<Tensor> {
        match self.adapter {
            None => self.model.forward_hidden(ids, real, cache),
            Some(adapter) => Adapted { model: self.model, adapter }.forward_hidden(ids, real, cache),
        }
    }

    fn head(&self, hidden: &Tensor) -> lm::Result<Tensor> {
        self.model.head(hidden)
    }

    fn head_rows(&self, hidden: &Tensor, ids: &Tensor) -> lm::Result<Tensor> {
        self.model.head_rows(hidden, ids)
    }
}

/// A part of a model, as the shared trunk needs it: layer, tokens or what enters the layer, mask of real tokens, cache.
type Part<M> = fn(&M, usize, &Tensor, Option<&Tensor>, &mut Cache) -> lm::Result<Tensor>;

/// The layers that policy and reference share.
pub(crate) struct Trunk<P, R> {
    /// The first layer that they don't share.
    pub(crate) layer: usize,
    pub(crate) enter: Part<P>,
    pub(crate) policy: Part<P>,
    pub(crate) reference: Part<R>,
}

impl<P, R> std::fmt::Debug for Trunk<P, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trunk").field("layer", &self.layer).finish_non_exhaustive()
    }
}

/// A preference-trained model and the model that it was trained from.
///
/// ```
/// use aligned_decoding::pair::ModelPair;
/// use aligned_decoding::tensor::{Seed, tch::{Device, Kind}};
/// use lm::{config::ModelConfig, lora::{Adapter, Layers, LoraConfig}, model::Model};
///
/// let config = ModelConfig::llama(40, 16, 4, 2, 1, 24);
/// let model = Model::random(&config, Seed::new(0), Kind::Float, Device::Cpu)?;
/// let lora = LoraConfig { layers: Layers::Top(1), ..LoraConfig::default() };
/// let adapter = Adapter::new(&config, &lora, Kind::Float, Device::Cpu)?;
/// // The adapter over the bare model; layers 0 to 2 are run once for both.
/// let pair = ModelPair::lora(&model, adapter.view(), None)?;
/// assert_eq!(pair.shared_layers(), 3);
/// # Ok::<(), aligned_decoding::Error>(())
/// ```
#[derive(Debug)]
pub struct ModelPair<P: CausalLm, R: CausalLm> {
    policy: P,
    reference: R,
    tokens: i64,
    device: Device,
    trunk: Option<Trunk<P, R>>,
}

impl<P: CausalLm, R: CausalLm> ModelPair<P, R> {
    /// Two models with vocabularies of one size. That their tokenizers agree is for the caller to know;
    /// [`of`](ModelPair::of) checks it.
    ///
    /// # Errors
    /// [`Error::VocabMismatch`].
    pub fn new(policy: P, reference: R) -> Result<Self> {
        let (ours, theirs) = (policy.vocab(), reference.vocab());
        if ours != theirs {
            return Err(Error::VocabMismatch { policy: ours, reference: theirs });
        }
        Ok(Self { policy, reference, tokens: ours, device: Device::Cpu, trunk: None })
    }

    /// Two models of which only the first `tokens` ids are used: tables of embeddings are often padded, to different sizes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if one of them has fewer, or none are left.
    pub fn padded(policy: P, reference: R, tokens: usize) -> Result<Self> {
        let most = policy.vocab().min(reference.vocab());
        match i64::try_from(tokens) {
            Ok(tokens) if (1..=most).contains(&tokens) => {
                Ok(Self { policy, reference, tokens, device: Device::Cpu, trunk: None })
            }
            _ => Err(Error::invalid("tokens", format!("from 1 to {most}, which both tables have"), tokens)),
        }
    }

    /// With tokens put on this device, where both models compute; the CPU by default. Pairs of views know it.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// Where tokens are put.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The preference-trained model.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// The model that it was trained from.
    pub fn reference(&self) -> &R {
        &self.reference
    }

    /// Tokens that both know; higher ids are padding and never chosen.
    pub fn tokens(&self) -> i64 {
        self.tokens
    }

    /// Positions that both have.
    pub fn context(&self) -> i64 {
        self.policy.context().min(self.reference.context())
    }

    /// Layers that are run once for both models.
    pub fn shared_layers(&self) -> usize {
        self.trunk.as_ref().map_or(0, |trunk| trunk.layer)
    }

    /// Runs every layer of both models, shared or not: the plain way, to compare with.
    #[must_use]
    pub fn without_shared_trunk(self) -> Self {
        Self { trunk: None, ..self }
    }

    pub(crate) fn trunk(&self) -> Option<&Trunk<P, R>> {
        self.trunk.as_ref()
    }

    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::ContextOverflow`], [`Error::TokenOutOfRange`].
    pub(crate) fn check_text(&self, row: usize, prompt: &[u32], completion: &[u32]) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt { row });
        }
        let (len, max) = ((prompt.len() + completion.len()) as i64, self.context());
        if len > max {
            return Err(Error::ContextOverflow { len, max });
        }
        let vocab = self.tokens;
        match prompt.iter().chain(completion).find(|id| i64::from(**id) >= vocab) {
            Some(&id) => Err(Error::TokenOutOfRange { id, row, vocab }),
            None => Ok(()),
        }
    }
}

impl<'a> ModelPair<View<'a>, View<'a>> {
    /// One model with two adapters, or with one over the bare model: the weights are shared, and the layers below the lowest adapted
    /// one are run once.
    ///
    /// If the policy was trained from an adapter of supervised fine-tuning, that adapter is the reference, not the bare model. Give views
    /// without a mask of rows: rows leave the batch while it is decoded.
    ///
    /// # Errors
    /// [`lm::Error::LayerOutOfRange`] for an adapter of another model.
    pub fn lora(model: &'a Model, policy: AdapterView<'a>, reference: Option<AdapterView<'a>>) -> Result<Self> {
        let (policy, reference) = (View::adapted(model, policy), View { model, adapter: reference });
        let layers = model.config().layers;
        let lowest = [policy.first_layer(), reference.first_layer()].into_iter().flatten().min().unwrap_or(0);
        if lowest >= layers {
            return Err(lm::Error::LayerOutOfRange { layer: lowest, layers }.into());
        }
        // Below layer 0 there is only the table of embeddings.
        let trunk = (lowest > 0).then_some(Trunk {
            layer: lowest,
            enter: View::enter,
            policy: View::rest,
            reference: View::rest,
        });
        Ok(Self { trunk, ..Self::new(policy, reference)?.on(model.device()) })
    }

    /// Two models by reference.
    ///
    /// # Errors
    /// [`Error::VocabMismatch`].
    pub fn models(policy: &'a Model, reference: &'a Model) -> Result<Self> {
        Ok(Self::new(View::bare(policy), View::bare(reference))?.on(policy.device()))
    }

    /// Two checkpoints, with their tokenizers compared. Ids beyond the tokenizer are padding and never chosen.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`]; [`Error::VocabMismatch`] for tables of different sizes, unless `allow_padded_vocab`.
    pub fn of(policy: &'a Lm, reference: &'a Lm, allow_padded_vocab: bool) -> Result<Self> {
        let tokens = shared_tokens(&policy.tokenizer, &reference.tokenizer, allow_padded_vocab)?;
        if !allow_padded_vocab {
            Self::models(&policy.model, &reference.model)?;
        }
        Ok(Self::padded(View::bare(&policy.model), View::bare(&reference.model), tokens)?.on(policy.model.device()))
    }
}

/// Number of tokens, from id 0 on, that two tokenizers agree on. With `allow_padded_vocab` one of them may have more tokens behind
/// those of the other.
///
/// # Errors
/// [`Error::TokenizerMismatch`] with the first id that they treat differently.
pub fn shared_tokens(policy: &Tokenizer, reference: &Tokenizer, allow_padded_vocab: bool) -> Result<usize> {
    let common = policy.vocab().min(reference.vocab());
    match policy.first_difference(reference) {
        None => Ok(common),
        Some(difference) if allow_padded_vocab && difference.id as usize >= common => Ok(common),
        Some(difference) => Err(Error::TokenizerMismatch {
            id: difference.id,
            policy: difference.here,
            reference: difference.there,
            what: difference.what.to_owned(),
        }),
    }
}
